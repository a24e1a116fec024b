//! Writes results to standard output and messages to standard error.

use std::io::{self, IsTerminal as _, Write as _};

use serde::Serialize;

use crate::failure::Outcome;
use crate::unfinished;

/// Prints the command's one JSON document. Does nothing if it is printed: two threads may want to print one if a second
/// signal arrives while the command ends.
pub fn json<T: Serialize>(document: &T) -> Outcome {
    let Some(_claim) = unfinished::claim() else { return Ok(()) };
    let mut text = serde_json::to_string_pretty(document)?;
    text.push('\n');
    print(&text)
}

/// Prints text and flushes it at once, so that a reader can follow a stream of tokens.
pub fn print(text: &str) -> Outcome {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Returns true if standard error may carry styles: it is a terminal, and the user did not disable styles
/// (<https://no-color.org>).
pub fn styled() -> bool {
    io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Writes a message to standard error. Unlike `eprint!`, this does not panic if standard error is closed, because
/// messages are never the result.
pub fn say(text: std::fmt::Arguments<'_>) {
    let _ = io::stderr().write_fmt(text);
}

/// `tell!("…", …)` writes a line to standard error.
macro_rules! tell {
    () => { $crate::output::say(format_args!("\n")) };
    ($($part:tt)*) => {{
        $crate::output::say(format_args!($($part)*));
        $crate::output::say(format_args!("\n"));
    }};
}
pub(crate) use tell;

/// Alignment of a column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Formats rows as columns, two spaces apart, without trailing spaces. The first row is the header.
pub fn table(columns: &[Align], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for ((cell, &align), &width) in row.iter().zip(columns).zip(&widths) {
            if !line.is_empty() {
                line.push_str("  ");
            }
            match align {
                Align::Left => line.push_str(&format!("{cell:<width$}")),
                Align::Right => line.push_str(&format!("{cell:>width$}")),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
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
    fn digits_in_groups() {
        assert_eq!(grouped(7), "7");
        assert_eq!(grouped(123456), "123 456");
        assert_eq!(grouped(1234567), "1 234 567");
    }
}
