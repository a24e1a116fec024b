//! Makes text from models, files and servers safe for a terminal.
//!
//! Such text may hold characters that a terminal obeys instead of showing: escape sequences set the title, write to
//! the clipboard, move the cursor or answer as if the user had typed. Characters for the direction of text make a line
//! read differently from what it is. Both are shown as escapes such as `\x1b`, so the reader sees that they are there.

use std::borrow::Cow;

/// Returns true if a terminal obeys this character. White space is not meant here.
fn is_obeyed(c: char) -> bool {
    // The control characters of ASCII and Latin-1, and embeddings, overrides and isolates of bidirectional text.
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn push_escape(c: char, to: &mut String) {
    match u32::from(c) {
        code @ ..=0xff => to.push_str(&format!("\\x{code:02x}")),
        code => to.push_str(&format!("\\u{{{code:x}}}")),
    }
}

/// Returns text of several lines in its visible form. Tabs and line breaks stay.
pub fn text(text: &str) -> Cow<'_, str> {
    if !text.contains(|c| is_obeyed(c) && !matches!(c, '\n' | '\t')) {
        return Cow::Borrowed(text);
    }
    let mut pieces = Pieces::default();
    let mut shown = pieces.push(text);
    shown.push_str(&pieces.finish());
    Cow::Owned(shown)
}

/// Returns a name, a path or a message in its visible form, without tabs and line breaks.
pub fn line(text: &str) -> Cow<'_, str> {
    if !text.contains(is_obeyed) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match is_obeyed(c) {
            true => push_escape(c, &mut shown),
            false => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// Returns a JSON document in its visible form, which is the same document.
pub fn json(document: &str) -> Cow<'_, str> {
    let is_unescaped = |c| is_obeyed(c) && !matches!(c, '\n' | '\t');
    if !document.contains(is_unescaped) {
        return Cow::Borrowed(document);
    }
    // Such characters are inside of strings, where JSON has an escape for all of them.
    let mut shown = String::with_capacity(document.len() + 8);
    for c in document.chars() {
        match is_unescaped(c) {
            true => shown.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// Makes text visible that arrives in pieces.
#[derive(Default)]
pub struct Pieces {
    /// True after a carriage return, which is part of a line break if a line feed follows.
    after_return: bool,
}

impl Pieces {
    /// Returns what of the text so far can be shown.
    pub fn push(&mut self, text: &str) -> String {
        let mut shown = String::with_capacity(text.len());
        for c in text.chars() {
            if std::mem::take(&mut self.after_return) && c != '\n' {
                push_escape('\r', &mut shown);
            }
            match c {
                '\r' => self.after_return = true,
                '\n' | '\t' => shown.push(c),
                c if is_obeyed(c) => push_escape(c, &mut shown),
                c => shown.push(c),
            }
        }
        shown
    }

    /// Returns what was held back.
    pub fn finish(&mut self) -> String {
        let mut shown = String::new();
        if std::mem::take(&mut self.after_return) {
            push_escape('\r', &mut shown);
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns every character that a terminal obeys, except tabs and line feeds.
    fn obeyed() -> impl Iterator<Item = char> {
        let latin = (0..0x20).chain(0x7f..0xa0).filter(|code| ![0x09, 0x0a].contains(code));
        latin.chain(0x202a..=0x202e).chain(0x2066..=0x2069).filter_map(char::from_u32)
    }

    fn is_safe(shown: &str) -> bool {
        !shown.contains(|c| obeyed().any(|bad| bad == c))
    }

    #[test]
    fn no_character_that_a_terminal_obeys_is_left() {
        for c in obeyed() {
            let hostile = format!("a{c}]0;title\u{7}{c}");
            for shown in [text(&hostile), line(&hostile), json(&hostile)] {
                assert!(is_safe(&shown), "{c:?}: {shown:?}");
                assert!(shown.starts_with('a') && shown.contains("]0;title"), "{shown:?}");
            }
        }
        assert_eq!(text("\u{1b}[2Jx\u{9b}2J\u{202e}\u{0}"), "\\x1b[2Jx\\x9b2J\\u{202e}\\x00");
        assert_eq!(line("a\n\tb"), "a\\x0a\\x09b");
    }

    #[test]
    fn ordinary_text_stays() {
        for plain in ["", "a\tb\n", "é 你好 👩‍🚀 שלום \u{200f}", "\u{a0}\u{ad}"] {
            assert!(matches!(text(plain), Cow::Borrowed(_)), "{plain:?}");
        }
        assert_eq!(text("a\r\nb\rc\r"), "a\nb\\x0dc\\x0d");
    }

    #[test]
    fn pieces_show_the_same_as_the_whole() {
        let hostile: String = obeyed().flat_map(|c| [c, 'x', '\r', '\n', '\t']).collect();
        let characters: Vec<String> = hostile.chars().map(String::from).collect();
        for length in 1..6 {
            let mut pieces = Pieces::default();
            let parts = characters.chunks(length).map(|part| pieces.push(&part.concat()));
            let shown: String = parts.collect::<String>() + &pieces.finish();
            assert_eq!(shown, text(&hostile), "{length}");
        }
    }

    #[test]
    fn a_visible_document_is_the_same_document() {
        let hostile: String = obeyed().collect();
        let document = serde_json::to_string_pretty(&[&hostile]).unwrap();
        let shown = json(&document);
        assert!(is_safe(&shown), "{shown}");
        assert_eq!(serde_json::from_str::<Vec<String>>(&shown).unwrap(), [hostile]);
    }
}
