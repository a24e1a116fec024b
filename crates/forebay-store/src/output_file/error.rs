//! Errors of output files: refusals and failed writes.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use forebay_format::{at_least, at_most, in_words};
use forebay_options::OptionName;

/// An error of an output file. Every message names the path as the caller gave it.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    #[error(
        "{}: exists already: choose another name, or replace it with {}",
        path.display(),
        OptionName::Force
    )]
    Exists { path: PathBuf },
    #[error(
        "{}: is the same file as {}, which this command reads: choose another name",
        path.display(),
        input.display()
    )]
    IsInput { path: PathBuf, input: PathBuf },
    #[error("{}: two outputs of this command would go there: give each its own name", path.display())]
    Twice { path: PathBuf },
    #[error("{}: is a directory: name the file to write inside it", path.display())]
    Directory { path: PathBuf },
    #[error("{}: is not empty: name a folder that is empty or does not exist yet", path.display())]
    NotEmpty { path: PathBuf },
    #[error("{}: exists and is not a directory: choose another name", path.display())]
    NotADirectory { path: PathBuf },
    #[error("{}: exists and is read-only: remove it or choose another name", path.display())]
    ReadOnly { path: PathBuf },
    #[error("{}: is a {what}: choose another name", path.display())]
    NotWritable { path: PathBuf, what: &'static str },
    #[error("{}: names no file: end the path with a file name", path.display())]
    NoName { path: PathBuf },
    #[error(
        "{}: cannot be written out of order, which this format needs: name a regular file",
        path.display()
    )]
    NotSeekable { path: PathBuf },
    #[error(
        "{}: another program created this file during the work; it was left alone, and the result was discarded",
        path.display()
    )]
    Appeared { path: PathBuf },
    #[error("{}: cannot be written: {why}", path.display())]
    Create { path: PathBuf, why: String },
    #[error("{}: cannot be written: {}", path.display(), in_words(&cause.to_string()))]
    Write { path: PathBuf, cause: io::Error },
    #[error(
        "{}: needs {}, and the disk has not enough room ({} are free): make room or choose another disk",
        path.display(),
        at_least(*needed_bytes),
        at_most(*free_bytes)
    )]
    NoRoom { path: PathBuf, needed_bytes: u64, free_bytes: u64 },
}

impl OutputError {
    /// Returns true if the request itself is wrong, as opposed to work that failed. The program
    /// then exits with status 2.
    pub fn is_refusal(&self) -> bool {
        use OutputError::*;
        match self {
            Exists { .. } | IsInput { .. } | Twice { .. } | Directory { .. } | NotEmpty { .. } => {
                true
            }
            NotADirectory { .. } | ReadOnly { .. } | NotWritable { .. } | NoName { .. } => true,
            NotSeekable { .. } => true,
            Appeared { .. } | Create { .. } | Write { .. } | NoRoom { .. } => false,
        }
    }

    /// Returns true if the write failed because the reader of a pipe closed its end.
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, OutputError::Write { cause, .. } if cause.kind() == ErrorKind::BrokenPipe)
    }

    /// Returns the error for a `path` that could not be created. It explains what is wrong with the
    /// folder of `path`.
    pub(super) fn create(path: &Path, error: &io::Error) -> OutputError {
        let folder = super::rules::folder_of(path).display();
        let why = match error.kind() {
            ErrorKind::NotFound => {
                format!("the directory {folder} does not exist: create it first")
            }
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                format!("{folder} is not writable: choose another place")
            }
            ErrorKind::NotADirectory => {
                format!("{folder} is not a directory: choose another place")
            }
            _ => format!("{}: choose another place", in_words(&error.to_string())),
        };
        OutputError::Create { path: path.to_path_buf(), why }
    }
}

impl From<OutputError> for io::Error {
    fn from(error: OutputError) -> io::Error {
        let kind = match &error {
            OutputError::Write { cause, .. } => cause.kind(),
            _ => ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
