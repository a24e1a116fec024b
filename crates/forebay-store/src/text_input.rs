//! Reads text that a user gives, with a limit: a wrong file or an endless pipe must not fill the memory.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Most bytes of a text that is read whole by default, such as a prompt: about 16 million tokens.
pub const TEXT_BYTES_MAX: u64 = 64 << 20;

/// Reads a file of at most `bytes_max` bytes as UTF-8 text.
///
/// # Errors
/// Returns an error if the file cannot be read, is larger ([`ErrorKind::FileTooLarge`]), or is not text
/// ([`ErrorKind::InvalidData`]). The message says so in plain words, without the path.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    read_text_from(File::open(path)?, bytes_max)
}

/// Reads at most `bytes_max` bytes of a file, a pipe or a terminal as UTF-8 text.
///
/// # Errors
/// Like [`read_text`].
pub fn read_text_from(from: impl Read, bytes_max: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    // The bytes that are read are limited, because a pipe has no size.
    from.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let why = format!("has more than {} MiB, the most that is read", bytes_max >> 20);
        return Err(io::Error::new(ErrorKind::FileTooLarge, why));
    }
    String::from_utf8(bytes).map_err(|error| {
        let why = format!("is not UTF-8 text: {}: convert it first", error.utf8_error());
        io::Error::new(ErrorKind::InvalidData, why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_up_to_the_limit() {
        let text = "é".repeat(1 << 19);
        assert_eq!(read_text_from(text.as_bytes(), 1 << 20).unwrap(), text);
        let larger = text.clone() + "x";
        let error = read_text_from(larger.as_bytes(), 1 << 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), "has more than 1 MiB, the most that is read");
        // A source without an end is not read to it.
        assert_eq!(
            read_text(Path::new("/dev/zero"), 1 << 20).unwrap_err().kind(),
            ErrorKind::FileTooLarge
        );
        let error = read_text_from(&b"a\xff"[..], 1 << 20).unwrap_err();
        assert!(error.to_string().starts_with("is not UTF-8 text"), "{error}");
    }
}
