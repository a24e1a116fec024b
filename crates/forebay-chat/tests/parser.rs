//! Tests of answers of every family: whole, cut anywhere and unfinished.

#[path = "parser/fragments.rs"]
mod fragments;
#[path = "parser/latest.rs"]
mod latest;

use forebay_chat::{Event, Format, Message, Parser, ToolCall};
use forebay_text::ChatTemplate;
use fragments::FRAGMENTS;
use proptest::prelude::*;

/// A piece of an answer: text, or a control token.
#[derive(Clone, Debug, PartialEq)]
enum Piece {
    Text(String),
    Control(&'static str),
}

const HARMONY_MARKS: [&str; 7] = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|constrain|>",
];

/// Cuts a harmony answer at its marks.
fn harmony(text: &str) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let found = HARMONY_MARKS.iter().filter_map(|mark| Some((rest.find(mark)?, *mark))).min();
        let Some((at, mark)) = found else { break };
        pieces.push(Piece::Text(rest[..at].to_owned()));
        pieces.push(Piece::Control(mark));
        rest = &rest[at + mark.len()..];
    }
    pieces.push(Piece::Text(rest.to_owned()));
    pieces
}

/// Parses an answer and checks that the events add up to the message.
fn parse(format: &Format, prompt: &str, pieces: &[Piece]) -> Message {
    let mut parser = Parser::new(format, prompt);
    let mut sum = Message::new("assistant", "");
    let mut add = |event: Event<'_>| match event {
        Event::Reasoning(text) => sum.reasoning.get_or_insert_default().push_str(text),
        Event::Content(text) => sum.content.push_str(text),
        Event::ToolCall { index, name } => {
            assert_eq!(index, sum.tool_calls.len());
            sum.tool_calls.push(ToolCall { name: name.to_owned(), ..ToolCall::default() });
        }
        Event::Arguments { index, text } => sum.tool_calls[index].arguments.push_str(text),
    };
    for piece in pieces {
        match piece {
            Piece::Text(text) => parser.text(text, &mut add),
            Piece::Control(name) => parser.control(name, &mut add),
        }
    }
    let message = parser.finish(&mut add);
    assert_eq!(message, sum, "the events do not add up to the message");
    message
}

fn format(template: &str) -> Format {
    let template = ChatTemplate::from_source(template, "", "").unwrap();
    Format::recognise(Some(&template), None).unwrap()
}

/// Minimal templates from which the family's format is recognised.
const QWEN: &str = "{{ '<think>\n</think>' }}<tool_call>{\"name\"";
const CODER: &str = "<tool_call><function=";
const GLM: &str = "</think><tool_call><arg_key>";
const DEEPSEEK: &str = "</think><｜tool▁call▁begin｜>";
const HARMONY: &str = "<|start|><|channel|><|message|>";
const MISTRAL: &str = "[TOOL_CALLS][ARGS][/THINK]";
const GEMMA: &str = "<channel|><|tool_call>call:";
const KIMI: &str = "</think><|tool_call_begin|>";
const MINIMAX: &str = "</think><minimax:tool_call>";
const DSML: &str = "</think>｜DSML｜function_calls invoke name=";
const LLAMA: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}{\"name\": \"{{ c.function.name }}\", \
                     \"parameters\": {{ c.function.arguments | tojson }}}{% endfor %}{% endfor %}";
const PYTHON: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.function.name }}(\
                      {% for k, v in c.function.arguments | items %}{{ k }}=\"{{ v }}\"{% endfor %})]{% endfor %}{% endfor %}";

const MINIMAX3: &str = "</mm:think>]<]minimax[>[<tool_call>";
const LFM2: &str = "</think><|tool_call_start|>";
const OLMO3: &str = "<think><functions></functions><function_calls>";
const PHI: &str = "<|tool_call|><|/tool_call|>";
const NEMOTRON2: &str = "</think><TOOLCALL>";
const HUNYUAN: &str = "</think><|startoftext|><|extra_0|><tool_calls>[";
const ERNIE: &str = "<think></think><response></response><tool_call>";

const SEED: &str = "<seed:think><seed:tool_call>";
const COHERE: &str = "<|START_THINKING|><|START_TEXT|><|START_ACTION|>";
const KIMI3: &str = "<|open|><|close|><|sep|><|end_of_msg|>";
const SOLAR: &str = "<|think|><|tool_call:begin|>";
const HY: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_calls:x><tool_call:x>{{ c.function.name }}\
                  {% for k, v in c.function.arguments | items %}<arg_key:x>{{ k }}</arg_key:x><arg_value:x>{{ v }}</arg_value:x>\
                  {% endfor %}</tool_call:x></tool_calls:x>{% endfor %}{% endfor %}";

/// Returns a format whose tools are `f` and `g`.
fn with_tools(template: &str) -> Format {
    let tool = |name: &str| serde_json::json!({ "type": "function", "function": { "name": name } });
    format(template).offering(Some(&[tool("f"), tool("g")].into_iter().collect()))
}

struct Expected<'a> {
    reasoning: Option<&'a str>,
    content: &'a str,
    calls: &'a [(&'a str, &'a str)],
}

fn thought<'a>(
    reasoning: &'a str,
    content: &'a str,
    calls: &'a [(&'a str, &'a str)],
) -> Expected<'a> {
    Expected { reasoning: Some(reasoning), content, calls }
}

fn expected(want: &Expected<'_>) -> Message {
    let calls = want.calls.iter().map(|(name, arguments)| ToolCall {
        name: (*name).to_owned(),
        arguments: (*arguments).to_owned(),
        ..ToolCall::default()
    });
    Message {
        reasoning: want.reasoning.map(str::to_owned),
        tool_calls: calls.collect(),
        ..Message::new("assistant", want.content)
    }
}

#[track_caller]
fn check(template: &str, prompt: &str, answer: &str, want: &Expected<'_>) {
    let format = with_tools(template);
    let whole = match template {
        HARMONY => harmony(answer),
        _ => vec![Piece::Text(answer.to_owned())],
    };
    assert_eq!(parse(&format, prompt, &whole), expected(want));
    // One character at a time.
    assert_eq!(parse(&format, prompt, &single(&whole)), expected(want));
}

fn single(pieces: &[Piece]) -> Vec<Piece> {
    let cut = |piece: &Piece| match piece {
        Piece::Text(text) => text.chars().map(|c| Piece::Text(c.to_string())).collect(),
        mark => vec![mark.clone()],
    };
    pieces.iter().flat_map(cut).collect()
}

#[test]
fn without_a_template_all_is_content() {
    let pieces = [Piece::Text("<think>x".into()), Piece::Control("<|end|>")];
    let message = parse(&Format::default(), "", &pieces);
    assert_eq!(message, Message::new("assistant", "<think>x"));
}

#[test]
fn thinking() {
    let want = |reasoning, content| Expected { reasoning, content, calls: &[] };
    let answer = "<think>\nTwo\nlines\n</think>\n\nThe answer.\n";
    check(QWEN, "", answer, &want(Some("Two\nlines"), "The answer.\n"));
    // The template has already opened the thinking part.
    let answer = "Hm.</think>The answer.";
    check(DEEPSEEK, "<｜Assistant｜><think>\n", answer, &want(Some("Hm."), "The answer."));
    // The template has already closed the thinking part, so there is no reasoning.
    check(GLM, "<think></think>", "\nThe answer.", &want(None, "The answer."));
    // An empty thinking part, as Qwen3 writes it when thinking is off.
    check(QWEN, "", "<think>\n\n</think>\n\nYes", &want(None, "Yes"));
    // The tag inside an answer is text.
    check(QWEN, "", "HTML has no <think> tag.", &want(None, "HTML has no <think> tag."));
    check(QWEN, "", " a < b", &want(None, " a < b"));
    check(QWEN, "", "<think>a</thin</think>b", &want(Some("a</thin"), "b"));
}

#[test]
fn answers_that_stop_in_the_middle() {
    let want = |reasoning, content| Expected { reasoning, content, calls: &[] };
    check(QWEN, "", "<think>\nI was interr", &want(Some("I was interr"), ""));
    check(QWEN, "", "<think>\nWhat</thi", &want(Some("What</thi"), ""));
    check(QWEN, "", "<thi", &want(None, "<thi"));
    check(QWEN, "", "", &want(None, ""));
    check(QWEN, "", "a <tool_ca", &want(None, "a <tool_ca"));
    let cut = "a\n<tool_call>\n{\"name\": \"f\", \"argum";
    check(QWEN, "", cut, &want(None, cut));
    // Only the closing tag is missing, so the call is whole.
    let answer = "<tool_call>{\"name\": \"f\", \"arguments\": {}}";
    check(QWEN, "", answer, &Expected { reasoning: None, content: "", calls: &[("f", "{}")] });
    check(
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Let me",
        &want(Some("Let me"), ""),
    );
    check(HARMONY, "<|start|>assistant", "<|channel|>fin", &want(None, ""));
}

#[test]
fn tool_calls() {
    let answer = "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":  1}}\n\
                  </tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>\n";
    let calls = [("f", "{\"x\":  1}"), ("g", "{}")];
    check(
        QWEN,
        "",
        answer,
        &Expected { reasoning: Some("Hm."), content: "I look.", calls: &calls },
    );
    let answer =
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>";
    check(
        CODER,
        "",
        answer,
        &Expected { reasoning: None, content: "", calls: &[("f", "{\"x\":1}")] },
    );
    let answer = "\n<think>a</think>\nb\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>";
    let calls = [("f", "{\"x\":1}")];
    check(GLM, "", answer, &Expected { reasoning: Some("a"), content: "b", calls: &calls });
    let answer = "a</think>b<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜>\
                  <｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let calls = [("f", "{\"x\": 1}"), ("g", "{}")];
    check(
        DEEPSEEK,
        "<think>",
        answer,
        &Expected { reasoning: Some("a"), content: "b", calls: &calls },
    );
}

#[test]
fn what_is_no_tool_call_stays_as_it_was_written() {
    let check = |template, text: &str| {
        check(template, "", text, &Expected { reasoning: None, content: text, calls: &[] });
    };
    check(QWEN, "Write\n <tool_call>like this</tool_call> and go on.");
    check(MISTRAL, "The mark is [TOOL_CALLS]f and no arguments");
    check(MISTRAL, "[TOOL_CALLS]f[ARGS]{\"x\": ]} and more");
    check(GEMMA, "Write <|tool_call>this<tool_call|> here.");
    check(KIMI, "<|tool_call_begin|>f<|tool_call_end|>");
    check(MINIMAX, "<minimax:tool_call>f</minimax:tool_call>");
    check(DSML, "<｜DSML｜invoke name=\"f\"></｜DSML｜invoke>");
    check(MINIMAX3, "]<]minimax[>[<tool_call>f]<]minimax[>[</tool_call>");
    check(
        MINIMAX3,
        "A ]<]minimax[>[ and ]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"f\">x",
    );
    check(LFM2, "Write <|tool_call_start|>f(x=1)<|tool_call_end|> so.");
    check(LFM2, "<|tool_call_start|>[f(cmd='a 'b' c')]<|tool_call_end|>");
    check(OLMO3, "<function_calls>f(x=1) g()</function_calls>");
    check(OLMO3, "<function_calls></function_calls>");
    check(NEMOTRON2, "<TOOLCALL>{\"f\"}</TOOLCALL> is none");
    check(HUNYUAN, "<tool_calls>[{\"f\"}]</tool_calls> is none");
    check(PHI, "[{\"name\": \"f\", \"arguments\": ]");
    // Other JSON, a call of a tool that is not offered, and JSON behind text.
    check(LLAMA, "{\"name\": \"Ada\", \"age\": 36}");
    check(LLAMA, " {\"name\": \"h\", \"parameters\": {}}\nText.");
    check(LLAMA, "Write {\"name\": \"f\", \"parameters\": {}}");
    check(LLAMA, "[1, 2, 3]\n");
    check(LLAMA, "{\"name\": \"f\", \"param");
    check(PYTHON, "[h(x=1)]");
    check(PYTHON, "[f(x=y)] is no call.");
    check(PYTHON, "Call [f(x=1)].");
}

#[test]
fn calls_of_newer_families() {
    let f = ("f", "{\"x\":1}");
    for (template, prompt, call, two) in [
        (
            MINIMAX3,
            "<mm:think>",
            "@<tool_call>\n@<invoke name=\"f\">@<x>1@</x>@</invoke>\n@</tool_call>",
            "@<tool_call>@<invoke name=\"f\">@<x>1@</x>@</invoke>@<invoke name=\"g\">@</invoke>@</tool_call>",
        ),
        (
            LFM2,
            "<think>",
            "<|tool_call_start|>[f(x=1)]<|tool_call_end|>",
            "<|tool_call_start|>[f(x=1), g()]<|tool_call_end|>",
        ),
        (
            OLMO3,
            "<think>",
            "<function_calls>\nf(x=1)\n</function_calls>",
            "<function_calls>f(x=1)\ng()</function_calls>",
        ),
        (
            NEMOTRON2,
            "<think>",
            "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"x\":1}}]</TOOLCALL>",
            "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"x\":1}}, {\"name\": \"g\"}]</TOOLCALL>",
        ),
        (
            HUNYUAN,
            "<think>",
            "<tool_calls>[{\"name\": \"f\", \"arguments\": {\"x\":1}}]</tool_calls>",
            "<tool_calls>[{\"name\": \"f\", \"arguments\": {\"x\":1}}, {\"name\": \"g\"}]</tool_calls>",
        ),
        (
            ERNIE,
            "<think>",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1}}\n</tool_call>",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\":1}}</tool_call>\n<tool_call>{\"name\": \"g\"}</tool_call>",
        ),
    ] {
        let mark = |text: &str| text.replace('@', "]<]minimax[>[");
        let close = if template == MINIMAX3 { "</mm:think>" } else { "</think>" };
        let (call, two) = (mark(call), mark(two));
        check(template, prompt, &format!("Hm.\n{close}\n\n{call}"), &thought("Hm.", "", &[f]));
        check(
            template,
            prompt,
            &format!("Hm.{close}I look.\n{two}\nDone."),
            &thought("Hm.", "I look.Done.", &[f, ("g", "{}")]),
        );
        // An answer that was cut in the middle of a call.
        let cut = &call[..call.len() / 2];
        let answer = format!("Hm.{close}I look.\n{cut}");
        check(template, prompt, &answer, &thought("Hm.", &format!("I look.\n{cut}"), &[]));
        // Only the closing mark is missing.
        let open = call.trim_end().rsplit_once(if template == MINIMAX3 { "]<" } else { "<" });
        let open = open.unwrap().0.trim_end_matches("]<]minimax[>[").trim_end();
        check(template, prompt, &format!("Hm.{close}{open}"), &thought("Hm.", "", &[f]));
    }
}

#[test]
fn calls_of_phi_and_granite() {
    let want = |content, calls| Expected { reasoning: None, content, calls };
    let list = "[{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\"}]";
    let calls = [("f", "{\"x\": 1}"), ("g", "{}")];
    for answer in [
        format!("functools{list}"),
        format!("<|tool_call|>{list}<|/tool_call|>"),
        format!("<|tool_call|>{list}"),
        format!(" {list}\n"),
    ] {
        check(PHI, "", &answer, &want("", &calls));
    }
    check(PHI, "", &format!("I look.\n<|tool_call|>{list}"), &want("I look.", &calls));
    for text in ["functools", "functools[1]", "functools are", "funny", "[{\"name\": \"h\"}]", "{}"]
    {
        check(PHI, "", text, &want(text, &[]));
    }
}

/// Marks around answers of ERNIE 4.5.
#[test]
fn marks_around_an_answer() {
    let want = |content| Expected { reasoning: Some("Hm."), content, calls: &[] };
    for (answer, content) in [
        ("\n\n<response>\nYes.\n</response>\n", "Yes."),
        ("Yes.", "Yes."),
        (
            "\nIn XML, <response> comes before </response>.",
            "In XML, <response> comes before </response>.",
        ),
        ("<response>\nThe tag <response>.\n</response>", "The tag <response>."),
        ("<response>Yes", "Yes"),
        ("<resp", "<resp"),
        ("<response>Yes</resp", "Yes</resp"),
    ] {
        check(ERNIE, "<think>", &format!("Hm.</think>{answer}"), &want(content));
    }
    // The marks as control tokens.
    let pieces = [
        Piece::Text("Hm.".into()),
        Piece::Control("</think>"),
        Piece::Text("\n\n".into()),
        Piece::Control("<response>"),
        Piece::Text("\nYes.\n".into()),
        Piece::Control("</response>"),
        Piece::Text("\n".into()),
    ];
    assert_eq!(parse(&with_tools(ERNIE), "<think>\n", &pieces), expected(&want("Yes.")));
    // Also without tools.
    let format = format(ERNIE).offering(None);
    let text = "Hm.</think>\n<response>\nYes.\n</response>";
    let message = parse(&format, "<think>\n", &[Piece::Text(text.into())]);
    assert_eq!(message, expected(&want("Yes.")));
}

/// Some models go from thinking to calling without the mark between them.
#[test]
fn calls_that_end_the_reasoning() {
    let json = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}\
                <|tool_call_end|><|tool_calls_section_end|>";
    let dsml = "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>";
    let coder = "<tool_call>\n<function=f>\n</function>\n</tool_call>";
    let m3 = "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"f\">]<]minimax[>[</invoke>]<]minimax[>[</tool_call>";
    for (template, call) in [
        (QWEN, json),
        (KIMI, kimi),
        (DSML, dsml),
        ("</think><tool_call><function=", coder),
        (GLM, "<tool_call>f</tool_call>"),
        (
            DEEPSEEK,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (MINIMAX, "<minimax:tool_call><invoke name=\"f\"></invoke></minimax:tool_call>"),
        (MINIMAX3, m3),
        (LFM2, "<|tool_call_start|>[f()]<|tool_call_end|>"),
        (OLMO3, "<function_calls>f()</function_calls>"),
        (NEMOTRON2, "<TOOLCALL>[{\"name\": \"f\"}]</TOOLCALL>"),
        (HUNYUAN, "<tool_calls>[{\"name\": \"f\"}]</tool_calls>"),
        (GEMMA, "<|tool_call>call:f{}<tool_call|>"),
        (SEED, "<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>"),
        (HY, "<tool_calls:x><tool_call:x>f</tool_call:x></tool_calls:x>"),
        (COHERE, "<|START_ACTION|>[{\"tool_name\": \"f\"}]<|END_ACTION|>"),
        (
            KIMI3,
            "<|open|>tools<|sep|><|open|>call tool=\"f\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        ),
        (SOLAR, "<|tool_call:begin|>a<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|>"),
    ] {
        let [open, close] = match template {
            SEED => ["<seed:think>", "</seed:think>"],
            HY => ["<think:x>", "</think:x>"],
            COHERE => ["<|START_THINKING|>", "<|END_THINKING|>"],
            KIMI3 => ["<|open|>think<|sep|>", "<|close|>think<|sep|>"],
            SOLAR => ["<|think|>", "<|end|>"],
            MINIMAX3 => ["<mm:think>", "</mm:think>"],
            GEMMA => ["<|channel>thought", "<channel|>"],
            _ => ["<think>", "</think>"],
        };
        let f = [("f", "{}")];
        check(template, open, &format!("Hm.\n\n{call}\n"), &thought("Hm.", "", &f));
        let twice = format!("I write {call} then.\n{call}\n{call}");
        let reasoning = format!("I write {call} then.");
        check(template, open, &twice, &thought(&reasoning, "", &[f[0], f[0]]));
        // The model only answered about a call.
        let answered = format!("Hm.\n{call}");
        let answer = format!("{answered}{close}Yes.");
        check(template, open, &answer, &thought(&answered, "Yes.", &[]));
        check(
            template,
            open,
            &format!("{answered} No."),
            &thought(&format!("{answered} No."), "", &[]),
        );
        // A call that is not whole, and one of a tool that is not offered.
        let cut = format!("Hm.\n{}", &call[..call.len() - 1]);
        check(template, open, &cut, &thought(&cut, "", &[]));
        let other = answered.replace(":f", ":h").replace("\"f\"", "\"h\"").replace("=f", "=h");
        let other = other.replace(">f", ">h").replace("[f", "[h").replace("s.f", "s.h");
        check(template, open, &other, &thought(&other, "", &[]));
        // Without tools, and if nothing is known about them, it is reasoning.
        for format in [format(template), format(template).offering(None)] {
            let message = parse(&format, open, &[Piece::Text(answered.clone())]);
            assert_eq!(message, expected(&thought(&answered, "", &[])));
        }
    }
}

/// Reasoning goes on while a call is only mentioned.
#[test]
fn reasoning_is_not_held_back_by_a_mark() {
    let mut parser = Parser::new(&with_tools(QWEN), "<think>");
    let mut seen = String::new();
    let mut add = |event: Event<'_>| match event {
        Event::Reasoning(text) => seen.push_str(text),
        other => panic!("{other:?}"),
    };
    for piece in ["The mark ", "<tool_call>", " begins", " calls"] {
        parser.text(piece, &mut add);
    }
    assert_eq!(seen, "The mark <tool_call> begins calls");
}

#[test]
fn an_answer_may_begin_with_the_mark_that_ends_reasoning() {
    let want = |content| Expected { reasoning: None, content, calls: &[] };
    check(MINIMAX3, "]~b]ai\n", "</mm:think>Yes.", &want("Yes."));
    check(QWEN, "", "\n</think>\n\nYes.", &want("Yes."));
    check(QWEN, "", "</thin", &want("</thin"));
    check(QWEN, "", "The mark </think> ends it.", &want("The mark </think> ends it."));
}

#[test]
fn without_tools_everything_is_text() {
    let texts = [
        (QWEN, "a <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call> b"),
        (LLAMA, "{\"name\": \"f\", \"parameters\": {}}"),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{}"),
        (GEMMA, "<|tool_call>call:f{}<tool_call|>"),
    ];
    for (template, text) in texts {
        let format = format(template).offering(None);
        let whole = parse(&format, "", &[Piece::Text(text.into())]);
        assert_eq!(whole, Message::new("assistant", text));
        assert_eq!(parse(&format, "", &single(&[Piece::Text(text.into())])), whole);
    }
    // A mark that is a control token becomes its text.
    let pieces =
        [Piece::Control("[TOOL_CALLS]"), Piece::Text("f".into()), Piece::Control("[ARGS]")];
    assert_eq!(parse(&format(MISTRAL).offering(None), "", &pieces).content, "[TOOL_CALLS]f[ARGS]");
    // Nothing is known about tools: calls with marks count, calls without marks do not.
    let bare = "{\"name\": \"f\", \"parameters\": {}}";
    assert_eq!(parse(&format(LLAMA), "", &[Piece::Text(bare.into())]).content, bare);
}

#[test]
fn control_tokens_as_tags() {
    let pieces = [
        Piece::Control("<think>"),
        Piece::Text("a".into()),
        Piece::Control("</think>"),
        Piece::Control("<|unrelated|>"),
        Piece::Text("b".into()),
    ];
    let want = Expected { reasoning: Some("a"), content: "b", calls: &[] };
    assert_eq!(parse(&format(QWEN), "", &pieces), expected(&want));
}

#[test]
fn harmony_channels() {
    let prompt = "<|start|>user<|message|>x<|end|><|start|>assistant";
    let answer = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>analysis<|message|>\
                  More.<|end|><|start|>assistant<|channel|>final<|message|> It is 4.\n";
    let want = Expected { reasoning: Some("Think.\n\nMore."), content: " It is 4.\n", calls: &[] };
    check(HARMONY, prompt, answer, &want);

    let answer = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary<|message|>\
                  I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json\
                  <|message|>{\"city\": \"Bern\"}";
    let calls = [("get_weather", "{\"city\": \"Bern\"}")];
    let want = Expected { reasoning: Some("Look it up."), content: "I look.", calls: &calls };
    check(HARMONY, prompt, answer, &want);
    // The recipient before the channel, as the template itself writes it.
    let answer = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>";
    let want = Expected { reasoning: None, content: "", calls: &[("f", "{}")] };
    check(HARMONY, prompt, answer, &want);

    // Text that looks like a mark is text: only control tokens count.
    let pieces = [
        Piece::Control("<|channel|>"),
        Piece::Text("final".into()),
        Piece::Control("<|message|>"),
        Piece::Text("The mark <|end|> ends a message.".into()),
    ];
    let message = parse(&format(HARMONY), prompt, &pieces);
    assert_eq!(message.content, "The mark <|end|> ends a message.");

    // The model did not follow the format.
    let message = parse(&format(HARMONY), prompt, &[Piece::Text("Hello".into())]);
    assert_eq!(message.content, "Hello");
    // The template opens the answer itself.
    let opened = "<|start|>assistant<|channel|>final<|message|>";
    assert_eq!(parse(&format(HARMONY), opened, &[Piece::Text("Hi".into())]).content, "Hi");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The message does not depend on where the text is cut.
    #[test]
    fn cuts_do_not_matter(
        parts in prop::collection::vec(0..FRAGMENTS.len(), 0..14),
        cuts in prop::collection::vec(1..6_usize, 1..60),
        template in 0..23_usize,
        opened in any::<bool>(),
    ) {
        let text: String = parts.iter().map(|part| FRAGMENTS[*part]).collect();
        let templates = [
            QWEN, CODER, GLM, DEEPSEEK, MISTRAL, GEMMA, KIMI, MINIMAX, DSML, LLAMA, PYTHON, MINIMAX3, LFM2, OLMO3, PHI,
            NEMOTRON2, ERNIE, HUNYUAN, SEED, HY, COHERE, KIMI3, SOLAR,
        ];
        let format = with_tools(templates[template]);
        let prompt = match (opened, template) {
            (false, _) => "",
            (true, 11) => "<mm:think>",
            (true, 18) => "<seed:think>",
            (true, 19) => "<think:x>",
            (true, 20) => "<|START_THINKING|>",
            (true, 21) => "<|open|>response<|sep|>",
            (true, _) => "<think>",
        };
        let whole = parse(&format, prompt, &[Piece::Text(text.clone())]);
        let mut pieces = Vec::new();
        let mut rest = text.as_str();
        for count in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let end = rest.char_indices().nth(*count).map_or(rest.len(), |(at, _)| at);
            pieces.push(Piece::Text(rest[..end].to_owned()));
            rest = &rest[end..];
        }
        prop_assert_eq!(parse(&format, prompt, &pieces), whole);
    }

    /// Control tokens stay where they are. The text between them may be cut anywhere.
    #[test]
    fn cuts_do_not_matter_to_harmony(parts in prop::collection::vec(0..12_usize, 0..20)) {
        let words = ["analysis", "final", "commentary to=functions.f", "{\"x\": 1}", " word"];
        let text: String = parts
            .iter()
            .map(|part| HARMONY_MARKS.get(*part).or(words.get(part % 5)).copied().unwrap_or_default())
            .collect();
        let pieces = harmony(&text);
        let whole = parse(&format(HARMONY), "<|start|>assistant", &pieces);
        prop_assert_eq!(parse(&format(HARMONY), "<|start|>assistant", &single(&pieces)), whole);
    }
}
