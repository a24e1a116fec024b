//! Tests of three turns with thinking. The prompt rendered from parsed answers must equal the
//! prompt that the template renders from the true messages.

use std::path::{Path, PathBuf};

use forebay_chat::{ChatError, Format, History, Message, Parser, Think};
use forebay_text::{ChatTemplate, RenderInput};
use serde_json::{Map, Value, json};

fn template(name: &str, bos: &str, eos: &str) -> ChatTemplate {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let full = std::env::var_os("FOREBAY_FIXTURES").map(PathBuf::from);
    let path = full.unwrap_or(project).join("templates").join(name);
    let source = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
    ChatTemplate::from_source(&source, bos, eos).unwrap()
}

/// Parses a generated answer. Control tokens are marked by a `\u{1}` on both sides.
fn answer(format: &Format, prompt: &str, generated: &str) -> Message {
    let mut parser = Parser::new(format, prompt);
    for (index, part) in generated.split('\u{1}').enumerate() {
        match index % 2 {
            0 => parser.text(part, &mut |_| {}),
            _ => parser.control(part, &mut |_| {}),
        }
    }
    parser.finish(&mut |_| {})
}

/// Leads a conversation as a chat does, and compares every prompt with the one that the template
/// renders from `truth`: literal messages, with the fields that this template reads.
fn lead(
    template: &ChatTemplate,
    variables: &Map<String, Value>,
    turns: &[(&str, &str)],
    truth: &[Value],
    expected_last: &str,
) {
    let format = Format::recognise(Some(template), None).unwrap();
    let mut history = History::default();
    history.set_system(Some("Be brief.".into()));
    let mut last = String::new();
    for (index, (user, generated)) in turns.iter().enumerate() {
        history.push(Message::new("user", *user));
        let prompt =
            format.render(template, history.messages(), None, variables).unwrap().into_text();
        // The system message, and alternating user and assistant messages.
        let input = RenderInput {
            messages: Value::Array(truth[..2 + 2 * index].to_vec()),
            tools: None,
            add_generation_prompt: true,
            variables: variables.clone(),
            now: None,
        };
        assert_eq!(prompt, template.render(&input).unwrap(), "turn {index}");
        history.push(answer(&format, &prompt, generated));
        // A saved and loaded conversation gives the same prompt.
        history = History::from_json(&history.to_json()).unwrap();
        last = prompt;
    }
    assert!(last.ends_with(expected_last), "{last}");
    for (_, generated) in turns {
        let thought = generated.split(['\u{1}', '<', '\n']).find(|part| part.contains("thought"));
        assert!(!last.contains(thought.expect("every answer has a thought")), "{last}");
    }
}

#[test]
fn qwen3() {
    let template = template("Qwen-Qwen3-0.6B.jinja", "", "<|im_end|>");
    let turns = [
        ("What is 2+2?", "<think>\nA first thought.\n</think>\n\nIt is 4."),
        ("And 3+3?", "<think>\nA second thought:\n\n3+3.\n</think>\n\nIt is 6.\n"),
        ("Thanks", "<think>\nA third thought.\n</think>\n\nGladly."),
    ];
    let truth = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "What is 2+2?"}),
        json!({"role": "assistant", "content": "It is 4.", "reasoning_content": "A first thought."}),
        json!({"role": "user", "content": "And 3+3?"}),
        json!({"role": "assistant", "content": "It is 6.\n", "reasoning_content": "A second thought:\n\n3+3."}),
        json!({"role": "user", "content": "Thanks"}),
    ];
    let end = "<|im_start|>assistant\nIt is 4.<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n\
               <|im_start|>assistant\nIt is 6.\n<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n\
               <|im_start|>assistant\n";
    lead(&template, &Map::new(), &turns, &truth, end);
}

#[test]
fn gpt_oss() {
    let template = template("openai-gpt-oss-120b.jinja", "<|startoftext|>", "<|return|>");
    let turn = |thought: &str, text: &str| {
        format!(
            "\u{1}<|channel|>\u{1}analysis\u{1}<|message|>\u{1}{thought}\u{1}<|end|>\u{1}\u{1}<|start|>\u{1}assistant\
             \u{1}<|channel|>\u{1}final\u{1}<|message|>\u{1}{text}"
        )
    };
    let answers = [
        turn("A first thought.", "It is 4."),
        turn("A second thought.", "It is 6.\n"),
        turn("A third thought.", "Gladly."),
    ];
    let turns =
        [("What is 2+2?", &*answers[0]), ("And 3+3?", &answers[1]), ("Thanks", &answers[2])];
    let truth = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "What is 2+2?"}),
        json!({"role": "assistant", "thinking": "A first thought.", "content": "It is 4."}),
        json!({"role": "user", "content": "And 3+3?"}),
        json!({"role": "assistant", "thinking": "A second thought.", "content": "It is 6.\n"}),
        json!({"role": "user", "content": "Thanks"}),
    ];
    let end = "<|start|>assistant<|channel|>final<|message|>It is 4.<|end|><|start|>user<|message|>And 3+3?<|end|>\
               <|start|>assistant<|channel|>final<|message|>It is 6.\n<|end|><|start|>user<|message|>Thanks<|end|>\
               <|start|>assistant";
    lead(&template, &Map::new(), &turns, &truth, end);
}

#[test]
fn deepseek() {
    let template = template(
        "deepseek-ai-DeepSeek-V3.1.jinja",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    );
    let format = Format::recognise(Some(&template), None).unwrap();
    let variables = format.think(Think::On).unwrap();
    // The prompt ends with <think>.
    let turns = [
        ("What is 2+2?", "A first thought.</think>It is 4."),
        ("And 3+3?", "A second thought.</think>It is 6.\n"),
        ("Thanks", "A third thought.</think>Gladly."),
    ];
    let truth = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "What is 2+2?"}),
        json!({"role": "assistant", "content": "It is 4."}),
        json!({"role": "user", "content": "And 3+3?"}),
        json!({"role": "assistant", "content": "It is 6.\n"}),
        json!({"role": "user", "content": "Thanks"}),
    ];
    let end = "<｜User｜>And 3+3?<｜Assistant｜><think></think>It is 6.\n<｜end▁of▁sentence｜>\
               <｜User｜>Thanks<｜Assistant｜><think>";
    lead(&template, &variables, &turns, &truth, end);
}

/// Reasoning stays in the prompt while tools are called, if the template keeps it.
#[test]
fn reasoning_stays_within_a_turn_of_tool_calls() {
    let qwen = template("Qwen-Qwen3-0.6B.jinja", "", "<|im_end|>");
    let oss = template("openai-gpt-oss-120b.jinja", "<|startoftext|>", "<|return|>");
    let call = "{\"name\": \"f\", \"arguments\": {\"x\":  1}}";
    let generated = [
        format!("<think>\nUse f.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"),
        "\u{1}<|channel|>\u{1}analysis\u{1}<|message|>\u{1}Use f.\u{1}<|end|>\u{1}\u{1}<|start|>\u{1}assistant\
         \u{1}<|channel|>\u{1}commentary to=functions.f \u{1}<|constrain|>\u{1}json\u{1}<|message|>\u{1}{\"x\":  1}"
            .to_owned(),
    ];
    let expected = [
        format!(
            "<|im_start|>assistant\n<think>\nUse f.\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>\n\
             <|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        ),
        "<|start|>assistant<|channel|>analysis<|message|>Use f.<|end|><|start|>assistant to=functions.f\
         <|channel|>commentary json<|message|>{\"x\": 1}<|call|><|start|>functions.f to=assistant\
         <|channel|>commentary<|message|>\"7\"<|end|><|start|>assistant"
            .to_owned(),
    ];
    for ((template, generated), expected) in [qwen, oss].iter().zip(&generated).zip(&expected) {
        let format = Format::recognise(Some(template), None).unwrap();
        let mut messages = vec![Message::new("user", "Go")];
        let render = |messages: &[Message]| {
            format.render(template, messages, None, &Map::new()).unwrap().into_text()
        };
        let message = answer(&format, &render(&messages), generated);
        messages.extend([message, Message::new("tool", "7")]);
        let prompt = render(&messages);
        assert!(prompt.ends_with(expected.as_str()), "{prompt}\n{expected}");
    }
}

#[test]
fn thinking_is_switched_by_the_variable_of_the_template() {
    let qwen = template("Qwen-Qwen3-0.6B.jinja", "", "");
    let deepseek = template("deepseek-ai-DeepSeek-V3.1.jinja", "", "");
    let oss = template("openai-gpt-oss-120b.jinja", "", "");
    let gemma = template("google-gemma-2-2b-it.jinja", "", "");
    let format = |template: &ChatTemplate| Format::recognise(Some(template), None).unwrap();
    let prompt = |template: &ChatTemplate, think| {
        let format = format(template);
        let variables = format.think(think).unwrap();
        format.render(template, &[Message::new("user", "x")], None, &variables).unwrap().into_text()
    };
    assert!(prompt(&qwen, Think::Off).ends_with("<think>\n\n</think>\n\n"));
    assert!(prompt(&qwen, Think::On).ends_with("assistant\n"));
    assert!(prompt(&deepseek, Think::On).ends_with("<think>"));
    assert!(prompt(&deepseek, Think::Off).ends_with("</think>"));
    assert!(prompt(&oss, Think::High).contains("Reasoning: high"));
    for (template, think, wanted) in [
        (&qwen, Think::High, "supports on and off (enable_thinking)"),
        (&oss, Think::Off, "supports low, medium and high (reasoning_effort)"),
        (&gemma, Think::On, "has no variable"),
    ] {
        let ChatError::Think(error) = format(template).think(think).unwrap_err() else { panic!() };
        assert!(error.contains(wanted), "{error}");
    }
    let error = format(&qwen).check_variable("enable_thinkin").unwrap_err().to_string();
    assert!(error.contains("it has enable_thinking"), "{error}");
    assert!(format(&oss).check_variable("model_identity").is_ok());
    assert!(format(&qwen).reasons() && format(&oss).reasons() && !format(&gemma).reasons());
}
