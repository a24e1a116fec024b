//! Decoding of compact blocks: the same weights on every processor.

#[cfg(target_arch = "x86_64")]
use super::{Coded, IN_WORD, PIECE, Plain, compact_exceptions};
use super::{Compact, LANE, check_block, decode_compact_block};
use crate::{CodecError, Isa};

/// Decodes blocks.
///
/// # Panics
/// Panics if the processor does not have the instructions of `isa`.
pub(super) fn decode_blocks(
    isa: Isa,
    of: Compact,
    coded: &[u8],
    weights: &mut [u8],
) -> Result<(), CodecError> {
    assert!(isa.is_available(), "{isa:?} on a processor without it");
    match isa {
        Isa::Portable => decode_eights(of, coded, weights),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the check above.
        Isa::Avx2 => unsafe { decode_avx2(of, coded, weights) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the check above.
        Isa::Avx512 => unsafe { decode_avx512(of, coded, weights) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("it is not available"),
    }
}

fn decode_eights(of: Compact, coded: &[u8], weights: &mut [u8]) -> Result<(), CodecError> {
    let blocks = coded.chunks_exact(of.bytes()).zip(weights.chunks_exact_mut(of.plain_bytes()));
    for (coded, weights) in blocks {
        check_block(of, coded)?;
        let mut all = weights.as_chunks_mut::<{ 2 * LANE }>().0.iter_mut();
        decode_compact_block(of, coded, |_, eight| {
            let bytes = all.next().map(|bytes| bytes.as_chunks_mut().0).unwrap_or_default();
            bytes.iter_mut().zip(eight).for_each(|(bytes, weight)| *bytes = weight.to_le_bytes());
        });
    }
    Ok(())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn decode_avx2(of: Compact, coded: &[u8], weights: &mut [u8]) -> Result<(), CodecError> {
    decode_all::<Avx2>(of, coded, weights)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,bmi1,bmi2,popcnt")]
fn decode_avx512(of: Compact, coded: &[u8], weights: &mut [u8]) -> Result<(), CodecError> {
    decode_all::<Avx512>(of, coded, weights)
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn decode_all<P: Pieces>(of: Compact, coded: &[u8], weights: &mut [u8]) -> Result<(), CodecError> {
    let blocks = coded.chunks_exact(of.bytes()).zip(weights.chunks_exact_mut(of.plain_bytes()));
    for (coded, weights) in blocks {
        check_block(of, coded)?;
        let (pieces, end) = coded.split_at(of.header());
        for (piece, weights) in pieces.as_chunks().0.iter().zip(weights.as_chunks_mut().0) {
            P::decode(piece, end[0], weights);
        }
        let weights = weights.as_chunks_mut().0;
        for (column, exponent) in compact_exceptions(end) {
            let bits = u16::from_le_bytes(weights[column]) & 0x807f | u16::from(exponent) << 7;
            weights[column] = bits.to_le_bytes();
        }
    }
    Ok(())
}

#[cfg(target_arch = "x86_64")]
trait Pieces {
    /// Decodes a piece of a block whose lowest exponent is `base`, without regard to exceptions.
    fn decode(coded: &Coded, base: u8, weights: &mut Plain);
}

/// Decodes 16 weights at a time. Only functions that are compiled for AVX2 may use this.
#[cfg(target_arch = "x86_64")]
struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Pieces for Avx2 {
    #[inline(always)]
    fn decode(coded: &Coded, base: u8, weights: &mut Plain) {
        use std::arch::x86_64::*;
        let (low, words) = coded.split_at(PIECE);
        let from = low.as_chunks::<16>().0.iter().zip(words.as_chunks::<8>().0);
        // SAFETY: the processor has the instructions, as the type says. Reads and writes are within the arrays of 16, 8 and 32 bytes.
        unsafe {
            let base = _mm256_set1_epi16(i16::from(base) << 7);
            let left = _mm256_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12);
            let right = _mm256_sub_epi32(_mm256_set1_epi32(32), left);
            let order = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
            for ((low, words), to) in from.zip(weights.as_chunks_mut::<32>().0) {
                let words = _mm256_castsi128_si256(_mm_loadl_epi64(words.as_ptr().cast()));
                let words = _mm256_permutevar8x32_epi32(words, order);
                let turned = _mm256_or_si256(
                    _mm256_sllv_epi32(words, left),
                    _mm256_srlv_epi32(words, right),
                );
                let high = _mm256_and_si256(turned, _mm256_set1_epi16(IN_WORD));
                let low = _mm256_cvtepu8_epi16(_mm_loadu_si128(low.as_ptr().cast()));
                let bits = _mm256_add_epi16(_mm256_or_si256(high, low), base);
                _mm256_storeu_si256(to.as_mut_ptr().cast(), bits);
            }
        }
    }
}

/// Decodes 32 weights at a time. Only functions that are compiled for AVX-512 F, BW and VL may use this.
#[cfg(target_arch = "x86_64")]
struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Pieces for Avx512 {
    #[inline(always)]
    fn decode(coded: &Coded, base: u8, weights: &mut Plain) {
        use std::arch::x86_64::*;
        let (low, words) = coded.split_at(PIECE);
        let from = low.as_chunks::<32>().0.iter().zip(words.as_chunks::<16>().0);
        // SAFETY: the processor has the instructions, as the type says. Reads and writes are within the arrays of 32, 16 and 64 bytes.
        unsafe {
            let base = _mm512_set1_epi16(i16::from(base) << 7);
            let turns = _mm512_set4_epi32(12, 8, 4, 0);
            let order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            for ((low, words), to) in from.zip(weights.as_chunks_mut::<64>().0) {
                let words = _mm512_castsi128_si512(_mm_loadu_si128(words.as_ptr().cast()));
                let turned = _mm512_rolv_epi32(_mm512_permutexvar_epi32(order, words), turns);
                let high = _mm512_and_si512(turned, _mm512_set1_epi16(IN_WORD));
                let low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(low.as_ptr().cast()));
                let bits = _mm512_add_epi16(_mm512_or_si512(high, low), base);
                _mm512_storeu_epi8(to.as_mut_ptr().cast(), bits);
            }
        }
    }
}
