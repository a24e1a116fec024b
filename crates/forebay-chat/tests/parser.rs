//! Tests of answers of every family: whole, cut anywhere and unfinished.

use forebay_chat::{Event, Format, Message, Parser, ToolCall};
use forebay_text::ChatTemplate;
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

/// Fragments from which answers of all tagged families are made, in any order.
const FRAGMENTS: [&str; 60] = [
    "<think>",
    "</think>",
    "<thi",
    "</",
    "\n",
    " ",
    "text",
    "é",
    "日本",
    "<tool_call>",
    "</tool_call>",
    "{\"name\": \"f\", \"arguments\": {\"x\": 1}}",
    "{\"name\"",
    "<function=f>",
    "<parameter=x>",
    "1</parameter>",
    "</function>",
    "f<arg_key>k</arg_key><arg_value>v</arg_value>",
    "<",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "f<｜tool▁sep｜>{}",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "[TOOL_CALLS]",
    "[TOOL_CA",
    "f[ARGS]{\"x\": \"é}\"}",
    "[CALL_ID]abcdefghi",
    "[{\"name\": \"f\", \"arguments\": {}}]",
    "[THINK]",
    "[/THINK]",
    "<|channel>",
    "thought\n",
    "<channel|>",
    "<|tool_call>",
    "call:f{x:<|\"|>é,}<|\"|>}",
    "<tool_call|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.f:0<|tool_call_argument_begin|>{}",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<minimax:tool_call>",
    "<invoke name=\"f\">",
    "<parameter name=\"x\">1</parameter>",
    "</invoke>",
    "</minimax:tool_call>",
    "<｜DSML｜function_calls>",
    "<｜DSML｜invoke name=\"g\">",
    "</｜DSML｜invoke>",
    "</｜DSML｜function_calls>",
    "<|python_tag|>",
    "<|python",
    "{\"name\": \"g\", \"parameters\": {\"x\": \"\\\"}\"}}",
    "{",
    "}",
    "; ",
    "[f(x='é)]', y=[1])]",
    "[g()]",
    "]",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The message does not depend on where the text is cut.
    #[test]
    fn cuts_do_not_matter(
        parts in prop::collection::vec(0..FRAGMENTS.len(), 0..14),
        cuts in prop::collection::vec(1..6_usize, 1..60),
        template in 0..11_usize,
        opened in any::<bool>(),
    ) {
        let text: String = parts.iter().map(|part| FRAGMENTS[*part]).collect();
        let templates =
            [QWEN, CODER, GLM, DEEPSEEK, MISTRAL, GEMMA, KIMI, MINIMAX, DSML, LLAMA, PYTHON];
        let format = with_tools(templates[template]);
        let prompt = if opened { "<think>" } else { "" };
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
