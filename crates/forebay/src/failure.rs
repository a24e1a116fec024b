//! Failures of a command: exit status and the one line that explains them.

use std::fmt::Write as _;
use std::io;

use forebay_engine::EngineError;
use forebay_engine::doctor::DoctorError;
use forebay_engine::load::LoadError;
use forebay_engine::pack::PackError;
use forebay_engine::plan::PlanError;
use forebay_format::in_words;
use forebay_lab::synth::SynthError;
use forebay_store::{OutputError, StoreError};

use crate::interrupt;
use crate::output::visible;

/// Reason why a command stopped. Each variant has its exit status.
#[derive(Debug)]
pub enum Failure {
    /// The command line asks for something impossible. Exit status 2.
    Usage(String),
    /// The work failed. Exit status 1.
    Work(anyhow::Error),
    /// Ctrl-C stopped the work, and the partial result was printed. Exit status 130.
    Interrupted,
}

pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// Returns the exit status of the process. A reader that closed its end of a pipe has what it wanted, so a broken
    /// pipe is no failure.
    pub fn status(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Work(error) if is_broken_pipe(error) => 0,
            Failure::Work(error) if is_refused_output(error) => 2,
            Failure::Work(_) => 1,
            Failure::Interrupted => interrupt::INTERRUPTED,
        }
    }

    /// Returns the message for the user without `error: `, or `None` if there is nothing to print.
    pub fn line(&self) -> Option<String> {
        match self {
            Failure::Usage(text) => Some(one_line(text)),
            Failure::Work(error) if is_broken_pipe(error) => None,
            Failure::Work(error) => Some(flatten(error)),
            Failure::Interrupted => Some("interrupted".into()),
        }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        let error = error.into();
        match is_interrupt(&error) {
            true => Failure::Interrupted,
            false => Failure::Work(error),
        }
    }
}

/// Returns true if the work stopped because of an interrupt.
fn is_interrupt(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        // An implementation of `Read` can only report the interrupt inside an `io::Error`.
        let inside = cause.downcast_ref().and_then(io::Error::get_ref);
        inside.is_some_and(|error| matches!(error.downcast_ref(), Some(StoreError::Interrupted)))
            || matches!(cause.downcast_ref(), Some(EngineError::Interrupted))
            || matches!(cause.downcast_ref(), Some(LoadError::Interrupted))
            || matches!(cause.downcast_ref(), Some(PackError::Interrupted))
            || matches!(cause.downcast_ref(), Some(PlanError::Interrupted))
            || matches!(cause.downcast_ref(), Some(DoctorError::Interrupted))
            || matches!(cause.downcast_ref(), Some(StoreError::Interrupted))
            || matches!(cause.downcast_ref(), Some(SynthError::Interrupted))
    })
}

/// Stops a command with exit status 2.
pub fn usage<T>(text: impl Into<String>) -> Outcome<T> {
    Err(Failure::Usage(text.into()))
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let by_system = cause.downcast_ref::<io::Error>();
        by_system.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
            || cause.downcast_ref::<OutputError>().is_some_and(OutputError::is_broken_pipe)
    })
}

/// Returns true if an output may not be written. This is a usage error, wherever the program detects it.
fn is_refused_output(error: &anyhow::Error) -> bool {
    error.downcast_ref::<OutputError>().is_some_and(OutputError::is_refusal)
}

/// Joins the chain of causes into one line. Text that another message of the chain repeats is left out, because library
/// errors differ in whether `Display` includes their source or the file name.
fn flatten(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = in_words(&one_line(&cause.to_string()));
        if line.contains(&text) {
            continue;
        }
        // The same message with more text after it. The check for ':' keeps a file called "dir" from matching
        // "directory".
        if text.strip_prefix(&line).is_some_and(|rest| rest.starts_with(':')) {
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

/// Joins lines and shows control characters, which file names, tensor names and tokens may contain. They must neither
/// break the line nor reach the terminal.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for part in text.split(['\n', '\r']).map(str::trim).filter(|part| !part.is_empty()) {
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(&visible::line(part));
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
        let error = anyhow!("Is a directory (os error 21)").context("dir");
        assert_eq!(flatten(&error), "dir: is a folder, and a file is needed");
        let error = anyhow!("x: Cannot allocate memory (os error 12), twice (os error 5)");
        assert!(flatten(&error).starts_with("x: not enough memory, the disk"), "{error}");
        let error = anyhow!("a.gguf: bad magic").context("a.gguf");
        assert_eq!(flatten(&error), "a.gguf: bad magic");
        let error = anyhow!("cause").context("outer");
        assert_eq!(flatten(&error), "outer: cause");
        assert_eq!(one_line("a\x1b[31m\r\n b"), "a\\x1b[31m b");
    }

    #[test]
    fn a_closed_pipe_is_quiet() {
        let result: Result<(), io::Error> = Err(io::ErrorKind::BrokenPipe.into());
        let failure = Failure::from(result.context("writing").unwrap_err());
        assert_eq!((failure.status(), failure.line()), (0, None));
        assert_eq!(Failure::from(anyhow!("x")).status(), 1);
        assert_eq!(Failure::Usage("x".into()).status(), 2);
        let refused = OutputError::Exists { path: "out".into() };
        assert_eq!(Failure::from(refused).status(), 2);
    }

    #[test]
    fn an_interrupt_is_no_error_whatever_is_around_it() {
        let error = anyhow::Error::new(EngineError::Interrupted).context("a.gguf");
        assert_eq!(Failure::from(error).status(), 130);
        let nested = EngineError::from(forebay_model::ModelError::from(StoreError::Interrupted));
        assert_eq!(Failure::from(nested).status(), 130);
        assert_eq!(Failure::from(StoreError::Interrupted).status(), 130);
        let read: Result<(), io::Error> = Err(io::Error::other(StoreError::Interrupted));
        assert_eq!(Failure::from(read.context("trace").unwrap_err()).status(), 130);
    }
}
