//! Breaks lines between words, for text that arrives in pieces.

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

const ZERO_WIDTH_JOINER: char = '\u{200d}';

/// Width of a tab stop.
const TAB: usize = 8;

/// Breaks the lines of a text at the width of a terminal. A word is held back until its end is known.
///
/// Code between fences (```` ``` ````) and rows of tables (`|`) are not broken, because they may be copied. The terminal
/// breaks them at its edge, as it does a word that is longer than a line.
#[derive(Default)]
pub struct Wrap {
    /// Columns of the terminal; 0 if unknown, which breaks nothing.
    width: usize,
    /// Columns of the line that are in use, without the word and the spaces that are held back.
    column: usize,
    spaces: String,
    word: String,
    /// The first characters of the line so far, without indentation.
    start: String,
    /// Columns by which the line is indented. Its continuation is, too.
    indent: usize,
    in_code: bool,
}

impl Wrap {
    /// Sets the width for the text that follows.
    pub fn set_width(&mut self, columns: usize) {
        self.width = columns;
    }

    /// Says that the cursor stands after this text.
    pub fn begin_after(&mut self, text: &str) {
        let last = text.rsplit('\n').next().unwrap_or_default();
        self.column = last.width();
    }

    /// Returns what of the text so far can be shown.
    pub fn push(&mut self, text: &str) -> String {
        let mut shown = String::with_capacity(text.len() + 8);
        for c in text.chars() {
            match c {
                '\n' => self.end_line(&mut shown),
                ' ' | '\t' => {
                    self.end_word(&mut shown);
                    self.spaces.push(c);
                }
                c => {
                    if self.may_break_before(c) {
                        self.end_word(&mut shown);
                    }
                    self.word.push(c);
                    self.note(c);
                    if self.word.len() >= 4 * self.width.max(1) {
                        self.end_word(&mut shown);
                    }
                }
            }
        }
        shown
    }

    /// Returns what was held back.
    pub fn finish(&mut self) -> String {
        let mut shown = String::new();
        self.end_word(&mut shown);
        shown.push_str(&std::mem::take(&mut self.spaces));
        shown
    }

    /// Returns true if a line may be broken between the word so far and `c`: beside a wide character, as in Chinese.
    fn may_break_before(&self, c: char) -> bool {
        let Some(last) = self.word.chars().next_back() else { return false };
        let is_wide = |c: char| c.width() == Some(2);
        // Marks, joined emoji and skin tones belong to the character before them.
        let belongs = c.width() == Some(0)
            || last == ZERO_WIDTH_JOINER
            || matches!(
                c,
                '\u{1f3fb}'
                    ..='\u{1f3ff}'
                        | '、'
                        | '。'
                        | '，'
                        | '．'
                        | '！'
                        | '？'
                        | '：'
                        | '；'
                        | '）'
                        | '」'
                        | '』'
            );
        !belongs && (is_wide(c) || is_wide(self.base().unwrap_or(last)))
    }

    /// Returns the last character of the word that has a width.
    fn base(&self) -> Option<char> {
        self.word.chars().rev().find(|c| c.width().unwrap_or(0) > 0)
    }

    /// Notes how the line begins.
    fn note(&mut self, c: char) {
        if self.start.len() < 3 {
            if self.start.is_empty() {
                self.indent = columns(self.column, &self.spaces).saturating_sub(self.column);
                self.indent = if self.column == 0 { self.indent.min(self.width / 2) } else { 0 };
            }
            self.start.push(c);
        }
    }

    fn is_fence(&self) -> bool {
        ["```", "~~~"].contains(&self.start.as_str())
    }

    fn breaks(&self) -> bool {
        self.width > 0 && !self.in_code && !self.is_fence() && !self.start.starts_with('|')
    }

    /// Shows the spaces and the word that were held back, on the next line if this one has no room.
    fn end_word(&mut self, shown: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let word_columns = self.word.as_str().width();
        let before = columns(self.column, &self.spaces);
        let is_first = self.column == 0;
        if self.breaks() && !is_first && before + word_columns > self.width {
            shown.push('\n');
            shown.extend(std::iter::repeat_n(' ', self.indent));
            self.column = self.indent;
        } else {
            shown.push_str(&self.spaces);
            self.column = before;
        }
        self.spaces.clear();
        shown.push_str(&self.word);
        self.word.clear();
        self.column += word_columns;
        if self.width > 0 && self.column > self.width {
            // The terminal has broken the word.
            self.column %= self.width;
        }
    }

    fn end_line(&mut self, shown: &mut String) {
        self.end_word(shown);
        self.spaces.clear();
        shown.push('\n');
        if self.is_fence() {
            self.in_code = !self.in_code;
        }
        self.start.clear();
        self.indent = 0;
        self.column = 0;
    }
}

/// Returns the column after white space that begins at `column`.
fn columns(column: usize, spaces: &str) -> usize {
    spaces.chars().fold(column, |column, c| match c {
        '\t' => (column / TAB + 1) * TAB,
        _ => column + 1,
    })
}

/// Breaks a whole text, whose lines but the first are indented.
pub fn indented(text: &str, width: usize, indent: usize) -> String {
    let room = width.saturating_sub(indent);
    let mut wrap = Wrap { width: if room < 20 { 0 } else { room }, ..Wrap::default() };
    let shown = wrap.push(text) + &wrap.finish();
    shown.replace('\n', &format!("\n{}", " ".repeat(indent)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(text: &str, width: usize) -> String {
        let mut wrap = Wrap { width, ..Wrap::default() };
        wrap.push(text) + &wrap.finish()
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped("one two three", 9), "one two\nthree");
        assert_eq!(wrapped("one two three", 7), "one two\nthree");
        assert_eq!(wrapped("one two\nthree four", 80), "one two\nthree four");
        assert_eq!(wrapped("  - one two", 9), "  - one\n  two");
        assert_eq!(wrapped("a  b", 80), "a  b");
        assert_eq!(wrapped("one two three", 0), "one two three");
    }

    #[test]
    fn widths_are_those_of_the_terminal() {
        assert_eq!(wrapped("你好世界", 5), "你好\n世界");
        assert_eq!(wrapped("你好。世界", 6), "你好。\n世界");
        // A combining mark takes no column.
        assert_eq!(
            wrapped("e\u{301}e\u{301} e\u{301}e\u{301}", 5),
            "e\u{301}e\u{301} e\u{301}e\u{301}"
        );
        // One emoji of several characters takes two.
        assert_eq!(wrapped("👩‍🚀 👩‍🚀 👩‍🚀", 5), "👩‍🚀 👩‍🚀\n👩‍🚀");
        assert_eq!(wrapped("a\tb c", 9), "a\tb\nc");
    }

    #[test]
    fn code_tables_and_long_words_are_not_broken() {
        let code = "```rust\nlet a = 1 + 2 + 3;\n```\n";
        assert_eq!(wrapped(&format!("{code}one two three"), 9), format!("{code}one two\nthree"));
        assert_eq!(wrapped("| a | b | c |", 9), "| a | b | c |");
        assert_eq!(wrapped("https://example.com/x y", 9), "https://example.com/x y");
        let endless = "x".repeat(100_000);
        let mut wrap = Wrap { width: 80, ..Wrap::default() };
        assert!(wrap.push(&endless).len() > 99_000, "an endless word is not held back");
    }

    #[test]
    fn pieces_break_like_the_whole_and_no_line_is_too_wide() {
        let words =
            ["a", "bb", "ccc dddd", "你好", "é", "👩‍🚀", "\n", "  ", "e\u{301}", "-", "12345"];
        let mut random = fastrand::Rng::with_seed(38);
        for _ in 0..300 {
            let (width, count) = (random.usize(6..40), random.usize(1..60));
            let mut text = String::new();
            for _ in 0..count {
                text += words[random.usize(..words.len())];
                text += if random.bool() { " " } else { "" };
            }
            let whole = wrapped(&text, width);
            let mut wrap = Wrap { width, ..Wrap::default() };
            let pieces: String = text.chars().map(|c| wrap.push(&c.to_string())).collect();
            assert_eq!(pieces + &wrap.finish(), whole, "{text:?}");
            let without = |text: &str| text.replace([' ', '\n'], "");
            assert_eq!(without(&whole), without(&text));
            for line in whole.lines() {
                // Only a word that is longer than a line may be.
                let longest = line.split(' ').map(|word| word.width()).max().unwrap_or(0);
                assert!(
                    line.trim_end().width() <= width.max(longest + width / 2),
                    "{width}: {line:?}"
                );
            }
        }
    }
}
