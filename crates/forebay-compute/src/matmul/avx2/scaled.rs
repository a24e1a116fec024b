//! Blocks of codes with their scales, as quantised safetensors files become them; `forebay-format`'s
//! `quant::scaled` describes the layouts. Values are the exact ones, so products differ from those of
//! other kernel families by the order of sums only.

use std::arch::x86_64::*;

use forebay_format::quant::scaled::{E2M1, E4M3, ZERO_BITS};

use super::float::Widen;

/// E4M3 in blocks of `N` with an F32 scale.
pub(crate) struct F8Blocks<const N: usize>;

/// `NVFP4_F32`.
pub(crate) struct Nvfp4;

/// `I4_BF16`.
pub(crate) struct Int4Brain;

/// 4-bit integers in blocks of `N` with a scale and a zero point.
pub(crate) struct Int4Zero<const N: usize>;

impl<const N: usize> Widen for F8Blocks<N> {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise, the block is whole.
        unsafe {
            let block = row.add(8 * i / N * (N + 4));
            let scale = block.add(N).cast::<f32>().read_unaligned();
            let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(block.add(8 * i % N).cast()));
            let below_sign = _mm256_and_si256(codes, _mm256_set1_epi32(0x7f));
            let sign = _mm256_slli_epi32::<24>(_mm256_xor_si256(codes, below_sign));
            // An E4M3 is a narrower F32, once the exponent's bias has grown by 120. So are subnormal ones.
            let magnitude = _mm256_mul_ps(
                _mm256_castsi256_ps(_mm256_slli_epi32::<20>(below_sign)),
                _mm256_set1_ps(f32::from_bits((127 + 120) << 23)),
            );
            let is_nan = _mm256_cmpeq_epi32(below_sign, _mm256_set1_epi32(0x7f));
            let bits =
                _mm256_or_si256(_mm256_castps_si256(magnitude), _mm256_or_si256(sign, is_nan));
            _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(scale))
        }
    }
}

/// Loads eight 4-bit codes, from eight bytes' lower halves or from their upper ones.
///
/// # Safety
/// The bytes are readable, and the machine has AVX2.
#[inline(always)]
unsafe fn eight_nibbles(bytes: *const u8, is_upper: bool) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe {
        let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.cast()));
        let shift = _mm_cvtsi32_si128(if is_upper { 4 } else { 0 });
        _mm256_and_si256(_mm256_srl_epi32(bytes, shift), _mm256_set1_epi32(15))
    }
}

impl Widen for Nvfp4 {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise, the block is whole.
        unsafe {
            let (block, group) = (row.add(i / 8 * 40), i % 8 / 2);
            let factor = block.cast::<f32>().read_unaligned();
            let scale = E4M3[usize::from(*block.add(4 + group))] * factor;
            let codes = eight_nibbles(block.add(8 + 8 * group), i % 2 == 1);
            let sign = _mm256_slli_epi32::<28>(_mm256_and_si256(codes, _mm256_set1_epi32(8)));
            // The lowest three bits of a code choose one of the first eight values.
            let value = _mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1.as_ptr()), codes);
            // Minus zero keeps its sign, which changes no sum.
            let value = _mm256_xor_ps(value, _mm256_castsi256_ps(sign));
            _mm256_mul_ps(value, _mm256_set1_ps(scale))
        }
    }
}

/// Decodes elements `8 * i..8 * (i + 1)` of 32 that `nibbles` hold.
///
/// # Safety
/// The 16 bytes are readable, and the machine has AVX2.
#[inline(always)]
unsafe fn int4(nibbles: *const u8, i: usize, scale: f32, zero: i32) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe {
        let codes = eight_nibbles(nibbles.add(i % 2 * 8), i >= 2);
        let codes = _mm256_sub_epi32(codes, _mm256_set1_epi32(zero));
        _mm256_mul_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(scale))
    }
}

impl Widen for Int4Brain {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise, the block is whole.
        unsafe {
            let block = row.add(i / 4 * 18);
            let scale = f32::from_bits(u32::from(block.cast::<u16>().read_unaligned()) << 16);
            int4(block.add(2), i % 4, scale, 8)
        }
    }
}

impl<const N: usize> Widen for Int4Zero<N> {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise, the block is whole.
        unsafe {
            let block = row.add(8 * i / N * (N / 2 + 4));
            let word = block.cast::<u32>().read_unaligned();
            let (scale, zero) = (f32::from_bits(word & !ZERO_BITS), (word & ZERO_BITS) as i32);
            int4(block.add(4 + 8 * i % N / 32 * 16), i % 4, scale, zero)
        }
    }
}
