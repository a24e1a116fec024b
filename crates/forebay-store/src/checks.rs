//! Checksums of a file: which bytes must be read together, and if the bytes that arrived are intact.

use std::ops::Range;
use std::sync::Arc;

use forebay_format::pack::{Chunk, ChunkIndex, checksum};

use crate::error::StoreError;

/// Largest chunk in bytes that is verified in a buffer on the stack. Embedding rows are read for every token, so they
/// must not allocate.
const SMALL_BYTES: usize = 4096;

/// Function that fills a buffer with the bytes at a file offset.
pub(crate) type ReadAt<'a> = dyn Fn(u64, &mut [u8]) -> Result<(), StoreError> + 'a;

/// The checksums of one file. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Checks {
    index: Arc<ChunkIndex>,
}

/// A chunk that does not match its checksum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadChunk {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Name of the block that the chunk belongs to.
    pub place: String,
    pub expected: u64,
    pub found: u64,
}

impl Checks {
    pub fn new(index: Arc<ChunkIndex>) -> Checks {
        Checks { index }
    }

    /// Returns a range extended to whole chunks, or the range itself if it has no checksums.
    pub fn cover(&self, range: Range<u64>) -> Range<u64> {
        match self.index.cover(range.start, range.end) {
            Some((start, end)) => start..end,
            None => range,
        }
    }

    /// Returns true if a range consists of whole chunks, or of bytes that have no checksums.
    pub fn is_whole(&self, range: Range<u64>) -> bool {
        let checked = self.index.range();
        let apart = range.end <= checked.start || range.start >= checked.end;
        apart || self.index.cover(range.start, range.end) == Some((range.start, range.end))
    }

    /// Returns the chunks that overlap a range, in order.
    pub fn chunks(&self, range: Range<u64>) -> impl Iterator<Item = Chunk> + '_ {
        self.index.chunks(range.start, range.end)
    }

    /// Returns the first chunk of `bytes` that does not match its checksum. `bytes` must be whole chunks, read from
    /// `offset`.
    pub fn first_bad(&self, offset: u64, bytes: &[u8]) -> Option<BadChunk> {
        let end = offset + bytes.len() as u64;
        self.index.chunks(offset, end).find_map(|chunk| {
            let start = (chunk.offset - offset) as usize;
            self.judge(&chunk, checksum(&bytes[start..start + chunk.bytes as usize]))
        })
    }

    fn judge(&self, chunk: &Chunk, found: u64) -> Option<BadChunk> {
        if found == chunk.checksum {
            return None;
        }
        let block = self.index.block_at(chunk.offset);
        Some(BadChunk {
            offset: chunk.offset,
            place: block.map(ToString::to_string).unwrap_or_default(),
            expected: chunk.checksum,
            found,
        })
    }

    /// Fills `out` with the bytes at `offset`, using `read` to read the chunks around them. Returns the first chunk
    /// that does not match its checksum, if any. In that case `out` must not be used.
    pub fn read(
        &self,
        offset: u64,
        out: &mut [u8],
        read: &ReadAt<'_>,
    ) -> Result<Option<BadChunk>, StoreError> {
        let end = offset.saturating_add(out.len() as u64);
        if self.index.cover(offset, end).is_none() {
            read(offset, out)?;
            return Ok(None);
        }
        let mut small = [0_u8; SMALL_BYTES];
        for chunk in self.index.chunks(offset, end) {
            let (from, to) = (chunk.offset.max(offset), chunk.end().min(end));
            let target = &mut out[(from - offset) as usize..(to - offset) as usize];
            let bytes = chunk.bytes as usize;
            let found = if target.len() == bytes {
                read(chunk.offset, target)?;
                checksum(target)
            } else {
                let mut large;
                let whole = match bytes <= SMALL_BYTES {
                    true => &mut small[..bytes],
                    false => {
                        large = vec![0; bytes];
                        &mut large[..]
                    }
                };
                read(chunk.offset, whole)?;
                let skip = (from - chunk.offset) as usize;
                target.copy_from_slice(&whole[skip..skip + target.len()]);
                checksum(whole)
            };
            if let Some(bad) = self.judge(&chunk, found) {
                return Ok(Some(bad));
            }
        }
        Ok(None)
    }
}
