//! Errors of the command line parser, as one line in the form of all other errors.

use std::process::ExitCode;

use clap::error::ErrorKind;

use crate::output;

/// Prints what clap found: help and version as they are, an error as `error: …; tip: …`.
pub fn report(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // A reader that left (`forebay --help | head -1`) is no failure.
            let _ = error.print();
            ExitCode::from(error.exit_code() as u8)
        }
        _ => {
            output::tell!("{}; see '{} --help'", flatten(&error.to_string()), command(error));
            ExitCode::from(2)
        }
    }
}

/// Joins the paragraphs of clap's message, without its usage line and its pointer to the help.
fn flatten(message: &str) -> String {
    let mut parts: Vec<String> = Vec::new();
    for paragraph in message.split("\n\n") {
        let lines: Vec<&str> = paragraph.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
        let first = lines.first().copied().unwrap_or_default();
        if first.is_empty() || first.starts_with("Usage:") || first.starts_with("For more") {
            continue;
        }
        parts.push(lines.join(" "));
    }
    parts.join("; ")
}

/// `forebay run` for an error in its arguments, `forebay` when no command was recognised.
fn command(error: &clap::Error) -> String {
    let message = error.to_string();
    let usage = message.lines().find_map(|line| line.trim().strip_prefix("Usage: "));
    let words = usage.unwrap_or("forebay").split_whitespace();
    let is_name = |word: &&str| word.chars().all(|c| c.is_ascii_lowercase());
    let named: Vec<&str> = words.take_while(is_name).take(2).collect();
    if named.len() == 2 {
        return named.join(" ");
    }
    // An invalid value comes without a usage line; the command is the first argument then.
    let typed = std::env::args().nth(1).unwrap_or_default();
    let known = <crate::args::Cli as clap::CommandFactory>::command();
    match known.find_subcommand(&typed) {
        Some(found) => format!("forebay {}", found.get_name()),
        None => "forebay".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser as _;

    fn line(arguments: &[&str]) -> String {
        let error = Cli::try_parse_from(arguments).err().expect("must not parse");
        flatten(&error.to_string())
    }

    #[test]
    fn one_line_with_cause_and_remedy() {
        assert_eq!(
            line(&["forebay", "run", "m", "--ram", "8GB"]),
            "error: invalid value '8GB' for '--ram <SIZE>': unknown unit 'GB': use KiB, MiB, GiB \
             or TiB, or plain bytes"
        );
        assert_eq!(
            line(&["forebay", "run", "m", "--polcy", "lru"]),
            "error: unexpected argument '--polcy' found; tip: a similar argument exists: '--policy'"
        );
        let text = line(&["forebay", "bench"]);
        assert!(text.contains("not provided: <MODEL>"), "{text}");
        let text = line(&["forebay", "run", "m", "--policy", "fifo"]);
        assert!(
            text.contains("'fifo'") && text.contains("[possible values: layer-lfu, "),
            "{text}"
        );
    }
}
