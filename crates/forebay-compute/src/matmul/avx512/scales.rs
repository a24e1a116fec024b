//! What panels of AVX-512 ask of a weight type: all types alike, as scales and offsets in F32 for
//! groups of 16 or 32 elements.

use crate::matmul::avx2::unpack::*;
use crate::matmul::quantize::{LargeBlock, SmallBlock};
use crate::matmul::task::Task;
use crate::matmul::types::{Block32, Block256, Format};

/// What codes are too large by once they are bytes without sign.
pub(crate) const fn zero<F: Format>() -> i32 {
    if F::LARGEST.is_some() { F::ZERO } else { 128 }
}

/// Numbers for the groups of 256 elements: element `g` of the first vector belongs to the group
/// that starts at 32 * g, of the second to the group that starts at 32 * g + 16 where groups have
/// 16 elements.
pub(crate) type Halves = [__m256; 2];

/// A weight type whose groups have scales, and perhaps offsets, that become F32.
pub(crate) trait FloatScales: Codes {
    /// Elements of a block.
    const BLOCK: usize;
    /// Elements of a group, 16 or 32.
    const GROUP: usize;
    /// Whether `offset * (sum of activations)` is subtracted.
    const HAS_OFFSETS: bool;
    /// Whether 256 activations have one scale, not one for every 32.
    const LARGE: bool;

    /// Scales, and offsets, of a row's elements from `32 * first` on, up to `count` times 32 (at
    /// most 8), then zeroes; `first` is a multiple of 8.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C, and the row has these elements.
    unsafe fn scales(row: *const u8, first: usize, count: usize) -> (Halves, Halves);

    /// A token's numbers for the 256 elements of `block`.
    fn activations(task: &Task, token: usize, block: usize) -> X<'_>;
}

/// 256 activations in the form that a type meets.
pub(crate) enum X<'a> {
    Small(&'a SmallBlock),
    Large(&'a LargeBlock),
}

macro_rules! blocks_of_32 {
    ($($format:ident)*) => {$(
        impl FloatScales for crate::matmul::types::$format {
            const BLOCK: usize = 32;
            const GROUP: usize = 32;
            const HAS_OFFSETS: bool = <Self as Block32>::OFFSET_AT.is_some();
            const LARGE: bool = false;

            #[inline(always)]
            unsafe fn scales(row: *const u8, first: usize, count: usize) -> (Halves, Halves) {
                // SAFETY: as for this function.
                unsafe { scales32::<Self>(row, first, count) }
            }

            #[inline(always)]
            fn activations(task: &Task, token: usize, block: usize) -> X<'_> {
                X::Small(&task.activations().small(token)[block])
            }
        }
    )*};
}
blocks_of_32!(Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Iq4Nl Mxfp4);

macro_rules! blocks_of_256 {
    ($($format:ident)*) => {$(
        impl FloatScales for crate::matmul::types::$format {
            const BLOCK: usize = 256;
            const GROUP: usize = <Self as Block256>::GROUP;
            const HAS_OFFSETS: bool = <Self as Block256>::OFFSET_AT.is_some();
            const LARGE: bool = true;

            #[inline(always)]
            unsafe fn scales(row: *const u8, first: usize, _: usize) -> (Halves, Halves) {
                // SAFETY: as for this function; 8 times 32 are a block.
                unsafe { scales256::<Self>(row.add(first / 8 * Self::TYPE.block_bytes())) }
            }

            #[inline(always)]
            fn activations(task: &Task, token: usize, block: usize) -> X<'_> {
                X::Large(&task.activations().large(token)[block])
            }
        }
    )*};
}
blocks_of_256!(Q2K Q3K Q4K Q5K Q6K Iq4Xs);

/// # Safety
/// As [`FloatScales::scales`].
#[inline(always)]
unsafe fn scales32<F: Scales>(row: *const u8, first: usize, count: usize) -> (Halves, Halves) {
    let stride = F::TYPE.block_bytes();
    // SAFETY: by the caller's promise.
    unsafe {
        let none = _mm256_setzero_ps();
        let blocks = row.add(first * stride);
        // Offsets are added in these types.
        let offsets = match F::OFFSET_AT {
            Some(at) => _mm256_sub_ps(none, halves(blocks.add(at), stride, count)),
            None => none,
        };
        ([F::scales(blocks, stride, count), none], [offsets, none])
    }
}

/// # Safety
/// As [`FloatScales::scales`], for one block.
#[inline(always)]
unsafe fn scales256<F: GroupLanes>(block: *const u8) -> (Halves, Halves) {
    // SAFETY: by the caller's promise.
    unsafe {
        let lanes = F::lanes(block);
        let offset = F::OFFSET_AT.map_or(0.0, |at| half_at(block.add(at)));
        (scaled(lanes.scales, half_at(block.add(F::SCALE_AT))), scaled(lanes.offsets, offset))
    }
}

/// 16-bit integers times `scale`, a vector for each 128-bit lane.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn scaled(words: __m256i, scale: f32) -> Halves {
    // SAFETY: by the caller's promise.
    unsafe {
        let scale = _mm256_set1_ps(scale);
        let lower = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(words));
        let upper = _mm256_cvtepi16_epi32(_mm256_extracti128_si256::<1>(words));
        [
            _mm256_mul_ps(_mm256_cvtepi32_ps(lower), scale),
            _mm256_mul_ps(_mm256_cvtepi32_ps(upper), scale),
        ]
    }
}
