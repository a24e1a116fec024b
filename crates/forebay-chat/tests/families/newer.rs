//! Conversations of newer families.

use forebay_chat::{Format, Message, Think, ToolCall};
use forebay_text::ChatTemplate;
use serde_json::{Map, Value, json};

use super::newer_templates::*;
use super::{Conversation, NONE, tools};

/// Calls in the form of JSON between tags, one in each line.
const JSON_CALLS: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 2}}\n</tool_call>\n\
                          <tool_call>\n{\"name\": \"time\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>";

/// Calls in a list of JSON objects.
const JSON_LIST: &str = "[{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 2}}, \
                         {\"name\": \"time\", \"arguments\": {\"zone\": \"CET\"}}]";

/// Returns the text with arguments as this test sends them to a template: without spaces.
fn compact(text: &str) -> String {
    text.replace("\"city\": \"Zürich\", \"days\": 2", "\"city\":\"Zürich\",\"days\":2")
        .replace("\"zone\": \"CET\"", "\"zone\":\"CET\"")
}

/// Calls of Qwen3-Coder and Nemotron 3.
const CODER_CALLS: &str = "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n\
                           </function>\n</tool_call>\n<tool_call>\n<function=time>\n<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>";

const TOOL_RESPONSES: &str =
    "<tool_response>\nwarm\n</tool_response>\n<tool_response>\nnoon\n</tool_response>";

#[test]
fn minimax_m3() {
    let calls = "@<tool_call>\n@<invoke name=\"weather\">@<city>Zürich@</city>@<days>2@</days>@</invoke>\n\
                 @<invoke name=\"time\">@<zone>CET@</zone>@</invoke>\n@</tool_call>";
    let prompt = format!(
        "[e~[\n]~b]ai\n<mm:think>Hm.</mm:think>I look.{calls}[e~[\n]~b]tool\n<response>warm</response>\n<response>noon</response>\
         [e~[\n]~b]ai\n"
    );
    for writes in [
        format!("<mm:think>Hm.</mm:think>I look.{calls}"),
        // The mark is a control token.
        format!(
            "\u{1}<mm:think>\u{1}Hm.\u{1}</mm:think>\u{1}I look.{}",
            calls.replace('@', "\u{1}@\u{1}")
        ),
        format!(
            "<mm:think>\nHm.\n</mm:think>\n\nI look.\n\n{}",
            calls.replace("@<invoke", " @ <invoke")
        ),
    ] {
        Conversation {
            file: "MiniMax-M3.jinja",
            own: MINIMAX_M3,
            eos: "[e~[",
            writes: &writes.replace('@', "]<]minimax[>["),
            reasoning: Some("Hm."),
            content: "I look.",
            prompt: &prompt.replace('@', "]<]minimax[>["),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn lfm2() {
    let pythonic = "<|tool_call_start|>[weather(city=\"Zürich\", days=2), time(zone=\"CET\")]<|tool_call_end|>";
    for writes in [
        format!("I look.{pythonic}"),
        format!("I look.{}", pythonic.replace("<|", "\u{1}<|").replace("|>", "|>\u{1}")),
        format!("I look.\n<|tool_call_start|>{JSON_LIST}<|tool_call_end|>"),
        "I look.<|tool_call_start|>[weather(city='Zürich',days=2)]<|tool_call_end|>\
         <|tool_call_start|>[time(zone='CET')]<|tool_call_end|>"
            .to_owned(),
    ] {
        Conversation {
            file: "LFM2-8B-A1B.jinja",
            own: LFM2,
            writes: &writes,
            content: "I look.",
            prompt: &format!(
                "<|im_end|>\n<|im_start|>assistant\nI look.{pythonic}<|im_end|>\n<|im_start|>tool\n<|tool_response_start|>warm\
                 <|tool_response_end|><|im_end|>\n<|im_start|>tool\n<|tool_response_start|>noon<|tool_response_end|><|im_end|>\n\
                 <|im_start|>assistant\n"
            ),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn lfm2_5() {
    let calls =
        "<|tool_call_start|>[weather(city='Zürich', days=2), time(zone='CET')]<|tool_call_end|>";
    Conversation {
        file: "LFM2.5-8B-A1B.jinja",
        own: LFM25,
        writes: &format!("<think>Hm.</think>I look.{calls}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "<|im_end|>\n<|im_start|>assistant\n<think>Hm.</think>I look.{calls}<|im_end|>\n<|im_start|>tool\nwarm<|im_end|>\n\
             <|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn olmo_3() {
    let calls =
        "<function_calls>weather(city=\"Zürich\", days=2)\ntime(zone=\"CET\")</function_calls>";
    for writes in [calls.to_owned(), calls.replace("calls>w", "calls>\n\n w").replace("</", "\n</")]
    {
        Conversation {
            file: "Olmo-3-7B-Think.jinja",
            own: OLMO3,
            writes: &format!("Hm.</think>I look.\n{writes}"),
            reasoning: Some("Hm."),
            content: "I look.",
            prompt: &format!(
                "<|im_end|>\n<|im_start|>assistant\nI look.{calls}<|im_end|>\n<|im_start|>environment\nwarm<|im_end|>\n\
                 <|im_start|>environment\nnoon<|im_end|>\n<|im_start|>assistant\n<think>"
            ),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn phi_4_mini() {
    for writes in [
        format!("<|tool_call|>{JSON_LIST}<|/tool_call|>"),
        format!("\u{1}<|tool_call|>\u{1}{JSON_LIST}\u{1}<|/tool_call|>\u{1}"),
        format!("functools{JSON_LIST}"),
        JSON_LIST.to_owned(),
    ] {
        Conversation {
            file: "Phi-4-mini-instruct.jinja",
            own: PHI_4_MINI,
            writes: &writes,
            prompt: &format!(
                "<|end|><|assistant|><|tool_call|>{JSON_LIST}<|/tool_call|><|end|><|tool|>warm<|end|><|tool|>noon<|end|><|assistant|>"
            ),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn tools_of_phi_are_in_the_system_message() {
    let template = ChatTemplate::from_source(PHI_4_MINI, "", "").unwrap();
    let format = Format::recognise(Some(&template), None).unwrap().offering(Some(&tools()));
    let render = |messages: &[Message]| {
        format.render(&template, messages, Some(&tools()), &Map::new()).unwrap().into_text()
    };
    let prompt = render(&[Message::new("system", "Be brief."), Message::new("user", "x")]);
    assert!(prompt.starts_with("<|system|>Be brief.<|tool|>[{\"name\": \"weather\","), "{prompt}");
    assert!(prompt.ends_with("}]<|/tool|><|end|><|user|>x<|end|><|assistant|>"), "{prompt}");
    let prompt = render(&[Message::new("user", "x")]);
    assert!(prompt.starts_with("<|system|>") && prompt.contains("<|tool|>[{\"name\""), "{prompt}");
}

#[test]
fn granite() {
    let role = |role: &str| format!("<|start_of_role|>{role}<|end_of_role|>");
    let [assistant, user, tool] = ["assistant", "user", "tool"].map(role);
    Conversation {
        file: "ibm-granite-granite-3.3-2B-Instruct.jinja",
        own: GRANITE_3,
        writes: &format!("\u{1}<|tool_call|>\u{1}{JSON_LIST}"),
        prompt: &format!(
            "<|end_of_text|>\n{assistant}<|tool_call|>{JSON_LIST}<|end_of_text|>\n{tool}warm<|end_of_text|>\n{tool}noon\
             <|end_of_text|>\n{assistant}"
        ),
        ..NONE
    }
    .lead();
    Conversation {
        file: "ibm-granite-granite-4.0.jinja",
        own: GRANITE_4,
        writes: &format!("I look.\n{JSON_CALLS}"),
        content: "I look.",
        prompt: &compact(&format!(
            "<|end_of_text|>\n{assistant}I look.\n{JSON_CALLS}<|end_of_text|>\n{user}\n{TOOL_RESPONSES}<|end_of_text|>\n{assistant}"
        )),
        ..NONE
    }
    .lead();
}

#[test]
fn nemotron_3() {
    Conversation {
        file: "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
        own: NEMOTRON_3,
        writes: &format!("Hm.\n</think>\nI look.\n{CODER_CALLS}\n"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\nI look.\n{CODER_CALLS}\n<|im_end|>\n<|im_start|>user\n\
             {TOOL_RESPONSES}\n<|im_end|>\n<|im_start|>assistant\n<think>\n"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn nemotron_nano_2() {
    Conversation {
        file: "NVIDIA-Nemotron-Nano-v2.jinja",
        own: NEMOTRON_2,
        writes: &format!("Hm.\n</think>\nI look.\n<TOOLCALL>{JSON_LIST}</TOOLCALL>"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &compact(&format!(
            "\n<SPECIAL_11>Assistant\nI look.\n<TOOLCALL>{JSON_LIST}</TOOLCALL>\n<SPECIAL_12>\n<SPECIAL_11>User\n\
             <TOOL_RESPONSE>[warm, noon]</TOOL_RESPONSE><SPECIAL_11>Assistant\n<think>\n"
        )),
        ..NONE
    }
    .lead();
}

#[test]
fn hunyuan_a13b() {
    let calls = format!("<tool_calls>{JSON_LIST}</tool_calls>");
    let prompt = format!(
        "<|extra_0|>I look.{calls}<|eos|><tool_response>warm</tool_response><|extra_0|><tool_response>noon</tool_response><|extra_0|>"
    );
    for writes in [
        format!("<think>\nHm.\n</think>\n<answer>\nI look.\n{calls}\n</answer>"),
        format!("<think>\nHm.\n</think>\n<answer>\n助手：I look.{calls}"),
        format!("<think>Hm.</think>I look.\n{calls}"),
    ] {
        Conversation {
            file: "Hunyuan-A13B.jinja",
            own: HUNYUAN,
            eos: "<|eos|>",
            writes: &writes,
            reasoning: Some("Hm."),
            content: "I look.",
            prompt: &prompt,
            ..NONE
        }
        .lead();
    }
    Conversation {
        file: "Hunyuan-A13B.jinja",
        own: HUNYUAN,
        eos: "<|eos|>",
        variables: &[("enable_thinking", false)],
        writes: &format!("<answer>\nI look.{calls}\n</answer>"),
        content: "I look.",
        prompt: &format!("{prompt}<think>\n\n</think>\n"),
        ..NONE
    }
    .lead();
}

/// With tools, answers begin with a name for their writer, which the template writes again.
#[test]
fn hunyuan_begins_answers_with_a_name() {
    let template = super::template("Hunyuan-A13B.jinja", HUNYUAN, "<|eos|>");
    let format = Format::recognise(Some(&template), None).unwrap();
    let with_tools = format.offering(Some(&tools()));
    let answer = |format: &Format, writes: &str, cut: usize| {
        super::parse(format, "<|extra_0|>", writes, cut, true)
    };
    for cut in [0, 1, 5] {
        let whole = "<think>\nHm.\n</think>\n<answer>\n助手：It is 助手：warm.\n</answer>";
        let said = answer(&with_tools, whole, cut);
        assert_eq!(said.reasoning.as_deref(), Some("Hm."));
        assert_eq!(said.content, "It is 助手：warm.");
        assert_eq!(answer(&with_tools, "助手：Warm.", cut).content, "Warm.");
        assert_eq!(answer(&with_tools, "助理 comes.", cut).content, "助理 comes.");
        assert_eq!(answer(&format.offering(None), "助手：Warm.", cut).content, "助手：Warm.");
    }
}

#[test]
fn ernie_4_5() {
    let [open, close] = ["<response>\n", "\n</response>\n"];
    let marks = |text: &str| text.replace('<', "\u{1}<").replace('>', ">\u{1}");
    for writes in [
        format!("Hm.\n</think>\n\n{open}I look.{close}{JSON_CALLS}\n"),
        format!("Hm.\n</think>\n\n{}I look.{}{JSON_CALLS}\n", marks(open), marks(close)),
        format!("Hm.\n</think>\nI look.\n{JSON_CALLS}\n"),
    ] {
        Conversation {
            file: "ERNIE-4.5-21B-A3B-Thinking.jinja",
            own: ERNIE,
            writes: &writes,
            reasoning: Some("Hm."),
            content: "I look.",
            prompt: &format!(
                "<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\n{open}I look.{close}{}\n<|im_end|>\n<|im_start|>tool\n<tool_output>\n\
                 warm\n</tool_output>\n<|im_end|>\n<|im_start|>tool\n<tool_output>\nnoon\n</tool_output>\n<|im_end|>\n\
                 <|im_start|>assistant\n<think>\n",
                JSON_CALLS
            ),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn glm_5() {
    let calls = "<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>\
                 </tool_call><tool_call>time<arg_key>zone</arg_key><arg_value>CET</arg_value></tool_call>";
    Conversation {
        file: "GLM-5.2.jinja",
        own: GLM_5,
        writes: &format!("Hm.</think>I look.{calls}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "<|assistant|><think>Hm.</think>I look.{calls}<|observation|><tool_response>warm</tool_response><tool_response>noon\
             </tool_response><|assistant|><think>"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn deepseek_v4() {
    let calls = "<@tool_calls>\n<@invoke name=\"weather\">\n<@parameter name=\"city\" string=\"true\">Zürich</@parameter>\n\
                 <@parameter name=\"days\" string=\"false\">2</@parameter>\n</@invoke>\n<@invoke name=\"time\">\n\
                 <@parameter name=\"zone\" string=\"true\">CET</@parameter>\n</@invoke>\n</@tool_calls>";
    for writes in [
        format!("Hm.</think>I look.\n\n{calls}"),
        format!("Hm.</think>I look.{}", calls.replace('@', "\u{1}@\u{1}")),
    ] {
        Conversation {
            file: "deepseek-ai-DeepSeek-V4.jinja",
            own: DEEPSEEK_V4,
            eos: "<｜end▁of▁sentence｜>",
            variables: &[("thinking", true)],
            writes: &writes.replace('@', "｜DSML｜"),
            reasoning: Some("Hm."),
            content: "I look.",
            prompt: &format!(
                "<｜Assistant｜><think>Hm.</think>I look.\n\n{}<｜end▁of▁sentence｜><｜User｜><tool_result>warm</tool_result>\n\n\
                 <tool_result>noon</tool_result><｜Assistant｜><think>",
                calls.replace('@', "｜DSML｜")
            ),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn kimi_k2_5() {
    let calls = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
                 {\"city\":\"Zürich\",\"days\":2}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>\
                 {\"zone\":\"CET\"}<|tool_call_end|><|tool_calls_section_end|>";
    for (think, reasoning, writes) in
        [("<think>", Some("Hm."), "Hm.</think>I look."), ("<think></think>", None, "I look.")]
    {
        let on = reasoning.is_some();
        Conversation {
            file: "Kimi-K2.5.jinja",
            own: KIMI_25,
            variables: if on { &[("thinking", true)] } else { &[("thinking", false)] },
            writes: &format!("{writes}{}", calls.replace("<|", "\u{1}<|").replace("|>", "|>\u{1}")),
            reasoning,
            content: "I look.",
            prompt: &format!(
                "<|im_end|><|im_assistant|>assistant<|im_middle|><think>{}</think>I look.{calls}<|im_end|><|im_system|>tool<|im_middle|>\
                 ## Return of functions.weather:0\nwarm<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.time:1\nnoon\
                 <|im_end|><|im_assistant|>assistant<|im_middle|>{think}",
                reasoning.unwrap_or_default()
            ),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn qwen3_next_thinking() {
    Conversation {
        file: "Qwen3-Next-80B-A3B-Thinking.jinja",
        own: QWEN3_NEXT,
        writes: &format!("Hm.\n</think>\n\nI look.\n{JSON_CALLS}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &compact(&format!(
            "<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\nI look.\n{JSON_CALLS}<|im_end|>\n<|im_start|>user\n\
             {TOOL_RESPONSES}<|im_end|>\n<|im_start|>assistant\n<think>\n"
        )),
        ..NONE
    }
    .lead();
}

/// A template that would end the model's turn behind text gets the text as reasoning, as long as the turn goes on.
#[test]
fn gemma_4_goes_on_behind_text_and_results() {
    let template = ChatTemplate::from_source(GEMMA_4_TEXT, "", "").unwrap();
    let format = Format::recognise(Some(&template), None).unwrap();
    let call = ToolCall { name: "f".into(), arguments: "{}".into(), id: Some("a".into()) };
    let turn = |reasoning: Option<&str>| {
        let calls = Message {
            reasoning: reasoning.map(str::to_owned),
            tool_calls: vec![call.clone()],
            ..Message::new("assistant", "I look.")
        };
        [
            Message::new("user", "x"),
            calls,
            Message { tool_call_id: Some("a".into()), ..Message::new("tool", "7") },
        ]
    };
    let render = |messages: &[Message]| {
        format.render(&template, messages, None, &Map::new()).unwrap().into_text()
    };
    let [call, result] = [
        "<|tool_call>call:f{}<tool_call|>",
        "<|tool_response>response:f{value:<|\"|>7<|\"|>}<tool_response|>",
    ];
    for (reasoning, thought) in [(None, "I look."), (Some("Hm."), "Hm.\n\nI look.")] {
        let expected = format!(
            "<|turn>user\nx<turn|>\n<|turn>model\n<|channel>thought\n{thought}\n<channel|>{call}{result}"
        );
        assert_eq!(render(&turn(reasoning)), expected);
    }
    // An earlier turn is over, and keeps its text.
    let mut all = turn(None).to_vec();
    all.push(Message::new("user", "y"));
    assert!(render(&all).starts_with(&format!(
        "<|turn>user\nx<turn|>\n<|turn>model\n{call}{result}I look.<turn|>\n"
    )));
}

/// Results go into the prompt of DeepSeek V4 in the order of their calls.
#[test]
fn results_of_deepseek_v4_are_in_the_order_of_the_calls() {
    let template = ChatTemplate::from_source(DEEPSEEK_V4, "", "").unwrap();
    let format = Format::recognise(Some(&template), None).unwrap();
    let call =
        |id: &str| ToolCall { name: "f".into(), arguments: "{}".into(), id: Some(id.into()) };
    let result = |id: &str| Message { tool_call_id: Some(id.into()), ..Message::new("tool", id) };
    let messages = [
        Message::new("user", "x"),
        Message { tool_calls: vec![call("one"), call("two")], ..Message::new("assistant", "") },
        result("two"),
        result("one"),
    ];
    let prompt = format.render(&template, &messages, None, &Map::new()).unwrap().into_text();
    assert!(
        prompt.contains("<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>"),
        "{prompt}"
    );
}

#[test]
fn thinking_is_switched_in_every_family() {
    let prompt = |source: &str, think: Think| -> Result<(Map<String, Value>, String), String> {
        let template = ChatTemplate::from_source(source, "", "").unwrap();
        let format = Format::recognise(Some(&template), None).unwrap();
        let variables = format.think(think).map_err(|error| error.to_string())?;
        let prompt = format.render(&template, &[Message::new("user", "x")], None, &variables);
        Ok((variables, prompt.unwrap().into_text()))
    };
    for (source, on, off) in [
        (NEMOTRON_3, "<think>\n", "<think></think>"),
        (GLM_5, "<think>", "<think></think>"),
        (DEEPSEEK_V4, "<｜Assistant｜><think>", "<｜Assistant｜></think>"),
        (KIMI_25, "<|im_middle|><think>", "<think></think>"),
        (MINIMAX_M3, "]~b]ai\n<mm:think>", "]~b]ai\n</mm:think>"),
    ] {
        for (think, end) in [(Think::On, on), (Think::Off, off)] {
            let (_, prompt) = prompt(source, think).unwrap();
            assert!(prompt.ends_with(end), "{prompt}");
        }
    }
    // DeepSeek V4 and GLM-5 read the effort only if thinking is on.
    let (variables, end) = prompt(DEEPSEEK_V4, Think::High).unwrap();
    let expected = json!({ "enable_thinking": true, "reasoning_effort": "high" });
    assert_eq!(Value::Object(variables), expected);
    assert!(end.ends_with("<think>"), "{end}");
    assert!(prompt(OLMO3, Think::Off).unwrap_err().contains("has no variable"));
}
