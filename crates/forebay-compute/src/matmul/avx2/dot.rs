//! Products with few tokens. A row's codes are unpacked once and multiplied with every token in
//! registers.
//!
//! Memory is the limit here, so a row is read once from front to back, and the bytes that follow
//! are prefetched.

use std::ops::Range;

use super::unpack::*;
use super::vector::sum_lanes;
use crate::matmul::quantize::{LargeBlock, SmallBlock};
use crate::matmul::task::{Scratch, Task};

/// Distance in bytes between the bytes in use and the prefetched ones.
const AHEAD: usize = 2048;

/// Largest number of tokens in one pass over a row. With more, panels are faster.
pub(crate) const TOKENS: usize = 3;

/// Calls `$kernel::<F, N>` for all tokens, `TOKENS` at a time, and then once for the rest.
macro_rules! for_tokens {
    ($kernel:ident, $task:ident, $row:ident) => {{
        let mut first = 0;
        while first < $task.token_count {
            let count = ($task.token_count - first).min(TOKENS);
            match count {
                1 => $kernel::<F, 1>($task, $row, first),
                2 => $kernel::<F, 2>($task, $row, first),
                _ => $kernel::<F, TOKENS>($task, $row, first),
            }
            first += count;
        }
    }};
}

pub(crate) use for_tokens;

/// Computes rows of a type with blocks of 32.
///
/// # Safety
/// The requirements of [`crate::matmul::task::Kernel`] hold.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn rows32<F: Scales>(task: &Task, rows: Range<usize>, _: &mut Scratch) {
    for row in rows {
        // SAFETY: as for this function.
        unsafe { for_tokens!(row32, task, row) };
    }
}

/// Computes rows of a type with blocks of 256.
///
/// # Safety
/// The requirements of [`crate::matmul::task::Kernel`] hold.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn rows256<F: GroupLanes>(task: &Task, rows: Range<usize>, _: &mut Scratch) {
    for row in rows {
        // SAFETY: as for this function.
        unsafe { for_tokens!(row256, task, row) };
    }
}

/// Computes one row for tokens `first..first + N`.
///
/// # Safety
/// The requirements of [`rows32`] hold, and these are tokens of the task.
#[inline(always)]
unsafe fn row32<F: Scales, const N: usize>(task: &Task, row: usize, first: usize) {
    let bytes = task.row(row);
    let stride = F::TYPE.block_bytes();
    let blocks = task.cols / 32;
    let x: [&[SmallBlock]; N] =
        std::array::from_fn(|t| task.activations().small(task.token(first + t)));
    // SAFETY: blocks are whole, and x has as many. The kernel's caller promises the rest.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); N];
        for eight in 0..blocks / 8 {
            let w = bytes.as_ptr().add(eight * 8 * stride);
            prefetch(w, 8 * stride);
            let x = std::array::from_fn(|t| x[t].get_unchecked(eight));
            eight_blocks::<F, N>(w, x, 8, &mut sums);
        }
        if !blocks.is_multiple_of(8) {
            let w = bytes.as_ptr().add(blocks / 8 * 8 * stride);
            let x = std::array::from_fn(|t| x[t].get_unchecked(blocks / 8));
            eight_blocks::<F, N>(w, x, blocks % 8, &mut sums);
        }
        for (t, sum) in sums.into_iter().enumerate() {
            task.store(first + t, row, sum_lanes(sum));
        }
    }
}

/// Adds the products of `count` (at most 8) blocks of a row with N tokens to `sums`.
///
/// # Safety
/// `w` points to `count` blocks, and the machine has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn eight_blocks<F: Scales, const N: usize>(
    w: *const u8,
    x: [&SmallBlock; N],
    count: usize,
    sums: &mut [__m256; N],
) {
    let stride = F::TYPE.block_bytes();
    // SAFETY: by the caller's promise. x holds 8 blocks, zero where there are fewer.
    unsafe {
        let w_scales = F::scales(w, stride, count);
        let mut scales = [[0.0_f32; 8]; N];
        for t in 0..N {
            let x_scales = _mm256_loadu_ps(x[t].scales.as_ptr());
            let product = _mm256_mul_ps(w_scales, x_scales);
            _mm256_storeu_ps(scales[t].as_mut_ptr(), product);
            if F::ZERO == 0 && F::OFFSET_AT.is_none() {
                continue;
            }
            let x_sums = _mm256_cvtepi32_ps(_mm256_loadu_si256(x[t].sums.as_ptr().cast()));
            if let Some(at) = F::OFFSET_AT {
                let offsets = _mm256_mul_ps(halves(w.add(at), stride, count), x_scales);
                sums[t] = _mm256_fmadd_ps(offsets, x_sums, sums[t]);
            } else {
                let zeroes = _mm256_mul_ps(x_sums, _mm256_set1_ps(F::ZERO as f32));
                sums[t] = _mm256_fnmadd_ps(product, zeroes, sums[t]);
            }
        }
        #[allow(clippy::needless_range_loop, reason = "the index is that of the blocks")]
        for i in 0..count {
            let codes = F::load(w.add(i * stride), 0);
            for t in 0..N {
                let x_codes = _mm256_loadu_si256(x[t].codes.as_ptr().add(i * 32).cast());
                let pairs = multiply::<F>(codes, x_codes);
                let product = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                let scale = _mm256_set1_ps(scales[t][i]);
                sums[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product), scale, sums[t]);
            }
        }
    }
}

/// Computes one row for tokens `first..first + N`.
///
/// # Safety
/// The requirements of [`rows256`] hold, and these are tokens of the task.
#[inline(always)]
unsafe fn row256<F: GroupLanes, const N: usize>(task: &Task, row: usize, first: usize) {
    let bytes = task.row(row);
    let stride = F::TYPE.block_bytes();
    let x: [&[LargeBlock]; N] =
        std::array::from_fn(|t| task.activations().large(task.token(first + t)));
    // SAFETY: blocks are whole, and x has as many. The kernel's caller promises the rest.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); N];
        for i in 0..task.cols / 256 {
            let w = bytes.as_ptr().add(i * stride);
            prefetch(w, stride);
            let x = std::array::from_fn(|t| x[t].get_unchecked(i));
            one_block::<F, N>(w, x, &mut sums);
        }
        for (t, sum) in sums.into_iter().enumerate() {
            task.store(first + t, row, sum_lanes(sum));
        }
    }
}

/// Adds the products of one block of a row with N tokens to `sums`.
///
/// # Safety
/// `w` points to a block, and the machine has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn one_block<F: GroupLanes, const N: usize>(
    w: *const u8,
    x: [&LargeBlock; N],
    sums: &mut [__m256; N],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let Lanes { scales, offsets } = F::lanes(w);
        let scale = half_at(w.add(F::SCALE_AT));
        let mut products = [_mm256_setzero_si256(); N];
        for group in 0..8_i16 {
            let codes = F::load(w, group as usize);
            let word = _mm256_set1_epi16(group * 0x0202 + 0x0100);
            let scales = _mm256_shuffle_epi8(scales, word);
            for t in 0..N {
                let x_codes =
                    _mm256_loadu_si256(x[t].codes.as_ptr().add(group as usize * 32).cast());
                let product = _mm256_madd_epi16(multiply::<F>(codes, x_codes), scales);
                products[t] = _mm256_add_epi32(products[t], product);
            }
        }
        for t in 0..N {
            let x_sums = _mm256_loadu_si256(x[t].half_sums.as_ptr().cast());
            if F::ZERO != 0 {
                let zeroes = _mm256_mullo_epi16(scales, _mm256_set1_epi16(F::ZERO as i16));
                products[t] = _mm256_sub_epi32(products[t], _mm256_madd_epi16(zeroes, x_sums));
            }
            let product = _mm256_cvtepi32_ps(products[t]);
            sums[t] = _mm256_fmadd_ps(product, _mm256_set1_ps(scale * x[t].scale), sums[t]);
            if let Some(at) = F::OFFSET_AT {
                let offset = _mm256_set1_ps(half_at(w.add(at)) * x[t].scale);
                let product = _mm256_cvtepi32_ps(_mm256_madd_epi16(offsets, x_sums));
                sums[t] = _mm256_fnmadd_ps(product, offset, sums[t]);
            }
        }
    }
}

/// Returns the products of 32 weight codes and activation codes, added in pairs.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn multiply<F: Codes>(codes: __m256i, x_codes: __m256i) -> __m256i {
    // SAFETY: by the caller's promise. 2 * 127 * 128 fits 16 bits.
    unsafe {
        if F::LARGEST.is_some() {
            return _mm256_maddubs_epi16(codes, x_codes);
        }
        // The instruction needs one unsigned side: move the sign of the weight to the activation.
        let x_codes = _mm256_sign_epi8(x_codes, codes);
        _mm256_maddubs_epi16(_mm256_abs_epi8(codes), x_codes)
    }
}

/// Prefetches the memory `AHEAD` bytes after `at..at + len`.
///
/// # Safety
/// The machine has SSE. An address that does not exist is ignored.
#[inline(always)]
pub(crate) unsafe fn prefetch(at: *const u8, len: usize) {
    for line in 0..len.div_ceil(64) {
        let at = at.wrapping_add(AHEAD + line * 64);
        // SAFETY: a prefetch does not access memory as far as the program can observe.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
}
