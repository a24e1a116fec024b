//! `MXFP4`: power-of-two scale, 32 floats of 4 bits (2 of exponent, 1 of mantissa).

use forebay_format::TensorType;

use super::*;

pub(crate) struct Mxfp4;

impl Format for Mxfp4 {
    const TYPE: TensorType = TensorType::MXFP4;
    const ZERO: i32 = 12;
    const LARGEST: Option<i32> = Some(24);

    #[inline(always)]
    fn codes(block: &[u8], _group: usize, codes: &mut [i8; 32]) {
        nibbles(&block[1..], codes);
        for code in codes {
            *code = TABLE[*code as usize & 15];
        }
    }
}

impl Block32 for Mxfp4 {
    const OFFSET_AT: Option<usize> = None;

    #[inline(always)]
    fn scale(block: &[u8]) -> f32 {
        half_power(block[0])
    }
}

/// Twice the value of each 4-bit float, plus `ZERO` so that no entry is negative.
const TABLE: [i8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Returns `2^(exponent - 128)`, which is half of the scale, because the table holds doubled
/// values.
#[inline(always)]
fn half_power(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => (u32::from(exponent) - 1) << 23,
    })
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Mxfp4 {
        #[inline(always)]
        unsafe fn load(block: *const u8, _group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe { look_up(&TABLE, nibbles_at(block.add(1))) }
        }
    }

    impl Scales for Mxfp4 {
        #[inline(always)]
        unsafe fn scales(blocks: *const u8, stride: usize, count: usize) -> __m256 {
            let mut scales = [0.0; 8];
            for (i, scale) in scales.iter_mut().enumerate().take(count) {
                // SAFETY: the caller promises `count` blocks.
                *scale = half_power(unsafe { *blocks.add(i * stride) });
            }
            // SAFETY: reads the array; the caller promises AVX2.
            unsafe { _mm256_loadu_ps(scales.as_ptr()) }
        }
    }
}
