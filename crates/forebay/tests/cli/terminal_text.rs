//! Tests how text of models is shown: safely and with whole words on a terminal, unchanged in pipes.

use std::path::Path;

use serde_json::{Value, json};

use crate::harness::{chat_model, copy_folder, demo, forebay, moe};
use crate::terminal::Terminal;

/// Sequences that set a title, write to the clipboard, clear the screen, move the cursor, ask for an answer or turn the
/// direction of text.
const HOSTILE: [&str; 12] = [
    "\u{1b}]0;title\u{7}",
    "\u{1b}]52;c;aGk=\u{7}",
    "\u{1b}[2J",
    "\u{9b}2J",
    "\u{9d}0;x\u{9c}",
    "\u{1b}[6n",
    "\u{8}\u{8}",
    "\u{7f}",
    "\u{202e}abc",
    "\u{2066}x",
    "\u{0}\u{e}",
    "\u{1b}c",
];

/// Returns a letter for each byte, as byte-level vocabularies write it.
fn byte_letters(text: &str) -> String {
    let is_plain = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let letter = |byte: u8| match is_plain(byte.into()) {
        true => char::from(byte),
        false => {
            let earlier = (0..u32::from(byte)).filter(|byte| !is_plain(*byte)).count();
            char::from_u32(256 + earlier as u32).unwrap()
        }
    };
    text.bytes().map(letter).collect()
}

/// Makes a model whose tokens are hostile.
fn hostile_model(folder: &Path) -> String {
    copy_folder(moe().as_ref(), folder);
    let path = folder.join("tokenizer.json");
    let mut tokenizer: Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let merged: Vec<String> = {
        let vocabulary = tokenizer["model"]["vocab"].as_object().unwrap();
        vocabulary.keys().filter(|token| token.chars().count() > 1).cloned().collect()
    };
    tokenizer["model"]["merges"] = json!([]);
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    for (number, token) in merged.iter().enumerate() {
        let id = vocabulary.remove(token).unwrap();
        let text = format!("{}{number}", HOSTILE[number % HOSTILE.len()]);
        vocabulary.insert(byte_letters(&text), id);
    }
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    folder.to_str().unwrap().to_owned()
}

fn is_obeyed(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\r' | '\t')
        || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns what a terminal was sent, without the sequences by which a progress bar erases its line. A bar appears if a
/// step takes long.
fn without_bars(screen: &str) -> String {
    ["\u{1b}[2K", "\u{1b}[1A", "\u{1b}[1B", "\u{1b}[?25l", "\u{1b}[?25h"]
        .iter()
        .fold(screen.to_owned(), |screen, bar| screen.replace(bar, ""))
}

#[test]
fn a_terminal_obeys_nothing_that_a_model_writes() {
    let folder = tempfile::tempdir().unwrap();
    let model = hostile_model(&folder.path().join("model"));
    let mut seen = String::new();
    for seed in ["1", "2", "3"] {
        let arguments = [
            "run",
            &model,
            "-p",
            "x",
            "--raw",
            "-n",
            "150",
            "--temperature",
            "5",
            "--top-k",
            "0",
            "--top-p",
            "1",
            "--min-p",
            "0",
            "--seed",
            seed,
            "--log",
            "off",
        ];
        let piped = forebay(&arguments).ok().stdout;
        assert!(piped.contains('\u{1b}') && piped.contains(is_obeyed), "{piped:?}");
        let (screen, status) = Terminal::start(&arguments, &folder.path().join("state")).end();
        assert_eq!(status, Some(0), "{screen:?}");
        assert!(!without_bars(&screen).contains(is_obeyed), "{screen:?}");
        seen += &screen;
    }
    for shown in ["\\x1b]0;title\\x07", "\\x9b2J", "\\u{202e}abc", "\\x00\\x0e", "\\x7f"] {
        assert!(seen.contains(shown), "{shown} is missing in {seen:?}");
    }
}

#[test]
fn templates_names_and_messages_are_shown_safely() {
    let folder = tempfile::tempdir().unwrap();
    let hostile = HOSTILE.concat();
    let model = chat_model(&folder.path().join("model"));
    std::fs::write(folder.path().join("model/chat_template.jinja"), &hostile).unwrap();
    let named = folder.path().join(format!("model{}", HOSTILE[2..].concat().replace('\0', "")));
    std::fs::rename(&model, &named).unwrap();
    let named = named.to_str().unwrap();
    for arguments in [
        &["run", named, "-p", "x", "-n", "1", "--stats"][..],
        &["inspect", named, "--tensors"],
        &["inspect", named, "--json"],
        &["run", "nowhere\u{1b}]0;x\u{7}", "-p", "x"],
        &["run", named, "--think", "on\u{9b}2J", "-p", "x"],
        &["tokenize", named, "--text", HOSTILE[3], "--json"],
        &["plan", named],
    ] {
        let arguments: Vec<&str> = arguments.iter().copied().chain(["--log", "error"]).collect();
        let (screen, _) = Terminal::start(&arguments, &folder.path().join("state")).end();
        assert!(
            screen.len() > 20 && !without_bars(&screen).contains(is_obeyed),
            "{arguments:?}: {screen:?}"
        );
    }
}

/// Breaking a line changes no word, and no line is wider than the terminal.
#[test]
fn lines_break_between_words_at_the_width_of_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let demo = demo();
    for columns in [30_u16, 57] {
        let arguments = [
            "run",
            &demo,
            "-p",
            "Once upon a time",
            "-n",
            "120",
            "--temperature",
            "0",
            "--log",
            "off",
        ];
        let piped = forebay(&arguments).ok().stdout;
        let terminal = Terminal::of_columns(columns, &arguments, &folder.path().join("state"));
        let (screen, _) = terminal.end();
        let answer = screen.split("plain text").nth(1).expect("the note comes first");
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(answer), words(&piped));
        for line in answer.lines() {
            assert!(line.trim_end().chars().count() <= columns.into(), "{columns}: {line:?}");
        }
        assert!(answer.lines().count() > piped.lines().count(), "{answer}");
    }
}
