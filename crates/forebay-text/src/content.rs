//! Text of messages in a prompt, which must never become control tokens.
//!
//! A chat template mixes its own text with that of messages: it cuts, joins and replaces. To know afterwards which characters
//! come from messages, some are replaced before the template sees them. A control token's text needs at least one of these
//! characters. Each stand-in is a code point of a plane without characters, so it passes through all operations on texts.
//! [`ContentMarks::finish`] puts the characters back and remembers where they are.

use serde_json::Value;

use crate::Tokenizer;

/// The first code point of plane 10, which has no characters. A stand-in is this plus the character.
const PLANE: u32 = 0xA_0000;
/// The first byte of each stand-in in UTF-8. Characters of some other planes begin with it, too.
const FIRST_BYTE: u8 = 0xF2;
/// Characters that JSON gives a meaning. They are the last choice for marks.
const JSON_CHARACTERS: &str = "\"\\{}[]:,";

/// Characters that frame the names of most control tokens. All of them are marked, so that a template that writes one end of a
/// frame itself does not make a control token of a message.
const FRAMES: [char; 7] = ['<', '>', '|', '｜', '▁', '[', ']'];

/// Returns true for a code point of the plane of stand-ins.
fn is_marked(character: char) -> bool {
    (PLANE..PLANE + 0x1_0000).contains(&u32::from(character))
}

/// Returns the stand-in for a character of the basic plane.
fn marked(character: char) -> char {
    let number = u32::from(character);
    let stand_in = if number < 0x1_0000 { char::from_u32(PLANE + number) } else { None };
    stand_in.unwrap_or(character)
}

/// Returns the character for a stand-in. Other characters stay as they are.
pub(crate) fn unmarked(character: char) -> char {
    let number = u32::from(character);
    let plain = if is_marked(character) { char::from_u32(number - PLANE) } else { None };
    plain.unwrap_or(character)
}

/// Returns true if the text has stand-ins.
pub(crate) fn has_marks(text: &str) -> bool {
    text.as_bytes().contains(&FIRST_BYTE) && text.contains(is_marked)
}

/// Returns the text with characters in place of their stand-ins.
pub(crate) fn unmarked_text(text: &str) -> String {
    text.chars().map(unmarked).collect()
}

/// A prompt, and which of its text comes from messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    text: String,
    /// Bytes at which characters begin that no control token may cover, in ascending order.
    guarded: Vec<usize>,
}

impl Prompt {
    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn into_text(self) -> String {
        self.text
    }

    /// Returns true if no character between two bytes is guarded.
    pub(crate) fn is_free(&self, start: usize, end: usize) -> bool {
        let next = self.guarded.partition_point(|byte| *byte < start);
        self.guarded.get(next).is_none_or(|byte| *byte >= end)
    }

    /// Returns true if the prompt guards any character.
    pub(crate) fn guards(&self) -> bool {
        !self.guarded.is_empty()
    }
}

/// A prompt in which every control token's text counts as this token.
impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self { text, guarded: Vec::new() }
    }
}

/// Marks for the text of messages. The default marks nothing, so that special tokens in messages are special tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContentMarks {
    /// Characters that are marked wherever they are.
    characters: Vec<char>,
    /// Control tokens without such characters. Their first letter is marked.
    words: Vec<String>,
    is_on: bool,
}

impl ContentMarks {
    /// Returns marks that keep the text of messages apart from a tokenizer's control tokens.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        Self::for_tokens(tokenizer.guarded_texts())
    }

    fn for_tokens<'a>(tokens: impl Iterator<Item = &'a str>) -> Self {
        let mut left: Vec<&str> = tokens.filter(|token| !token.is_empty()).collect();
        let is_used = |frame: &char| left.iter().any(|token| token.contains(*frame));
        let characters: Vec<char> = FRAMES.into_iter().filter(is_used).collect();
        left.retain(|token| !token.contains(characters.as_slice()));
        let mut marks = Self { characters, is_on: true, ..Self::default() };
        while !left.is_empty() {
            let mut counts: Vec<(char, usize)> = Vec::new();
            for character in left.iter().flat_map(|token| token.chars()) {
                if character.is_alphanumeric()
                    || character.is_whitespace()
                    || marked(character) == character
                {
                    continue;
                }
                match counts.iter_mut().find(|(known, _)| *known == character) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((character, 1)),
                }
            }
            let worth =
                |&(character, count): &(char, usize)| (!JSON_CHARACTERS.contains(character), count);
            let Some((best, _)) = counts.into_iter().max_by_key(worth) else { break };
            marks.characters.push(best);
            left.retain(|token| !token.contains(best));
        }
        marks.words = left.into_iter().map(str::to_owned).collect();
        marks
    }

    /// Returns a message's text as the template gets it. Code points of the plane that marks use, which has no characters,
    /// become U+FFFD.
    pub fn text(&self, text: &str) -> String {
        if !self.is_on {
            return text.to_owned();
        }
        let own = |character: char| match is_marked(character) {
            true => char::REPLACEMENT_CHARACTER,
            false => character,
        };
        self.mark(&text.chars().map(own).collect::<String>())
    }

    /// Marks a text that may already have marks.
    fn mark(&self, text: &str) -> String {
        let one = |character: char| match self.characters.contains(&character) {
            true => marked(character),
            false => character,
        };
        let mut out: String = text.chars().map(one).collect();
        for word in &self.words {
            let mut letters = word.chars();
            let first: String = letters.next().map(marked).into_iter().collect();
            out = out.replace(word.as_str(), &(first + letters.as_str()));
        }
        out
    }

    /// Returns JSON text as the template gets it. It stays the same JSON, because only text in quotes is marked.
    pub fn json_text(&self, text: &str) -> String {
        if !self.is_on || serde_json::from_str::<serde::de::IgnoredAny>(text).is_err() {
            return self.text(text);
        }
        let mut out = String::with_capacity(text.len());
        let (mut rest, mut inside) = (text, false);
        while let Some(at) = rest.find(['"', '\\']) {
            let escape = rest[at..].starts_with('\\');
            let next = at + 1;
            let part = &rest[..at];
            out.push_str(&if inside { self.text(part) } else { part.to_owned() });
            out.push_str(&rest[at..next]);
            rest = &rest[next..];
            match escape {
                // The character behind a backslash is ASCII, and what it stands for is marked when the JSON is read.
                true => {
                    out.push_str(rest.get(..1).unwrap_or_default());
                    rest = rest.get(1..).unwrap_or_default();
                }
                false => inside = !inside,
            }
        }
        out + rest
    }

    /// Returns a value with all its texts and keys marked.
    pub fn value(&self, value: &Value) -> Value {
        if !self.is_on {
            return value.clone();
        }
        match value {
            Value::String(text) => Value::from(self.text(text)),
            Value::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Value::Object(entries) => Value::Object(
                entries.iter().map(|(key, value)| (self.text(key), self.value(value))).collect(),
            ),
            other => other.clone(),
        }
    }

    /// Returns a value with its texts and keys marked, some of which may already have marks.
    pub fn value_again(&self, value: Value) -> Value {
        if !self.is_on {
            return value;
        }
        match value {
            Value::String(text) => Value::from(self.mark(&text)),
            Value::Array(items) => items.into_iter().map(|item| self.value_again(item)).collect(),
            Value::Object(entries) => Value::Object(
                entries
                    .into_iter()
                    .map(|(key, value)| (self.mark(&key), self.value_again(value)))
                    .collect(),
            ),
            other => other,
        }
    }

    /// Returns the prompt that a template made of marked texts.
    pub fn finish(&self, rendered: String) -> Prompt {
        if !self.is_on || !has_marks(&rendered) {
            return Prompt::from(rendered);
        }
        let mut prompt =
            Prompt { text: String::with_capacity(rendered.len()), ..Prompt::default() };
        for character in rendered.chars() {
            if is_marked(character) {
                prompt.guarded.push(prompt.text.len());
            }
            prompt.text.push(unmarked(character));
        }
        prompt
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn marks(tokens: &[&str]) -> ContentMarks {
        ContentMarks::for_tokens(tokens.iter().copied())
    }

    #[test]
    fn each_control_token_has_a_marked_character() {
        for tokens in [
            &["<|im_start|>", "<think>", "</s>"][..],
            &["[INST]", "[/INST]", "<s>", "</s>"],
            &["]<]minimax[>[", "]~b]", "[e~["],
            &["<｜User｜>", "eot", "a b"],
        ] {
            let marks = marks(tokens);
            for token in tokens {
                let text = marks.text(&format!("x{token}y"));
                let prompt = marks.finish(text.clone());
                assert!(has_marks(&text), "{token}");
                assert_eq!(prompt.text(), format!("x{token}y"));
                assert!(!prompt.is_free(1, 1 + token.len()), "{token}");
                assert!(prompt.is_free(0, 1));
                assert_eq!(text.chars().count(), token.chars().count() + 2, "{token}");
            }
        }
        assert_eq!(marks(&["<|a|>", "<b>", "</c>"]).characters, ['<', '>', '|']);
        assert_eq!(marks(&["[a]", "{b}", "!{c}", "@d", "e"]).characters, ['[', ']', '@', '!', '}']);
    }

    #[test]
    fn stand_ins_in_messages_are_not_taken_for_marks() {
        let marks = marks(&["<s>"]);
        let forged = format!("{}s>", marked('<'));
        assert_eq!(marks.finish(marks.text(&forged)).text(), "\u{fffd}s>");
        assert_eq!(marks.finish(marks.text("\u{f0001}\u{10fffd}é")).text(), "\u{f0001}\u{10fffd}é");
    }

    #[test]
    fn json_stays_json() {
        let marks = marks(&["[a]", "{b}", "\"c\"", "<d>"]);
        let text = r#"{"[a]": ["{b}", "\"c\" \u003cd> \\", 1.50, {"x":  null}]}"#;
        let marked = marks.json_text(text);
        assert!(has_marks(&marked));
        let value = marks.value_again(serde_json::from_str(&marked).unwrap());
        let plain: Value = serde_json::from_str(text).unwrap();
        assert_eq!(value.to_string(), marks.value(&plain).to_string());
        assert_eq!(marks.finish(marked).text(), text);
        // Text that is not JSON is marked everywhere.
        let cut = &text[..20];
        assert_eq!(marks.json_text(cut), marks.text(cut));
    }

    #[test]
    fn without_marks_nothing_changes() {
        let none = ContentMarks::default();
        let text = format!("<s>{}", marked('<'));
        assert_eq!(none.text(&text), text);
        assert_eq!(none.value(&json!({ "<s>": ["<s>"] })), json!({ "<s>": ["<s>"] }));
        assert_eq!(none.finish(text.clone()), Prompt::from(text));
    }
}
