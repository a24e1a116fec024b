//! Help, version, completions: what a newcomer meets first.

use crate::harness::forebay;

const COMMANDS: [&str; 8] =
    ["run", "bench", "inspect", "logits", "tokenize", "render", "synth", "completions"];

#[test]
fn every_command_explains_itself() {
    let top = forebay(&["--help"]).ok().stdout;
    for command in COMMANDS {
        assert!(top.contains(command), "{command} is missing in --help");
        let long = forebay(&[command, "--help"]).ok().stdout;
        assert!(long.contains("Usage: forebay ") && long.contains("Examples:"), "{long}");
        assert_eq!(forebay(&[command, "-h"]).ok().stdout, long);
    }
}

#[test]
fn without_a_command_there_is_help() {
    let ran = forebay::<&str>(&[]);
    assert_eq!(ran.status, Some(2));
    assert!(ran.stderr.contains("Usage: forebay"));
}

#[test]
fn version() {
    let text = forebay(&["--version"]).ok().stdout;
    assert_eq!(text, format!("forebay {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = forebay(&["completions", shell]).ok().stdout;
        for command in COMMANDS {
            assert!(script.contains(command), "{shell}: {command}");
        }
    }
}
