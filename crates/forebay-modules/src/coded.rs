//! Weights in RAM: coded without loss where that makes them smaller.

use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use forebay_codec::{Codec, CodecError, Decoder, Encoder, Encoding, Weights};

use crate::device::DeviceError;
use crate::expansion::Expansion;
use crate::stored::damaged;

/// Coded chunks that are larger than this share of the plain ones stay plain.
const WORTH: f64 = 0.95;

/// Bytes in memory that others share.
#[derive(Clone)]
pub struct SharedBytes {
    memory: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// Returns a range of memory, which stays as long as this.
    ///
    /// # Panics
    /// Panics if the memory has no such range.
    pub fn of(memory: Arc<dyn AsRef<[u8]> + Send + Sync>, range: Range<usize>) -> SharedBytes {
        assert!(range.start <= range.end && range.end <= (*memory).as_ref().len());
        SharedBytes { memory, range }
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> SharedBytes {
        let range = 0..bytes.len();
        SharedBytes { memory: Arc::new(bytes.into_boxed_slice()), range }
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.memory).as_ref()[self.range.clone()]
    }
}

/// Up to [`forebay_codec::CHUNK_BYTES`] bytes of a tensor.
#[derive(Clone)]
pub struct CodedChunk {
    /// [`Codec::Raw`] or [`Codec::Exponents`].
    pub codec: Codec,
    pub coded: SharedBytes,
    /// Where the bytes go, counted from the first byte of the group.
    pub at: u64,
    /// Number of bytes when they are decoded.
    pub bytes: usize,
    /// What the bytes become then, if they are weights of another type.
    pub expansion: Option<Expansion>,
}

impl CodedChunk {
    /// Codes bytes, if that makes them clearly smaller. `scratch` is memory that later calls use again: what they return has memory of its
    /// exact size, so that none is lost between pieces of it.
    ///
    /// # Errors
    /// Returns an error if the bytes are too many for the codec.
    pub fn encode(
        at: u64,
        plain: &[u8],
        weights: Option<Weights>,
        scratch: &mut Vec<u8>,
    ) -> Result<CodedChunk, CodecError> {
        let of = |codec, coded: &[u8]| {
            let (coded, bytes) = (coded.to_vec().into(), plain.len());
            CodedChunk { codec, coded, at, bytes, expansion: None }
        };
        if let Some(weights) = weights {
            scratch.clear();
            Encoder::new(Encoding::Exponents(weights)).encode(plain, scratch)?;
            if (scratch.len() as f64) < WORTH * plain.len() as f64 {
                return Ok(of(Codec::Exponents, scratch));
            }
        }
        Ok(of(Codec::Raw, plain))
    }

    /// Decodes the chunk.
    ///
    /// # Errors
    /// Returns an error if the chunk is damaged.
    pub fn decode(&self, decoder: &mut Decoder, out: &mut [u8]) -> Result<(), DeviceError> {
        match self.expansion {
            Some(of) => of.decode(&self.coded, out).map_err(|error| damaged(&error)),
            None => decoder.decode(self.codec, &self.coded, out).map_err(|error| damaged(&error)),
        }
    }

    /// Decodes the chunk to its place in its group.
    ///
    /// # Errors
    /// Returns an error if the chunk is damaged.
    ///
    /// # Panics
    /// Panics if `group` has fewer bytes than the group.
    pub fn decode_in(&self, decoder: &mut Decoder, group: &mut [u8]) -> Result<(), DeviceError> {
        self.decode(decoder, &mut group[self.at as usize..][..self.bytes])
    }
}

/// Returns the bytes of chunks as they are in memory.
pub fn coded_bytes(chunks: &[CodedChunk]) -> u64 {
    chunks.iter().map(|chunk| chunk.coded.len() as u64).sum()
}

/// Codes chunks with so many threads: each is its place in the group, its bytes, and what they are if they can be coded. Returns them in the
/// order of their places.
///
/// # Errors
/// Returns an error if a chunk is too large for the codec.
pub fn encode(
    plain: &[(u64, &[u8], Option<Weights>)],
    threads: usize,
) -> Result<Vec<CodedChunk>, CodecError> {
    let next = AtomicUsize::new(0);
    let chunks = Mutex::new(Vec::new());
    let work = || {
        let mut scratch = Vec::new();
        while let Some((at, plain, weights)) = plain.get(next.fetch_add(1, Ordering::Relaxed)) {
            let chunk = CodedChunk::encode(*at, plain, *weights, &mut scratch);
            chunks.lock().unwrap_or_else(PoisonError::into_inner).push(chunk);
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(plain.len()) {
            scope.spawn(work);
        }
        work();
    });
    let chunks = chunks.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut chunks = chunks.into_iter().collect::<Result<Vec<CodedChunk>, CodecError>>()?;
    chunks.sort_unstable_by_key(|chunk| chunk.at);
    Ok(chunks)
}

#[cfg(test)]
mod tests {
    use forebay_codec::{CHUNK_BYTES, Float};

    use super::*;

    #[test]
    fn chunks_come_back_to_the_byte() {
        let mut random = fastrand::Rng::with_seed(1);
        let weights: Vec<u8> = (0..3 * CHUNK_BYTES / 4)
            .flat_map(|_| ((random.f32() - 0.5).to_bits() >> 16).to_le_bytes()[..2].to_vec())
            .collect();
        let noise: Vec<u8> = (0..5001).map(|_| random.u8(..)).collect();
        let bf16 = Some(Weights::Plain(Float::Bf16));
        let half = weights.len() / 2;
        let plain = [
            (0, &weights[..half], bf16),
            (half as u64, &weights[half..], bf16),
            (weights.len() as u64, &noise[..], None),
            (weights.len() as u64 + 5001, &noise[..4000], bf16),
        ];
        for threads in [1, 3] {
            let chunks = encode(&plain, threads).unwrap();
            let coded: usize = chunks.iter().map(|chunk| chunk.coded.len()).sum();
            assert!(coded < weights.len() * 3 / 4 + 10_000);
            let mut all = vec![7; weights.len() + 9001];
            let mut decoder = Decoder::default();
            chunks.iter().for_each(|chunk| chunk.decode_in(&mut decoder, &mut all).unwrap());
            assert_eq!(all, [&weights[..], &noise, &noise[..4000]].concat());
            // Noise is not worth coding.
            let last = chunks.last().unwrap();
            assert_eq!((last.codec, last.bytes), (Codec::Raw, 4000));
        }
    }
}
