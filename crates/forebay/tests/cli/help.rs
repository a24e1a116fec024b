//! Tests help, version and completions, which new users see first.

use crate::harness::{command, forebay};

const COMMANDS: [&str; 21] = [
    "run",
    "plan",
    "serve",
    "pull",
    "list",
    "rm",
    "bench",
    "assess",
    "trace-io",
    "replay",
    "load",
    "doctor",
    "inspect",
    "logits",
    "tokenize",
    "render",
    "synth",
    "pack",
    "verify",
    "completions",
    "config",
];

#[test]
fn every_command_explains_itself() {
    let top = forebay(&["--help"]).ok().stdout;
    for command in COMMANDS {
        assert!(top.contains(command), "{command} is missing in --help");
        let long = forebay(&[command, "--help"]).ok().stdout;
        assert!(long.contains("Usage: forebay ") && long.contains("Examples:"), "{long}");
        let short = forebay(&[command, "-h"]).ok().stdout;
        assert!(short.contains("Usage: forebay ") && short.contains("Examples:"), "{short}");
        assert!(short.lines().count() <= long.lines().count(), "{short}");
    }
}

#[test]
fn the_short_help_shows_what_people_need_first() {
    for command in ["run", "plan", "batch", "serve", "bench", "assess", "replay", "load", "logits"]
    {
        let short = forebay(&[command, "-h"]).ok().stdout;
        let long = forebay(&[command, "--help"]).ok().stdout;
        assert!(short.lines().count() <= 36, "{short}");
        assert!(long.lines().count() > short.lines().count(), "{command}");
        assert!(short.contains(&format!("forebay {command} --help shows all")), "{short}");
    }
    assert!(!forebay(&["run", "-h"]).ok().stdout.contains("--min-p"));
    assert!(forebay(&["run", "--help"]).ok().stdout.contains("--min-p"));
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
        assert!(script.contains("FOREBAY_COMPLETE"), "{shell}: {script}");
    }
    // The scripts ask the program.
    let binary = env!("CARGO_BIN_EXE_forebay");
    let asked = [
        "FOREBAY_COMPLETE=bash",
        "_CLAP_COMPLETE_INDEX=1",
        "_CLAP_COMPLETE_COMP_TYPE=9",
        "_CLAP_COMPLETE_SPACE=true",
        "_CLAP_IFS=\n",
        binary,
        "--",
        "forebay",
        "",
    ];
    let words = command("/usr/bin/env", &asked, "").ok().stdout;
    for command in COMMANDS {
        assert!(words.lines().any(|word| word == command), "{command}: {words}");
    }
}

#[test]
fn help_fits_terminals_of_80_and_100_columns() {
    for columns in [80, 100] {
        for name in COMMANDS.iter().copied().chain(["the whole"]) {
            let environment = format!("COLUMNS={columns}");
            let binary = env!("CARGO_BIN_EXE_forebay");
            let arguments = match name {
                "the whole" => vec![environment.as_str(), binary, "--help"],
                name => vec![environment.as_str(), binary, name, "--help"],
            };
            let help = command("/usr/bin/env", &arguments, "").ok().stdout;
            let mut before = "";
            // clap does not wrap usage lines.
            for line in help.lines().filter(|line| !line.starts_with("Usage:")) {
                assert!(line.chars().count() <= columns, "{name}: {line}");
                // This finds text that continues an example, and paragraphs whose lines were broken twice: a short line
                // before more text.
                let example =
                    before.starts_with("  ") && !line.is_empty() && !line.starts_with(' ');
                assert!(!example, "{name} at {columns}: {before} / {line}");
                let first = line.split(' ').next().unwrap_or_default().chars().count();
                let prose = [before, line]
                    .iter()
                    .all(|line| line.starts_with(|c: char| c.is_alphanumeric()));
                let fits = before.chars().count() + 1 + first <= columns;
                assert!(!(prose && fits), "{name} at {columns}: {before} / {line}");
                before = line;
            }
        }
    }
}

#[test]
fn units_of_sizes_and_the_default_of_ram_are_said() {
    for name in ["run", "plan"] {
        let help = forebay(&[name, "--help"]).ok().stdout;
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(help.contains("8GiB, 8G or 8g (GB is decimal)"), "{help}");
        let default = "[default: what the model needs, at most three quarters of the free RAM]";
        assert!(help.contains(default), "{help}");
    }
}
