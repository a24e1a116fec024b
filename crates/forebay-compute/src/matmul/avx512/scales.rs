//! Scales of weight types for the AVX-512 panels. All types have the same form: scales and offsets
//! in F32 for groups of 16 or 32 elements.

use crate::matmul::avx2::unpack::*;
use crate::matmul::quantize::{LargeBlock, SmallBlock};
use crate::matmul::task::Task;
use crate::matmul::types::{Block32, Block256, Format};

/// Returns the amount by which codes are too large as unsigned bytes.
pub(crate) const fn zero<F: Format>() -> i32 {
    if F::LARGEST.is_some() { F::ZERO } else { 128 }
}

/// Numbers for the groups of 256 elements. Element `g` of the first vector belongs to the group
/// that starts at 32 * g. If groups have 16 elements, element `g` of the second vector belongs to
/// the group that starts at 32 * g + 16.
pub(crate) type Halves = [__m256; 2];

/// A weight type whose groups have scales, and possibly offsets, that are converted to F32.
pub(crate) trait FloatScales: Codes {
    /// Number of elements in a block.
    const BLOCK: usize;
    /// Number of elements in a group: 16 or 32.
    const GROUP: usize;
    /// True if `offset * (sum of activations)` is subtracted.
    const HAS_OFFSETS: bool;
    /// True if 256 activations share one scale, false if every 32 have one.
    const LARGE: bool;

    /// Returns the scales and offsets of a row's elements from `32 * first` on, for `count` times
    /// 32 elements (at most 8 times), then zeroes. `first` must be a multiple of 8.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C, and the row has these elements.
    unsafe fn scales(row: *const u8, first: usize, count: usize) -> (Halves, Halves);

    /// Returns a token's activations for the 256 elements of `block`.
    fn activations(task: &Task, token: usize, block: usize) -> X<'_>;
}

/// 256 activations in the form that a type needs.
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
                // SAFETY: as for this function. 8 times 32 elements are one block.
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
/// The requirements of [`FloatScales::scales`] hold.
#[inline(always)]
unsafe fn scales32<F: Scales>(row: *const u8, first: usize, count: usize) -> (Halves, Halves) {
    let stride = F::TYPE.block_bytes();
    // SAFETY: by the caller's promise.
    unsafe {
        let none = _mm256_setzero_ps();
        let blocks = row.add(first * stride);
        // These types add their offsets, so the sign is changed.
        let offsets = match F::OFFSET_AT {
            Some(at) => _mm256_sub_ps(none, halves(blocks.add(at), stride, count)),
            None => none,
        };
        ([F::scales(blocks, stride, count), none], [offsets, none])
    }
}

/// # Safety
/// The requirements of [`FloatScales::scales`] hold for one block.
#[inline(always)]
unsafe fn scales256<F: GroupLanes>(block: *const u8) -> (Halves, Halves) {
    // SAFETY: by the caller's promise.
    unsafe {
        let lanes = F::lanes(block);
        let offset = F::OFFSET_AT.map_or(0.0, |at| half_at(block.add(at)));
        (scaled(lanes.scales, half_at(block.add(F::SCALE_AT))), scaled(lanes.offsets, offset))
    }
}

/// Multiplies 16-bit integers by `scale`. Each 128-bit lane becomes one vector.
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
