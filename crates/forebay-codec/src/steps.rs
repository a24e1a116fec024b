//! Steps of encoding that depend on the processor. Results do not.

use crate::bits::{equal, gather};
use crate::blocks::{Piece, first_exponent, split_piece};
#[cfg(target_arch = "x86_64")]
use crate::blocks::{split_piece_avx2, split_piece_avx512};
use crate::compact::{Coded, PIECE, PIECE_BYTES};
use crate::{CHUNK_WEIGHTS, Compact, Isa};

/// A byte for each weight of a chunk, with room for whole words of 64 behind the last.
pub(crate) type Bytes = [u8; CHUNK_WEIGHTS + 64];

pub(crate) const NO_BYTES: Bytes = [0; CHUNK_WEIGHTS + 64];

/// The bitmaps of the low and the high bits of codes.
pub(crate) type Maps<'a> = (&'a mut [u8], &'a mut [u8]);

pub(crate) trait Steps {
    /// Writes the codes of exponents to `maps`: the position in `of`, or 3 if it is not there. Such exponents go to `others`. Returns
    /// their number. A bitmap has a bit for each of `exponents` up to the next multiple of 32.
    fn level(exponents: &Bytes, of: [u8; 3], maps: Maps<'_>, others: &mut Bytes) -> usize;

    /// Writes a bitmap of bit `bit` of each of `bytes`.
    fn bitmap(bytes: &Bytes, bit: u32, bitmap: &mut [u8]);

    /// Takes a piece of a compact block apart, like [`split_piece`].
    fn piece(piece: &Coded, first: u8, exponents: &mut Piece, rest: &mut Piece);
}

/// Takes eight bytes at a time.
pub(crate) struct Eights;

impl Steps for Eights {
    #[inline(always)]
    fn level(exponents: &Bytes, of: [u8; 3], (low, high): Maps<'_>, others: &mut Bytes) -> usize {
        let mut count = 0;
        let bitmaps = low.iter_mut().zip(high);
        for (eight, (low, high)) in exponents.as_chunks::<8>().0.iter().zip(bitmaps) {
            let word = u64::from_le_bytes(*eight);
            let [zero, one, two] = of.map(|exponent| equal(word, exponent));
            let three = !(zero | one | two) & 0x8080_8080_8080_8080;
            (*low, *high) = (gather((one | three) >> 7), gather((two | three) >> 7));
            let mut left = three;
            while left != 0 {
                others[count] = eight[left.trailing_zeros() as usize / 8];
                count += 1;
                left &= left - 1;
            }
        }
        count
    }

    #[inline(always)]
    fn bitmap(bytes: &Bytes, bit: u32, bitmap: &mut [u8]) {
        for (eight, to) in bytes.as_chunks::<8>().0.iter().zip(bitmap) {
            *to = gather(u64::from_le_bytes(*eight) >> bit);
        }
    }

    #[inline(always)]
    fn piece(piece: &Coded, first: u8, exponents: &mut Piece, rest: &mut Piece) {
        split_piece(piece, first, exponents, rest);
    }
}

/// Takes 32 bytes at a time. Only functions that are compiled for AVX2, BMI2 and POPCNT may use this.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Steps for Avx2 {
    #[inline(always)]
    fn level(exponents: &Bytes, of: [u8; 3], (low, high): Maps<'_>, others: &mut Bytes) -> usize {
        use std::arch::x86_64::*;
        let mut count = 0;
        let bitmaps = low.as_chunks_mut::<4>().0.iter_mut().zip(high.as_chunks_mut::<4>().0);
        for (bytes, (low, high)) in exponents.as_chunks::<32>().0.iter().zip(bitmaps) {
            // SAFETY: the processor has the instructions, as the type says. 32 bytes are read.
            let (one_or_three, two_or_three, three, counted) = unsafe {
                let bytes = _mm256_loadu_si256(bytes.as_ptr().cast());
                let zero = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(of[0] as i8));
                let one = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(of[1] as i8));
                let two = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(of[2] as i8));
                let zero_or_one = _mm256_or_si256(zero, one);
                let zero_or_two = _mm256_or_si256(zero, two);
                let any = _mm256_or_si256(zero_or_one, two);
                let three = _mm256_andnot_si256(any, _mm256_set1_epi8(-1));
                let words = [
                    _mm256_extract_epi64(three, 0),
                    _mm256_extract_epi64(three, 1),
                    _mm256_extract_epi64(three, 2),
                    _mm256_extract_epi64(three, 3),
                ];
                let counted = _mm256_movemask_epi8(three) as u32;
                // Neither code 0 nor 2 is code 1 or 3.
                let odd = !_mm256_movemask_epi8(zero_or_two) as u32;
                (odd, !_mm256_movemask_epi8(zero_or_one) as u32, words, counted)
            };
            (*low, *high) = (one_or_three.to_le_bytes(), two_or_three.to_le_bytes());
            for (index, (word, three)) in bytes.as_chunks::<8>().0.iter().zip(three).enumerate() {
                // SAFETY: the processor has the instruction, as the type says.
                let kept = unsafe { _pext_u64(u64::from_le_bytes(*word), three as u64) };
                others[count..count + 8].copy_from_slice(&kept.to_le_bytes());
                count += (counted >> (8 * index) & 0xff).count_ones() as usize;
            }
        }
        count
    }

    #[inline(always)]
    fn bitmap(bytes: &Bytes, bit: u32, bitmap: &mut [u8]) {
        use std::arch::x86_64::*;
        let bitmap = bitmap.as_chunks_mut::<4>().0;
        for (bytes, to) in bytes.as_chunks::<32>().0.iter().zip(bitmap) {
            // SAFETY: the processor has the instructions, as the type says. 32 bytes are read.
            let bits = unsafe {
                let bytes = _mm256_loadu_si256(bytes.as_ptr().cast());
                let up = _mm_cvtsi32_si128(7 - bit as i32);
                _mm256_movemask_epi8(_mm256_sll_epi16(bytes, up)) as u32
            };
            *to = bits.to_le_bytes();
        }
    }

    #[inline(always)]
    fn piece(piece: &Coded, first: u8, exponents: &mut Piece, rest: &mut Piece) {
        // SAFETY: the processor has the instructions, as the type says.
        unsafe { split_piece_avx2(piece, first, exponents, rest) }
    }
}

/// Takes 64 bytes at a time. Only functions that are compiled for AVX-512 F, BW, VL and VBMI2, and POPCNT, may use this.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Steps for Avx512 {
    #[inline(always)]
    fn level(exponents: &Bytes, of: [u8; 3], (low, high): Maps<'_>, others: &mut Bytes) -> usize {
        use std::arch::x86_64::*;
        let mut count = 0;
        let bitmaps = low.chunks_mut(8).zip(high.chunks_mut(8));
        for (bytes, (low, high)) in exponents.as_chunks::<64>().0.iter().zip(bitmaps) {
            let to = &mut others[count..count + 64];
            // SAFETY: the processor has the instructions, as the type says. 64 bytes are read, and written to `to`.
            let (zero, one, two) = unsafe {
                let bytes = _mm512_loadu_epi8(bytes.as_ptr().cast());
                let zero = _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(of[0] as i8));
                let one = _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(of[1] as i8));
                let two = _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(of[2] as i8));
                let kept = _mm512_maskz_compress_epi8(!(zero | one | two), bytes);
                _mm512_storeu_epi8(to.as_mut_ptr().cast(), kept);
                (zero, one, two)
            };
            put(!(zero | two), low);
            put(!(zero | one), high);
            count += (zero | one | two).count_zeros() as usize;
        }
        count
    }

    #[inline(always)]
    fn bitmap(bytes: &Bytes, bit: u32, bitmap: &mut [u8]) {
        use std::arch::x86_64::*;
        for (bytes, to) in bytes.as_chunks::<64>().0.iter().zip(bitmap.chunks_mut(8)) {
            // SAFETY: the processor has the instructions, as the type says. 64 bytes are read.
            let bits = unsafe {
                let bytes = _mm512_loadu_epi8(bytes.as_ptr().cast());
                _mm512_test_epi8_mask(bytes, _mm512_set1_epi8(1 << bit))
            };
            put(bits, to);
        }
    }

    #[inline(always)]
    fn piece(piece: &Coded, first: u8, exponents: &mut Piece, rest: &mut Piece) {
        // SAFETY: the processor has the instructions, as the type says.
        unsafe { split_piece_avx512(piece, first, exponents, rest) }
    }
}

/// Takes blocks apart: the exponents of the weights, without regard to exceptions, and their other bits.
#[inline(always)]
pub(crate) fn split_blocks<S: Steps>(
    of: Compact,
    blocks: &[u8],
    exponents: &mut [u8],
    rest: &mut [u8],
) {
    let mut to = exponents.as_chunks_mut::<PIECE>().0.iter_mut().zip(rest.as_chunks_mut().0);
    for block in blocks.chunks_exact(of.bytes()) {
        let (pieces, end) = block.split_at(of.header());
        let first = first_exponent(end[0]);
        let pieces = pieces.as_chunks::<PIECE_BYTES>().0.iter();
        for (piece, (exponents, rest)) in pieces.zip(&mut to) {
            S::piece(piece, first, exponents, rest);
        }
    }
}

/// Does the same with the instructions of `isa`.
///
/// # Panics
/// Panics if the processor has no such instructions.
pub(crate) fn split_blocks_with(
    isa: Isa,
    of: Compact,
    blocks: &[u8],
    exponents: &mut [u8],
    rest: &mut [u8],
) {
    assert!(isa.is_available(), "{isa:?} on a processor without it");
    match isa {
        Isa::Portable => split_blocks::<Eights>(of, blocks, exponents, rest),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the check above.
        Isa::Avx2 => unsafe { split_avx2(of, blocks, exponents, rest) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the check above.
        Isa::Avx512 => unsafe { split_avx512(of, blocks, exponents, rest) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("it is not available"),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn split_avx2(of: Compact, blocks: &[u8], exponents: &mut [u8], rest: &mut [u8]) {
    split_blocks::<Avx2>(of, blocks, exponents, rest);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
fn split_avx512(of: Compact, blocks: &[u8], exponents: &mut [u8], rest: &mut [u8]) {
    split_blocks::<Avx512>(of, blocks, exponents, rest);
}

/// Writes the lowest bytes of `bits`, at most eight.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn put(bits: u64, to: &mut [u8]) {
    match to.first_chunk_mut::<8>() {
        Some(to) => *to = bits.to_le_bytes(),
        None => to.copy_from_slice(&bits.to_le_bytes()[..to.len()]),
    }
}
