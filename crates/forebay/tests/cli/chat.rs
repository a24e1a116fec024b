//! The chat of `run`, on a terminal.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::{Command, Stdio};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::harness::{Ran, demo, forebay};

/// Ctrl-D at the begin of a line: the end of input.
const END_OF_INPUT: &str = "\x04";
const O_NOCTTY: i32 = rustix::fs::OFlags::NOCTTY.bits() as i32;

/// Runs the binary with this text typed at a terminal; what it says comes through pipes.
fn typed(arguments: &[&str], text: &str) -> Ran {
    typed_with_log(arguments, text, "off")
}

/// The same, with a log on standard error.
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
    // The terminal keeps what is typed, line by line, until somebody reads it.
    let mut keyboard = File::from(keyboard);
    keyboard.write_all(text.as_bytes()).expect("typed");
    let output = child.wait_with_output().expect("the binary ends");
    Ran {
        status: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// What the model says to a text that it continues.
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

    let lines = ["Once upon a time", " The dog", "", "/nonsense", "/reset", "Once upon a time"];
    let ran = typed(&arguments, &format!("{}\n{END_OF_INPUT}", lines.join("\n"))).ok();
    assert_eq!(ran.stdout, [&*first, &second, &first].concat());
    for needed in ["/exit ends", "no /nonsense here", "forgotten", "cut at --max-tokens"] {
        assert!(ran.stderr.contains(needed), "{needed} is missing in: {}", ran.stderr);
    }
}

/// A turn reads what is new: all but the last token of what was said before is in the cache.
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
    // The eighth token of the answer was chosen last and not read.
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
