//! Errors of the library.

use std::io;
use std::path::{Path, PathBuf};

use forebay_format::{at_least, at_most};

/// An error of the library or of a pull.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "'{name}' is not a name of a model: write OWNER/REPO or OWNER/REPO:QUANT, as on huggingface.co"
    )]
    BadName { name: String },
    #[error(
        "{name} has no owner: write OWNER/REPO[:QUANT], as on huggingface.co. Names of Ollama's registry cannot be pulled"
    )]
    NoOwner { name: String },
    #[error("{name} is not in the library: forebay pull {name} downloads it")]
    NotFound { name: String },
    #[error(
        "{name}: that program has no such model on this machine; forebay list shows what it has"
    )]
    NotThere { name: String },
    #[error("{name} is not in the library")]
    NoSuchName { name: String },
    #[error("{name} stands for several models of the library: {}", names.join(", "))]
    Ambiguous { name: String, names: Vec<String> },
    #[error("{name} exists already: remove it first")]
    Exists { name: String },
    #[error("{repository}: {why}; it has: {}", choices.join(", "))]
    Choice { repository: String, why: String, choices: Vec<String> },
    #[error(
        "{repository}: has no GGUF files, and no safetensors model with config.json in its main folder"
    )]
    NoModel { repository: String },
    #[error("{repository}: {why}")]
    Denied { repository: String, why: String },
    #[error("{url}: not found")]
    Missing { url: String },
    #[error("{url}: the server answers {status}")]
    Status { url: String, status: u16 },
    #[error("{host} cannot be reached: {why}")]
    Unreachable { host: String, why: String },
    #[error("{url}: {why}")]
    Network { url: String, why: String },
    #[error(
        "{path}: the server sends {found} bytes, but its list says {expected}: the repository changed or the server is wrong; pull again"
    )]
    WrongLength { path: String, expected: u64, found: u64 },
    #[error(
        "{path}: the bytes that arrived have the checksum {found}, but the repository's list says {expected}; they were deleted: pull again"
    )]
    WrongChecksum { path: String, expected: String, found: String },
    #[error("the repository lists a file whose path is refused ({why}): {path:?}")]
    BadPath { path: String, why: &'static str },
    #[error("{url}: the list of files cannot be read: {why}")]
    BadListing { url: String, why: String },
    #[error(
        "{folder}: the disk has {} free, but {} are needed",
        at_most(*available),
        at_least(*needed)
    )]
    Space { folder: PathBuf, needed: u64, available: u64 },
    #[error("{repository}: another process pulls from this repository: wait until it ends")]
    Locked { repository: String },
    #[error("{path}: the manifest is damaged: {why}; remove the file or pull the model again")]
    Damaged { path: PathBuf, why: String },
    #[error("{path}")]
    Io { path: PathBuf, source: io::Error },
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Returns true if the connection or the server failed, so that the same request may succeed later.
    pub fn is_passing(&self) -> bool {
        matches!(self, Error::Unreachable { .. } | Error::Network { .. } | Error::Status { .. })
    }

    /// Returns true if the error is about a name that the library does not have.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::NotFound { .. } | Error::NotThere { .. } | Error::NoSuchName { .. })
    }
}

/// Adds the path to an I/O error.
pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> Error + '_ {
    move |source| Error::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_written_for_people() {
        let (needed, available) = ((3 << 30) + 1, 5 << 19);
        let error = Error::Space { folder: "models".into(), needed, available };
        let said = "models: the disk has 2.50 MiB free, but 3.01 GiB are needed";
        assert_eq!(error.to_string(), said);
    }
}
