//! BF16 weights in blocks of fixed size, about 12 bits each, that products read as they are.
//!
//! A block has a lowest exponent, and each weight has its exponent as four bits above that. The few weights whose exponents lie elsewhere
//! are in a short list. `docs/codec.md` describes the bytes.

mod decode;
mod encode;

use self::decode::decode_blocks;
use self::encode::encode_blocks;
use crate::{CodecError, Isa};

/// Exponents that four bits can say.
const WINDOW: usize = 16;

/// The largest exponent that a block may begin with, so that the sum of it and four bits has eight bits.
pub(crate) const BASE_MAX: usize = 256 - WINDOW;

/// Exponents below the window that a list entry can name. 0 is the exponent 0, higher numbers are these.
const BELOW: u16 = 24;

/// Lists' entries have a position in their low bits, and an exponent above it.
const POSITION_BITS: u32 = 11;
const COLUMN_MASK: u16 = (1 << POSITION_BITS) - 1;

/// Number of weights that share a word.
pub(crate) const LANE: usize = 8;

/// Number of weights of a piece of a block, whose bytes and words lie together.
pub(crate) const PIECE: usize = 256;
/// Bytes of a piece.
pub(crate) const PIECE_BYTES: usize = PIECE + PIECE / 2;

/// Bits of a weight that a word has: the sign, and the four bits of its exponent at their place.
#[cfg(target_arch = "x86_64")]
const IN_WORD: i16 = 0x8700_u16 as i16;

/// Operation of `ternarylogic` that takes the bits of the second operand where the first has ones, and those of the third elsewhere.
#[cfg(target_arch = "x86_64")]
pub(crate) const SELECT: i32 = 0xca;

/// A piece as BF16, and as it is coded.
type Plain = [u8; 2 * PIECE];
pub(crate) type Coded = [u8; PIECE_BYTES];

/// The blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compact {
    /// 2048 weights in 3088 bytes.
    C2048,
    /// 256 weights in 392 bytes.
    C256,
}

impl Compact {
    pub const ALL: [Compact; 2] = [Compact::C2048, Compact::C256];

    /// Returns the largest blocks of which rows of `columns` weights have a whole number, if there are any.
    pub fn of_row(columns: u64) -> Option<Compact> {
        let fits = |of: &Compact| columns > 0 && columns.is_multiple_of(of.weights() as u64);
        Compact::ALL.into_iter().find(fits)
    }

    /// Returns the number of weights of a block.
    pub const fn weights(self) -> usize {
        match self {
            Compact::C2048 => 2048,
            Compact::C256 => 256,
        }
    }

    /// Returns the number of bytes of the weights of a block as BF16.
    pub const fn plain_bytes(self) -> usize {
        2 * self.weights()
    }

    /// Returns the number of bytes of a block.
    pub const fn bytes(self) -> usize {
        self.header() + 2 + 2 * self.exceptions_max()
    }

    /// Returns the most weights of a block that its list has room for.
    pub const fn exceptions_max(self) -> usize {
        match self {
            Compact::C2048 => 7,
            Compact::C256 => 3,
        }
    }

    /// Returns the offset of the lowest exponent, which the number of exceptions and their list follow.
    pub const fn header(self) -> usize {
        self.weights() / PIECE * PIECE_BYTES
    }

    /// Returns the offset in a block of the byte of the weight in this column.
    pub const fn byte_at(column: usize) -> usize {
        column / PIECE * PIECE_BYTES + column % PIECE
    }

    /// Returns the offset in a block of the word of the eight weights from this column on.
    pub const fn word_at(column: usize) -> usize {
        column / PIECE * PIECE_BYTES + PIECE + column % PIECE / LANE * 4
    }
}

/// Encodes whole blocks of BF16 weights, little-endian. Returns false if a block has more exceptions than its list has room for, or
/// numbers that no entry can say: very large or small ones beside others, infinities, NaNs. `coded` is then not to be used.
///
/// # Errors
/// Returns an error if the lengths are not those of equally many blocks.
pub fn encode_compact(of: Compact, weights: &[u8], coded: &mut [u8]) -> Result<bool, CodecError> {
    encode_compact_with(Isa::best(), of, weights, coded)
}

/// Encodes like [`encode_compact`] with the instructions of `isa`.
///
/// # Errors
/// Returns the errors of [`encode_compact`].
///
/// # Panics
/// Panics if the processor has no such instructions.
pub fn encode_compact_with(
    isa: Isa,
    of: Compact,
    weights: &[u8],
    coded: &mut [u8],
) -> Result<bool, CodecError> {
    check_lengths(of, coded.len(), weights.len())?;
    Ok(encode_blocks(isa, of, weights, coded).is_some())
}

/// Decodes whole blocks to BF16 weights, little-endian.
///
/// # Errors
/// Returns an error if the lengths are not those of equally many blocks, or if a block is not as [`encode_compact`] makes it.
pub fn decode_compact(of: Compact, coded: &[u8], weights: &mut [u8]) -> Result<(), CodecError> {
    decode_compact_with(Isa::best(), of, coded, weights)
}

/// Decodes like [`decode_compact`] with the instructions of `isa`.
///
/// # Errors
/// Returns the errors of [`decode_compact`].
///
/// # Panics
/// Panics if the processor has no such instructions.
pub fn decode_compact_with(
    isa: Isa,
    of: Compact,
    coded: &[u8],
    weights: &mut [u8],
) -> Result<(), CodecError> {
    check_lengths(of, coded.len(), weights.len())?;
    decode_blocks(isa, of, coded, weights)
}

/// Calls `take` with every eight weights of a block, as bits, and the column of the first one. Blocks that [`decode_compact`] refuses give
/// some weights.
///
/// # Panics
/// Panics if `coded` is not as long as a block.
#[inline]
pub fn decode_compact_block(of: Compact, coded: &[u8], mut take: impl FnMut(usize, [u16; LANE])) {
    assert_eq!(coded.len(), of.bytes());
    let (base, has_exceptions) = (coded[of.header()], coded[of.header() + 1] > 0);
    let pieces = coded[..of.header()].as_chunks::<PIECE_BYTES>().0.iter();
    let eights = pieces.flat_map(|piece| {
        let (low, words) = piece.split_at(PIECE);
        low.as_chunks::<LANE>().0.iter().zip(words.as_chunks().0)
    });
    for (eight, (low, word)) in eights.enumerate() {
        let word = u32::from_le_bytes(*word);
        let mut weights = [0; LANE];
        for (i, pair) in weights.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let high = word.rotate_left(4 * i as u32);
            for (j, weight) in pair.iter_mut().enumerate() {
                let bits = (high >> (16 * j)) as u16 & 0x8700 | u16::from(low[2 * i + j]);
                *weight = bits.wrapping_add(u16::from(base) << 7);
            }
        }
        if has_exceptions {
            for (column, exponent) in compact_exceptions(&coded[of.header()..]) {
                if let Some(weight) = weights.get_mut(column.wrapping_sub(LANE * eight)) {
                    *weight = *weight & 0x807f | u16::from(exponent) << 7;
                }
            }
        }
        take(LANE * eight, weights);
    }
}

/// Returns the columns and exponents of the exceptions of a block, given its bytes from the lowest exponent on. Columns may be beyond the
/// block, and exponents wrong, if [`decode_compact`] refuses the block.
///
/// # Panics
/// Panics if `end` is shorter than the two bytes before the list.
#[inline]
pub fn compact_exceptions(end: &[u8]) -> impl Iterator<Item = (usize, u8)> {
    entries(end).map(|entry| {
        let exponent = exponent_of(entry >> POSITION_BITS, end[0]) as u8;
        (usize::from(entry & COLUMN_MASK), exponent)
    })
}

fn check_lengths(of: Compact, coded: usize, weights: usize) -> Result<(), CodecError> {
    let (blocks, block_bytes) = (weights / of.plain_bytes(), of.plain_bytes());
    if !weights.is_multiple_of(block_bytes) {
        return Err(CodecError::PartOfABlock { bytes: weights, block_bytes });
    }
    match blocks * of.bytes() {
        needed if needed == coded => Ok(()),
        needed => Err(CodecError::ChunkLength { bytes: coded, needed }),
    }
}

/// Checks what a block says about its exceptions.
fn check_block(of: Compact, coded: &[u8]) -> Result<(), CodecError> {
    let end = &coded[of.header()..];
    let (base, count) = (end[0], end[1]);
    let mut columns = entries(end).map(|entry| entry & COLUMN_MASK);
    let is_right = usize::from(base) <= BASE_MAX
        && usize::from(count) <= of.exceptions_max()
        && columns.clone().is_sorted_by(|a, b| a < b)
        && columns.all(|column| usize::from(column) < of.weights())
        && entries(end)
            .all(|entry| code_of(exponent_of(entry >> POSITION_BITS, base), base).is_some());
    match is_right {
        true => Ok(()),
        false => Err(CodecError::Block { base, exceptions: count }),
    }
}

/// Returns the entries of a block's list, given the block's bytes from the lowest exponent on.
#[inline]
fn entries(end: &[u8]) -> impl Iterator<Item = u16> + Clone {
    let list = end[2..].as_chunks().0.iter().take(usize::from(end[1]));
    list.map(|entry| u16::from_le_bytes(*entry))
}

/// Returns the exponent that an entry's code means. A code that no encoder writes may mean one of more than eight bits.
fn exponent_of(code: u16, base: u8) -> u16 {
    let base = u16::from(base);
    match code {
        0 => 0,
        1..=BELOW => base.wrapping_sub(code),
        above => base + WINDOW as u16 + above - BELOW - 1,
    }
}

/// Returns the code of an exponent outside of the window.
fn code_of(exponent: u16, base: u8) -> Option<u16> {
    let base = u16::from(base);
    let first_above = base + WINDOW as u16;
    let code = match exponent {
        0 => 0,
        _ if exponent < base => base - exponent,
        _ if (first_above..256).contains(&exponent) => BELOW + 1 + exponent - first_above,
        _ => return None,
    };
    let fits = if exponent < base { code <= BELOW } else { code < 1 << (16 - POSITION_BITS) };
    fits.then_some(code)
}
