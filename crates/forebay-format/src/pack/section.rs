//! Reader of one section of a pack's front, which also computes the section's checksum.

use std::hash::Hasher as _;
use std::io::Read;
use std::path::Path;

use twox_hash::XxHash3_64;

use super::PAGE_BYTES;
use crate::FormatError;

/// Header entry of a section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SectionExtent {
    /// Offset from the start of the file, in bytes.
    pub offset: u64,
    /// Number of bytes without the padding up to the next page.
    pub bytes: u64,
    /// Number of entries.
    pub count: u64,
    /// XXH3-64 of the section and its padding.
    pub checksum: u64,
}

impl SectionExtent {
    /// Returns the offset of the byte after the padding, or `None` if it overflows.
    pub fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.bytes)?.checked_next_multiple_of(PAGE_BYTES)
    }
}

/// Reader of one section from front to back.
pub struct Section<'a, R> {
    reader: &'a mut R,
    path: &'a Path,
    name: &'static str,
    place: SectionExtent,
    hasher: XxHash3_64,
    /// Number of bytes left, without padding.
    left: u64,
}

impl<'a, R: Read> Section<'a, R> {
    pub fn new(
        reader: &'a mut R,
        path: &'a Path,
        name: &'static str,
        place: SectionExtent,
    ) -> Section<'a, R> {
        let hasher = XxHash3_64::default();
        Section { reader, path, name, place, hasher, left: place.bytes }
    }

    pub fn path(&self) -> &'a Path {
        self.path
    }

    pub fn count(&self) -> u64 {
        self.place.count
    }

    /// Returns the number of bytes left, without padding.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Returns an error about the next byte.
    pub fn damaged(&self, what: impl Into<String>) -> FormatError {
        FormatError::PackDamaged {
            path: self.path.to_owned(),
            offset: self.place.offset + (self.place.bytes - self.left),
            what: format!("in {}, {}", self.name, what.into()),
        }
    }

    pub fn fill(&mut self, out: &mut [u8]) -> Result<(), FormatError> {
        if out.len() as u64 > self.left {
            return Err(self.damaged("an entry is cut off"));
        }
        self.reader.read_exact(out).map_err(FormatError::io(self.path))?;
        self.hasher.write(out);
        self.left -= out.len() as u64;
        Ok(())
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub fn u64(&mut self) -> Result<u64, FormatError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads `count` bytes. Memory is reserved only if the section still has that many.
    pub fn bytes(&mut self, count: u64) -> Result<Vec<u8>, FormatError> {
        if count > self.left {
            return Err(self.damaged(format!("{count} bytes are claimed, {} are left", self.left)));
        }
        let mut bytes = vec![0; count as usize];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub fn text(&mut self, count: u64) -> Result<String, FormatError> {
        let bytes = self.bytes(count)?;
        String::from_utf8(bytes).map_err(|_| self.damaged("a name is not valid UTF-8"))
    }

    /// Reads the rest of the section and compares the checksum. A wrong checksum replaces the error
    /// in `outcome`, because damaged bytes explain it better.
    pub fn finish<T>(mut self, outcome: Result<T, FormatError>) -> Result<T, FormatError> {
        let unread = self.left;
        let end = self.place.end().unwrap_or(u64::MAX);
        let mut rest = end - (self.place.offset + (self.place.bytes - self.left));
        let mut buffer = [0; 4096];
        while rest > 0 {
            let step = rest.min(buffer.len() as u64) as usize;
            self.reader.read_exact(&mut buffer[..step]).map_err(FormatError::io(self.path))?;
            self.hasher.write(&buffer[..step]);
            rest -= step as u64;
        }
        let found = self.hasher.finish();
        if found != self.place.checksum {
            return Err(FormatError::PackChecksum {
                path: self.path.to_owned(),
                what: self.name.to_owned(),
                offset: self.place.offset,
                expected: self.place.checksum,
                found,
            });
        }
        let value = outcome?;
        if unread > 0 {
            self.left = unread;
            return Err(self.damaged(format!("{unread} bytes belong to no entry")));
        }
        Ok(value)
    }
}
