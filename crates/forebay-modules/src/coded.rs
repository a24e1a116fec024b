//! Weights in RAM: coded without loss where that makes them smaller.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use forebay_codec::{CHUNK_BYTES, Codec, CodecError, Decoder, Encoder, Encoding, Weights};

use crate::room::aligned;

/// Coded chunks that are larger than this share of the plain ones stay plain.
const WORTH: f64 = 0.95;

/// One tensor of a group.
pub struct GroupTensor<'a> {
    pub bytes: &'a [u8],
    /// What its elements are, if they can be coded.
    pub weights: Option<Weights>,
}

/// Tensors that are in a device together. They do not change.
pub struct CodedGroup {
    chunks: Vec<CodedChunk>,
    tensors: Vec<TensorPlace>,
    bytes: u64,
    coded_bytes: u64,
}

/// Where a tensor is in its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorPlace {
    /// Where it begins in the device, counted from the first byte of the group.
    pub at: u64,
    pub bytes: u64,
}

/// Up to [`CHUNK_BYTES`] bytes of a tensor.
pub struct CodedChunk {
    /// [`Codec::Raw`] or [`Codec::Exponents`].
    pub codec: Codec,
    pub coded: Box<[u8]>,
    /// Where the bytes go, counted from the first byte of the group.
    pub at: u64,
    /// Number of bytes when they are decoded.
    pub bytes: usize,
}

impl CodedGroup {
    pub fn chunks(&self) -> &[CodedChunk] {
        &self.chunks
    }

    /// Returns the places of the tensors, in their order.
    pub fn tensors(&self) -> &[TensorPlace] {
        &self.tensors
    }

    /// Returns the bytes that the group needs in a device.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes of its chunks in RAM.
    pub fn coded_bytes(&self) -> u64 {
        self.coded_bytes
    }

    /// Decodes the whole group. What is between tensors stays as it is.
    ///
    /// # Errors
    /// Returns an error if a chunk is damaged.
    ///
    /// # Panics
    /// Panics if `out` has fewer bytes than the group.
    pub fn decode(&self, out: &mut [u8]) -> Result<(), CodecError> {
        let mut decoder = Decoder::default();
        self.chunks.iter().try_for_each(|chunk| {
            let out = &mut out[chunk.at as usize..][..chunk.bytes];
            decoder.decode(chunk.codec, &chunk.coded, out)
        })
    }

    /// Decodes one tensor.
    ///
    /// # Errors
    /// Returns an error if a chunk is damaged.
    ///
    /// # Panics
    /// Panics if there is no such tensor.
    pub fn decode_tensor(&self, index: usize) -> Result<Vec<u8>, CodecError> {
        let TensorPlace { at, bytes } = self.tensors[index];
        let mut out = vec![0; bytes as usize];
        let mut decoder = Decoder::default();
        let own = self.chunks.iter().filter(|chunk| (at..at + bytes).contains(&chunk.at));
        for chunk in own {
            let out = &mut out[(chunk.at - at) as usize..][..chunk.bytes];
            decoder.decode(chunk.codec, &chunk.coded, out)?;
        }
        Ok(out)
    }
}

/// Codes the tensors of a group with so many threads.
///
/// # Errors
/// Returns an error if the tensors are too large for the codec.
pub fn encode(tensors: &[GroupTensor<'_>], threads: usize) -> Result<CodedGroup, CodecError> {
    let mut places = Vec::new();
    let mut end = 0;
    let mut plain = Vec::new();
    for tensor in tensors {
        let bytes = tensor.bytes.len() as u64;
        places.push(TensorPlace { at: end, bytes });
        for (index, chunk) in tensor.bytes.chunks(CHUNK_BYTES).enumerate() {
            plain.push((end + (index * CHUNK_BYTES) as u64, chunk, tensor.weights));
        }
        end += aligned(bytes);
    }
    let next = AtomicUsize::new(0);
    let chunks = Mutex::new(Vec::new());
    let work = || {
        while let Some((at, plain, weights)) = plain.get(next.fetch_add(1, Ordering::Relaxed)) {
            let chunk = encode_chunk(*at, plain, *weights);
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
    let coded_bytes = chunks.iter().map(|chunk| chunk.coded.len() as u64).sum();
    Ok(CodedGroup { chunks, tensors: places, bytes: end, coded_bytes })
}

fn encode_chunk(at: u64, plain: &[u8], weights: Option<Weights>) -> Result<CodedChunk, CodecError> {
    let bytes = plain.len();
    if let Some(weights) = weights {
        let mut coded = Vec::new();
        Encoder::new(Encoding::Exponents(weights)).encode(plain, &mut coded)?;
        if (coded.len() as f64) < WORTH * bytes as f64 {
            let coded = coded.into_boxed_slice();
            return Ok(CodedChunk { codec: Codec::Exponents, coded, at, bytes });
        }
    }
    Ok(CodedChunk { codec: Codec::Raw, coded: plain.into(), at, bytes })
}

#[cfg(test)]
mod tests {
    use forebay_codec::Float;

    use super::*;

    #[test]
    fn groups_come_back_to_the_byte() {
        let mut random = fastrand::Rng::with_seed(1);
        let weights: Vec<u8> = (0..3 * CHUNK_BYTES / 4)
            .flat_map(|_| ((random.f32() - 0.5).to_bits() >> 16).to_le_bytes()[..2].to_vec())
            .collect();
        let noise: Vec<u8> = (0..5001).map(|_| random.u8(..)).collect();
        let bf16 = Some(Weights::Plain(Float::Bf16));
        let tensors = [
            GroupTensor { bytes: &weights, weights: bf16 },
            GroupTensor { bytes: &noise, weights: None },
            GroupTensor { bytes: &[], weights: bf16 },
            GroupTensor { bytes: &noise[..4000], weights: bf16 },
        ];
        for threads in [1, 3] {
            let group = encode(&tensors, threads).unwrap();
            assert!(group.coded_bytes() < weights.len() as u64 * 3 / 4 + 10_000);
            let mut all = vec![7; group.bytes() as usize];
            group.decode(&mut all).unwrap();
            for (index, (tensor, place)) in tensors.iter().zip(group.tensors()).enumerate() {
                let TensorPlace { at, bytes } = *place;
                assert_eq!(all[at as usize..][..bytes as usize], *tensor.bytes);
                assert_eq!(group.decode_tensor(index).unwrap(), tensor.bytes);
            }
            // Noise is not worth coding.
            let last = group.chunks().last().unwrap();
            assert_eq!((last.codec, last.bytes), (Codec::Raw, 4000));
        }
    }
}
