//! The conversations. Every model calls `weather(city: "Zürich", days: 2)`, and most of them `time(zone: "CET")`, too.

use super::templates::*;
use super::{Conversation, NONE};

#[test]
fn qwen3() {
    Conversation {
        file: "Qwen-Qwen3-0.6B.jinja",
        eos: "<|im_end|>",
        writes: "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\", \
                 \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>",
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: "<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"weather\", \
                 \"arguments\": {\"city\":\"Zürich\",\"days\":2}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": \
                 {\"zone\":\"CET\"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nwarm\n</tool_response>\n\
                 <tool_response>\nnoon\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ..NONE
    }
    .lead();
}

const CODER_WRITES: &str = "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n\
                            </parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n<parameter=zone>\nCET\n\
                            </parameter>\n</function>\n</tool_call>";

#[test]
fn qwen3_coder() {
    Conversation {
        file: "Qwen3-Coder.jinja",
        eos: "<|im_end|>",
        writes: CODER_WRITES,
        prompt: &format!(
            "<|im_end|>\n<|im_start|>assistant\n{CODER_WRITES}<|im_end|>\n<|im_start|>user\n<tool_response>\nwarm\n\
             </tool_response>\n<tool_response>\nnoon\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn qwen3_5() {
    Conversation {
        file: "Qwen3.5-4B.jinja",
        own: QWEN_35,
        eos: "<|im_end|>",
        writes: &format!("Hm.\n</think>\n\n{CODER_WRITES}"),
        reasoning: Some("Hm."),
        prompt: &format!(
            "<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\n{CODER_WRITES}<|im_end|>\n<|im_start|>user\n\
             <tool_response>\nwarm\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>\n\
             <|im_start|>assistant\n<think>\n"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn glm_4_7() {
    let calls = "<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key><arg_value>2\
                 </arg_value></tool_call><tool_call>time<arg_key>zone</arg_key><arg_value>CET</arg_value></tool_call>";
    Conversation {
        file: "GLM-4.7-Flash.jinja",
        own: GLM_47,
        writes: &format!("Hm.\u{1}</think>\u{1}I look.{calls}"),
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
fn deepseek_v3_1() {
    let calls = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\":\"Zürich\",\"days\":2}<｜tool▁call▁end｜>\
                 <｜tool▁call▁begin｜>time<｜tool▁sep｜>{\"zone\":\"CET\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    Conversation {
        file: "deepseek-ai-DeepSeek-V3.1.jinja",
        eos: "<｜end▁of▁sentence｜>",
        variables: &[("thinking", true)],
        writes: &format!("Hm.</think>I look.{calls}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "<｜Assistant｜><think></think>I look.{}<｜end▁of▁sentence｜><｜tool▁output▁begin｜>warm<｜tool▁output▁end｜>\
             <｜tool▁output▁begin｜>noon<｜tool▁output▁end｜>",
            calls.replace(":\"", ": \"").replace(",\"", ", \"").replace(":2", ": 2")
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn deepseek_v3_2() {
    let calls = "<\u{1}｜DSML｜\u{1}function_calls>\n<\u{1}｜DSML｜\u{1}invoke name=\"weather\">\n\
                 <\u{1}｜DSML｜\u{1}parameter name=\"city\" string=\"true\">Zürich</\u{1}｜DSML｜\u{1}parameter>\n\
                 <\u{1}｜DSML｜\u{1}parameter name=\"days\" string=\"false\">2</\u{1}｜DSML｜\u{1}parameter>\n\
                 </\u{1}｜DSML｜\u{1}invoke>\n<\u{1}｜DSML｜\u{1}invoke name=\"time\">\n\
                 <\u{1}｜DSML｜\u{1}parameter name=\"zone\" string=\"true\">CET</\u{1}｜DSML｜\u{1}parameter>\n\
                 </\u{1}｜DSML｜\u{1}invoke>\n</\u{1}｜DSML｜\u{1}function_calls>";
    Conversation {
        file: "deepseek-ai-DeepSeek-V3.2.jinja",
        own: DEEPSEEK_V32,
        eos: "<｜end▁of▁sentence｜>",
        variables: &[("thinking", true)],
        writes: &format!("Hm.</think>I look.\n\n{calls}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "<｜Assistant｜><think>Hm.</think>I look.\n\n{}<｜end▁of▁sentence｜>\n\n<function_results>\n<result>warm</result>\n\
             <result>noon</result>\n</function_results>\n\n<think>",
            calls.replace('\u{1}', "")
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn gpt_oss() {
    let mark = |name: &str| format!("\u{1}<|{name}|>\u{1}");
    let [channel, message, end, start, constrain] =
        ["channel", "message", "end", "start", "constrain"].map(mark);
    Conversation {
        file: "openai-gpt-oss-120b.jinja",
        eos: "<|return|>",
        writes: &format!(
            "{channel}analysis{message}Hm.{end}{start}assistant{channel}commentary to=functions.weather {constrain}json{message}\
             {{\"city\": \"Zürich\", \"days\": 2}}"
        ),
        reasoning: Some("Hm."),
        both: false,
        prompt: "<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.weather\
                 <|channel|>commentary json<|message|>{\"city\": \"Zürich\", \"days\": 2}<|call|><|start|>functions.weather \
                 to=assistant<|channel|>commentary<|message|>\"warm\"<|end|><|start|>assistant",
        ..NONE
    }
    .lead();
}

/// Header of Llama 3.
fn header(role: &str) -> String {
    format!("<|start_header_id|>{role}<|end_header_id|>\n\n")
}

#[test]
fn llama_3_1() {
    let pair = |call: &str, result: &str| {
        let [assistant, results] = ["assistant", "ipython"].map(header);
        format!("{assistant}{call}<|eot_id|>{results}\"{result}\"<|eot_id|>")
    };
    let [one, two] = [
        "{\"name\": \"weather\", \"parameters\": {\"city\": \"Zürich\", \"days\": 2}}",
        "{\"name\": \"time\", \"parameters\": {\"zone\": \"CET\"}}",
    ];
    // The template takes one call in a message. Several calls come with separators or marks.
    for writes in [
        format!("{one}; {two}"),
        format!("\u{1}<|python_tag|>\u{1}{one}\n{two}"),
        format!("[{one}, {two}]"),
        format!("\n{one};\u{1}<|python_tag|>\u{1}{two};"),
    ] {
        Conversation {
            file: "meta-llama-Llama-3.1-8B-Instruct.jinja",
            eos: "<|eot_id|>",
            writes: &writes,
            prompt: &format!(
                "<|eot_id|>{}{}{}",
                pair(one, "warm"),
                pair(two, "noon"),
                header("assistant")
            ),
            ..NONE
        }
        .lead();
    }
}

#[test]
fn llama_4_in_the_form_of_python() {
    let header = |role: &str| format!("<|header_start|>{role}<|header_end|>\n\n");
    let [assistant, results] = ["assistant", "ipython"].map(header);
    Conversation {
        file: "tool_chat_template_llama4_pythonic.jinja",
        own: LLAMA_4_PYTHON,
        eos: "<|eot|>",
        writes: "\u{1}<|python_start|>\u{1}[weather(city='Zürich', days=2), time(zone=\"CET\")]\u{1}<|python_end|>\u{1}",
        prompt: &format!(
            "<|eot|>{assistant}[weather(city=\"Zürich\", days=\"2\"), time(zone=\"CET\")]<|eot|>{results}\"warm\"<|eot|>\
             {results}\"noon\"<|eot|>{assistant}"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn mistral_nemo() {
    Conversation {
        file: "mistralai-Mistral-Nemo-Instruct-2407.jinja",
        eos: "</s>",
        writes: "\u{1}[TOOL_CALLS]\u{1}[{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 2}, \"id\": \"a1b2c3d4e\"}, \
                 {\"name\": \"time\", \"arguments\": {\"zone\": \"CET\"}}]",
        prompt: "[/INST][TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 2}, \"id\": \"call00001\"}, \
                 {\"name\": \"time\", \"arguments\": {\"zone\": \"CET\"}, \"id\": \"call00002\"}]</s>[TOOL_RESULTS]{\"content\": warm, \
                 \"call_id\": \"call00001\"}[/TOOL_RESULTS][TOOL_RESULTS]{\"content\": noon, \"call_id\": \"call00002\"}[/TOOL_RESULTS]",
        ..NONE
    }
    .lead();
}

#[test]
fn mistral_small_3_2() {
    let calls = |[one, two]: [&str; 2]| {
        format!(
            "[TOOL_CALLS]weather[CALL_ID]{one}[ARGS]{{\"city\": \"Zürich\", \"days\": 2}}[TOOL_CALLS]time[CALL_ID]{two}[ARGS]\
             {{\"zone\": \"CET\"}}"
        )
    };
    Conversation {
        file: "Mistral-Small-3.2-24B-Instruct-2506.jinja",
        own: MISTRAL_SMALL,
        eos: "</s>",
        writes: &calls(["a1b2c3d4e", "abcdefghi"]).replace('[', "\u{1}[").replace(']', "]\u{1}"),
        prompt: &format!(
            "[/INST]{}</s>[TOOL_RESULTS]call00001[TOOL_CONTENT]warm[/TOOL_RESULTS][TOOL_RESULTS]call00002[TOOL_CONTENT]noon\
             [/TOOL_RESULTS]",
            calls(["call00001", "call00002"])
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn ministral_3() {
    let calls = "[TOOL_CALLS]weather[ARGS]{\"city\":\"Zürich\",\"days\":2}[TOOL_CALLS]time[ARGS]{\"zone\":\"CET\"}";
    Conversation {
        file: "mistralai-Ministral-3-14B-Reasoning-2512.jinja",
        own: MINISTRAL,
        eos: "</s>",
        writes: &format!("[THINK]Hm.[/THINK]I look.{calls}").replace('[', "\u{1}[").replace(']', "]\u{1}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "[/INST][THINK]Hm.[/THINK]I look.{calls}</s>[TOOL_RESULTS]warm[/TOOL_RESULTS][TOOL_RESULTS]noon[/TOOL_RESULTS]"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn gemma_4() {
    let calls = "<|tool_call>call:weather{city:<|\"|>Zürich<|\"|>,days:2}<tool_call|><|tool_call>call:time{zone:<|\"|>CET<|\"|>}<tool_call|>";
    Conversation {
        file: "google-gemma-4-31B-it.jinja",
        own: GEMMA_4,
        variables: &[("enable_thinking", true)],
        writes: &format!("<|channel>thought\nHm.\n<channel|>{calls}").replace('<', "\u{1}<").replace('>', ">\u{1}"),
        reasoning: Some("Hm."),
        prompt: &format!(
            "<turn|>\n<|turn>model\n<|channel>thought\nHm.\n<channel|>{calls}<|tool_response>response:weather{{value:<|\"|>warm<|\"|>}}\
             <tool_response|><|tool_response>response:time{{value:<|\"|>noon<|\"|>}}<tool_response|>"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn function_gemma() {
    let calls = "<start_function_call>call:weather{city:<escape>Zürich<escape>,days:2}<end_function_call>\
                 <start_function_call>call:time{zone:<escape>CET<escape>}<end_function_call>";
    Conversation {
        file: "google-functiongemma-270m-it.jinja",
        own: FUNCTION_GEMMA,
        writes: &calls.replace('<', "\u{1}<").replace('>', ">\u{1}"),
        prompt: &format!(
            "<end_of_turn>\n<start_of_turn>model\n{calls}<start_function_response>response:weather{{value:<escape>warm<escape>}}\
             <end_function_response><start_function_response>response:time{{value:<escape>noon<escape>}}<end_function_response>"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn kimi_k2_thinking() {
    let calls = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
                 {\"city\":\"Zürich\",\"days\":2}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>\
                 {\"zone\":\"CET\"}<|tool_call_end|><|tool_calls_section_end|>";
    Conversation {
        file: "Kimi-K2-Thinking.jinja",
        own: KIMI,
        eos: "<|im_end|>",
        writes: &format!("<think>Hm.</think>I look.{calls}").replace("<|", "\u{1}<|").replace("|>", "|>\u{1}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "<|im_end|><|im_assistant|>assistant<|im_middle|><think>Hm.</think>I look.{calls}<|im_end|><|im_system|>tool<|im_middle|>\
             ## Return of functions.weather:0\nwarm<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.time:1\nnoon\
             <|im_end|><|im_assistant|>assistant<|im_middle|>"
        ),
        ..NONE
    }
    .lead();
}

#[test]
fn minimax_m2() {
    let calls = "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Zürich</parameter>\n<parameter name=\"days\">2\
                 </parameter>\n</invoke>\n<invoke name=\"time\">\n<parameter name=\"zone\">CET</parameter>\n</invoke>\n</minimax:tool_call>";
    Conversation {
        file: "MiniMax-M2.jinja",
        own: MINIMAX,
        eos: "[e~[",
        writes: &format!("Hm.\n</think>\n\nI look.\n{calls}"),
        reasoning: Some("Hm."),
        content: "I look.",
        prompt: &format!(
            "[e~[\n]~b]ai\n<think>\nHm.\n</think>\n\nI look.\n{calls}[e~[\n]~b]tool\n<response>warm</response>\n\
             <response>noon</response>[e~[\n]~b]ai\n<think>\n"
        ),
        ..NONE
    }
    .lead();
}

/// The template of Gemma 2 has neither tools nor system messages.
#[test]
fn gemma_2() {
    let calls = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 2}}\n</tool_call>\n\
                 <tool_call>\n{\"name\": \"time\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>";
    Conversation {
        file: "google-gemma-2-2b-it.jinja",
        writes: &format!("I look.\n{calls}"),
        content: "I look.",
        prompt: &format!(
            "<end_of_turn>\n<start_of_turn>model\nI look.\n{calls}<end_of_turn>\n<start_of_turn>user\n<tool_response>\nwarm\n\
             </tool_response>\n<tool_response>\nnoon\n</tool_response><end_of_turn>\n<start_of_turn>model\n"
        ),
        ..NONE
    }
    .lead();
}
