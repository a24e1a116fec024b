//! Encoding of compact blocks: the same bytes on every processor.

use super::{BASE_MAX, Coded, Compact, LANE, PIECE, POSITION_BITS, Plain, WINDOW, code_of};
#[cfg(target_arch = "x86_64")]
use super::{IN_WORD, SELECT};
use crate::Isa;

/// A bit for each weight of a piece, from the lowest of the first word on: ones for those whose exponents are outside the window.
type Outside = [u32; PIECE / 32];

/// Encodes blocks. Returns `None` if the list of one has no room.
///
/// # Panics
/// Panics if the processor does not have the instructions of `isa`.
pub(super) fn encode_blocks(isa: Isa, of: Compact, weights: &[u8], coded: &mut [u8]) -> Option<()> {
    assert!(isa.is_available(), "{isa:?} on a processor without it");
    match isa {
        Isa::Portable => encode_all::<Eights>(of, weights, coded),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the check above.
        Isa::Avx2 => unsafe { encode_avx2(of, weights, coded) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the check above.
        Isa::Avx512 => unsafe { encode_avx512(of, weights, coded) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("it is not available"),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn encode_avx2(of: Compact, weights: &[u8], coded: &mut [u8]) -> Option<()> {
    encode_all::<Avx2>(of, weights, coded)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,bmi1,bmi2,popcnt")]
fn encode_avx512(of: Compact, weights: &[u8], coded: &mut [u8]) -> Option<()> {
    encode_all::<Avx512>(of, weights, coded)
}

#[inline(always)]
fn encode_all<P: Pieces>(of: Compact, weights: &[u8], coded: &mut [u8]) -> Option<()> {
    let blocks = weights.chunks_exact(of.plain_bytes()).zip(coded.chunks_exact_mut(of.bytes()));
    for (weights, coded) in blocks {
        let pieces = weights.as_chunks().0;
        let base = base_below(pieces.iter().map(P::largest).fold(0, u8::max));
        if encode_block::<P>(of, base, pieces, coded).is_none() {
            match base_of(of, base, weights.as_chunks().0) {
                same if same == base => return None,
                other => encode_block::<P>(of, other, pieces, coded)?,
            }
        }
    }
    Some(())
}

/// Encodes a block with this lowest exponent. Returns `None` if its list has no room.
#[inline(always)]
fn encode_block<P: Pieces>(
    of: Compact,
    base: u8,
    pieces: &[Plain],
    coded: &mut [u8],
) -> Option<()> {
    let (places, header) = coded.split_at_mut(of.header());
    header.fill(0);
    header[0] = base;
    for (index, (weights, coded)) in pieces.iter().zip(places.as_chunks_mut().0).enumerate() {
        let outside = P::encode(weights, base, coded);
        if outside != [0; PIECE / 32] {
            add_exceptions(of, header, index * PIECE, weights, outside)?;
        }
    }
    Some(())
}

/// Adds weights of a piece to the list of a block. Returns `None` if there is no room, or if no entry says an exponent.
#[cold]
fn add_exceptions(
    of: Compact,
    header: &mut [u8],
    first: usize,
    weights: &Plain,
    outside: Outside,
) -> Option<()> {
    for (index, mut left) in outside.into_iter().enumerate() {
        while left != 0 {
            let column = 32 * index + left.trailing_zeros() as usize;
            left &= left - 1;
            let at = usize::from(header[1]);
            let code = code_of(u16::from(exponent(weights.as_chunks().0[column])), header[0])?;
            if at == of.exceptions_max() {
                return None;
            }
            let entry = (first + column) as u16 | code << POSITION_BITS;
            header[2 + 2 * at..][..2].copy_from_slice(&entry.to_le_bytes());
            header[1] += 1;
        }
    }
    Some(())
}

fn exponent(weight: [u8; 2]) -> u8 {
    (u16::from_le_bytes(weight) >> 7) as u8
}

/// Encodes pieces of a block.
trait Pieces {
    /// Returns the largest exponent.
    fn largest(weights: &Plain) -> u8;

    /// Encodes a piece of a block whose lowest exponent is `base`. Weights outside the window, which it returns, get code 0.
    fn encode(weights: &Plain, base: u8, coded: &mut Coded) -> Outside;
}

/// Encodes eight weights at a time.
struct Eights;

impl Pieces for Eights {
    #[inline(always)]
    fn largest(weights: &Plain) -> u8 {
        weights.as_chunks().0.iter().map(|weight| exponent(*weight)).fold(0, u8::max)
    }

    #[inline(always)]
    fn encode(weights: &Plain, base: u8, coded: &mut Coded) -> Outside {
        let mut outside = [0; PIECE / 32];
        let (low, words) = coded.split_at_mut(PIECE);
        let places = low.as_chunks_mut::<LANE>().0.iter_mut().zip(words.as_chunks_mut().0);
        let eights = weights.as_chunks::<2>().0.as_chunks::<LANE>().0.iter();
        for (eight, (weights, (low, word))) in eights.zip(places).enumerate() {
            let bits = weights.map(u16::from_le_bytes);
            let mut code = bits.map(|bits| ((bits >> 7) as u8).wrapping_sub(base));
            if code.iter().any(|code| usize::from(*code) >= WINDOW) {
                for (j, code) in code.iter_mut().enumerate() {
                    if usize::from(*code) >= WINDOW {
                        *code = 0;
                        outside[eight / 4] |= 1 << (LANE * (eight % 4) + j);
                    }
                }
            }
            for ((low, bits), code) in low.iter_mut().zip(bits).zip(code) {
                *low = code << 7 | bits as u8 & 0x7f;
            }
            let mut all = 0u32;
            for i in 0..LANE / 2 {
                let high = |j: usize| u32::from(bits[j] & 0x8000 | u16::from(code[j] >> 1) << 8);
                all |= (high(2 * i) | high(2 * i + 1) << 16).rotate_right(4 * i as u32);
            }
            *word = all.to_le_bytes();
        }
        outside
    }
}

/// Bits of the exponent of BF16, and of the four bits of a code and of the upper three where the lowest exponent was.
#[cfg(target_arch = "x86_64")]
const EXPONENT: i16 = 0x7f80;
#[cfg(target_arch = "x86_64")]
const CODE: i16 = 0x0780;

/// Encodes 64 weights at a time. Only functions that are compiled for AVX2 may use this.
#[cfg(target_arch = "x86_64")]
struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Pieces for Avx2 {
    #[inline(always)]
    fn largest(weights: &Plain) -> u8 {
        use std::arch::x86_64::*;
        // SAFETY: the processor has the instructions, as the type says. Reads are within arrays of 32 bytes.
        unsafe {
            let exponent = _mm256_set1_epi16(EXPONENT);
            let mut largest = _mm256_setzero_si256();
            for weights in weights.as_chunks::<32>().0 {
                let bits = _mm256_loadu_si256(weights.as_ptr().cast());
                largest = _mm256_max_epi16(largest, _mm256_and_si256(bits, exponent));
            }
            let mut all = [0_u16; 16];
            _mm256_storeu_si256(all.as_mut_ptr().cast(), largest);
            (all.into_iter().fold(0, u16::max) >> 7) as u8
        }
    }

    #[inline(always)]
    fn encode(weights: &Plain, base: u8, coded: &mut Coded) -> Outside {
        use std::arch::x86_64::*;
        let mut outside = [0; PIECE / 32];
        let (low, words) = coded.split_at_mut(PIECE);
        let places = low.as_chunks_mut::<64>().0.iter_mut().zip(words.as_chunks_mut::<32>().0);
        let from = weights.as_chunks::<128>().0.iter().zip(outside.as_chunks_mut::<2>().0);
        // SAFETY: the processor has the instructions, as the type says. Reads and writes are within the arrays of 128, 64 and 32 bytes.
        unsafe {
            let base = _mm256_set1_epi16(i16::from(base) << 7);
            let right = _mm256_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12);
            let left = _mm256_sub_epi32(_mm256_set1_epi32(32), right);
            for ((weights, outside), (low, words)) in from.zip(places) {
                let (mut all, mut rare, mut turned) = ([base; 4], [base; 4], [base; 4]);
                for (i, ((all, rare), turned)) in
                    all.iter_mut().zip(&mut rare).zip(&mut turned).enumerate()
                {
                    let bits = _mm256_loadu_si256(weights.as_ptr().add(32 * i).cast());
                    let exponent = _mm256_set1_epi16(EXPONENT);
                    let code = _mm256_sub_epi16(_mm256_and_si256(bits, exponent), base);
                    let inside = _mm256_andnot_si256(_mm256_set1_epi16(CODE), code);
                    let inside = _mm256_cmpeq_epi16(inside, _mm256_setzero_si256());
                    *rare = inside;
                    let code = _mm256_and_si256(code, inside);
                    *all = _mm256_or_si256(_mm256_andnot_si256(exponent, bits), code);
                    let high = _mm256_and_si256(*all, _mm256_set1_epi16(IN_WORD));
                    let (low, high) =
                        (_mm256_srlv_epi32(high, right), _mm256_sllv_epi32(high, left));
                    *turned = _mm256_or_si256(low, high);
                }
                for i in 0..2 {
                    let byte = _mm256_set1_epi16(0xff);
                    let (first, second) = (
                        _mm256_and_si256(all[2 * i], byte),
                        _mm256_and_si256(all[2 * i + 1], byte),
                    );
                    let packed = _mm256_packus_epi16(first, second);
                    let packed = _mm256_permute4x64_epi64(packed, 0b1101_1000);
                    _mm256_storeu_si256(low.as_mut_ptr().add(32 * i).cast(), packed);
                    let inside = _mm256_packs_epi16(rare[2 * i], rare[2 * i + 1]);
                    let inside = _mm256_permute4x64_epi64(inside, 0b1101_1000);
                    outside[i] = !_mm256_movemask_epi8(inside) as u32;
                }
                // Each vector has two words, in four parts each. First the parts 0 and 2, and 1 and 3, of two vectors.
                let [a, b, c, d] = turned;
                let ab = _mm256_or_si256(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                let cd = _mm256_or_si256(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
                let (even, odd) = (_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
                let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
                let joined = _mm256_permutevar8x32_epi32(_mm256_or_si256(even, odd), order);
                _mm256_storeu_si256(words.as_mut_ptr().cast(), joined);
            }
        }
        outside
    }
}

/// Encodes 128 weights at a time. Only functions that are compiled for AVX-512 F, BW and VL may use this.
#[cfg(target_arch = "x86_64")]
struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Pieces for Avx512 {
    #[inline(always)]
    fn largest(weights: &Plain) -> u8 {
        use std::arch::x86_64::*;
        // SAFETY: the processor has the instructions, as the type says. Reads are within arrays of 64 bytes.
        unsafe {
            let exponent = _mm512_set1_epi16(EXPONENT);
            let mut largest = _mm512_setzero_si512();
            for weights in weights.as_chunks::<64>().0 {
                let bits = _mm512_loadu_epi8(weights.as_ptr().cast());
                largest = _mm512_max_epi16(largest, _mm512_and_si512(bits, exponent));
            }
            let halves = (_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
            let mut all = [0_u16; 16];
            _mm256_storeu_si256(all.as_mut_ptr().cast(), _mm256_max_epi16(halves.0, halves.1));
            (all.into_iter().fold(0, u16::max) >> 7) as u8
        }
    }

    #[inline(always)]
    fn encode(weights: &Plain, base: u8, coded: &mut Coded) -> Outside {
        use std::arch::x86_64::*;
        let mut outside = [0; PIECE / 32];
        let (low, words) = coded.split_at_mut(PIECE);
        let places = low.as_chunks_mut::<128>().0.iter_mut().zip(words.as_chunks_mut::<64>().0);
        let from = weights.as_chunks::<256>().0.iter().zip(outside.as_chunks_mut::<4>().0);
        // SAFETY: the processor has the instructions, as the type says. Reads and writes are within the arrays of 256, 128 and 64 bytes.
        unsafe {
            let base = _mm512_set1_epi16(i16::from(base) << 7);
            let exponent = _mm512_set1_epi16(EXPONENT);
            let turns = _mm512_set4_epi32(12, 8, 4, 0);
            for ((weights, outside), (low, words)) in from.zip(places) {
                let mut turned = [base; 4];
                for (i, (outside, turned)) in outside.iter_mut().zip(&mut turned).enumerate() {
                    let bits = _mm512_loadu_epi8(weights.as_ptr().add(64 * i).cast());
                    let code = _mm512_sub_epi16(_mm512_and_si512(bits, exponent), base);
                    *outside = _mm512_test_epi16_mask(code, _mm512_set1_epi16(!CODE));
                    let code = _mm512_maskz_mov_epi16(!*outside, code);
                    let all = _mm512_ternarylogic_epi64(exponent, code, bits, SELECT);
                    let to = low.as_mut_ptr().add(32 * i).cast();
                    _mm256_storeu_si256(to, _mm512_cvtepi16_epi8(all));
                    let high = _mm512_and_si512(all, _mm512_set1_epi16(IN_WORD));
                    *turned = _mm512_rorv_epi32(high, turns);
                }
                // Each vector has four words, in four parts each. First the parts 0 and 2, and 1 and 3, of two vectors.
                let [a, b, c, d] = turned;
                let ab = _mm512_or_si512(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
                let cd = _mm512_or_si512(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
                let (even, odd) = (_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
                let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                let joined = _mm512_permutexvar_epi32(order, _mm512_or_si512(even, odd));
                _mm512_storeu_epi8(words.as_mut_ptr().cast(), joined);
            }
        }
        outside
    }
}

/// Returns the lowest exponent of the window that ends with this exponent.
fn base_below(largest: u8) -> u8 {
    largest.saturating_sub(WINDOW as u8 - 1).min(BASE_MAX as u8)
}

/// Returns the lowest exponent of a block: that of a window which ends with the largest exponent, `base`, if few weights are below, as
/// nearly always, else that of the window which leaves out the fewest weights.
#[cold]
fn base_of(of: Compact, base: u8, weights: &[[u8; 2]]) -> u8 {
    let below: u16 = weights.iter().map(|weight| u16::from(exponent(*weight) < base)).sum();
    if usize::from(below) <= of.exceptions_max() { base } else { best_base(weights) }
}

/// Returns the lowest exponent of the window that leaves out the fewest weights: the highest one, because entries reach further down.
fn best_base(weights: &[[u8; 2]]) -> u8 {
    // Several tables, because equal exponents often follow each other.
    let mut counts = [[0u16; 256]; 4];
    let (mut least, mut largest) = (255, 0);
    for weights in weights.as_chunks::<4>().0 {
        for (weight, counts) in weights.iter().zip(&mut counts) {
            let exponent = usize::from(u16::from_le_bytes(*weight) >> 7 & 255);
            counts[exponent] += 1;
            (least, largest) = (exponent.min(least), exponent.max(largest));
        }
    }
    let count = |exponent: usize| counts.iter().map(|of| u32::from(of[exponent])).sum::<u32>();
    let first = least.saturating_sub(WINDOW - 1).min(BASE_MAX);
    let mut inside: u32 = (first..first + WINDOW).map(count).sum();
    let (mut best, mut most) = (first, inside);
    for base in first + 1..=largest.min(BASE_MAX) {
        inside = inside + count(base + WINDOW - 1) - count(base - 1);
        if inside >= most {
            (best, most) = (base, inside);
        }
    }
    best as u8
}
