//! Conversations of the latest families.

use forebay_chat::{Format, Message, Parser, Think, ToolCall};
use forebay_text::ChatTemplate;
use serde_json::{Map, Value, json};

use super::latest_templates::*;
use super::{Conversation, NONE, tools};

/// Returns a text whose marks `<|...|>` are control tokens.
fn controls(text: &str) -> String {
    text.replace("<|", "\u{1}<|").replace("|>", "|>\u{1}")
}

#[test]
fn seed_oss() {
    let calls = "<seed:tool_call>\n<function=weather>\n<parameter=city>Zürich</parameter>\n<parameter=days>2</parameter>\n\
                 </function>\n</seed:tool_call>\n<seed:tool_call>\n<function=time>\n<parameter=zone>CET</parameter>\n\
                 </function>\n</seed:tool_call>";
    let results = "<seed:eos><seed:bos>tool\nwarm<seed:eos><seed:bos>tool\nnoon<seed:eos><seed:bos>assistant\n";
    let marks = |text: &str| text.replace("<seed:think>", "\u{1}<seed:think>\u{1}");
    for writes in [
        format!("<seed:think>Hm.</seed:think>\nI look.\n\n{calls}"),
        marks(&format!("<seed:think>\nHm.</seed:think>\nI look.{calls}")),
    ] {
        Conversation {
            file: "ByteDance-Seed-OSS.jinja",
            own: SEED,
            writes: &writes,
            reasoning: Some("Hm."),
            content: "I look.",
            prompt: &format!(
                "<seed:eos><seed:bos>assistant\n<seed:think>Hm.</seed:think>\nI look.\n\n{calls}{results}"
            ),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn hy_3_and_hy_4() {
    let calls = "<tool_calls@>\n<tool_call@>weather<tool_sep@>\n<arg_key@>city</arg_key@>\n<arg_value@>Zürich</arg_value@>\n\
                 <arg_key@>days</arg_key@>\n<arg_value@>2</arg_value@>\n</tool_call@>\n<tool_call@>time<tool_sep@>\n\
                 <arg_key@>zone</arg_key@>\n<arg_value@>CET</arg_value@>\n</tool_call@>\n</tool_calls@>";
    let prompt = format!(
        "<｜hy_Assistant@｜><think@>Hm.</think@>I look.{calls}<｜hy_eos@｜><tool_responses@>\n<tool_response@>\nwarm\n\
         </tool_response@>\n<tool_response@>\nnoon\n</tool_response@>\n</tool_responses@><｜hy_Assistant@｜><think@>"
    );
    let of = |text: &str| text.replace('@', ":opensource");
    let marks = |text: &str| of(text).replace('<', "\u{1}<").replace('>', ">\u{1}");
    for writes in
        [of(&format!("Hm.</think@>I look.{calls}")), marks(&format!("Hm.</think@>I look.{calls}"))]
    {
        Conversation {
            file: "tencent-Hy3.jinja",
            own: HY3,
            think: Some(Think::High),
            writes: &writes,
            reasoning: Some("Hm."),
            content: "I look.",
            prompt: &of(&prompt),
            ..NONE
        }
        .lead();
    }
    let compact = calls.replace("<tool_sep@>", "").replace('\n', "").replace('@', ":6124c78e");
    Conversation {
        file: "tencent-Hy4.jinja",
        own: HY4,
        writes: &format!("Hm.</think:6124c78e>I look.{compact}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "<｜assistant｜><think:6124c78e>Hm.</think:6124c78e>I look.{compact}<｜tool｜>warm<｜tool｜>noon<｜assistant｜><think:6124c78e>"
        ),
        ..NONE
    }
    .lead();
}

/// A suffix is a word. Marks without one are those of Hy4, and their reasoning is between usual marks.
#[test]
fn suffixes_of_marks() {
    let format = |suffix: &str| {
        let source = HY4.replace(":6124c78e", suffix);
        let template = ChatTemplate::from_source(&source, "", "").unwrap();
        Format::recognise(Some(&template), None).unwrap().offering(Some(&tools()))
    };
    let parse = |suffix: &str, written: &str| {
        let text = "Hm.</think@>Well.<tool_calls@><tool_call@>time</tool_call@></tool_calls@>";
        let prompt = format!("<think{suffix}>");
        super::parse(&format(suffix), &prompt, &text.replace('@', written), 1, true)
    };
    for suffix in ["", ":a", ":opensource", ":x-1_y"] {
        let message = parse(suffix, suffix);
        assert_eq!(message.reasoning.as_deref(), Some("Hm."), "{suffix}");
        assert_eq!((message.content.as_str(), message.tool_calls.len()), ("Well.", 1), "{suffix}");
        assert_eq!(message.tool_calls[0].name, "time");
    }
    // Marks of another checkpoint are text.
    assert_eq!(parse(":a", ":b").tool_calls, []);
    for other in [":", ": a", "a", ":a<b", &format!(":{}", "a".repeat(40))] {
        assert_eq!(parse(other, other).tool_calls, [], "{other}");
    }
}

#[test]
fn command_a_plus() {
    let calls = "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {\"city\": \"Zürich\", \"days\": 2}},\n    \
                 {\"tool_call_id\": \"1\", \"tool_name\": \"time\", \"parameters\": {\"zone\": \"CET\"}}\n]<|END_ACTION|>";
    let of = |reasoning: &str| {
        let results = [("0", "warm"), ("1", "noon")].map(|(id, text)| {
            format!("{{\n        \"tool_call_id\": \"{id}\",\n        \"results\": {{\n            \"0\": {{\"content\": \"{text}\"}}\n        }},\n        \"is_error\": null\n    }}")
        });
        format!(
            "<|END_TEXT|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>{reasoning}<|END_THINKING|>{calls}\
             <|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\n    {}\n]<|END_TOOL_RESULT|>\
             <|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>",
            results.join(",\n    ")
        )
    };
    for (writes, content, reasoning) in [
        (format!("Hm.<|END_THINKING|>{calls}"), "", "Hm."),
        (controls(&format!("Hm.<|END_THINKING|>{calls}")), "", "Hm."),
        // The template has no place for text beside calls. It goes into the reasoning.
        (
            format!("Hm.<|END_THINKING|><|START_TEXT|>I look.<|END_TEXT|>{calls}"),
            "I look.",
            "Hm.\n\nI look.",
        ),
    ] {
        Conversation {
            file: "Cohere2MoE.jinja",
            own: COHERE,
            writes: &writes,
            reasoning: Some("Hm."),
            content,
            prompt: &of(reasoning),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn kimi_k3() {
    let calls = "(tools|(call tool=\"weather\" index=\"1\"|(argument key=\"city\" type=\"string\"|Zürich)argument|\
                 (argument key=\"days\" type=\"number\"|2)argument|)call|(call tool=\"time\" index=\"2\"|\
                 (argument key=\"zone\" type=\"string\"|CET)argument|)call|)tools|";
    let of = |text: &str| {
        text.replace('|', "<|sep|>").replace('(', "<|open|>").replace(')', "<|close|>")
    };
    let end = ")message|";
    let prompt = |think: &str, last: &str| {
        let text = format!(
            "{end}@(message role=\"assistant\"|{think}(response|I look.)response|{calls}{end}@\
             (message role=\"tool\" tool=\"weather\" index=\"1\"|warm{end}@(message role=\"tool\" tool=\"time\" index=\"2\"|noon{end}@\
             (message role=\"assistant\"|({last}|"
        );
        of(&text).replace('@', "<|end_of_msg|>")
    };
    let thoughts = of(&format!("Hm.)think|(response|I look.)response|{calls}{end}"));
    for writes in
        [thoughts.clone(), controls(&thoughts), controls(&thoughts) + "\u{1}<|end_of_msg|>\u{1}"]
    {
        Conversation {
            file: "Kimi-K3.jinja",
            own: KIMI_3,
            writes: &writes,
            reasoning: Some("Hm."),
            content: "I look.",
            prompt: &prompt("(think|Hm.)think|", "think"),
            ..NONE
        }
        .lead();
    }
    Conversation {
        file: "Kimi-K3.jinja",
        own: KIMI_3,
        think: Some(Think::Off),
        writes: &of(&format!("I look.)response|{calls}{end}")),
        content: "I look.",
        prompt: &prompt("", "response"),
        ..NONE
    }
    .lead();
}

#[test]
fn solar_open() {
    let calls = |ids: [&str; 2]| {
        let [first, second] = ids;
        format!(
            "<|tool_calls|><|tool_call:begin|>{first}<|tool_call:name|>weather<|tool_call:args|>{{\"city\":\"Zürich\",\"days\":2}}\
             <|tool_call:end|><|tool_call:begin|>{second}<|tool_call:name|>time<|tool_call:args|>{{\"zone\":\"CET\"}}<|tool_call:end|><|calls|>"
        )
    };
    let begin = "<|begin|>assistant";
    let written = calls(["a1b2c3d4e5", "f6g7h8i9j0"]);
    // Ids of clients have another length than those of the model.
    let ids = ["cjsduegzqx", "xkyvkqj5sx"];
    let results: String = [("weather", "warm"), ("time", "noon")]
        .iter()
        .zip(ids)
        .map(|((name, text), id)| {
            format!(
                "<|tool_response:begin|>{id}<|tool_response:name|>{name}<|tool_response:result|>{text}<|tool_response:end|>"
            )
        })
        .collect();
    let prompt = |reasoning: &str| {
        format!(
            "<|end|>{begin}<|think|>{reasoning}<|end|>{begin}{}<|begin|>tool<|tool_response|>{results}<|end|>{begin}",
            calls(ids)
        )
    };
    for (writes, content, reasoning) in [
        (format!("<|think|>Hm.<|end|>{begin}{written}"), "", "Hm."),
        (controls(&format!("<|think|>Hm.<|end|>{begin}{written}")), "", "Hm."),
        (
            format!("<|think|>Hm.<|end|>{begin}<|content|>I look.<|end|>{begin}{written}"),
            "I look.",
            "Hm.\n\nI look.",
        ),
    ] {
        Conversation {
            file: "upstage-Solar-Open-100B.jinja",
            own: SOLAR,
            writes: &writes,
            reasoning: Some("Hm."),
            content,
            prompt: &prompt(reasoning),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn muse() {
    let call = |name: &str, parameters: &str| {
        format!(
            "<|start|>assistant to={name}<|message|><atem:function_calls>\n<atem:invoke name=\"{name}\">\n{parameters}\
             </atem:invoke>\n</atem:function_calls>"
        )
    };
    let parameter = |key: &str, value: &str| {
        format!("<atem:parameter name=\"{key}\">{value}</atem:parameter>\n")
    };
    let forecast = call("weather", &(parameter("city", "Zürich") + &parameter("days", "2")));
    let time = call("time", &parameter("zone", "CET"));
    let thought = "<|start|>assistant to=self<|message|>Hm.<|eom|>";
    let result = |name: &str, text: &str| {
        format!(
            "<|start|>tool {name}<|message|><tool_output name=\"{name}\">\n{text}\n</tool_output><|eot|>"
        )
    };
    let answer = format!("{thought}{forecast}<|eom|>{time}<|eot|>");
    let writes = controls(answer.strip_prefix("<|start|>assistant").unwrap());
    Conversation {
        file: "muse-glimmer.jinja",
        own: MUSE,
        writes: &writes,
        reasoning: Some("Hm."),
        prompt: &format!(
            "<|eot|>{answer}{}{}<|start|>assistant",
            result("weather", "warm"),
            result("time", "noon")
        ),
        ..NONE
    }
    .lead();
}

/// Answers of Muse may quote calls and marks.
#[test]
fn messages_of_muse() {
    let template = ChatTemplate::from_source(MUSE, "", "").unwrap();
    let format = Format::recognise(Some(&template), None).unwrap();
    let offered = format.offering(Some(&tools()));
    let call = "<atem:function_calls>\n<atem:invoke name=\"time\">\n</atem:invoke>\n</atem:function_calls>";
    let parse = |format: &Format, text: &str| {
        let whole = super::parse(format, "<|start|>assistant", &controls(text), 0, true);
        for cut in [1, 2, 5] {
            let message = super::parse(format, "<|start|>assistant", &controls(text), cut, true);
            assert_eq!(message, whole, "{text}");
        }
        whole
    };
    let message = |reasoning: Option<&str>, content: &str| Message {
        reasoning: reasoning.map(str::to_owned),
        ..Message::new("assistant", content)
    };
    for (text, expected) in [
        (" to=user<|message|>Hello!<|eot|>".to_owned(), message(None, "Hello!")),
        ("<|message|>Hello!".to_owned(), message(None, "Hello!")),
        (
            format!(" to=user<|message|>Like this: {call}<|eot|>"),
            message(None, &format!("Like this: {call}")),
        ),
        (
            format!(
                " to=self<|message|>I could {call}.<|eom|><|start|>assistant to=self<|message|>No.<|eom|><|start|>assistant to=user<|message|>Hi"
            ),
            message(Some(&format!("I could {call}.\n\nNo.")), "Hi"),
        ),
        // A message to a tool without a call, and one that ends in the middle.
        (
            " to=time<|message|>What time is it?<|eom|>".to_owned(),
            message(None, "What time is it?"),
        ),
        (format!(" to=time<|message|>{}", &call[..40]), message(None, &call[..40])),
        // The model did not follow the format.
        ("Hello!".to_owned(), message(None, "Hello!")),
        (" to=us".to_owned(), message(None, " to=us")),
    ] {
        assert_eq!(parse(&offered, &text), expected, "{text}");
    }
    // A call behind an answer.
    let text = format!(
        " to=user<|message|>I look.<|eom|><|start|>assistant to=time<|message|>{call}<|eot|>"
    );
    let called = parse(&offered, &text);
    let time = ToolCall { name: "time".into(), arguments: "{}".into(), id: None };
    assert_eq!((called.content.as_str(), called.tool_calls), ("I look.", vec![time]));
    // Without tools, calls are text. Marks that are no control tokens always are.
    let text = format!(" to=time<|message|>{call}");
    assert_eq!(parse(&format.offering(None), &text), message(None, call));
    let mut parser = Parser::new(&offered, "<|start|>assistant");
    parser.text(" to=user", &mut |_| {});
    parser.control("<|message|>", &mut |_| {});
    parser.text("The mark <|eom|> ends it.", &mut |_| {});
    assert_eq!(parser.finish(&mut |_| {}).content, "The mark <|eom|> ends it.");
}

/// Calls of GLM, as newer models write them.
const COMPACT_CALLS: &str = "<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>\
                             </tool_call><tool_call>time<arg_key>zone</arg_key><arg_value>CET</arg_value></tool_call>";

#[test]
fn laguna_and_glm_5_3() {
    Conversation {
        file: "poolside-Laguna-S-2.1.jinja",
        own: LAGUNA,
        writes: &format!("Hm.</think>I look.{COMPACT_CALLS}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "</user>\n<assistant><think>Hm.</think>I look.{COMPACT_CALLS}</assistant>\n<tool_response>warm</tool_response>\n\
             <tool_response>noon</tool_response>\n<assistant><think>"
        ),
        ..NONE
    }
    .lead();
    Conversation {
        file: "GLM-5.3-Flash.jinja",
        own: super::newer_templates::GLM_5,
        writes: &format!("Hm.</think>I look.{COMPACT_CALLS}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "<|assistant|><think>Hm.</think>I look.{COMPACT_CALLS}<|observation|><tool_response>warm</tool_response><tool_response>noon\
             </tool_response><|assistant|><think>"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn ling_3() {
    let calls = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value><arg_key>days</arg_key>\n<arg_value>2</arg_value>\n\
                 </tool_call>\n<tool_call>time\n<arg_key>zone</arg_key>\n<arg_value>CET</arg_value>\n</tool_call>";
    for writes in [calls.to_owned(), calls.replace("weather\n", "weather")] {
        Conversation {
            file: "inclusionai-ling-3.0-flash.jinja",
            own: LING_3,
            writes: &format!("Hm.</think>I look.\n{writes}"),
            reasoning: Some("Hm."),
            content: "I look.",
            prompt: &format!(
                "<|role_end|><role>ASSISTANT</role>\n<think>Hm.</think>I look.\n{calls}<|role_end|><role>OBSERVATION</role>\n<tool_response>\n\
                 warm\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|role_end|><role>ASSISTANT</role>\n<think>"
            ),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn step_3_5() {
    let calls = "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n\
                 </function>\n</tool_call><tool_call>\n<function=time>\n<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>";
    Conversation {
        file: "StepFun3.5-Flash.jinja",
        own: STEP_35,
        writes: &format!("Hm.\n</think>\nI look.{calls}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\nI look.{calls}<|im_end|>\n<|im_start|>tool_response\n\
             <tool_response>warm</tool_response><tool_response>noon</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn exaone_4() {
    let calls = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 2}}</tool_call>\n\
                 <tool_call>{\"name\": \"time\", \"arguments\": {\"zone\": \"CET\"}}</tool_call>";
    Conversation {
        file: "EXAONE-4.0.jinja",
        own: EXAONE_4,
        think: Some(Think::On),
        writes: &format!("Hm.\n</think>\n\nI look.\n{calls}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "[|endofturn|]\n[|assistant|]\n<think>\n\n</think>\n\nI look.\n{calls}[|endofturn|]\n[|tool|]\n<tool_result>{{\"result\": \"warm\"}}</tool_result>\n\
             <tool_result>{{\"result\": \"noon\"}}</tool_result>[|endofturn|]\n[|assistant|]\n<think>\n"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn jamba() {
    let calls = "<tool_calls>[\n    {\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 2}},\n    \
                 {\"name\": \"time\", \"arguments\": {\"zone\": \"CET\"}}\n]</tool_calls>";
    Conversation {
        file: "AI21-Jamba.jinja",
        own: JAMBA,
        writes: calls,
        prompt: &format!(
            "<|eom|><|bom|><|assistant|> {calls}<|eom|><|bom|><|tool|> warm<|eom|><|bom|><|tool|> noon<|eom|><|bom|><|assistant|>"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn thinking_is_switched_by_the_variable_of_the_family() {
    let prompt = |source: &str, think: Think| {
        let template = ChatTemplate::from_source(source, "", "").unwrap();
        let format = Format::recognise(Some(&template), None).unwrap();
        let variables = format.think(think).unwrap_or_else(|error| panic!("{error}: {source}"));
        let prompt = format.render(&template, &[Message::new("user", "x")], None, &variables);
        (Value::Object(variables), prompt.unwrap().into_text())
    };
    for (source, [off, on], ends) in [
        (
            SEED,
            [json!({ "thinking_budget": 0 }), json!({ "thinking_budget": -1 })],
            ["</seed:think>", "assistant\n"],
        ),
        (
            HY3,
            [json!({ "reasoning_effort": "no_think" }), json!({ "reasoning_effort": "high" })],
            ["</think:opensource>", "<think:opensource>"],
        ),
        (
            COHERE,
            [json!({ "reasoning": false }), json!({ "reasoning": true })],
            ["<|END_THINKING|>", "<|START_THINKING|>"],
        ),
        (
            KIMI_3,
            [json!({ "thinking": false }), json!({ "thinking": true })],
            ["<|open|>response<|sep|>", "<|open|>think<|sep|>"],
        ),
        (
            LAGUNA,
            [json!({ "enable_thinking": false }), json!({ "enable_thinking": true })],
            ["<assistant></think>", "<assistant><think>"],
        ),
        (
            LING_3,
            [json!({ "enable_thinking": false }), json!({ "enable_thinking": true })],
            ["<think></think>", "\n<think>"],
        ),
    ] {
        for ((think, variables), end) in
            [Think::Off, Think::On].into_iter().zip([off, on]).zip(ends)
        {
            let (set, prompt) = prompt(source, think);
            assert_eq!(set, variables);
            assert!(prompt.ends_with(end), "{prompt}");
        }
    }
    let (set, _) = prompt(KIMI_3, Think::Low);
    assert_eq!(set, json!({ "thinking": true, "thinking_effort": "low" }));
    let (set, _) = prompt(HY3, Think::Low);
    assert_eq!(set, json!({ "reasoning_effort": "low" }));
    let (set, _) = prompt(SOLAR, Think::Low);
    assert_eq!(set, json!({ "reasoning_effort": "low" }));
}

/// Text before calls that the template would leave out becomes reasoning of the current turn.
#[test]
fn no_text_is_lost_beside_calls() {
    for source in [COHERE, SOLAR, MUSE] {
        let template = ChatTemplate::from_source(source, "", "").unwrap();
        let format = Format::recognise(Some(&template), None).unwrap();
        let call = ToolCall { name: "f".into(), arguments: "{}".into(), id: Some("a".into()) };
        let calls = Message { tool_calls: vec![call], ..Message::new("assistant", "I look.") };
        let result = Message { tool_call_id: Some("a".into()), ..Message::new("tool", "7") };
        let messages = [Message::new("user", "x"), calls, result];
        let prompt = format.render(&template, &messages, None, &Map::new()).unwrap().into_text();
        assert!(prompt.contains("I look."), "{prompt}");
    }
}
