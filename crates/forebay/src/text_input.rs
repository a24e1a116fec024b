//! Text that the user gives in files and on standard input. No other module reads it, so that all of it has a limit.

use std::io;
use std::path::Path;

use anyhow::anyhow;
use forebay_store::{TEXT_BYTES_MAX, read_text, read_text_from};

use crate::interrupt;

/// Most bytes of a file of API keys.
const KEY_FILE_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of a file of requests. Its text is kept in memory until the end.
const REQUEST_FILE_BYTES_MAX: u64 = 1 << 30;

/// Reads a file. `shown` is how the error names it.
pub fn file(path: &Path, shown: &str) -> anyhow::Result<String> {
    bounded(path, shown, TEXT_BYTES_MAX)
}

/// Reads a file of requests.
pub fn requests(path: &Path) -> anyhow::Result<String> {
    bounded(path, &path.display().to_string(), REQUEST_FILE_BYTES_MAX)
}

/// Reads a file of API keys.
pub fn keys(path: &Path) -> anyhow::Result<String> {
    bounded(path, &path.display().to_string(), KEY_FILE_BYTES_MAX)
}

/// Reads standard input. Ctrl-C ends the program meanwhile.
pub fn standard() -> anyhow::Result<String> {
    let _waiting = interrupt::waiting_for_input();
    read_text_from(io::stdin().lock(), TEXT_BYTES_MAX)
        .map_err(|error| anyhow!("standard input {}", in_a_sentence(&error)))
}

fn bounded(path: &Path, shown: &str, bytes_max: u64) -> anyhow::Result<String> {
    // A pipe may have no writer yet.
    let _waiting = interrupt::waiting_for_input();
    read_text(path, bytes_max).map_err(|error| anyhow!("{shown}: {}", in_a_sentence(&error)))
}

/// Continues a sentence about the text with what is wrong with it.
fn in_a_sentence(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::FileTooLarge | io::ErrorKind::InvalidData => error.to_string(),
        _ => format!("cannot be read as text: {error}"),
    }
}
