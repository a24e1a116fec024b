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
    /// Show the model, where it is, the settings and the system message.
    Show,
    /// Answer the last message again.
    Retry,
    /// Save to a file, or to the file of the last `/save` or `/load`.
    Save(Option<String>),
    Load(String),
    /// An invalid command, with the reason.
    Wrong(String),
}

/// Commands with their arguments and what they do.
const COMMANDS: [(&str, &str, &str); 10] = [
    ("help", "", "this list"),
    ("show", "", "model, memory, settings and system message"),
    ("system", "[TEXT]", "show or set the system message"),
    ("set", "[NAME VALUE]", "show or change a setting, such as temperature or think"),
    ("retry", "", "answer the last message again, with other random choices"),
    ("clear", "", "forget the conversation; the system message stays"),
    ("save", "[FILE]", "write the conversation to FILE, and its keys and values to FILE.kv"),
    ("load", "FILE", "continue a saved conversation, with its keys and values if they are there"),
    ("stats", "", "speed, context used and statistics so far"),
    ("bye", "", "quit (also /exit, Ctrl-D)"),
];

/// Names of the settings of `/set`.
pub const SETTINGS: [&str; 8] =
    ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "seed", "max_tokens", "think"];

/// Other names of commands.
const OTHER_NAMES: [&str; 4] = ["?", "reset", "exit", "quit"];

/// Returns the names of all commands, without the slash.
pub fn names() -> impl Iterator<Item = &'static str> {
    COMMANDS.into_iter().map(|(name, ..)| name).chain(OTHER_NAMES)
}

/// Returns the text of `/help`.
pub fn help() -> String {
    let mut text = String::new();
    for (name, argument, what) in COMMANDS {
        text += &format!("{:<20}{what}\n", format!("/{name} {argument}"));
    }
    text + "\
Tab completes commands, settings and file names. A line that begins with a space is never a command.
\"\"\" begins and ends a message of several lines; a paste is one message.
Ctrl-C stops the answer. At the prompt it clears the line, and on an empty line it quits."
}

/// Delimiter of a message with several lines.
const QUOTES: &str = "\"\"\"";

/// Returns true if the text so far has an open `\"\"\"` block, so more lines follow.
pub fn is_open(text: &str) -> bool {
    let text = text.trim_start();
    let text = text.strip_prefix("/system").unwrap_or(text).trim_start();
    text.strip_prefix(QUOTES).is_some_and(|rest| !rest.contains(QUOTES))
}

/// Parses one input. A slash and a word of letters at the beginning of a line are a command, known or not. Other text
/// with a slash may be a path, and text of several lines may be pasted.
pub fn parse(input: &str) -> Line {
    let text = input.trim();
    if text.is_empty() {
        return Line::Empty;
    }
    if input.starts_with(' ') {
        return say(input);
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
        "show" => alone(Line::Show),
        "retry" => alone(Line::Retry),
        "load" if argument.is_empty() => Line::Wrong("/load needs a file name".into()),
        "save" => Line::Save((!argument.is_empty()).then(|| argument.to_owned())),
        "load" => Line::Load(argument.to_owned()),
        _ if is_name => Line::Wrong(unknown(word)),
        _ => say(input),
    }
}

/// Returns the error for a command that does not exist, with the known one that is most like it.
fn unknown(word: &str) -> String {
    let similar = names()
        .map(|name| (differences(word, name), name))
        .min()
        .filter(|(count, name)| *count <= 2 && *count < name.len());
    match similar {
        Some((_, name)) => {
            format!(
                "there is no /{word} here: did you mean /{name}? A space before it sends it as text"
            )
        }
        None => format!(
            "there is no /{word} here: /help lists the commands; a space before it sends it as text"
        ),
    }
}

/// Returns the number of letters to insert, remove, replace or swap to make one word of the other.
fn differences(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // Optimal string alignment, with all rows kept: words are short.
    let mut counts = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            counts[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replaced = counts[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let least = replaced.min(counts[i - 1][j] + 1).min(counts[i][j - 1] + 1);
                match i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    true => least.min(counts[i - 2][j - 2] + 1),
                    false => least,
                }
            };
        }
    }
    counts[a.len()][b.len()]
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
        for text in [
            "Hello",
            " indented",
            "/usr/bin is a path",
            "/a/b",
            "/help\nis a command",
            "/",
            "/2 of them",
            " /bye",
            " /hepl me",
        ] {
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
        assert_eq!(parse("/save a b.json"), Line::Save(Some("a b.json".into())));
        assert_eq!(
            (parse("/save"), parse("/show"), parse("/retry")),
            (Line::Save(None), Line::Show, Line::Retry)
        );
        for wrong in ["/nonsense", "/set top_p", "/load", "/bye now", "/hepl me", "/retry it"] {
            assert!(matches!(parse(wrong), Line::Wrong(_)), "{wrong}");
        }
    }

    #[test]
    fn every_name_is_a_command_and_mistakes_get_a_hint() {
        for name in names() {
            let line = parse(&format!("/{name}"));
            assert!(!matches!(line, Line::Say(_)), "{name}");
            assert!(name == "load" || !matches!(line, Line::Wrong(_)), "{name}");
        }
        for (wrong, meant) in
            [("hepl", "help"), ("sav", "save"), ("statss", "stats"), ("retyr", "retry")]
        {
            let Line::Wrong(why) = parse(&format!("/{wrong} x")) else { panic!("{wrong}") };
            assert!(why.contains(&format!("did you mean /{meant}?")), "{why}");
        }
        let Line::Wrong(why) = parse("/nonsense x") else { panic!() };
        assert!(why.contains("there is no /nonsense here: /help"), "{why}");
    }
}
