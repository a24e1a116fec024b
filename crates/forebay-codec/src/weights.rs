//! What the bytes of a chunk of codec `exponents` are.

use crate::layout::CHUNK_WEIGHTS;
use crate::{CodecError, Compact, Float};

/// Weights of codec `exponents`: numbers of a type, or compact blocks, which come back as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weights {
    Plain(Float),
    Compact(Compact),
}

impl From<Float> for Weights {
    fn from(float: Float) -> Weights {
        Weights::Plain(float)
    }
}

impl From<Compact> for Weights {
    fn from(of: Compact) -> Weights {
        Weights::Compact(of)
    }
}

impl Weights {
    pub const ALL: [Weights; 6] = [
        Weights::Plain(Float::Bf16),
        Weights::Plain(Float::F16),
        Weights::Plain(Float::F8E4M3),
        Weights::Plain(Float::F8E5M2),
        Weights::Compact(Compact::C2048),
        Weights::Compact(Compact::C256),
    ];

    /// Returns the number by which containers name these weights.
    pub const fn number(self) -> u8 {
        match self {
            Weights::Plain(float) => float.number(),
            Weights::Compact(Compact::C2048) => 4,
            Weights::Compact(Compact::C256) => 5,
        }
    }

    pub fn from_number(number: u8) -> Option<Weights> {
        Weights::ALL.into_iter().find(|weights| weights.number() == number)
    }

    /// Returns the number of bytes that `weights` weights have. They must be whole blocks, where there are blocks.
    pub const fn bytes_of(self, weights: usize) -> usize {
        match self {
            Weights::Plain(float) => weights * float.bytes(),
            Weights::Compact(of) => weights / of.weights() * of.bytes(),
        }
    }

    /// Returns the number of bytes of [`CHUNK_WEIGHTS`] weights.
    pub const fn chunk_bytes(self) -> usize {
        self.bytes_of(CHUNK_WEIGHTS)
    }

    /// Returns the number of weights of which `bytes` bytes hold all bits: whole numbers, or those of whole blocks.
    pub const fn whole_weights(self, bytes: usize) -> usize {
        match self {
            Weights::Plain(float) => bytes / float.bytes(),
            Weights::Compact(of) => bytes / of.bytes() * of.weights(),
        }
    }

    /// Returns the number of bits of a weight that are stored as they are.
    pub(crate) const fn rest_bits(self) -> u32 {
        match self {
            Weights::Plain(float) => float.rest_bits(),
            Weights::Compact(_) => 8,
        }
    }

    /// Returns the number of weights in `bytes` bytes.
    ///
    /// # Errors
    /// Returns an error if they are no whole weights or blocks.
    pub(crate) fn in_bytes(self, bytes: usize) -> Result<usize, CodecError> {
        let weights = self.whole_weights(bytes);
        if self.bytes_of(weights) == bytes {
            return Ok(weights);
        }
        Err(match self {
            Weights::Plain(float) => {
                CodecError::PartOfAWeight { bytes, weight_bytes: float.bytes() }
            }
            Weights::Compact(of) => CodecError::PartOfABlock { bytes, block_bytes: of.bytes() },
        })
    }

    /// Returns the number of weights in the `bytes` bytes of a chunk.
    ///
    /// # Errors
    /// Returns an error if they are no whole weights or blocks, or too many or none for a chunk.
    pub(crate) fn in_chunk(self, bytes: usize) -> Result<usize, CodecError> {
        let weights = self.in_bytes(bytes)?;
        if !(1..=CHUNK_WEIGHTS).contains(&weights) {
            return Err(CodecError::ChunkSize { weights, most: CHUNK_WEIGHTS });
        }
        Ok(weights)
    }
}
