//! Reader of little-endian values that trusts no length in the file.

use std::io::{self, Read};
use std::path::Path;

use crate::FormatError;

/// Largest header (metadata and tensor table together) that is accepted, in bytes. The largest
/// published headers, with vocabularies of 256 thousand tokens and merges, stay below 32 MiB.
pub const HEADER_BYTES_MAX: u64 = 256 << 20;

/// Largest amount of memory that a read reserves ahead of the bytes that have arrived.
const CHUNK_BYTES: u64 = 1 << 20;

/// Reader of a header from its start. It knows how many bytes are left to back a claimed length.
pub struct Reader<'p, R> {
    inner: R,
    path: &'p Path,
    position: u64,
    file_bytes: u64,
}

impl<'p, R: Read> Reader<'p, R> {
    pub fn new(inner: R, path: &'p Path, file_bytes: u64) -> Self {
        Self { inner, path, position: 0, file_bytes }
    }

    pub fn path(&self) -> &'p Path {
        self.path
    }

    /// Returns the offset of the next byte from the start of the file.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns `count` if that many items of at least `bytes_min` bytes each can still follow.
    /// Otherwise returns an error.
    pub fn check_count(
        &self,
        what: &'static str,
        count: u64,
        bytes_min: u64,
    ) -> Result<usize, FormatError> {
        let needed = count.saturating_mul(bytes_min);
        let available = self.file_bytes - self.position;
        if needed > available {
            return Err(self.truncated(what, needed));
        }
        let end = self.position + needed;
        if end > HEADER_BYTES_MAX {
            return Err(FormatError::LimitExceeded {
                path: self.path.to_owned(),
                what,
                offset: self.position,
                found: end,
                limit: HEADER_BYTES_MAX,
            });
        }
        // The count is at most HEADER_BYTES_MAX, which fits every platform's usize.
        Ok(count as usize)
    }

    fn truncated(&self, what: &'static str, needed: u64) -> FormatError {
        FormatError::Truncated {
            path: self.path.to_owned(),
            what,
            offset: self.position,
            needed,
            file_bytes: self.file_bytes,
        }
    }

    fn fill(&mut self, what: &'static str, out: &mut [u8]) -> Result<(), FormatError> {
        self.inner.read_exact(out).map_err(|error| match error.kind() {
            // The file was truncated after its size was read.
            io::ErrorKind::UnexpectedEof => self.truncated(what, out.len() as u64),
            _ => FormatError::Io { path: self.path.to_owned(), source: error },
        })?;
        self.position += out.len() as u64;
        Ok(())
    }

    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], FormatError> {
        self.check_count(what, N as u64, 1)?;
        let mut bytes = [0; N];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    pub fn u8(&mut self, what: &'static str) -> Result<u8, FormatError> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads `count` bytes and appends them to `out`.
    pub fn bytes(
        &mut self,
        what: &'static str,
        count: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), FormatError> {
        let mut left = self.check_count(what, count, 1)?;
        while left > 0 {
            let step = left.min(CHUNK_BYTES as usize);
            let start = out.len();
            out.resize(start + step, 0);
            self.fill(what, &mut out[start..])?;
            left -= step;
        }
        Ok(())
    }

    /// Reads a length of 8 bytes and that many raw bytes.
    pub fn string(&mut self, what: &'static str) -> Result<Vec<u8>, FormatError> {
        let length = self.u64(what)?;
        let mut bytes = Vec::new();
        self.bytes(what, length, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the name of something: a string that is valid UTF-8 and not empty.
    pub fn name(&mut self, what: &'static str) -> Result<String, FormatError> {
        let offset = self.position;
        let bytes = self.string(what)?;
        if bytes.is_empty() {
            return Err(FormatError::EmptyName { path: self.path.to_owned(), what, offset });
        }
        String::from_utf8(bytes).map_err(|_| FormatError::NotUtf8 {
            path: self.path.to_owned(),
            what,
            offset,
        })
    }
}
