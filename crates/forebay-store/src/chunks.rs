//! Chunks of a pack: which bytes must be read together, how they are decoded, and if they are intact.
//!
//! Offsets are those of the decoded file: as if every block of the pack were stored as it is. Everything above reads the decoded file.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use forebay_codec::Decoder;
use forebay_format::pack::{Chunk, ChunkIndex, checksum};

use crate::error::{Damage, StoreError};

/// Largest chunk in bytes that is verified in a buffer on the stack. Embedding rows are read for every token, so they
/// must not allocate.
const SMALL_BYTES: usize = 4096;

/// Function that fills a buffer with the bytes at an offset of the stored file.
pub(crate) type ReadAt<'a> = dyn Fn(u64, &mut [u8]) -> Result<(), StoreError> + 'a;

thread_local! {
    /// Memory for decoding, kept from chunk to chunk.
    static MEMORY: RefCell<Memory> = RefCell::default();
}

#[derive(Default)]
struct Memory {
    decoder: Decoder,
    stored: Vec<u8>,
    decoded: Vec<u8>,
}

/// The chunks of one file. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Chunks {
    index: Arc<ChunkIndex>,
    /// True if checksums are verified.
    pub verify: bool,
}

/// A chunk that is damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadChunk {
    /// Offset in the stored file, in bytes.
    pub offset: u64,
    /// Name of the block that the chunk belongs to.
    pub place: String,
    pub damage: Damage,
}

impl Chunks {
    pub fn new(index: Arc<ChunkIndex>, verify: bool) -> Chunks {
        Chunks { index, verify }
    }

    /// Returns the chunks of the file itself, which are not decoded.
    pub fn of_stored(&self) -> Chunks {
        Chunks { index: Arc::new(self.index.of_stored()), verify: self.verify }
    }

    /// Returns true if any block is coded.
    pub fn is_coded(&self) -> bool {
        self.index.is_coded()
    }

    /// Returns true if this byte belongs to a coded block.
    pub fn is_coded_at(&self, offset: u64) -> bool {
        self.index.is_coded_at(offset)
    }

    /// Returns the most bytes that a coded chunk has, before or after decoding.
    pub fn coded_bytes_max(&self) -> u64 {
        self.index.coded_bytes_max()
    }

    /// Returns the number of bytes of the decoded file.
    pub fn decoded_bytes(&self) -> u64 {
        self.index.range().end
    }

    /// Returns by how much a byte of the decoded file lies behind the same byte of the stored file, if its block is stored as it is.
    pub fn behind(&self, offset: u64) -> u64 {
        let block = self.index.block_at(offset).filter(|_| self.index.is_coded());
        block.map_or(0, |block| block.offset.wrapping_sub(block.stored_offset))
    }

    /// Returns the range of the stored file that must be read for a range of the decoded file.
    pub fn stored(&self, range: Range<u64>) -> Range<u64> {
        self.index.stored_for(range.start, range.end).unwrap_or(range)
    }

    /// Returns a range extended to whole chunks. Bytes without checksums that are stored as they are can be read alone.
    pub fn cover(&self, range: Range<u64>) -> Range<u64> {
        let Some((start, end)) = self.index.cover(range.start, range.end) else { return range };
        let whole = |offset| self.verify || self.is_coded_at(offset);
        let start = if whole(range.start) { start } else { range.start };
        start..if whole(range.end - 1) { end } else { range.end }
    }

    /// Returns true if a range consists of whole chunks, or of bytes that can be read alone.
    pub fn is_whole(&self, range: Range<u64>) -> bool {
        let checked = self.index.range();
        let apart = range.end <= checked.start || range.start >= checked.end;
        apart
            || self.index.cover(range.start, range.end).is_some()
                && self.cover(range.clone()) == range
    }

    /// Returns the chunks that overlap a range, in order.
    pub fn chunks(&self, range: Range<u64>) -> impl Iterator<Item = Chunk> + '_ {
        self.index.chunks(range.start, range.end)
    }

    /// Returns the end of the range from `offset` on whose blocks are all coded, or all stored as they are.
    pub fn end_of_kind(&self, offset: u64) -> u64 {
        if !self.index.is_coded() {
            return u64::MAX;
        }
        let blocks = self.index.blocks();
        let at = blocks.partition_point(|block| block.end() <= offset);
        let Some(first) = blocks.get(at).filter(|first| first.offset <= offset) else {
            return blocks.get(at).map_or(u64::MAX, |next| next.offset);
        };
        let other = blocks[at..].iter().find(|block| block.is_coded() != first.is_coded());
        other.map_or(u64::MAX, |other| other.offset)
    }

    /// Returns the first chunk of `bytes` that does not match its checksum. `bytes` must be whole chunks that are stored as they are, from
    /// `offset` on.
    pub fn first_bad(&self, offset: u64, bytes: &[u8]) -> Option<BadChunk> {
        let end = offset + bytes.len() as u64;
        self.index.chunks(offset, end).find_map(|chunk| {
            let start = (chunk.offset - offset) as usize;
            self.compare(&chunk, checksum(&bytes[start..start + chunk.bytes as usize]))
        })
    }

    fn compare(&self, chunk: &Chunk, found: u64) -> Option<BadChunk> {
        let expected = chunk.checksum;
        let damage = Damage::Checksum { expected, found };
        (found != expected).then(|| self.bad(chunk, damage))
    }

    fn bad(&self, chunk: &Chunk, damage: Damage) -> BadChunk {
        let block = self.index.block_at(chunk.offset);
        let place = block.map(ToString::to_string).unwrap_or_default();
        BadChunk { offset: chunk.stored_offset, place, damage }
    }

    /// Verifies and decodes the chunks of `range`, which must be whole. `stored` are their bytes in the file. Returns the first one that is
    /// damaged, if any; `out` is then not to be used.
    pub fn decode(&self, range: Range<u64>, stored: &[u8], out: &mut [u8]) -> Option<BadChunk> {
        MEMORY.with_borrow_mut(|memory| {
            let mut stored = stored;
            let mut out = out;
            self.chunks(range).find_map(|chunk| {
                let (own, other) = stored.split_at(chunk.stored_bytes as usize);
                let (to, rest) = std::mem::take(&mut out).split_at_mut(chunk.bytes as usize);
                (stored, out) = (other, rest);
                self.decode_one(&chunk, own, to, &mut memory.decoder)
            })
        })
    }

    /// Verifies and decodes one chunk, as [`Chunks::decode`].
    fn decode_one(
        &self,
        chunk: &Chunk,
        stored: &[u8],
        out: &mut [u8],
        decoder: &mut Decoder,
    ) -> Option<BadChunk> {
        let bad = self.verify.then(|| self.compare(chunk, checksum(stored))).flatten();
        bad.or_else(|| {
            let decoded = decoder.decode(chunk.codec, chunk.encoded(stored), out);
            decoded.err().map(|error| self.bad(chunk, Damage::Coding(Box::new(error))))
        })
    }

    /// Fills `out` with the bytes at `offset`, using `read` to read the chunks around them. Returns the first chunk
    /// that is damaged, if any. In that case `out` must not be used.
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
        let mut at = offset;
        while at < end {
            let next = self.end_of_kind(at).min(end);
            let target = &mut out[(at - offset) as usize..(next - offset) as usize];
            let bad = match (self.is_coded_at(at), self.verify) {
                (true, _) => self.read_coded(at, target, read)?,
                (false, true) => self.read_verified(at, target, read)?,
                (false, false) => {
                    read(at.wrapping_sub(self.behind(at)), target)?;
                    None
                }
            };
            if bad.is_some() {
                return Ok(bad);
            }
            at = next;
        }
        Ok(None)
    }

    /// Reads bytes that are stored as they are, and verifies them.
    fn read_verified(
        &self,
        offset: u64,
        out: &mut [u8],
        read: &ReadAt<'_>,
    ) -> Result<Option<BadChunk>, StoreError> {
        let end = offset + out.len() as u64;
        let mut small = [0_u8; SMALL_BYTES];
        for chunk in self.index.chunks(offset, end) {
            let (from, to) = (chunk.offset.max(offset), chunk.end().min(end));
            let target = &mut out[(from - offset) as usize..(to - offset) as usize];
            let bytes = chunk.bytes as usize;
            let found = if target.len() == bytes {
                read(chunk.stored_offset, target)?;
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
                read(chunk.stored_offset, whole)?;
                let skip = (from - chunk.offset) as usize;
                target.copy_from_slice(&whole[skip..skip + target.len()]);
                checksum(whole)
            };
            if let Some(bad) = self.compare(&chunk, found) {
                return Ok(Some(bad));
            }
        }
        Ok(None)
    }

    /// Reads and decodes bytes of coded blocks.
    fn read_coded(
        &self,
        offset: u64,
        out: &mut [u8],
        read: &ReadAt<'_>,
    ) -> Result<Option<BadChunk>, StoreError> {
        let end = offset + out.len() as u64;
        MEMORY.with_borrow_mut(|memory| {
            let Memory { decoder, stored, decoded } = memory;
            for chunk in self.index.chunks(offset, end) {
                let (from, to) = (chunk.offset.max(offset), chunk.end().min(end));
                let target = &mut out[(from - offset) as usize..(to - offset) as usize];
                stored.resize(chunk.stored_bytes as usize, 0);
                read(chunk.stored_offset, stored)?;
                let bad = if target.len() as u64 == chunk.bytes {
                    self.decode_one(&chunk, stored, target, decoder)
                } else {
                    decoded.resize(chunk.bytes as usize, 0);
                    let bad = self.decode_one(&chunk, stored, decoded, decoder);
                    let skip = (from - chunk.offset) as usize;
                    target.copy_from_slice(&decoded[skip..skip + target.len()]);
                    bad
                };
                if bad.is_some() {
                    return Ok(bad);
                }
            }
            Ok(None)
        })
    }
}
