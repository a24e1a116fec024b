//! Tests the chat of `run` on a terminal.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::{Command, Stdio};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::harness::{Ran, chat_model, demo, forebay, model_with_template};

/// Ctrl-D at the beginning of a line, which ends the input.
const END_OF_INPUT: &str = "\x04";
const O_NOCTTY: i32 = rustix::fs::OFlags::NOCTTY.bits() as i32;

/// Runs the binary with this text typed at a terminal. Its output goes to pipes.
fn typed(arguments: &[&str], text: &str) -> Ran {
    typed_with_log(arguments, text, "off")
}

/// Runs the binary as [`typed`] does, with a log on standard error.
fn typed_with_log(arguments: &[&str], text: &str, log: &str) -> Ran {
    let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&keyboard).expect("the terminal is ours");
    unlockpt(&keyboard).expect("the terminal opens");
    let name = ptsname(&keyboard, Vec::new()).expect("the terminal has a name");
    let name = name.into_string().expect("UTF-8");
    let terminal = File::options().read(true).write(true).custom_flags(O_NOCTTY).open(name);
    let child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(arguments)
        .env("FOREBAY_LOG", log)
        .stdin(terminal.expect("the terminal opens"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // The terminal keeps the typed lines until the program reads them.
    let mut keyboard = File::from(keyboard);
    keyboard.write_all(text.as_bytes()).expect("typed");
    let output = child.wait_with_output().expect("the binary ends");
    Ran {
        status: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Returns the model's continuation of a text.
fn continued(arguments: &[&str], text: &str) -> String {
    forebay(&[arguments, &["--prompt", text]].concat()).ok().stdout
}

#[test]
fn a_chat_remembers_its_turns_until_reset_and_ends_with_its_input() {
    let demo = demo();
    let arguments = ["run", &demo, "--raw", "--temperature", "0", "--max-tokens", "8"];
    let first = continued(&arguments, "Once upon a time");
    let so_far = format!("Once upon a time{} The dog", first.trim_end_matches('\n'));
    let second = continued(&arguments, &so_far);
    assert_ne!(second, continued(&arguments, " The dog"), "the first turn makes no difference");

    let lines = ["Once upon a time", " The dog", "", "/nonsense", "/clear", "Once upon a time"];
    let ran = typed(&arguments, &format!("{}\n{END_OF_INPUT}", lines.join("\n"))).ok();
    assert_eq!(ran.stdout, [&*first, &second, &first].concat());
    for needed in ["/bye", "no /nonsense here", "forgotten", "cut at --max-tokens"] {
        assert!(ran.stderr.contains(needed), "{needed} is missing in: {}", ran.stderr);
    }
}

/// A turn processes only new tokens: all but the last token of the earlier turns are in the cache.
#[test]
fn a_turn_does_not_read_the_turns_before_it_again() {
    let demo = demo();
    let arguments = ["run", &demo, "--raw", "--temperature", "0", "--max-tokens", "8"];
    let text = format!("Once upon a time there was a dog\n The dog went\n{END_OF_INPUT}");
    let log = typed_with_log(&arguments, &text, "debug").ok().stderr;
    let number = |line: &str, name: &str| {
        let from = line.split(name).nth(1).expect("is logged");
        let digits: String = from.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<usize>().expect("a number")
    };
    let of = |line: &str| (number(line, "tokens="), number(line, "reused="));
    let turns: Vec<_> = log.lines().filter(|line| line.contains("reused=")).map(of).collect();
    let [(first, none), (second, reused)] = turns[..] else { panic!("two turns: {log}") };
    assert_eq!(none, 0);
    // The eighth token of the answer was chosen last and not fed.
    assert!(reused >= first + 7 && reused < second, "{turns:?}");
}

#[test]
fn a_chat_ends_at_exit_and_says_its_statistics() {
    let demo = demo();
    let ran = typed(&["run", &demo, "--max-tokens", "4", "--stats"], "Hello\n/exit\nMore\n").ok();
    assert!(!ran.stdout.trim().is_empty());
    assert_eq!(ran.stderr.matches("cut at --max-tokens").count(), 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("hit rate"), "{}", ran.stderr);
}

/// The demo's file has a chat template that the model was never trained with.
#[test]
fn the_demo_named_by_its_path_continues_text() {
    let arguments = ["--temperature", "0", "-n", "8", "-p", "Once upon a time"];
    let by_path = forebay(&[&["run", &demo()], &arguments[..]].concat()).ok();
    let raw = forebay(&[&["run", &demo(), "--raw"], &arguments[..]].concat()).ok();
    assert_eq!(by_path.stdout, raw.stdout);
    assert!(by_path.stderr.contains("not trained to chat"), "{}", by_path.stderr);
}

/// Returns the prompt ids of each turn in the log.
fn prompts(log: &str) -> Vec<Vec<u32>> {
    let lists = log.split("ids=[").skip(1).filter_map(|rest| rest.split(']').next());
    lists.map(|list| list.split(", ").map(|id| id.parse().unwrap()).collect()).collect()
}

#[test]
fn the_oldest_turns_leave_a_full_context_and_it_is_said_once() {
    let directory = tempfile::tempdir().unwrap();
    let model = chat_model(&directory.path().join("model"));
    let mut lines: Vec<String> =
        (0..8).map(|i| format!("This is the message number {i}.")).collect();
    lines.push("/stats".into());
    let typed_text = format!("{}\n{END_OF_INPUT}", lines.join("\n"));
    let base = ["run", &model, "-n", "6", "--temperature", "0", "--ctx", "160", "--system", "STAY"];
    let ran = typed_with_log(&base, &typed_text, "forebay::chat=trace").ok();
    let notes = ran.stderr.matches("the oldest turns are dropped").count();
    assert_eq!(notes, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("old turns were dropped because it was full"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("error:"), "{}", ran.stderr);
    let all = prompts(&ran.stderr);
    assert_eq!(all.len(), 8);
    let text = |ids: &[u32]| {
        let words = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
        format!(" {words} ")
    };
    let system = forebay(&["tokenize", &model, "--no-special", "--text", "STAY"]).ok().stdout;
    for ids in &all {
        assert!(ids.len() <= 160 && text(ids).contains(&format!(" {} ", system.trim())), "{ids:?}");
    }
    // The template makes the last prompt from the remaining messages.
    assert!(all[7].len() < 8 * (all[0].len() - 10), "nothing left the conversation");

    // With `stop`, the answer is cut and one line gives the reason. Later turns get one line each.
    let ran = typed(&[&base[..], &["--on-full", "stop"]].concat(), &typed_text).ok();
    // The first line names the model and its context.
    let lines = ran.stderr.lines().skip(1);
    let lines: Vec<&str> = lines.filter(|line| line.contains("context")).collect();
    assert!(!ran.stderr.contains("the oldest turns are dropped"), "{}", ran.stderr);
    assert!(
        lines.iter().all(|line| line.contains("--ctx") || line.contains("tokens used")),
        "{lines:?}"
    );
    assert!(lines.iter().any(|line| line.contains("16384")), "{lines:?}");
}

#[test]
fn an_answer_goes_on_when_the_context_fills_in_the_middle_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let model = model_with_template(&directory.path().join("model"), PLAIN, 1024);
    let text = format!("Six\nTwo\n{END_OF_INPUT}");
    let arguments = ["run", &model, "-n", "30", "--temperature", "0", "--ctx", "84", "--stats"];
    let log = typed_with_log(&arguments, &text, "forebay::chat=trace").ok().stderr;
    assert!(log.contains("1 old turn was dropped"), "{log}");
    let all = prompts(&log);
    let [first, second, third] = &all[..] else { panic!("three prompts: {log}") };
    // The third prompt is processed in the middle of the second answer. It lacks the first turn, and the answer so far
    // follows it.
    assert!(third.len() < second.len() && third.len() > first.len(), "{log}");
}

/// A template without special tokens.
const PLAIN: &str = "{% for m in messages %}({{ m.role }}) {{ m.content }} {% endfor %}(assistant)";

#[test]
fn at_the_largest_context_of_a_model_no_larger_one_is_recommended() {
    let directory = tempfile::tempdir().unwrap();
    let model = model_with_template(&directory.path().join("model"), PLAIN, 64);
    let long = "many words ".repeat(40);
    let line = forebay(&["run", &model, "-p", &long]).failed(1);
    assert!(line.contains("holds 64") && !line.contains("--ctx"), "{line}");
    let line = forebay(&["run", &model, "-p", &long, "-c", "32"]).failed(1);
    assert!(line.contains("larger --ctx (this model: at most 64)"), "{line}");
    // A sampled answer could end before the context is full.
    let ran = forebay(&["run", &model, "-p", "Hello", "--temperature", "0"]).ok();
    assert!(ran.stderr.contains("is full; this model has no larger one"), "{}", ran.stderr);
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
}

#[test]
fn settings_and_the_system_message_change_in_the_chat() {
    let directory = tempfile::tempdir().unwrap();
    let model = chat_model(&directory.path().join("model"));
    let file = directory.path().join("chat.json");
    let lines = [
        "/system Be brief.",
        "/system",
        "/set temperature 0",
        "/set temperature hot",
        "/set max_tokens 3",
        "/set think off",
        "/set think high",
        "/set nothing 1",
        "Hello",
        &format!("/save {}", file.display()),
        &format!("/load {}.missing", file.display()),
        "/set",
        "/help",
        "/bye",
        "never read",
    ];
    let ran = typed(&["run", &model], &format!("{}\n", lines.join("\n"))).ok();
    for needed in [
        "Be brief.",
        "temperature is 0",
        "must be a number of at least 0",
        "think is off",
        "supports on and off (enable_thinking)",
        "no such setting",
        "missing: cannot be read",
        "max_tokens      3",
        "think           off",
        "/load FILE",
    ] {
        assert!(ran.stderr.contains(needed), "{needed} is missing in: {}", ran.stderr);
    }
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(saved["messages"][0]["content"], "Be brief.");
    assert_eq!(saved["messages"].as_array().map(Vec::len), Some(3));
}

#[test]
fn a_saved_conversation_goes_on_without_reading_it_again() {
    let directory = tempfile::tempdir().unwrap();
    let model = chat_model(&directory.path().join("model"));
    let file = directory.path().join("chat.json");
    let (save, load) = (format!("/save {}", file.display()), format!("/load {}", file.display()));
    let arguments = ["run", &model, "--temperature", "0", "--max-tokens", "12", "--stats"];
    let chat = |lines: &[&str]| typed(&arguments, &format!("{}\n", lines.join("\n")));
    let turns = ["A question that has some words", "Another one"];
    let whole = chat(&[turns[0], &save, &save, turns[1], "/bye"]).ok();
    assert!(whole.stderr.contains("its keys and values in"), "{}", whole.stderr);
    // A chat may write its own file again.
    assert_eq!(whole.stderr.matches("the conversation is in").count(), 2, "{}", whole.stderr);
    // The first line is the first answer.
    let answers: Vec<&str> = whole.stdout.lines().collect();
    let kv = directory.path().join("chat.json.kv");
    assert!(kv.metadata().unwrap().len() > 1000);

    let later = chat(&[&load, turns[1], "/bye"]).ok();
    assert!(later.stderr.contains("need not be computed again"), "{}", later.stderr);
    assert_eq!(later.stdout.lines().next(), answers.get(1).copied(), "{}", later.stdout);
    let prompt_tokens = |ran: &Ran| {
        let line = ran.stderr.lines().find(|line| line.trim_start().starts_with("prompt"));
        let line = line.unwrap_or_else(|| panic!("no prompt line: {}", ran.stderr));
        let mut words = line.split_whitespace();
        words.find_map(|word| word.parse::<usize>().ok()).expect("a number of tokens")
    };
    let with = prompt_tokens(&later);

    let mut bytes = std::fs::read(&kv).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&kv, bytes).unwrap();
    let damaged = chat(&[&load, turns[1], "/bye"]).ok();
    assert!(damaged.stderr.contains("checksum does not match"), "{}", damaged.stderr);
    assert!(damaged.stderr.contains("will be read again"), "{}", damaged.stderr);
    std::fs::remove_file(&kv).unwrap();
    let without = chat(&[&load, turns[1], "/bye"]).ok();
    assert!(prompt_tokens(&without) > with + 10, "{with} and {}", prompt_tokens(&without));
}
