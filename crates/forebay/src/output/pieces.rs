//! Streams text of a model while it is generated.

use std::io::{self, IsTerminal as _, Write as _};

use super::visible::Pieces;
use super::wrap::Wrap;
use super::{DIM, NORMAL, styled, write};
use crate::failure::Outcome;

/// Text that arrives in pieces, on standard output or standard error. On a terminal it is shown in its visible form,
/// with lines broken between words. Elsewhere it is passed on unchanged.
pub struct TextStream {
    to: To,
    /// `None` if the text does not go to a terminal.
    terminal: Option<Shaper>,
    at_line_start: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum To {
    Output,
    /// Standard error, dim if it may carry styles.
    Error {
        dim: bool,
    },
}

#[derive(Default)]
struct Shaper {
    visible: Pieces,
    wrap: Wrap,
}

impl TextStream {
    /// Creates a stream of a result.
    pub fn result() -> TextStream {
        TextStream::new(To::Output, io::stdout().is_terminal())
    }

    /// Creates a stream of text that is no result, such as what a model thinks.
    pub fn aside() -> TextStream {
        TextStream::new(To::Error { dim: styled() }, io::stderr().is_terminal())
    }

    fn new(to: To, is_terminal: bool) -> TextStream {
        let terminal = is_terminal.then(Shaper::default);
        TextStream { to, terminal, at_line_start: true }
    }

    /// Says that the cursor stands after this text, which was printed by other means.
    pub fn begin_after(&mut self, text: &str) {
        self.at_line_start = text.is_empty() || text.ends_with('\n');
        if let Some(Shaper { wrap, .. }) = &mut self.terminal {
            wrap.begin_after(text);
        }
    }

    /// Returns true if the text so far is empty or ends with a line break.
    pub fn is_at_line_start(&self) -> bool {
        self.at_line_start
    }

    /// Shows the next piece.
    pub fn push(&mut self, text: &str) -> Outcome {
        if let Some(last) = text.chars().next_back() {
            self.at_line_start = last == '\n';
        }
        let columns = self.columns();
        let Some(Shaper { visible, wrap }) = &mut self.terminal else { return self.put(text) };
        wrap.set_width(columns);
        let shown = wrap.push(&visible.push(text));
        self.put(&shown)
    }

    /// Shows what was held back. Later pieces continue the text.
    pub fn flush(&mut self) -> Outcome {
        let Some(Shaper { visible, wrap }) = &mut self.terminal else { return Ok(()) };
        let shown = wrap.push(&visible.finish()) + &wrap.finish();
        self.put(&shown)
    }

    /// Returns the columns of the terminal, which may change at any time, or 0 if they are unknown.
    fn columns(&self) -> usize {
        let size = match (self.to, &self.terminal) {
            (_, None) => return 0,
            (To::Output, _) => rustix::termios::tcgetwinsize(io::stdout()),
            (To::Error { .. }, _) => rustix::termios::tcgetwinsize(io::stderr()),
        };
        size.map_or(0, |size| size.ws_col.into())
    }

    fn put(&self, text: &str) -> Outcome {
        if text.is_empty() {
            return Ok(());
        }
        match self.to {
            To::Output => return write(text),
            // Every piece resets the style, because Ctrl-C may end the program between two pieces.
            To::Error { dim: true } => {
                let _ = write!(io::stderr(), "{DIM}{text}{NORMAL}");
            }
            To::Error { dim: false } => {
                let _ = io::stderr().write_all(text.as_bytes());
            }
        }
        Ok(())
    }
}
