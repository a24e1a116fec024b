//! Completes commands, settings and file names with Tab.

use std::fs;
use std::path::{MAIN_SEPARATOR, Path};

use reedline::{Completer, CompletionResult, Span, Suggestion};

use super::command;
use crate::output::visible;

/// Most entries of a folder that are offered.
const ENTRIES_MAX: usize = 200;

/// Values of the setting `think`.
const THINK: [&str; 5] = ["on", "off", "low", "medium", "high"];

/// Completes the lines of a chat.
pub struct ChatCompleter;

impl Completer for ChatCompleter {
    fn complete(&mut self, line: &str, position: usize) -> CompletionResult {
        let before = line.get(..position).unwrap_or(line);
        let (start, candidates) = candidates(before);
        let suggestion = |value: String| Suggestion {
            // A folder may be followed by what is in it.
            append_whitespace: !value.ends_with(MAIN_SEPARATOR),
            value,
            span: Span::new(start, before.len()),
            ..Suggestion::default()
        };
        CompletionResult::fresh(candidates.into_iter().map(suggestion).collect::<Vec<_>>())
    }
}

/// Returns what the last word of a line may become, and where this word begins.
fn candidates(line: &str) -> (usize, Vec<String>) {
    let beginning = |words: &mut dyn Iterator<Item = &'static str>, word: &str| {
        words.filter(|name| name.starts_with(word)).map(str::to_owned).collect::<Vec<_>>()
    };
    let none = (line.len(), Vec::new());
    if !line.starts_with('/') || line.contains('\n') {
        return none;
    }
    let Some((command, argument)) = line.split_once(' ') else {
        let mut commands: Vec<String> = beginning(&mut command::names(), &line[1..]);
        commands.iter_mut().for_each(|name| name.insert(0, '/'));
        return (0, commands);
    };
    let start = line.len() - argument.len();
    match command {
        "/save" | "/load" => (start, files(argument)),
        "/set" => match argument.split_once(' ') {
            None => (start, beginning(&mut command::SETTINGS.into_iter(), argument)),
            Some(("think", value)) => {
                let start = line.len() - value.len();
                (start, beginning(&mut THINK.into_iter(), value))
            }
            Some(_) => none,
        },
        _ => none,
    }
}

/// Returns the paths that begin with `text`. Folders end with a slash. Hidden entries are offered after a dot.
fn files(text: &str) -> Vec<String> {
    let (folder, name) = match text.rfind(MAIN_SEPARATOR) {
        Some(at) => text.split_at(at + 1),
        None => ("", text),
    };
    let path = if folder.is_empty() { Path::new(".") } else { Path::new(folder) };
    let Ok(entries) = fs::read_dir(path) else { return Vec::new() };
    let matching = entries.flatten().filter_map(|entry| {
        let found = entry.file_name().into_string().ok()?;
        // A name with control characters could not be typed either.
        let offered = found.starts_with(name)
            && (name.starts_with('.') || !found.starts_with('.'))
            && visible::line(&found) == found;
        let is_folder = entry.path().is_dir();
        offered.then(|| format!("{folder}{found}{}", if is_folder { "/" } else { "" }))
    });
    let mut found: Vec<String> = matching.take(ENTRIES_MAX).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_settings_are_completed() {
        assert_eq!(candidates("/sa"), (0, vec!["/save".into()]));
        let (_, all) = candidates("/");
        assert!(all.len() >= 12 && all.contains(&"/retry".into()), "{all:?}");
        assert_eq!(candidates("/set temp"), (5, vec!["temperature".into()]));
        let (start, values) = candidates("/set think h");
        assert_eq!((start, values), (11, vec!["high".into()]));
        for nothing in ["", "hello", "hello /sa", "/nonsense x", "/set top_k 1", "a\n/sa", "/é"] {
            assert_eq!(candidates(nothing).1, Vec::<String>::new(), "{nothing}");
        }
    }

    #[test]
    fn all_values_of_think_are_offered() {
        assert!(THINK.iter().all(|value| value.parse::<forebay_chat::Think>().is_ok()));
    }

    #[test]
    fn files_are_completed_with_spaces_and_in_folders() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["a one.json", "a two.json", ".hidden", "b\u{1b}"] {
            fs::write(at(name), "").unwrap();
        }
        fs::create_dir(at("also")).unwrap();
        let typed = |name: &str| format!("{}/{name}", folder.path().display());
        let complete = |name: &str| candidates(&format!("/load {}", typed(name)));
        let expected = vec![typed("a one.json"), typed("a two.json"), typed("also/")];
        assert_eq!(complete("a"), (6, expected.clone()));
        assert_eq!(complete("").1, expected);
        assert_eq!(complete("a t").1, [typed("a two.json")]);
        assert_eq!(complete(".h").1, [typed(".hidden")]);
        assert_eq!(complete("none/x").1, Vec::<String>::new());
    }
}
