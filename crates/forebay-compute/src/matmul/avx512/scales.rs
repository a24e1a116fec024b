//! Scales of weight types for the AVX-512 panels. All types have the same form: scales and offsets
//! in F32 for groups of 16 or 32 elements.

use std::ops::Range;

use crate::matmul::avx2::unpack::*;
use crate::matmul::avx2::{store, transpose_words};
use crate::matmul::quantize::{LargeBlock, SmallBlock};
use crate::matmul::task::Task;
use crate::matmul::types::{Block32, Block256, Format};

/// Returns the amount by which codes are too large as unsigned bytes.
pub(crate) const fn zero<F: Format>() -> i32 {
    if F::LARGEST.is_some() { F::ZERO } else { 128 }
}

/// Eight neighbouring rows of weights. Past the end of the matrix, its last row is repeated.
pub(crate) struct EightRows {
    pub(crate) starts: [*const u8; 8],
    /// Distance in bytes between two rows that are not repeated.
    pub(crate) row_bytes: usize,
    /// Number of rows before the repeated ones.
    pub(crate) count: usize,
}

/// Memory for the scales and offsets of eight rows' groups.
pub(crate) struct GroupNumbers {
    /// Scales of the first group.
    pub(crate) scales: *mut u8,
    /// Offsets of the first group.
    pub(crate) offsets: *mut u8,
    /// Distance between the groups of the same 32 columns.
    pub(crate) group_bytes: usize,
    /// Distance between groups that are 32 columns apart.
    pub(crate) columns_bytes: usize,
}

impl GroupNumbers {
    /// Stores the numbers of one group.
    ///
    /// # Safety
    /// The machine has AVX2, and there is memory for this group.
    #[inline(always)]
    unsafe fn store<F: FloatScales>(&self, group: usize, scales: __m256, offsets: __m256) {
        let groups = 32 / F::GROUP;
        let at = group / groups * self.columns_bytes + group % groups * self.group_bytes;
        // SAFETY: by the caller's promise.
        unsafe {
            store(self.scales.add(at), _mm256_castps_si256(scales));
            if F::HAS_OFFSETS {
                store(self.offsets.add(at), _mm256_castps_si256(offsets));
            }
        }
    }
}

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

    /// Stores the eight rows' scales and offsets for each group of the columns. Repeated rows get
    /// any numbers.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C. The rows have these columns, which are whole blocks, and
    /// there is memory for the numbers.
    unsafe fn scales(rows: &EightRows, columns: Range<usize>, to: &GroupNumbers);

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
            unsafe fn scales(rows: &EightRows, columns: Range<usize>, to: &GroupNumbers) {
                // SAFETY: as for this function.
                unsafe { scales32::<Self>(rows, columns, to) }
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
            unsafe fn scales(rows: &EightRows, columns: Range<usize>, to: &GroupNumbers) {
                // SAFETY: as for this function.
                unsafe { scales256::<Self>(rows, columns, to) }
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
unsafe fn scales32<F: FloatScales + Scales>(
    rows: &EightRows,
    columns: Range<usize>,
    to: &GroupNumbers,
) {
    for (i, block) in (columns.start / 32..columns.end / 32).enumerate() {
        // SAFETY: by the caller's promise.
        unsafe {
            let block = rows.starts[0].add(block * F::TYPE.block_bytes());
            // The common case is separate, so that the compiler knows the number of rows.
            let (scales, offsets) = match rows.count {
                8.. => block_scales::<F>(block, rows.row_bytes, 8),
                fewer => block_scales::<F>(block, rows.row_bytes, fewer),
            };
            to.store::<F>(i, scales, offsets);
        }
    }
}

/// Returns the scales and offsets of `count` blocks of 32 that are `stride` bytes apart, then
/// zeroes.
///
/// # Safety
/// The machine has AVX2, FMA and F16C, and the blocks are whole.
#[inline(always)]
unsafe fn block_scales<F: Scales>(
    block: *const u8,
    stride: usize,
    count: usize,
) -> (__m256, __m256) {
    // SAFETY: by the caller's promise.
    unsafe {
        let none = _mm256_setzero_ps();
        // These types add their offsets, so the sign is changed.
        let offsets = match F::OFFSET_AT {
            Some(at) => _mm256_sub_ps(none, halves(block.add(at), stride, count)),
            None => none,
        };
        (F::scales(block, stride, count), offsets)
    }
}

/// # Safety
/// The requirements of [`FloatScales::scales`] hold.
#[inline(always)]
unsafe fn scales256<F: FloatScales + GroupLanes>(
    rows: &EightRows,
    columns: Range<usize>,
    to: &GroupNumbers,
) {
    let groups = 256 / <F as FloatScales>::GROUP;
    for (i, block) in (columns.start / 256..columns.end / 256).enumerate() {
        let first = block * F::TYPE.block_bytes();
        // SAFETY: by the caller's promise.
        unsafe {
            let mut scales = [_mm256_setzero_si256(); 8];
            let mut offsets = [_mm256_setzero_si256(); 8];
            for (row, start) in rows.starts.into_iter().enumerate() {
                let lanes = F::lanes(start.add(first));
                (scales[row], offsets[row]) = (lanes.scales, lanes.offsets);
            }
            let (scales, offsets) = (transpose_words(scales), transpose_words(offsets));
            let block = rows.starts[0].add(first);
            let (scale, offset) = match rows.count {
                8.. => factors::<F>(block, rows.row_bytes, 8),
                fewer => factors::<F>(block, rows.row_bytes, fewer),
            };
            for pair in 0..8 {
                for half in 0..groups / 8 {
                    let scales = _mm256_mul_ps(floats(scales[pair], half), scale);
                    let offsets = _mm256_mul_ps(floats(offsets[pair], half), offset);
                    to.store::<F>(i * groups + pair * groups / 8 + half, scales, offsets);
                }
            }
        }
    }
}

/// Returns the scales of `count` blocks of 256 that are `stride` bytes apart, and the scales of
/// their offsets, then zeroes.
///
/// # Safety
/// The machine has AVX2, FMA and F16C, and the blocks are whole.
#[inline(always)]
unsafe fn factors<F: GroupLanes>(
    block: *const u8,
    stride: usize,
    count: usize,
) -> (__m256, __m256) {
    // SAFETY: by the caller's promise.
    unsafe {
        let offsets = match F::OFFSET_AT {
            Some(at) => halves(block.add(at), stride, count),
            None => _mm256_setzero_ps(),
        };
        (halves(block.add(F::SCALE_AT), stride, count), offsets)
    }
}

/// Converts the 16-bit integers of one 128-bit lane.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn floats(words: __m256i, lane: usize) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe {
        let words = if lane == 1 {
            _mm256_extracti128_si256::<1>(words)
        } else {
            _mm256_castsi256_si128(words)
        };
        _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(words))
    }
}
