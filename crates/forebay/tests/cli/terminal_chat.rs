//! Tests what a person can do in a chat: keys, commands, completion, and typing ahead.

use std::path::Path;

use crate::harness::chat_model;
use crate::terminal::{Terminal, plain};

const CTRL_C: &str = "\u{3}";
/// A conversation of one turn.
const SAVED: &str = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]"#;

/// Starts a chat with a tiny model in a folder.
fn chat(folder: &Path, answer_tokens: &str) -> Terminal {
    let model = folder.join("model");
    let model = match model.exists() {
        true => model.to_str().unwrap().to_owned(),
        false => chat_model(&model),
    };
    let arguments = ["run", &model, "-n", answer_tokens, "--temperature", "0"];
    let mut chat = Terminal::start(&arguments, &folder.join("state"));
    chat.ready();
    chat
}

#[test]
fn ctrl_c_clears_a_typed_line_and_quits_on_an_empty_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut chat = chat(folder.path(), "2");
    chat.keys("a half message");
    chat.wait("a half message");
    chat.keys(CTRL_C);
    chat.ready();
    // The cleared text is not part of the next input.
    assert!(chat.line("/set seed 5").contains("seed is 5"));
    chat.keys("\"\"\"\rtwo lines");
    chat.wait("two lines");
    chat.keys(CTRL_C);
    chat.ready();
    assert!(chat.line("/set top_k 3").contains("top_k is 3"));
    chat.keys(CTRL_C);
    assert_eq!(chat.status(), Some(130));
}

#[test]
fn a_mistyped_command_is_not_sent_to_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let mut chat = chat(folder.path(), "2");
    for (wrong, hint) in
        [("/hepl", "/help"), ("/sav a.json", "/save"), ("/sytem Be brief", "/system")]
    {
        let said = plain(&chat.line(wrong));
        assert!(said.contains("error: there is no") && said.contains(hint), "{said}");
        assert!(!said.contains("ids=["), "{said}");
    }
    // A space before it sends it.
    assert!(plain(&chat.line(" /hepl me")).contains("ids=["));
    chat.keys("/bye\r");
    assert_eq!(chat.status(), Some(0));
}

#[test]
fn show_and_retry() {
    let folder = tempfile::tempdir().unwrap();
    let mut chat = chat(folder.path(), "4");
    assert!(plain(&chat.line("/retry")).contains("no answer to try again"));
    chat.line("/system Be brief.");
    let first = plain(&chat.line("Hello"));
    let again = plain(&chat.line("/retry"));
    let ids = |text: &str| {
        text.split("ids=[").nth(1).map(|rest| rest.split(']').next().unwrap().to_owned())
    };
    assert!(ids(&first).is_some(), "{first}");
    assert_eq!(ids(&first), ids(&again), "the same prompt is answered again");
    let shown = plain(&chat.line("/show"));
    // Long lines are broken between words.
    let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["qwen3moe", "on cpu", "all weights in RAM", "temperature", "Be brief.", "turns"] {
        assert!(words.contains(part), "{part} is missing in {shown}");
    }
    let turns = shown.lines().find(|line| line.starts_with("turns")).unwrap_or_default();
    assert!(turns.trim_end().ends_with('1'), "the question is there once: {shown}");
    chat.keys("/bye\r");
    assert_eq!(chat.status(), Some(0));
}

#[test]
fn the_start_says_model_device_and_place_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let mut chat = chat(folder.path(), "2");
    chat.keys("/bye\r");
    chat.wait("/bye");
    let (screen, _) = chat.end();
    let screen = plain(&screen);
    let line = screen.lines().find(|line| line.contains("context of")).unwrap_or_default();
    for part in ["model: qwen3moe", "on cpu", "all weights in RAM", "16384 tokens"] {
        assert!(screen.contains(part), "{part} is missing: {line:?} in {screen}");
    }
}

#[test]
fn tab_completes_commands_settings_and_files() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a conversation.json"), SAVED).unwrap();
    let mut chat = chat(folder.path(), "2");
    chat.keys("/sho\t");
    chat.wait("/show");
    assert!(chat.line("").contains("temperature"));
    chat.keys("/set temp\t");
    chat.wait("/set temperature");
    assert!(chat.line("0.5").contains("temperature is 0.5"));
    chat.keys("/load a\t");
    assert!(chat.line("").contains("1 turn from a conversation.json"));
    chat.keys("/bye\r");
    assert_eq!(chat.status(), Some(0));
}

#[test]
fn what_is_typed_during_an_answer_waits_for_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let mut chat = chat(folder.path(), "400");
    chat.keys("Hello\r");
    chat.wait("ids=[");
    chat.keys("/set seed 77\r/set seed");
    let answer = chat.wait("\u{1b}[6n");
    assert!(!answer.contains("/set"), "it is shown in the answer: {answer:?}");
    chat.wait("seed is 77");
    chat.ready();
    assert!(chat.line(" 78").contains("seed is 78"));
    // Ctrl-C still stops an answer, and the terminal shows what is typed afterwards.
    chat.keys("Hello again\r");
    chat.wait("ids=[");
    chat.keys(CTRL_C);
    chat.ready();
    chat.keys("/bye\r");
    assert_eq!(chat.status(), Some(0));
}
