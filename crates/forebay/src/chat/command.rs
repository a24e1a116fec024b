//! Parses the lines that a user types in the chat.

/// A message, or a command.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    Empty,
    Say(String),
    Help,
    Clear,
    Statistics,
    Bye,
    /// Show the system message, or set it.
    System(Option<String>),
    /// Show the settings, or set one.
    Set(Option<(String, String)>),
    Save(String),
    Load(String),
    /// An invalid command, with the reason.
    Wrong(String),
}

pub const HELP: &str = "\
/help              this list
/system [TEXT]     show or set the system message
/set [NAME VALUE]  show or change a setting: temperature, top_p, top_k, min_p, repeat_penalty,
                   seed, max_tokens, think
/clear             forget the conversation; the system message stays
/save FILE         write the conversation to a JSON file, and its keys and values to FILE.kv
/load FILE         continue a saved conversation, with its keys and values if they are there
/stats             speed, context used and statistics so far
/bye               quit (also /exit, Ctrl-D)
\"\"\" begins and ends a message of several lines; a paste is one message.
Ctrl-C stops the answer; at the prompt it quits.";

/// Delimiter of a message with several lines.
const QUOTES: &str = "\"\"\"";

/// Returns true if the text so far has an open `\"\"\"` block, so more lines follow.
pub fn is_open(text: &str) -> bool {
    let text = text.trim_start();
    let text = text.strip_prefix("/system").unwrap_or(text).trim_start();
    text.strip_prefix(QUOTES).is_some_and(|rest| !rest.contains(QUOTES))
}

/// Parses one input. A slash starts a command only before a known word, or if the word is the whole input. Other text
/// with a slash may be a path or pasted.
pub fn parse(input: &str) -> Line {
    let text = input.trim();
    if text.is_empty() {
        return Line::Empty;
    }
    let Some(rest) = text.strip_prefix('/') else { return say(input) };
    let (word, argument) = match rest.split_once(char::is_whitespace) {
        Some((word, argument)) => (word, argument.trim()),
        None => (rest, ""),
    };
    let is_name = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphabetic());
    let one_line = !text.contains('\n');
    let alone = |line: Line| match argument {
        "" => line,
        _ => Line::Wrong(format!("/{word} takes no argument")),
    };
    match word {
        "system" => Line::System((!argument.is_empty()).then(|| unquoted(argument).to_owned())),
        _ if !one_line => say(input),
        "help" | "?" => alone(Line::Help),
        "clear" | "reset" => alone(Line::Clear),
        "stats" => alone(Line::Statistics),
        "bye" | "exit" | "quit" => alone(Line::Bye),
        "set" if argument.is_empty() => Line::Set(None),
        "set" => match argument.split_once(char::is_whitespace) {
            Some((name, value)) => Line::Set(Some((name.to_owned(), value.trim().to_owned()))),
            None => Line::Wrong(format!("/set {argument} needs a value")),
        },
        "save" | "load" if argument.is_empty() => Line::Wrong(format!("/{word} needs a file name")),
        "save" => Line::Save(argument.to_owned()),
        "load" => Line::Load(argument.to_owned()),
        _ if is_name && argument.is_empty() => {
            Line::Wrong(format!("there is no /{word} here: /help lists the commands"))
        }
        _ => say(input),
    }
}

fn say(input: &str) -> Line {
    match input.trim().starts_with(QUOTES) {
        true => Line::Say(unquoted(input.trim()).to_owned()),
        false => Line::Say(input.to_owned()),
    }
}

/// Returns the text between `\"\"\"` delimiters, without the line breaks next to them.
fn unquoted(text: &str) -> &str {
    let Some(inner) = text.strip_prefix(QUOTES) else { return text };
    let inner = inner.strip_suffix(QUOTES).unwrap_or(inner);
    let inner = inner.strip_prefix('\n').unwrap_or(inner);
    inner.strip_suffix('\n').unwrap_or(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages() {
        for text in ["Hello", " indented", "/usr/bin is a path", "/a/b", "/help\nis a command", "/"]
        {
            assert_eq!(parse(text), Line::Say(text.into()));
        }
        assert_eq!(parse("\"\"\"\na\n\nb\n\"\"\""), Line::Say("a\n\nb".into()));
        assert_eq!(parse("\"\"\"one line\"\"\""), Line::Say("one line".into()));
        assert_eq!(parse("  "), Line::Empty);
        assert!(is_open("\"\"\"a") && is_open("/system \"\"\"\na") && !is_open("\"\"\"a\"\"\""));
        assert!(!is_open("a \"\"\""));
    }

    #[test]
    fn commands() {
        assert_eq!(parse("/help "), Line::Help);
        assert_eq!(parse("/reset"), Line::Clear);
        assert_eq!(parse("/exit"), Line::Bye);
        assert_eq!(parse("/system"), Line::System(None));
        assert_eq!(parse("/system Be  brief."), Line::System(Some("Be  brief.".into())));
        assert_eq!(parse("/system \"\"\"\na\nb\"\"\""), Line::System(Some("a\nb".into())));
        assert_eq!(parse("/set"), Line::Set(None));
        assert_eq!(parse("/set top_p 0.5"), Line::Set(Some(("top_p".into(), "0.5".into()))));
        assert_eq!(parse("/save a b.json"), Line::Save("a b.json".into()));
        for wrong in ["/nonsense", "/set top_p", "/save", "/load", "/bye now"] {
            assert!(matches!(parse(wrong), Line::Wrong(_)), "{wrong}");
        }
    }
}
