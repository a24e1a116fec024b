//! Products with F32 activations for few tokens.

use std::ops::Range;

use forebay_format::TensorType;

use super::compact::{Compact256, Compact2048};
use super::dot::TOKENS;
use super::scaled::{F8Blocks, Int4Brain, Int4Zero, Nvfp4};
use super::unpack::*;
use super::vector::sum_lanes;
use crate::matmul::float::widen_row;
use crate::matmul::task::{Kernel, Scratch, Task};

/// A number type that widens to F32.
pub(crate) trait Widen {
    /// Loads the numbers of columns `8 * i..8 * (i + 1)` of a row.
    ///
    /// # Safety
    /// The row has these columns, and the machine has AVX2, FMA and F16C.
    unsafe fn eight(row: *const u8, i: usize) -> __m256;
}

pub(crate) struct Full;
pub(crate) struct Half;
pub(crate) struct Brain;

impl Widen for Full {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise.
        unsafe {
            let at = row.add(32 * i);
            _mm256_loadu_ps(at.cast())
        }
    }
}

impl Widen for Half {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise.
        unsafe {
            let at = row.add(16 * i);
            _mm256_cvtph_ps(_mm_loadu_si128(at.cast()))
        }
    }
}

impl Widen for Brain {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise.
        unsafe {
            let at = row.add(16 * i);
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
}

/// Returns the kernel for few tokens.
pub(crate) fn few_tokens(ty: TensorType) -> Kernel {
    match ty {
        TensorType::F32 => rows::<Full>,
        TensorType::F16 => rows::<Half>,
        TensorType::BF16 => rows::<Brain>,
        TensorType::BF16_C2048 => rows::<Compact2048>,
        TensorType::BF16_C256 => rows::<Compact256>,
        TensorType::F8_B128 => rows::<F8Blocks<128>>,
        TensorType::F8_B32 => rows::<F8Blocks<32>>,
        TensorType::NVFP4_F32 => rows::<Nvfp4>,
        TensorType::I4_BF16 => rows::<Int4Brain>,
        TensorType::I4_Z32 => rows::<Int4Zero<32>>,
        TensorType::I4_Z128 => rows::<Int4Zero<128>>,
        _ => rows_dequantised,
    }
}

/// Computes rows of a plain type.
///
/// # Safety
/// The requirements of [`Kernel`] hold.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<W: Widen>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    // The elements after the last eight, widened and padded with zeroes.
    let whole = task.cols / 8 * 8;
    let tail = scratch.floats.first(8);
    for row in rows {
        let bytes = task.row(row);
        tail.fill(0.0);
        // Rows of whole blocks have no such elements.
        let rest = whole / task.ty.block_elements() * task.ty.block_bytes();
        widen_row(task.ty, &bytes[rest..], &mut tail[..task.cols - whole]);
        // SAFETY: the row is `cols` numbers long; the caller promises the rest.
        unsafe { row_all_tokens::<W>(task, row, bytes.as_ptr(), tail) };
    }
}

/// Computes rows of any type. Each row is first dequantised to F32.
///
/// # Safety
/// The requirements of [`Kernel`] hold.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows_dequantised(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    // `cols` need not be a multiple of eight, so the row is padded.
    let padded = task.cols.next_multiple_of(8);
    let weights = scratch.floats.first(padded + 8);
    for row in rows {
        weights[task.cols..].fill(0.0);
        widen_row(task.ty, task.row(row), &mut weights[..task.cols]);
        let tail = &weights[task.cols / 8 * 8..][..8];
        // SAFETY: the scratch row is `cols` numbers long; the caller promises the rest.
        unsafe { row_all_tokens::<Full>(task, row, weights.as_ptr().cast(), tail) };
    }
}

/// Computes one row for all tokens.
///
/// # Safety
/// `w` is readable for the row, and the requirements of [`Kernel`] hold.
#[inline(always)]
unsafe fn row_all_tokens<W: Widen>(task: &Task, row: usize, w: *const u8, tail: &[f32]) {
    let mut first = 0;
    while first < task.token_count {
        let count = (task.token_count - first).min(TOKENS);
        // SAFETY: as for this function.
        unsafe {
            match count {
                1 => row_tokens::<W, 1>(task, row, w, tail, first),
                2 => row_tokens::<W, 2>(task, row, w, tail, first),
                _ => row_tokens::<W, { TOKENS }>(task, row, w, tail, first),
            }
        }
        first += count;
    }
}

/// Number of sums that run side by side for each token. It is the same for every number of tokens, because the order of a
/// token's sums must not depend on the tokens beside it.
const U: usize = 4;

/// Computes one row for tokens `first..first + N`.
///
/// # Safety
/// The requirements of [`row_all_tokens`] hold, and these are tokens of the task.
#[inline(always)]
unsafe fn row_tokens<W: Widen, const N: usize>(
    task: &Task,
    row: usize,
    w: *const u8,
    tail: &[f32],
    first: usize,
) {
    let x: [&[f32]; N] = std::array::from_fn(|t| task.activations().floats(task.token(first + t)));
    let eights = task.cols / 8;
    // SAFETY: `eights * 8` is at most the length of w and of every x.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); U]; N];
        for i in 0..eights / U {
            for u in 0..U {
                add_eight::<W, N>(w, x, i * U + u, u, &mut sums);
            }
        }
        for i in eights / U * U..eights {
            add_eight::<W, N>(w, x, i, 0, &mut sums);
        }
        for t in 0..N {
            let sum = sums[t].into_iter().reduce(|a, b| _mm256_add_ps(a, b));
            let rest: f32 = x[t][eights * 8..].iter().zip(tail).map(|(x, w)| x * w).sum();
            task.store(first + t, row, sum_lanes(sum.unwrap_or(_mm256_setzero_ps())) + rest);
        }
    }
}

/// Adds the products of elements `8 * i..8 * (i + 1)` to sum `u` of each token. A closure would not
/// always be inlined, and its instructions would then be calls.
///
/// # Safety
/// `w` and every x have these elements, and the machine has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn add_eight<W: Widen, const N: usize>(
    w: *const u8,
    x: [&[f32]; N],
    i: usize,
    u: usize,
    sums: &mut [[__m256; U]; N],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let w = W::eight(w, i);
        for t in 0..N {
            let x = _mm256_loadu_ps(x[t].as_ptr().add(i * 8));
            sums[t][u] = _mm256_fmadd_ps(w, x, sums[t][u]);
        }
    }
}
