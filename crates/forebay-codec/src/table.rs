//! The table of a tensor: which exponents are frequent.

use std::cmp::Reverse;

use crate::blocks::split_blocks;
use crate::{CHUNK_WEIGHTS, CodecError, Float, Weights};

/// Number of exponents with a code of their own: three of the first level, three of the second, fifteen of the third.
pub(crate) const CODES: usize = 21;
/// First code of each level.
pub(crate) const SECOND: usize = 3;
pub(crate) const THIRD: usize = 6;

/// Chunks that [`Table::of`] looks at, at most. They are spread evenly.
const CHUNKS_SAMPLED: usize = 16;

/// Weights of a chunk that choose its base. Any base gives the same weights; a frequent exponent gives fewer bytes.
pub(crate) const SAMPLED: usize = 1024;

/// Offsets of exponents to the base of a chunk, the most frequent first. All chunks of a tensor share one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    pub(crate) offsets: [u8; CODES],
}

impl Table {
    pub const BYTES: usize = CODES;

    /// Returns the table for `weights`, of any number.
    ///
    /// # Errors
    /// Returns an error if these are no whole weights or blocks.
    pub fn of(weights: impl Into<Weights>, bytes: &[u8]) -> Result<Table, CodecError> {
        let weights = weights.into();
        weights.in_bytes(bytes.len())?;
        let chunks = bytes.chunks(weights.chunk_bytes());
        let step = chunks.len().div_ceil(CHUNKS_SAMPLED).max(1);
        let mut of_offset = [0_u64; 256];
        for chunk in chunks.step_by(step) {
            let counts = counts_of(&first_exponents(weights, chunk));
            let base = most_frequent(&counts);
            for (exponent, count) in counts.iter().enumerate() {
                of_offset[usize::from((exponent as u8).wrapping_sub(base))] += u64::from(*count);
            }
        }
        // Offsets that do not occur come last, those near the base first.
        let distance = |offset: u8| (offset as i8).unsigned_abs();
        let mut offsets: Vec<u8> = (0..=255).collect();
        offsets.sort_by_key(|&offset| {
            (Reverse(of_offset[usize::from(offset)]), distance(offset), offset)
        });
        Ok(Table { offsets: std::array::from_fn(|rank| offsets[rank]) })
    }

    /// Returns the table as it is stored.
    pub fn to_bytes(&self) -> [u8; Table::BYTES] {
        self.offsets
    }

    /// Reads a table.
    ///
    /// # Errors
    /// Returns an error if it has another length, or names an offset twice.
    pub fn from_bytes(bytes: &[u8]) -> Result<Table, CodecError> {
        let Ok(offsets) = <[u8; CODES]>::try_from(bytes) else {
            return Err(CodecError::TableLength { bytes: bytes.len(), needed: CODES });
        };
        for (index, offset) in offsets.iter().enumerate() {
            if offsets[..index].contains(offset) {
                return Err(CodecError::TableRepeats { offset: *offset });
            }
        }
        Ok(Table { offsets })
    }

    /// Returns the exponents of all codes, in a chunk with this base.
    pub(crate) fn exponents(&self, base: u8) -> [u8; CODES] {
        self.offsets.map(|offset| base.wrapping_add(offset))
    }
}

/// Counts exponents.
pub(crate) fn counts_of(exponents: &[u8]) -> [u32; 256] {
    // Equal neighbours would wait for each other in one array.
    let mut counts = [[0_u32; 256]; 4];
    let (fours, rest) = exponents.as_chunks::<4>();
    for four in fours {
        for (counts, exponent) in counts.iter_mut().zip(four) {
            counts[usize::from(*exponent)] += 1;
        }
    }
    rest.iter().for_each(|exponent| counts[0][usize::from(*exponent)] += 1);
    std::array::from_fn(|exponent| counts.iter().map(|counts| counts[exponent]).sum())
}

/// Returns the exponents of the first weights of a chunk.
fn first_exponents(weights: Weights, chunk: &[u8]) -> Vec<u8> {
    match weights {
        Weights::Plain(float @ (Float::Bf16 | Float::F16)) => {
            let numbers = chunk.as_chunks::<2>().0.iter().take(SAMPLED);
            numbers.map(|weight| float.split(u16::from_le_bytes(*weight)).0).collect()
        }
        Weights::Plain(float) => {
            let numbers = chunk.iter().take(SAMPLED);
            numbers.map(|weight| float.split(u16::from(*weight)).0).collect()
        }
        Weights::Compact(of) => {
            let blocks = SAMPLED.div_ceil(of.weights()) * of.bytes();
            let sampled = &chunk[..chunk.len().min(blocks)];
            let mut exponents = vec![0; weights.whole_weights(sampled.len())];
            split_blocks(of, sampled, &mut exponents, &mut [0; CHUNK_WEIGHTS]);
            exponents.truncate(SAMPLED);
            exponents
        }
    }
}

/// Returns the most frequent exponent; the lowest of several.
pub(crate) fn most_frequent(counts: &[u32; 256]) -> u8 {
    let most =
        (0..=255_u8).max_by_key(|&exponent| (counts[usize::from(exponent)], Reverse(exponent)));
    most.unwrap_or_default()
}
