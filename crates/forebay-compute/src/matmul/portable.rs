//! Products with rounded activations without special instructions. This is the reference for the
//! other kernels.
//!
//! A row of weights is unpacked once and then multiplied with every token.

use std::ops::Range;

use super::quantize::{LargeBlock, SmallBlock};
use super::task::{Scratch, Task};
use super::types::{Block32, Block256, Groups, f16_at};

/// Computes rows of a type with blocks of 32.
///
/// # Safety
/// The requirements of [`super::task::Kernel`] hold.
pub(crate) unsafe fn rows32<F: Block32>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    let codes = scratch.codes.first(task.cols);
    let scales = scratch.floats.first(task.cols / 32 * 2);
    for row in rows {
        let blocks = task.row(row).chunks_exact(F::TYPE.block_bytes());
        let targets = codes.as_chunks_mut().0.iter_mut().zip(scales.as_chunks_mut().0);
        for (block, (codes, scales)) in blocks.zip(targets) {
            F::codes(block, 0, codes);
            *scales = [F::scale(block), F::OFFSET_AT.map_or(0.0, |at| f16_at(block, at))];
        }
        for selected in 0..task.token_count {
            let x = task.activations().small(task.token(selected));
            let value = dot32::<F>(codes, scales, x);
            // SAFETY: this chunk's rows are this worker's.
            unsafe { task.store(selected, row, value) };
        }
    }
}

fn dot32<F: Block32>(codes: &[i8], scales: &[f32], x: &[SmallBlock]) -> f32 {
    let mut sum = 0.0;
    for (i, (codes, scales)) in
        codes.as_chunks::<32>().0.iter().zip(scales.as_chunks().0).enumerate()
    {
        let (x, at) = (&x[i / 8], i % 8);
        let [scale, offset] = scales;
        let product = dot(codes, &x.codes[at * 32..][..32]) - F::ZERO * x.sums[at];
        sum += scale * x.scales[at] * product as f32;
        if F::OFFSET_AT.is_some() {
            sum += offset * x.scales[at] * x.sums[at] as f32;
        }
    }
    sum
}

/// Scales of one block of 256. [`rows256`] keeps those of the row at hand.
#[derive(Default)]
pub(crate) struct BlockScales {
    scale: f32,
    offset: f32,
    groups: Groups,
}

/// Computes rows of a type with blocks of 256.
///
/// # Safety
/// The requirements of [`super::task::Kernel`] hold.
pub(crate) unsafe fn rows256<F: Block256>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    let codes = scratch.codes.first(task.cols);
    let scales = &mut scratch.block_scales;
    for row in rows {
        scales.clear();
        let blocks = task.row(row).chunks_exact(F::TYPE.block_bytes());
        for (block, codes) in blocks.zip(codes.as_chunks_mut::<256>().0) {
            for (group, codes) in codes.as_chunks_mut().0.iter_mut().enumerate() {
                F::codes(block, group, codes);
            }
            scales.push(BlockScales {
                scale: f16_at(block, F::SCALE_AT),
                offset: F::OFFSET_AT.map_or(0.0, |at| f16_at(block, at)),
                groups: F::groups(block),
            });
        }
        for selected in 0..task.token_count {
            let x = task.activations().large(task.token(selected));
            let value = dot256::<F>(codes, scales, x);
            // SAFETY: this chunk's rows are this worker's.
            unsafe { task.store(selected, row, value) };
        }
    }
}

fn dot256<F: Block256>(codes: &[i8], scales: &[BlockScales], x: &[LargeBlock]) -> f32 {
    let mut sum = 0.0;
    for ((codes, scales), x) in codes.as_chunks::<256>().0.iter().zip(scales).zip(x) {
        let (mut product, mut offset) = (0, 0);
        let halves = codes.as_chunks::<16>().0.iter().zip(x.codes.as_chunks::<16>().0);
        for (half, (codes, x_codes)) in halves.enumerate() {
            let group = half * 16 / F::GROUP;
            let x_sum = i32::from(x.half_sums[half / 2 + half % 2 * 8]);
            let half_dot = dot(codes, x_codes) - F::ZERO * x_sum;
            product += i32::from(scales.groups.scales[group]) * half_dot;
            offset += i32::from(scales.groups.offsets[group]) * x_sum;
        }
        sum += scales.scale * x.scale * product as f32;
        if F::OFFSET_AT.is_some() {
            sum -= scales.offset * x.scale * offset as f32;
        }
    }
    sum
}

#[inline(always)]
fn dot(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum()
}
