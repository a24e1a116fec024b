//! Checksums of what a file holds: which bytes must be read together, and whether they arrived
//! whole.

use std::ops::Range;
use std::sync::Arc;

use forebay_format::pack::{Chunk, ChunkIndex, checksum};

use crate::error::StoreError;

/// Chunks up to this size are checked on the stack: rows of embeddings are read for every token.
const SMALL_BYTES: usize = 4096;

/// Fills a buffer with the bytes at an offset.
pub(crate) type ReadAt<'a> = dyn Fn(u64, &mut [u8]) -> Result<(), StoreError> + 'a;

/// The checksums of one file. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Checks {
    index: Arc<ChunkIndex>,
}

/// A chunk whose bytes are not those that were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadChunk {
    /// Bytes from the start of the file.
    pub offset: u64,
    /// The block that it belongs to, in words.
    pub place: String,
    pub expected: u64,
    pub found: u64,
}

impl Checks {
    pub fn new(index: Arc<ChunkIndex>) -> Checks {
        Checks { index }
    }

    /// A range extended to whole chunks; the range itself where nothing has checksums.
    pub fn cover(&self, range: Range<u64>) -> Range<u64> {
        match self.index.cover(range.start, range.end) {
            Some((start, end)) => start..end,
            None => range,
        }
    }

    /// Whether a range is one of whole chunks, or of bytes that have no checksums.
    pub fn is_whole(&self, range: Range<u64>) -> bool {
        let checked = self.index.range();
        let apart = range.end <= checked.start || range.start >= checked.end;
        apart || self.index.cover(range.start, range.end) == Some((range.start, range.end))
    }

    /// The chunks that share a byte with a range, in order.
    pub fn chunks(&self, range: Range<u64>) -> impl Iterator<Item = Chunk> + '_ {
        self.index.chunks(range.start, range.end)
    }

    /// The first chunk of `bytes`, which were read at `offset` and are whole chunks, that is not as
    /// it was written.
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

    /// Fills `out` with the bytes at `offset`, reading the chunks around them with `read`. Gives the
    /// first chunk that is not as it was written; `out` must not be used then.
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
