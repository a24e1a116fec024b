//! Products with few tokens, 64 codes at a time. They differ from the AVX2 kernels of the same
//! names in width and in fused multiplication and addition.

use std::ops::Range;

use super::scales::zero;
use crate::matmul::avx2::unpack::*;
use crate::matmul::quantize::{LargeBlock, SmallBlock};
use crate::matmul::task::{Scratch, Task};

pub(crate) use crate::matmul::avx2::{TOKENS, for_tokens, prefetch};

/// Computes rows of a type with blocks of 32.
///
/// # Safety
/// The requirements of [`crate::matmul::task::Kernel`] hold.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn rows32<F: Scales>(task: &Task, rows: Range<usize>, _: &mut Scratch) {
    for row in rows {
        // SAFETY: as for this function.
        unsafe { for_tokens!(row32, task, row) };
    }
}

/// Computes rows of a type with blocks of 256 and unsigned codes.
///
/// # Safety
/// The requirements of [`crate::matmul::task::Kernel`] hold.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn rows256<F: GroupLanes>(task: &Task, rows: Range<usize>, _: &mut Scratch) {
    const { assert!(F::LARGEST.is_some(), "sums of two products must fit 16 bits") };
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
        let mut sums = [_mm512_setzero_ps(); N];
        for from in (0..blocks).step_by(8) {
            let w = bytes.as_ptr().add(from * stride);
            prefetch(w, 8 * stride);
            let x = std::array::from_fn(|t| x[t].get_unchecked(from / 8));
            // The common case is separate, so that the compiler knows its number of blocks.
            match blocks - from {
                8.. => eight_blocks::<F, N>(w, x, 8, &mut sums),
                rest => eight_blocks::<F, N>(w, x, rest, &mut sums),
            }
        }
        for (t, sum) in sums.into_iter().enumerate() {
            task.store(first + t, row, _mm512_reduce_add_ps(sum));
        }
    }
}

/// Adds the products of `count` (at most 8) blocks of a row with N tokens to `sums`.
///
/// # Safety
/// `w` points to `count` blocks, and the machine has the family's instructions.
#[inline(always)]
unsafe fn eight_blocks<F: Scales, const N: usize>(
    w: *const u8,
    x: [&SmallBlock; N],
    count: usize,
    sums: &mut [__m512; N],
) {
    let stride = F::TYPE.block_bytes();
    // SAFETY: by the caller's promise. x holds 8 blocks, zero where there are fewer.
    unsafe {
        let w_scales = F::scales(w, stride, count);
        let mut scales = [_mm512_setzero_ps(); N];
        for t in 0..N {
            let x_scales = _mm256_loadu_ps(x[t].scales.as_ptr());
            let product = _mm256_mul_ps(w_scales, x_scales);
            scales[t] = _mm512_zextps256_ps512(product);
            let x_sums = _mm256_cvtepi32_ps(_mm256_loadu_si256(x[t].sums.as_ptr().cast()));
            if zero::<F>() != 0 {
                let zeroes = _mm256_mul_ps(x_sums, _mm256_set1_ps(-zero::<F>() as f32));
                let zeroes = _mm512_zextps256_ps512(_mm256_mul_ps(zeroes, product));
                sums[t] = _mm512_add_ps(sums[t], zeroes);
            }
            if let Some(at) = F::OFFSET_AT {
                let offsets = _mm256_mul_ps(halves(w.add(at), stride, count), x_scales);
                let offsets = _mm512_zextps256_ps512(_mm256_mul_ps(offsets, x_sums));
                sums[t] = _mm512_add_ps(sums[t], offsets);
            }
        }
        for pair in 0..count.div_ceil(2) {
            let first = F::load(w.add(2 * pair * stride), 0);
            let second = if 2 * pair + 1 < count {
                F::load(w.add((2 * pair + 1) * stride), 0)
            } else {
                _mm256_setzero_si256()
            };
            let codes = unsigned::<F>(join(first, second));
            let lanes =
                join(_mm256_set1_epi32(2 * pair as i32), _mm256_set1_epi32(2 * pair as i32 + 1));
            for t in 0..N {
                let x = _mm512_loadu_si512(x[t].codes.as_ptr().add(pair * 64).cast());
                let product = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, x);
                let scale = _mm512_permutexvar_ps(lanes, scales[t]);
                sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), scale, sums[t]);
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
        let mut sums = [_mm512_setzero_ps(); N];
        for i in 0..task.cols / 256 {
            let w = bytes.as_ptr().add(i * stride);
            prefetch(w, stride);
            let x = std::array::from_fn(|t| x[t].get_unchecked(i));
            one_block::<F, N>(w, x, &mut sums);
        }
        for (t, sum) in sums.into_iter().enumerate() {
            task.store(first + t, row, _mm512_reduce_add_ps(sum));
        }
    }
}

/// Adds the products of one block of a row with N tokens to `sums`.
///
/// # Safety
/// `w` points to a block, and the machine has the family's instructions.
#[inline(always)]
unsafe fn one_block<F: GroupLanes, const N: usize>(
    w: *const u8,
    x: [&LargeBlock; N],
    sums: &mut [__m512; N],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let Lanes { scales, offsets } = F::lanes(w);
        let both_scales = join(scales, scales);
        let scale = half_at(w.add(F::SCALE_AT));
        let mut products = [_mm512_setzero_si512(); N];
        for pair in 0..4_i16 {
            let at = pair as usize;
            let codes = join(F::load(w, 2 * at), F::load(w, 2 * at + 1));
            let words = join(
                _mm256_set1_epi16(2 * pair * 0x0202 + 0x0100),
                _mm256_set1_epi16((2 * pair + 1) * 0x0202 + 0x0100),
            );
            let scales = _mm512_shuffle_epi8(both_scales, words);
            for t in 0..N {
                let x = _mm512_loadu_si512(x[t].codes.as_ptr().add(at * 64).cast());
                let pairs = _mm512_maddubs_epi16(codes, x);
                products[t] = _mm512_dpwssd_epi32(products[t], pairs, scales);
            }
        }
        for t in 0..N {
            let x_sums = _mm256_loadu_si256(x[t].half_sums.as_ptr().cast());
            if F::ZERO != 0 {
                let zeroes = _mm256_mullo_epi16(scales, _mm256_set1_epi16(F::ZERO as i16));
                let zeroes = _mm512_zextsi256_si512(_mm256_madd_epi16(zeroes, x_sums));
                products[t] = _mm512_sub_epi32(products[t], zeroes);
            }
            let product = _mm512_cvtepi32_ps(products[t]);
            sums[t] = _mm512_fmadd_ps(product, _mm512_set1_ps(scale * x[t].scale), sums[t]);
            if let Some(at) = F::OFFSET_AT {
                let offset = _mm512_set1_ps(half_at(w.add(at)) * x[t].scale);
                let product = _mm512_zextsi256_si512(_mm256_madd_epi16(offsets, x_sums));
                sums[t] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(product), offset, sums[t]);
            }
        }
    }
}

/// Converts codes to unsigned bytes. Signed codes become 128 too large.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
unsafe fn unsigned<F: Codes>(codes: __m512i) -> __m512i {
    if F::LARGEST.is_some() {
        return codes;
    }
    // SAFETY: by the caller's promise.
    unsafe { _mm512_xor_si512(codes, _mm512_set1_epi8(i8::MIN)) }
}

/// Joins two halves of a vector.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
unsafe fn join(lower: __m256i, upper: __m256i) -> __m512i {
    // SAFETY: by the caller's promise.
    unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(lower), upper) }
}
