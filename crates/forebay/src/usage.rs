//! Formats errors of the command line parser as one line, in the form of all other errors.

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::args::foreign;
use crate::output;

/// Prints clap's result: help and version unchanged, an error as `error: …; tip: …`.
pub fn report(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // A reader that closed the pipe (`forebay --help | head -1`) is no failure.
            let _ = error.print();
            ExitCode::from(error.exit_code() as u8)
        }
        _ => {
            output::tell!("{}; see '{} --help'", line(error), command(error));
            ExitCode::from(2)
        }
    }
}

/// Prints what is wrong with the arguments, as one line.
pub fn refuse(sentence: &str) -> ExitCode {
    output::tell!("error: {sentence}");
    ExitCode::from(2)
}

/// Returns the message without the pointer to the help.
pub fn line(error: &clap::Error) -> String {
    let about = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match (error.kind(), about(ContextKind::InvalidArg), about(ContextKind::InvalidSubcommand)) {
        // clap suggests to write -- before it, which is wrong if the user meant an option.
        (ErrorKind::UnknownArgument, Some(argument), _) => {
            let what =
                if argument.starts_with('-') { "unknown option" } else { "unexpected argument" };
            let similar = about(ContextKind::SuggestedArg);
            let tip =
                similar.map_or_else(String::new, |similar| format!("; did you mean '{similar}'?"));
            format!("error: {what} '{argument}'{tip}")
        }
        (ErrorKind::InvalidSubcommand, _, Some(word)) if is_path(word) => {
            format!("error: unknown command '{word}'; did you mean 'forebay run {word}'?")
        }
        (ErrorKind::InvalidSubcommand, _, Some(word)) if foreign::command(word).is_some() => {
            let sentence = foreign::command(word).unwrap_or_default();
            format!("error: unknown command '{word}': {sentence}")
        }
        _ => {
            flatten(&error.to_string()).replace(NOT_DIGITS, "must be a whole number, not negative")
        }
    }
}

/// Rust's message for a number that does not consist of digits.
const NOT_DIGITS: &str = "invalid digit found in string";

/// Returns true if a word that is not a command looks like a model.
fn is_path(word: &str) -> bool {
    word.contains(['.', '/']) || std::path::Path::new(word).exists()
}

/// Joins the paragraphs of clap's message, without its usage line and its pointer to the help.
fn flatten(message: &str) -> String {
    let mut parts: Vec<String> = Vec::new();
    for paragraph in message.split("\n\n") {
        let lines: Vec<&str> = paragraph.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
        let first = lines.first().copied().unwrap_or_default();
        if first.is_empty()
            || ["Usage:", "For more", "tip: to pass '-"]
                .iter()
                .any(|start| first.starts_with(start))
        {
            continue;
        }
        parts.push(lines.join(" "));
    }
    parts.join("; ")
}

/// Returns `forebay run` for an error in the arguments of `run`, or `forebay` if no command was recognised.
fn command(error: &clap::Error) -> String {
    let message = error.to_string();
    let usage = message.lines().find_map(|line| line.trim().strip_prefix("Usage: "));
    let words = usage.unwrap_or("forebay").split_whitespace();
    let is_name = |word: &&str| word.chars().all(|c| c.is_ascii_lowercase());
    let named: Vec<&str> = words.take_while(is_name).take(2).collect();
    if named.len() == 2 {
        return named.join(" ");
    }
    // The error of an invalid value has no usage line. In that case the command is the first argument.
    let typed = std::env::args().nth(1).unwrap_or_default();
    let known = <crate::args::Cli as clap::CommandFactory>::command();
    match known.find_subcommand(&typed) {
        Some(found) => format!("forebay {}", found.get_name()),
        None => "forebay".into(),
    }
}

#[cfg(test)]
mod tests {
    use crate::args;

    fn line(arguments: &[&str]) -> String {
        super::line(&args::parse_all(arguments).err().expect("must not parse"))
    }

    #[test]
    fn one_line_with_cause_and_remedy() {
        assert_eq!(
            line(&["forebay", "run", "m", "--ram", "8"]),
            "error: invalid value '8' for '--ram <SIZE>': a number without a unit: did you mean 8GiB?"
        );
        assert_eq!(
            line(&["forebay", "run", "m", "--polcy", "lru"]),
            "error: unknown option '--polcy'; did you mean '--policy'?"
        );
        assert_eq!(line(&["forebay", "run", "m", "--bogus"]), "error: unknown option '--bogus'");
        assert_eq!(line(&["forebay", "run", "m", "-x"]), "error: unknown option '-x'");
        assert_eq!(
            line(&["forebay", "dir/m.gguf"]),
            "error: unknown command 'dir/m.gguf'; did you mean 'forebay run dir/m.gguf'?"
        );
        assert_eq!(
            line(&["forebay", "run", "m", "--temperature", "-1"]),
            "error: invalid value '-1' for '--temperature <X>': must be a number of at least 0"
        );
        for option in ["--top-k", "--seed"] {
            let text = line(&["forebay", "run", "m", option, "-3"]);
            assert!(text.ends_with("must be a whole number, not negative"), "{text}");
        }
        let text = line(&["forebay", "run", "m", "--ctx", "-3"]);
        assert!(text.contains("invalid value '-3' for '--ctx <N>'"), "{text}");
        let text = line(&["forebay", "bench"]);
        assert!(text.contains("not provided: <MODEL>"), "{text}");
        let text = line(&["forebay", "run", "m", "--policy", "fifo"]);
        assert!(
            text.contains("'fifo'") && text.contains("[possible values: layer-lfu, "),
            "{text}"
        );
    }
}
