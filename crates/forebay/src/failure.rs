//! How a command ends when it does not end well: exit status and the one line that says why.

use std::fmt::Write as _;
use std::io;

use crate::interrupt;

/// Why a command stopped. The variants are the exit statuses.
#[derive(Debug)]
pub enum Failure {
    /// The command line asks for something that cannot be; exit status 2.
    Usage(String),
    /// The work failed; exit status 1.
    Work(anyhow::Error),
    /// Ctrl-C ended work that has no partial result; exit status 130.
    Interrupted,
}

pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// The process exit status. A reader that closed its end of the pipe has what it wanted, so
    /// that is no failure.
    pub fn status(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Work(error) if is_broken_pipe(error) => 0,
            Failure::Work(_) => 1,
            Failure::Interrupted => interrupt::INTERRUPTED,
        }
    }

    /// The line for the person, without `error: `; `None` when there is nothing to say.
    pub fn line(&self) -> Option<String> {
        match self {
            Failure::Usage(text) => Some(one_line(text)),
            Failure::Work(error) if is_broken_pipe(error) => None,
            Failure::Work(error) => Some(flatten(error)),
            Failure::Interrupted => Some("interrupted; nothing is left behind".into()),
        }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Work(error.into())
    }
}

/// Stops a command with exit status 2.
pub fn usage<T>(text: impl Into<String>) -> Outcome<T> {
    Err(Failure::Usage(text.into()))
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    })
}

/// The chain of causes in one line. What another message of the chain repeats is left out: library
/// errors differ in whether `Display` includes their source, and the file that they are about.
fn flatten(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = one_line(&cause.to_string());
        if line.contains(&text) {
            continue;
        }
        if text.contains(&line) {
            line = text;
            continue;
        }
        if !line.is_empty() {
            line.push_str(": ");
        }
        let _ = write!(line, "{text}");
    }
    line
}

/// Control characters (a file name, a tensor name, a token may hold any) must neither break the
/// line nor reach the terminal.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for part in text.split(['\n', '\r']).map(str::trim).filter(|part| !part.is_empty()) {
        if !line.is_empty() {
            line.push(' ');
        }
        line.extend(part.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context as _, anyhow};

    #[test]
    fn chains_become_one_line() {
        let error = anyhow!("no such\nfile").context("a.gguf: cannot read: no such file");
        assert_eq!(flatten(&error), "a.gguf: cannot read: no such file");
        let error = anyhow!("a.gguf: bad magic").context("a.gguf");
        assert_eq!(flatten(&error), "a.gguf: bad magic");
        let error = anyhow!("cause").context("outer");
        assert_eq!(flatten(&error), "outer: cause");
        assert_eq!(one_line("a\x1b[31m\r\n b"), "a\u{fffd}[31m b");
    }

    #[test]
    fn a_closed_pipe_is_quiet() {
        let result: Result<(), io::Error> = Err(io::ErrorKind::BrokenPipe.into());
        let failure = Failure::from(result.context("writing").unwrap_err());
        assert_eq!((failure.status(), failure.line()), (0, None));
        assert_eq!(Failure::from(anyhow!("x")).status(), 1);
        assert_eq!(Failure::Usage("x".into()).status(), 2);
    }
}
