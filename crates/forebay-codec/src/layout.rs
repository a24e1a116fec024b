//! The parts of a chunk, and their places.

use std::ops::Range;

use crate::blocks::Ends;
use crate::{CodecError, Weights};

/// Largest number of weights of a chunk.
pub const CHUNK_WEIGHTS: usize = 4096;

/// Bytes of a chunk's header: the base, a zero, and three counts of 16 bits.
pub(crate) const HEADER: usize = 8;

/// Number of levels of codes.
pub(crate) const LEVELS: usize = 3;

/// What a chunk's header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Exponent to which the offsets of the table are added.
    pub base: u8,
    /// Number of codes of the first, second and third level that another level follows.
    pub follow: [usize; LEVELS],
}

impl Header {
    pub fn read(chunk: &[u8]) -> Result<Header, CodecError> {
        let Some((header, _)) = chunk.split_first_chunk::<HEADER>() else {
            return Err(CodecError::ChunkLength { bytes: chunk.len(), needed: HEADER });
        };
        let count = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
        Ok(Header { base: header[0], follow: [count(2), count(4), count(6)] })
    }

    pub fn write(self, to: &mut [u8]) {
        to[..2].copy_from_slice(&[self.base, 0]);
        for (level, count) in self.follow.into_iter().enumerate() {
            let at = 2 + 2 * level;
            to[at..at + 2].copy_from_slice(&(count as u16).to_le_bytes());
        }
    }
}

/// Places of a chunk's parts. A bitmap has a bit for every item, from the lowest bit of the first byte on, and fills whole words of 32
/// bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// What the blocks have besides their weights; empty where there are no blocks.
    pub ends: Range<usize>,
    /// Sign and mantissa without what is in `rest_bits`, a byte each; empty for types with fewer than eight such bits.
    pub rest_bytes: Range<usize>,
    /// Bitmaps of the other bits of sign and mantissa, lowest first.
    pub rest_bits: Range<usize>,
    /// First level: two bitmaps, low and high bit of each weight's code.
    pub first: Range<usize>,
    /// Second level: two bitmaps, for every weight whose code is 3.
    pub second: Range<usize>,
    /// Third level: four bitmaps, for every code of the second level that is 3.
    pub third: Range<usize>,
    /// Exponents, a byte each, for every code of the third level that is 15.
    pub raw: Range<usize>,
}

/// Returns the bytes of a bitmap of `items` bits.
pub(crate) fn bitmap_bytes(items: usize) -> usize {
    items.div_ceil(32) * 4
}

impl Layout {
    /// Returns the places for a chunk of `count` weights with these counts, and with this number of bytes for the ends of blocks.
    pub fn of(weights: Weights, count: usize, ends: usize, follow: [usize; LEVELS]) -> Layout {
        let items = count.next_multiple_of(32);
        let mut end = HEADER;
        let mut take = |bytes: usize| {
            let start = end;
            end += bytes;
            start..end
        };
        let rest = weights.rest_bits() as usize;
        Layout {
            ends: take(ends),
            rest_bytes: take(rest / 8 * items),
            rest_bits: take(rest % 8 * bitmap_bytes(items)),
            first: take(2 * bitmap_bytes(items)),
            second: take(2 * bitmap_bytes(follow[0])),
            third: take(4 * bitmap_bytes(follow[1])),
            raw: take(follow[2].next_multiple_of(4)),
        }
    }

    /// Returns the bytes of the chunk.
    pub fn bytes(&self) -> usize {
        self.raw.end
    }
}

/// Returns the most bytes that a chunk of `count` weights can have.
pub fn chunk_bytes_max(weights: impl Into<Weights>, count: usize) -> usize {
    let weights = weights.into();
    let ends = match weights {
        Weights::Plain(_) => 0,
        Weights::Compact(of) => Ends::bytes_max(of, count / of.weights()),
    };
    Layout::of(weights, count, ends, [count; LEVELS]).bytes()
}
