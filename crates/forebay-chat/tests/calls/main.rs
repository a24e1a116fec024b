//! Tests of required tool calls of every family: the grammar allows what the parser reads, and nothing else.

mod latest;
mod references;

use std::sync::Arc;

use forebay_chat::{AnswerStream, CallsWanted, ChatError, Format};
use forebay_format::{Document, HfMetadata};
use forebay_grammar::{Compiler, Grammar, GrammarError, Preamble, Rules};
use forebay_text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};

const END: &str = "<|im_end|>";

const MARKS: [&str; 53] = [
    END,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
    "<|end|>",
    "｜DSML｜",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|channel>",
    "<channel|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "]<]minimax[>[",
    "<mm:think>",
    "</mm:think>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "<tool_calls>",
    "</tool_calls>",
    "<function_calls>",
    "</function_calls>",
];

/// Marks of a vocabulary: how it has them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Marks {
    Control,
    /// Tokens that are text.
    Text,
    /// No tokens.
    Absent,
}

/// Returns a tokenizer with a token for every byte and, unless they are absent, for every mark.
fn tokenizer(form: Marks) -> Arc<Tokenizer> {
    // The byte-level alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
    let mut next = 256;
    let mut vocabulary = Map::new();
    for byte in 0..=255u8 {
        let plain = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if plain { u32::from(byte) } else { next };
        next += u32::from(!plain);
        vocabulary.insert(char::from_u32(code).unwrap().to_string(), byte.into());
    }
    let all = MARKS.into_iter().chain(latest::MARKS);
    let count = if form == Marks::Absent { 1 } else { usize::MAX };
    let marks = all.take(count).enumerate().map(|(number, mark)| {
        let special = form == Marks::Control || mark == END;
        json!({ "id": 256 + number, "content": mark, "special": special, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false })
    });
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let description = json!({
        "version": "1.0", "added_tokens": marks.collect::<Vec<_>>(), "normalizer": null, "pre_tokenizer": level,
        "post_processor": null, "decoder": level,
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [] },
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, description.to_string()).unwrap();
    let metadata = HfMetadata {
        config: json!({}),
        tokenizer_json: Some(Document::on_disk(path)),
        tokenizer_config: Some(json!({ "eos_token": END })),
        generation_config: None,
        tiktoken: None,
        chat_templates: Default::default(),
    };
    Arc::new(Tokenizer::from_hugging_face(&metadata).unwrap())
}

fn tools() -> Value {
    let of = |name: &str, parameters: Value| json!({ "type": "function", "function": { "name": name, "parameters": parameters } });
    json!([
        of(
            "forecast",
            json!({
                "type": "object",
                "properties": {
                    "city": { "type": "string" },
                    "days": { "$ref": "#/$defs/days" },
                    "unit": { "enum": ["C", "F"] },
                },
                "required": ["city", "days"],
                "additionalProperties": false,
                "$defs": { "days": { "type": "integer", "minimum": 1 } },
            })
        ),
        of("stop", json!({ "type": "object", "properties": {}, "additionalProperties": false })),
    ])
}

fn format(source: &str) -> Format {
    let template = ChatTemplate::from_source(source, "", "").unwrap();
    Format::recognise(Some(&template), None).unwrap().offering(Some(&tools()))
}

/// Feeds an answer to a grammar token by token. Returns how much of it the grammar allows, and forecest it may end there.
fn feed(grammar: &Grammar, tokenizer: &Tokenizer, answer: &str) -> (usize, bool) {
    let mut matcher = grammar.begin();
    let mut mask = Vec::new();
    let mut at = 0;
    for id in tokenizer.encode(answer, false, true).unwrap() {
        if matcher.mask(&mut mask).is_err() || mask[id as usize / 32] >> (id % 32) & 1 == 0 {
            return (at, false);
        }
        matcher.accept(id).unwrap();
        at += tokenizer.token_bytes(id, true).len();
    }
    let end = tokenizer.token_id(END).unwrap();
    let ends = matcher.is_complete()
        || matcher.mask(&mut mask).is_ok() && mask[end as usize / 32] >> (end % 32) & 1 == 1;
    (at, ends)
}

struct Family {
    template: &'static str,
    prompt: &'static str,
    /// Answer with one call of `forecast`, with `CITY` for a text, and what is before it.
    before: &'static str,
    forecast: &'static str,
    stop: &'static str,
    /// Text around the calls.
    around: [&'static str; 2],
    /// Text between two calls.
    between: &'static str,
    several: bool,
}

/// Template that writes calls as Llama 3 does.
const LLAMA: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}{\"name\": \"{{ c.function.name }}\", \
                     \"parameters\": {{ c.function.arguments | tojson }}}{% endfor %}{% endfor %}";

/// Template that writes calls in the form of Python.
const PYTHON: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.function.name }}(\
                      {% for k, v in c.function.arguments | items %}{{ k }}=\"{{ v }}\"{% endfor %})]{% endfor %}{% endfor %}";

const FAMILIES: [Family; 26] = [
    Family {
        template: "{{ '<think>\n</think>' }}<tool_call>{\"name\"",
        prompt: "<|im_start|>assistant\n",
        before: "<think>\nI call <tool_call>.\n</think>\n\n",
        forecast: "<tool_call>\n{\"name\": \"forecast\", \"arguments\": {\"city\": \"CITY\", \"days\": 3}}\n</tool_call>\n",
        stop: "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>\n",
        around: ["", ""],
        between: "",
        several: true,
    },
    Family {
        template: "<tool_call><function=",
        prompt: "<|im_start|>assistant\n",
        before: "",
        forecast: "<tool_call>\n<function=forecast>\n<parameter=city>\nCITY\n</parameter>\n<parameter=days>\n3\n</parameter>\n\
                  </function>\n</tool_call>\n",
        stop: "<tool_call>\n<function=stop>\n</function>\n</tool_call>\n",
        around: ["", ""],
        between: "",
        several: true,
    },
    Family {
        template: "</think><tool_call><arg_key>",
        prompt: "<|assistant|><think>",
        before: "thoughts</think>\n",
        forecast: "<tool_call>forecast\n<arg_key>city</arg_key>\n<arg_value>CITY</arg_value>\n<arg_key>days</arg_key>\n\
                  <arg_value>3</arg_value>\n</tool_call>\n",
        stop: "<tool_call>stop\n</tool_call>\n",
        around: ["", ""],
        between: "",
        several: true,
    },
    Family {
        template: "</think><｜tool▁call▁begin｜>",
        prompt: "<｜Assistant｜></think>",
        before: "",
        forecast: "<｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{\"city\": \"CITY\", \"days\": 3}<｜tool▁call▁end｜>",
        stop: "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        around: ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
        between: "",
        several: true,
    },
    Family {
        template: "<｜tool▁call▁begin｜>```json",
        prompt: "<｜Assistant｜>",
        before: "",
        forecast: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n{\"city\": \"CITY\", \"days\": 3}\n```<｜tool▁call▁end｜>",
        stop: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜>",
        around: ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
        between: "",
        several: true,
    },
    Family {
        template: "<|start|><|channel|><|message|>",
        prompt: "<|start|>assistant",
        before: "<|channel|>analysis<|message|>thoughts<|end|>",
        forecast: "<|start|>assistant<|channel|>commentary to=functions.forecast <|constrain|>json<|message|>\
                  {\"city\": \"CITY\", \"days\": 3}<|call|>",
        stop: "<|start|>assistant<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}<|call|>",
        around: ["", ""],
        between: "",
        several: false,
    },
    Family {
        template: "</think><tool_call></arg_key><arg_value><arg_key>",
        prompt: "<|assistant|><think>",
        before: "thoughts</think>",
        forecast: "<tool_call>forecast<arg_key>city</arg_key><arg_value>CITY</arg_value><arg_key>days</arg_key>\
                  <arg_value>3</arg_value></tool_call>",
        stop: "<tool_call>stop</tool_call>",
        around: ["", ""],
        between: "",
        several: true,
    },
    Family {
        template: "</think>｜DSML｜function_calls invoke name=",
        prompt: "<｜Assistant｜><think>",
        before: "I write <｜DSML｜invoke.</think>",
        forecast: "<｜DSML｜invoke name=\"forecast\">\n<｜DSML｜parameter name=\"city\" string=\"true\">CITY</｜DSML｜parameter>\n\
                  <｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n",
        stop: "<｜DSML｜invoke name=\"stop\">\n</｜DSML｜invoke>\n",
        around: ["<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"],
        between: "",
        several: true,
    },
    Family {
        template: "｜DSML｜tool_calls invoke name=",
        prompt: "<｜Assistant｜>",
        before: "",
        forecast: "<｜DSML｜invoke name=\"forecast\">\n<｜DSML｜parameter name=\"city\" string=\"true\">CITY</｜DSML｜parameter>\n\
                  <｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n",
        stop: "<｜DSML｜invoke name=\"stop\">\n</｜DSML｜invoke>\n",
        around: ["<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"],
        between: "",
        several: true,
    },
    Family {
        template: "</think><minimax:tool_call>",
        prompt: "]~b]ai\n<think>\n",
        before: "thoughts\n</think>\n\n",
        forecast: "<invoke name=\"forecast\">\n<parameter name=\"city\">CITY</parameter>\n\
                  <parameter name=\"days\">3</parameter>\n</invoke>\n",
        stop: "<invoke name=\"stop\">\n</invoke>\n",
        around: ["<minimax:tool_call>\n", "</minimax:tool_call>"],
        between: "",
        several: true,
    },
    Family {
        template: "</think><|tool_call_begin|>",
        prompt: "<|im_assistant|>assistant<|im_middle|>",
        before: "<think>thoughts</think>",
        forecast: "<|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>{\"city\": \"CITY\", \"days\": 3}<|tool_call_end|>",
        stop: "<|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
        around: ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
        between: "",
        several: true,
    },
    Family {
        template: "<start_function_call>",
        prompt: "<start_of_turn>model\n",
        before: "",
        forecast: "<start_function_call>call:forecast{city:<escape>CITY<escape>,days:3}<end_function_call>",
        stop: "<start_function_call>call:stop{}<end_function_call>",
        around: ["", ""],
        between: "",
        several: true,
    },
    Family {
        template: "<channel|><|tool_call>call:",
        prompt: "<|turn>model\n",
        before: "<|channel>thought\nthoughts<channel|>",
        forecast: "<|tool_call>call:forecast{city:<|\"|>CITY<|\"|>,days:3}<tool_call|>",
        stop: "<|tool_call>call:stop{}<tool_call|>",
        around: ["", ""],
        between: "",
        several: true,
    },
    Family {
        template: "[TOOL_CALLS][",
        prompt: "[/INST]",
        before: "",
        forecast: "{\"name\": \"forecast\", \"arguments\": {\"city\": \"CITY\", \"days\": 3}}",
        stop: "{\"name\": \"stop\", \"arguments\": {}}",
        around: ["[TOOL_CALLS][", "]"],
        between: ", ",
        several: true,
    },
    Family {
        template: "[TOOL_CALLS][ARGS]",
        prompt: "[/INST]",
        before: "",
        forecast: "[TOOL_CALLS]forecast[ARGS]{\"city\": \"CITY\", \"days\": 3}",
        stop: "[TOOL_CALLS]stop[ARGS]{}",
        around: ["", ""],
        between: "",
        several: true,
    },
    Family {
        template: "[TOOL_CALLS][CALL_ID][ARGS]",
        prompt: "[/INST]",
        before: "",
        forecast: "[TOOL_CALLS]forecast[CALL_ID]abcDEF123[ARGS]{\"city\": \"CITY\", \"days\": 3}",
        stop: "[TOOL_CALLS]stop[CALL_ID]123456789[ARGS]{}",
        around: ["", ""],
        between: "",
        several: true,
    },
    Family {
        template: LLAMA,
        prompt: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        before: "",
        forecast: "{\"name\": \"forecast\", \"parameters\": {\"city\": \"CITY\", \"days\": 3}}",
        stop: "{\"name\": \"stop\", \"parameters\": {}}",
        around: ["", ""],
        between: "; ",
        several: true,
    },
    Family {
        template: PYTHON,
        prompt: "<|header_start|>assistant<|header_end|>\n\n",
        before: "",
        forecast: "forecast(city=\"CITY\", days=3)",
        stop: "stop()",
        around: ["[", "]"],
        between: ", ",
        several: true,
    },
    Family {
        template: "</mm:think>]<]minimax[>[<tool_call>",
        prompt: "]~b]ai\n",
        before: "<mm:think>thoughts</mm:think>",
        forecast: "]<]minimax[>[<invoke name=\"forecast\">]<]minimax[>[<city>CITY]<]minimax[>[</city>\
                   ]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n",
        stop: "]<]minimax[>[<invoke name=\"stop\">]<]minimax[>[</invoke>\n",
        around: ["]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>"],
        between: "",
        several: true,
    },
    Family {
        template: "<|tool_call_start|>",
        prompt: "<|im_start|>assistant\n",
        before: "",
        forecast: "forecast(city=\"CITY\", days=3)",
        stop: "stop()",
        around: ["<|tool_call_start|>[", "]<|tool_call_end|>"],
        between: ", ",
        several: true,
    },
    Family {
        template: "<think><functions></functions><function_calls>",
        prompt: "<|im_start|>assistant\n<think>",
        before: "thoughts</think>",
        forecast: "forecast(city=\"CITY\", days=3)",
        stop: "stop()",
        around: ["<function_calls>", "</function_calls>"],
        between: "\n",
        several: true,
    },
    Family {
        template: "<|tool_call|><|/tool_call|>",
        prompt: "<|assistant|>",
        before: "",
        forecast: "{\"name\": \"forecast\", \"arguments\": {\"city\": \"CITY\", \"days\": 3}}",
        stop: "{\"name\": \"stop\", \"arguments\": {}}",
        around: ["<|tool_call|>[", "]<|/tool_call|>"],
        between: ", ",
        several: true,
    },
    Family {
        template: "functools",
        prompt: "<|assistant|>",
        before: "",
        forecast: "{\"name\": \"forecast\", \"arguments\": {\"city\": \"CITY\", \"days\": 3}}",
        stop: "{\"name\": \"stop\", \"arguments\": {}}",
        around: ["functools[", "]"],
        between: ", ",
        several: true,
    },
    Family {
        template: "<|tool_call|>",
        prompt: "<|start_of_role|>assistant<|end_of_role|>",
        before: "",
        forecast: "{\"name\": \"forecast\", \"arguments\": {\"city\": \"CITY\", \"days\": 3}}",
        stop: "{\"name\": \"stop\", \"arguments\": {}}",
        around: ["<|tool_call|>[", "]"],
        between: ", ",
        several: true,
    },
    Family {
        template: "</think><TOOLCALL>",
        prompt: "<SPECIAL_11>Assistant\n<think>\n",
        before: "thoughts\n</think>\n\n",
        forecast: "{\"name\": \"forecast\", \"arguments\": {\"city\": \"CITY\", \"days\": 3}}",
        stop: "{\"name\": \"stop\", \"arguments\": {}}",
        around: ["<TOOLCALL>[", "]</TOOLCALL>"],
        between: ", ",
        several: true,
    },
    Family {
        template: "</think><|startoftext|><|extra_0|><tool_calls>[",
        prompt: "<|extra_0|><think>\n",
        before: "thoughts\n</think>\n",
        forecast: "{\"name\": \"forecast\", \"arguments\": {\"city\": \"CITY\", \"days\": 3}}",
        stop: "{\"name\": \"stop\", \"arguments\": {}}",
        around: ["<tool_calls>[", "]</tool_calls>"],
        between: ", ",
        several: true,
    },
];

#[test]
fn required_calls_are_those_that_the_parser_reads() {
    let forms = [Marks::Control, Marks::Text, Marks::Absent];
    let families = FAMILIES.iter().chain(&latest::FAMILIES);
    for (family, form) in families.flat_map(|family| forms.map(|form| (family, form))) {
        // The same prompt as that of Muse, whose marks are control tokens, too.
        let is_harmony = family.prompt == "<|start|>assistant";
        if is_harmony && form != Marks::Control {
            // Marks of this family are control tokens.
            continue;
        }
        let (tokenizer, format, tools) = (tokenizer(form), format(family.template), tools());
        let compiler = Compiler::new(&tokenizer);
        let compile = |wanted: &CallsWanted<'_>, instead: Option<&Value>| {
            let rules = format.call_rules(wanted, instead, &tokenizer).unwrap();
            let preamble = format.preamble_of_calls(family.prompt);
            compiler.compile(&rules, preamble.as_ref()).unwrap_or_else(|e| panic!("{e}: {rules:?}"))
        };
        let any = CallsWanted { tools: &tools, name: None, several: true };
        let grammar = compile(&any, None);
        let [open, close] = family.around;
        // Without a token for its mark, an answer cannot begin with reasoning.
        let begun = ["<think>", "<think:x>", "<|START_THINKING|>", "<|sep|>"];
        let prompt = family.prompt.trim_end();
        let may_think = form != Marks::Absent || begun.iter().any(|mark| prompt.ends_with(mark));
        let before = if may_think { family.before } else { "" };
        let forecast = family.forecast.replace("CITY", "Køln & <b>");
        let one = format!("{before}{open}{forecast}{close}");
        let both = format!("{before}{open}{forecast}{}{}{close}", family.between, family.stop);
        let what = format!("{:?}, {form:?}", family.template);
        assert_eq!(feed(&grammar, &tokenizer, &one), (one.len(), true), "{what}");
        assert_eq!(feed(&grammar, &tokenizer, &both).1, family.several, "{what}");
        // A text that begins otherwise, a value of another type, and an unknown tool.
        let begun = before.len();
        assert_eq!(feed(&grammar, &tokenizer, &format!("{before}Hello")).0, begun, "{what}");
        for (from, to) in [("forecast", "forecest"), ("3", "?"), ("days", "dags")] {
            let wrong = one.replace("DEF123", "DEFabc").replace(from, to);
            let wrong = wrong.replace("a1b2c?d4e5", "a1b2c3d4e5");
            let (allowed, _) = feed(&grammar, &tokenizer, &wrong);
            assert!(allowed < wrong.find(to).unwrap() + to.len(), "{what}: {to}");
        }
        // Only the named tool, and only one call.
        let stop = CallsWanted { tools: &tools, name: Some("stop"), several: false };
        let grammar = compile(&stop, None);
        assert!(!feed(&grammar, &tokenizer, &one).1, "{what}");
        let only = format!("{before}{open}{}{close}", family.stop);
        assert_eq!(feed(&grammar, &tokenizer, &only), (only.len(), true), "{what}");
        let twice = format!("{before}{open}{0}{1}{0}{close}", family.stop, family.between);
        assert!(!feed(&grammar, &tokenizer, &twice).1, "{what}");
        // JSON instead of calls.
        let schema = json!({ "type": "integer" });
        if is_harmony {
            let refused = format.call_rules(&any, Some(&schema), &tokenizer).unwrap_err();
            assert!(matches!(refused, ChatError::CallOrJson));
        } else {
            let grammar = compile(&any, Some(&schema));
            assert!(feed(&grammar, &tokenizer, &format!("{before}42")).1, "{what}");
            assert!(feed(&grammar, &tokenizer, &one).1, "{what}");
        }
        // The parser reads the same calls.
        let text = if family.several { both } else { one };
        let mut stream = AnswerStream::new(tokenizer.clone(), &format, family.prompt, false, &[]);
        for id in tokenizer.encode(&text, false, true).unwrap() {
            stream.push(id, &mut |_| {});
        }
        let message = stream.finish(&mut |_| {}).0;
        let calls: Vec<(&str, Value)> = message
            .tool_calls
            .iter()
            .map(|call| (call.name.as_str(), serde_json::from_str(&call.arguments).unwrap()))
            .collect();
        let forecast = ("forecast", json!({ "city": "Køln & <b>", "days": 3 }));
        let expected = [forecast, ("stop", json!({}))];
        assert_eq!(calls, expected[..if family.several { 2 } else { 1 }], "{what}");
    }
}

/// MiniMax M3 writes lists and objects as tags, too.
#[test]
fn required_calls_with_lists_and_objects_in_tags() {
    let of = |text: &str| text.replace('@', "]<]minimax[>[");
    let places = json!({ "type": "array", "items": {
        "type": "object",
        "properties": { "zip": { "type": "string" }, "near": { "type": "boolean" } },
        "required": ["zip"],
    } });
    let properties = json!({ "places": places, "unit": { "enum": ["C", "F"] }, "any": {}, "map": { "type": "object" } });
    let parameters =
        json!({ "type": "object", "properties": properties, "required": ["places", "unit"] });
    let tools =
        json!([{ "type": "function", "function": { "name": "f", "parameters": parameters } }]);
    let template = ChatTemplate::from_source("]<]minimax[>[<tool_call>", "", "").unwrap();
    let format = Format::recognise(Some(&template), None).unwrap().offering(Some(&tools));
    let wanted = CallsWanted { tools: &tools, name: None, several: true };
    for form in [Marks::Control, Marks::Text, Marks::Absent] {
        let tokenizer = tokenizer(form);
        let rules = format.call_rules(&wanted, None, &tokenizer).unwrap();
        let grammar = Compiler::new(&tokenizer).compile(&rules, None).unwrap();
        let call = |inside: &str| {
            of(&format!("@<tool_call>\n@<invoke name=\"f\">{inside}@</invoke>\n@</tool_call>"))
        };
        let item = "@<item>@<zip>3000@</zip>@<near>true@</near>@</item>@<item>@<zip>Zürich <8>@</zip>@</item>";
        let whole = call(&format!(
            "@<places>{item}@</places>@<unit>C@</unit>@<any>[1]@</any>@<map>x@</map>"
        ));
        assert_eq!(feed(&grammar, &tokenizer, &whole), (whole.len(), true), "{form:?}");
        let short = call("@<places>@</places>@<unit>F@</unit>");
        assert_eq!(feed(&grammar, &tokenizer, &short), (short.len(), true), "{form:?}");
        for wrong in [
            "@<unit>C@</unit>",
            "@<places>3000@</places>@<unit>C@</unit>",
            "@<places>@<item>@<near>true@</near>@</item>@</places>@<unit>C@</unit>",
            "@<places>@</places>@<unit>K@</unit>",
        ] {
            assert!(!feed(&grammar, &tokenizer, &call(wrong)).1, "{form:?}: {wrong}");
        }
        let mut stream = AnswerStream::new(tokenizer.clone(), &format, "]~b]ai\n", false, &[]);
        for id in tokenizer.encode(&whole, false, true).unwrap() {
            stream.push(id, &mut |_| {});
        }
        let message = stream.finish(&mut |_| {}).0;
        let arguments: Value = serde_json::from_str(&message.tool_calls[0].arguments).unwrap();
        let places = json!([{ "zip": "3000", "near": true }, { "zip": "Zürich <8>" }]);
        let expected = json!({ "places": places, "unit": "C", "any": [1], "map": "x" });
        assert_eq!(arguments, expected, "{form:?}");
    }
}

#[test]
fn calls_that_cannot_be_required_are_refused() {
    let (tokenizer, tools) = (tokenizer(Marks::Control), tools());
    let refused = |template: &str, tools: &Value, name| {
        let wanted = CallsWanted { tools, name, several: true };
        let template = ChatTemplate::from_source(template, "", "").unwrap();
        let format = Format::recognise(Some(&template), None).unwrap();
        format.call_rules(&wanted, None, &tokenizer).unwrap_err().to_string()
    };
    let qwen = FAMILIES[0].template;
    assert!(refused("plain", &tools, None).contains("no tool calls"));
    assert!(refused(qwen, &tools, Some("nothing")).contains("no tool `nothing`"));
    assert!(refused(qwen, &json!([]), None).contains("no tool to call"));
}

#[test]
fn json_follows_the_reasoning_and_may_begin_within_its_last_token() {
    let tokenizer = tokenizer(Marks::Text);
    let compiler = Compiler::new(&tokenizer);
    let format = format(FAMILIES[0].template);
    let rules = Rules::JsonSchema(json!({ "type": "array", "items": { "type": "boolean" } }));
    let grammar =
        |prompt: &str| compiler.compile(&rules, format.preamble(prompt).as_ref()).unwrap();
    for (prompt, answer, fits) in [
        ("assistant\n", "<think>\nHm {}</think>\n\n[true]", true),
        ("assistant\n", "[true]", true),
        ("assistant\n", "Hm [true]", false),
        ("assistant\n<think>\n", "Hm</think>[ true ]", true),
        ("assistant\n<think>\n", "[true]", false),
        ("assistant\n<think>\n\n</think>\n\n", "[true,false]", true),
        ("assistant\n<think>\n\n</think>\n\n", "<think>Hm</think>[true]", false),
    ] {
        assert_eq!(feed(&grammar(prompt), &tokenizer, answer).1, fits, "{prompt:?} {answer:?}");
    }
    // The reasoning cannot end the answer.
    let mut matcher = grammar("<think>").begin();
    let mut mask = Vec::new();
    matcher.mask(&mut mask).unwrap();
    let end = tokenizer.token_id(END).unwrap();
    assert_eq!(mask[end as usize / 32] >> (end % 32) & 1, 0);
    let allowed: u32 = mask.iter().map(|word| word.count_ones()).sum();
    assert!(allowed as usize >= tokenizer.vocab_size() - tokenizer.eog_ids().len());
    // A token that ends the reasoning may also begin the rest.
    let preamble = Preamble { open: None, close: vec!["</thi".into()] };
    let grammar = compiler.compile(&Rules::Regex("nk>[0-9]{2}".into()), Some(&preamble)).unwrap();
    let mut matcher = grammar.begin();
    matcher.accept(tokenizer.token_id("</think>").unwrap()).unwrap();
    matcher.mask(&mut mask).unwrap();
    let close = tokenizer.token_id("</think>").unwrap();
    assert_eq!(mask[close as usize / 32] >> (close % 32) & 1, 0);
    for digit in ["4", "2"] {
        assert!(!matcher.is_complete());
        matcher.accept(tokenizer.token_id(digit).unwrap()).unwrap();
    }
    assert!(matcher.is_complete());
}

#[test]
fn grammars_that_cannot_be_used_are_refused() {
    let tokenizer = tokenizer(Marks::Control);
    let compiler = Compiler::new(&tokenizer);
    let refused = |rules: Rules| match compiler.compile(&rules, None) {
        Err(GrammarError::Invalid(why)) => why,
        other => panic!("{rules:?}: {other:?}"),
    };
    for rules in [
        Rules::JsonSchema(json!({ "type": "object", "properties": 1 })),
        Rules::JsonSchema(json!({ "enum": "yes" })),
        Rules::JsonSchema(json!(false)),
        Rules::Regex("(".into()),
        Rules::Lark("begin: \"x\"".into()),
    ] {
        assert!(!refused(rules).is_empty());
    }
    let one_of = compiler.compile(&Rules::one_of(["yes", "\"no\"\n"]), None).unwrap();
    for (answer, fits) in [("yes", true), ("\"no\"\n", true), ("no", false)] {
        assert_eq!(feed(&one_of, &tokenizer, answer).1, fits, "{answer:?}");
    }
    let mut matcher = one_of.begin();
    let tokens = |text: &str| tokenizer.encode(text, false, false).unwrap();
    assert!(matcher.forced().is_empty());
    matcher.accept(tokens("y")[0]).unwrap();
    assert_eq!(matcher.forced(), tokens("es"));
    assert!(matcher.accept(tokens("x")[0]).is_err());
}
