//! Writes results to standard output and messages to standard error.
//!
//! Everything that the program prints passes through this module. On a terminal, text from models and files is shown in
//! its visible form ([`visible`]); in pipes and files, results are what they are.

mod pieces;
pub mod visible;
pub mod wrap;

use std::io::{self, IsTerminal as _, Write as _};

use forebay_format::in_words;
use serde::Serialize;
use unicode_width::UnicodeWidthStr as _;

use crate::failure::Outcome;
use crate::unfinished;

pub use pieces::TextStream;

const DIM: &str = "\u{1b}[2m";
const RED: &str = "\u{1b}[1;31m";
const YELLOW: &str = "\u{1b}[1;33m";
const CYAN: &str = "\u{1b}[1;36m";
const NORMAL: &str = "\u{1b}[0m";

/// Widest cell that the other cells of its column are padded to.
const CELL_COLUMNS_MAX: usize = 100;

/// Prints the command's one JSON document. Does nothing if it is printed: two threads may want to print one if a second
/// signal arrives while the command ends.
pub fn json<T: Serialize>(document: &T) -> Outcome {
    let Some(_claim) = unfinished::claim() else { return Ok(()) };
    let mut text = serde_json::to_string_pretty(document)?;
    text.push('\n');
    match io::stdout().is_terminal() {
        true => write(&visible::json(&text)),
        false => write(&text),
    }
}

/// Prints a result and flushes it at once. Items of lists are broken at the width of the terminal, if it is one.
pub fn print(text: &str) -> Outcome {
    match io::stdout().is_terminal() {
        true => write(&broken_items(&visible::text(text), columns())),
        false => write(text),
    }
}

/// Writes to standard output, unchanged.
fn write(text: &str) -> Outcome {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Returns true if standard error may carry styles: it is a terminal, and the user did not disable styles
/// (<https://no-color.org>).
pub fn styled() -> bool {
    io::stderr().is_terminal() && wants_styles()
}

/// Returns true unless the user disabled styles.
pub fn wants_styles() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Returns the columns of the terminal that standard error is, or 0 if it is none.
pub fn columns() -> usize {
    rustix::termios::tcgetwinsize(io::stderr()).map_or(0, |size| size.ws_col.into())
}

/// Sends a command of this program, not of a model, to the terminal that standard error is.
pub fn command_terminal(command: &'static str) {
    if io::stderr().is_terminal() {
        let _ = io::stderr().write_all(command.as_bytes());
    }
}

/// Writes a message to standard error, with the system's errors in plain words. Unlike `eprint!`, this does not panic
/// if standard error is closed, because messages are never the result.
pub fn say(text: std::fmt::Arguments<'_>) {
    let text = in_words(&text.to_string());
    let shown = match io::stderr().is_terminal() {
        true => visible::text(&text),
        false => text.into(),
    };
    let styled = if styled() { with_style(&shown) } else { None };
    let _ = io::stderr().write_all(styled.as_deref().unwrap_or(&shown).as_bytes());
}

/// Colours the word at the beginning of a message that says how grave it is.
fn with_style(text: &str) -> Option<String> {
    let styles = [("error: ", RED), ("warning: ", YELLOW), ("note: ", CYAN)];
    let (word, style) = styles.into_iter().find(|(word, _)| text.starts_with(word))?;
    let (word, rest) = text.split_at(word.len() - 2);
    Some(format!("{style}{word}{NORMAL}{rest}"))
}

/// Writes lines to standard error that have a label each. Labels are as wide as the widest, and long lines continue
/// beside them.
pub fn say_labelled(lines: &[(&str, String)]) {
    let (before, after) = if styled() { (DIM, NORMAL) } else { ("", "") };
    let width = lines.iter().map(|(label, _)| label.width()).max().unwrap_or(0);
    let columns = columns();
    let mut text = String::new();
    for (label, line) in lines {
        let (line, padding) = (in_words(&visible::line(line)), " ".repeat(width - label.width()));
        let line = wrap::indented(&line, columns, width + 2);
        text.push_str(&format!("{before}{label}{after}{padding}  {line}\n"));
    }
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Breaks the items (`- …`) of a text at the width of the terminal. Other lines stay, such as tables and commands.
fn broken_items(text: &str, columns: usize) -> String {
    let item = |line: &str| match line.strip_prefix("- ") {
        Some(item) => format!("- {}", wrap::indented(item, columns, 2)),
        None => line.to_owned(),
    };
    text.split('\n').map(item).collect::<Vec<_>>().join("\n")
}

/// `tell!("…", …)` writes a line to standard error.
macro_rules! tell {
    () => { $crate::output::say(format_args!("\n")) };
    ($($part:tt)*) => { $crate::output::say(format_args!("{}\n", format_args!($($part)*))) };
}
pub(crate) use tell;

/// Alignment of a column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Formats rows as columns, two spaces apart, without trailing spaces. The first row is the header. Cells are shown in
/// their visible form. A very long cell moves only the cells of its own row.
pub fn table(columns: &[Align], rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<_>> =
        rows.iter().map(|row| row.iter().map(|cell| visible::line(cell)).collect()).collect();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.width()).filter(|width| *width <= CELL_COLUMNS_MAX).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for ((cell, &align), &width) in row.iter().zip(columns).zip(&widths) {
            if !line.is_empty() {
                line.push_str("  ");
            }
            let padding = " ".repeat(width.saturating_sub(cell.width()));
            match align {
                Align::Left => line.push_str(&format!("{cell}{padding}")),
                Align::Right => line.push_str(&format!("{padding}{cell}")),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Returns a count with its noun: `1 turn`, `2 turns`.
pub fn counted(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

/// Groups the digits of a number by three: `30532122624` becomes `30 532 122 624`.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_broken_and_tables_are_not() {
        let text = "a table with one long line\n- one item of several words\n- two\n";
        let broken = "a table with one long line\n- one item of several\n  words\n- two\n";
        assert_eq!(broken_items(text, 24), broken);
        assert_eq!(broken_items(text, 0), text);
    }

    #[test]
    fn columns_line_up() {
        let rows = [["name", "n"], ["é", "10"], ["long name", "7"]];
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(|c| c.to_string()).collect()).collect();
        assert_eq!(
            table(&[Align::Left, Align::Right], &rows),
            "name        n\né          10\nlong name   7\n"
        );
    }

    #[test]
    fn cells_of_any_length_and_content_are_safe() {
        for length in [CELL_COLUMNS_MAX, 65_535, 65_536, 200_000] {
            let long = "x".repeat(length);
            let rows = vec![vec!["a".into(), "1".into()], vec![long.clone(), "22".into()]];
            for columns in [[Align::Left; 2], [Align::Right; 2]] {
                let text = table(&columns, &rows);
                assert!(text.ends_with(&format!("{long}  22\n")), "{length}");
                assert!(text.len() < 2 * length + 100, "{length}: {}", text.len());
            }
        }
        let rows = vec![
            vec!["a\u{1b}]0;x\n\u{9b}".to_string(), "b".into()],
            vec!["你好".into(), "c".into()],
        ];
        let text = table(&[Align::Left; 2], &rows);
        assert_eq!(text, "a\\x1b]0;x\\x0a\\x9b  b\n你好               c\n");
    }

    #[test]
    fn nouns_follow_their_count() {
        assert_eq!([0, 1, 2].map(|n| counted(n, "turn")), ["0 turns", "1 turn", "2 turns"]);
    }

    #[test]
    fn digits_in_groups() {
        assert_eq!(grouped(7), "7");
        assert_eq!(grouped(123456), "123 456");
        assert_eq!(grouped(1234567), "1 234 567");
    }
}
