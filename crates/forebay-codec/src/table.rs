//! The table of a tensor: which exponents are frequent.

use crate::steps::split_blocks_with;
use crate::{CodecError, Float, Isa, Weights};

/// Number of exponents with a code of their own: three of the first level, three of the second, fifteen of the third.
pub(crate) const CODES: usize = 21;
/// First code of each level.
pub(crate) const SECOND: usize = 3;
pub(crate) const THIRD: usize = 6;

/// Chunks that [`Table::of`] looks at, at most. They are spread evenly.
const CHUNKS_SAMPLED: usize = 16;

/// Weights of a chunk that choose its base. Any base gives the same weights; a frequent exponent gives fewer bytes.
pub(crate) const SAMPLED: usize = 1024;
/// Weights of whole blocks that hold so many.
const SAMPLED_MAX: usize = 2048;

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
        Table::with_bases(weights.into(), bytes).map(|(table, _)| table)
    }

    /// Returns the table for `weights`, and the bases of the chunks that it looked at.
    ///
    /// # Errors
    /// Returns the errors of [`Table::of`].
    pub(crate) fn with_bases(weights: Weights, bytes: &[u8]) -> Result<(Table, Bases), CodecError> {
        weights.in_bytes(bytes.len())?;
        let isa = Isa::best();
        let chunks = bytes.chunks(weights.chunk_bytes());
        let step = chunks.len().div_ceil(CHUNKS_SAMPLED).max(1);
        let mut bases = Bases { step, of: [0; CHUNKS_SAMPLED] };
        let mut of_offset = [0_u32; 256];
        for (chunk, own) in chunks.step_by(step).zip(&mut bases.of) {
            let counts = first_counts(isa, weights, chunk);
            *own = most_frequent(&counts);
            // Wide sums of a rotated table are faster than a place for each exponent.
            let (below, from) = counts.split_at(usize::from(*own));
            let counts = from.iter().chain(below);
            of_offset.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        // Offsets that do not occur come last, those near the base first.
        let mut keys: [u64; 256] = std::array::from_fn(|offset| {
            let distance = (offset as u8 as i8).unsigned_abs();
            u64::from(!of_offset[offset]) << 16 | u64::from(distance) << 8 | offset as u64
        });
        keys.select_nth_unstable(CODES);
        keys[..CODES].sort_unstable();
        Ok((Table { offsets: std::array::from_fn(|rank| keys[rank] as u8) }, bases))
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

/// The bases of the chunks of a tensor that its table was made from.
pub(crate) struct Bases {
    step: usize,
    of: [u8; CHUNKS_SAMPLED],
}

impl Bases {
    /// Returns the base of a chunk, if the table was made from it.
    pub fn get(&self, chunk: usize) -> Option<u8> {
        let sampled = chunk.is_multiple_of(self.step);
        self.of.get(chunk / self.step).copied().filter(|_| sampled)
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

/// Counts the exponents of the first weights of a chunk.
fn first_counts(isa: Isa, weights: Weights, chunk: &[u8]) -> [u32; 256] {
    let mut exponents = [0; SAMPLED_MAX];
    let count = match weights {
        Weights::Plain(float) => {
            let count = (chunk.len() / float.bytes()).min(SAMPLED);
            let bytes = &chunk[..count * float.bytes()];
            match float {
                Float::Bf16 => split_two(Float::Bf16, bytes, &mut exponents),
                Float::F16 => split_two(Float::F16, bytes, &mut exponents),
                _ => exponents.iter_mut().zip(bytes).for_each(|(exponent, weight)| {
                    *exponent = float.split(u16::from(*weight)).0;
                }),
            }
            count
        }
        Weights::Compact(of) => {
            let blocks = SAMPLED.div_ceil(of.weights()) * of.bytes();
            let sampled = &chunk[..chunk.len().min(blocks)];
            split_blocks_with(isa, of, sampled, &mut exponents, &mut [0; SAMPLED_MAX]);
            weights.whole_weights(sampled.len()).min(SAMPLED)
        }
    };
    counts_of(&exponents[..count])
}

/// Takes the exponents from weights of two bytes.
#[inline(always)]
fn split_two(float: Float, weights: &[u8], exponents: &mut [u8]) {
    for (exponent, weight) in exponents.iter_mut().zip(weights.as_chunks::<2>().0) {
        *exponent = float.split(u16::from_le_bytes(*weight)).0;
    }
}

/// Returns the most frequent exponent; the lowest of several.
pub(crate) fn most_frequent(counts: &[u32; 256]) -> u8 {
    // One number for each, so that the largest is found without branches.
    let keys = counts.iter().zip(0..).map(|(count, exponent)| count << 8 | (255 - exponent));
    255 - keys.fold(0, u32::max) as u8
}
