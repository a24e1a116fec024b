//! Products with rounded activations without special instructions: the reference for the others.
//!
//! A row of weights is unpacked once and then meets every token.

use std::ops::Range;

use super::activations::Rounded;
use super::task::{Scratch, Task};
use super::types::{Block32, Block256, Header};

/// Rows of a type with blocks of 32.
///
/// # Safety
/// As [`super::task::Kernel`].
pub(crate) unsafe fn rows32<F: Block32>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    let blocks = task.cols / 32;
    let codes = scratch.codes.first(task.cols);
    let scales = scratch.floats.first(2 * blocks);
    for row in rows {
        let bytes = task.row(row);
        for (i, block) in bytes.chunks_exact(F::TYPE.block_bytes()).enumerate() {
            F::codes(block, 0, as_group(&mut codes[i * 32..]));
            (scales[2 * i], scales[2 * i + 1]) = F::scale(block);
        }
        for selected in 0..task.token_count {
            let x = task.activations().small(task.token(selected));
            let value = dot32::<F>(codes, scales, x);
            // SAFETY: this chunk's rows are this worker's.
            unsafe { task.store(selected, row, value) };
        }
    }
}

fn dot32<F: Block32>(codes: &[i8], scales: &[f32], x: Rounded<'_>) -> f32 {
    let mut sum = 0.0;
    let blocks = codes.chunks_exact(32).zip(x.codes.chunks_exact(32)).zip(scales.chunks_exact(2));
    for (i, ((codes, x_codes), scale)) in blocks.enumerate() {
        let x_sum = i32::from(x.sums32[i]);
        let product = dot(codes, x_codes) - F::ZERO * x_sum;
        sum += scale[0] * x.scales[i] * product as f32;
        if F::HAS_OFFSET {
            sum += scale[1] * x.scales[i] * x_sum as f32;
        }
    }
    sum
}

/// Rows of a type with blocks of 256.
///
/// # Safety
/// As [`super::task::Kernel`].
pub(crate) unsafe fn rows256<F: Block256>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    let codes = scratch.codes.first(task.cols);
    for row in rows {
        let bytes = task.row(row);
        scratch.headers.clear();
        for (i, block) in bytes.chunks_exact(F::TYPE.block_bytes()).enumerate() {
            for group in 0..8 {
                F::codes(block, group, as_group(&mut codes[i * 256 + group * 32..]));
            }
            scratch.headers.push(F::header(block));
        }
        for selected in 0..task.token_count {
            let x = task.activations().large(task.token(selected));
            let value = dot256::<F>(codes, &scratch.headers, x);
            // SAFETY: this chunk's rows are this worker's.
            unsafe { task.store(selected, row, value) };
        }
    }
}

fn dot256<F: Block256>(codes: &[i8], headers: &[Header], x: Rounded<'_>) -> f32 {
    let mut sum = 0.0;
    let groups_of_block = 256 / F::GROUP;
    let x_sums = if F::GROUP == 16 { x.sums16 } else { x.sums32 };
    for (i, header) in headers.iter().enumerate() {
        let (mut product, mut offset) = (0, 0);
        for group in 0..groups_of_block {
            let at = i * 256 + group * F::GROUP;
            let x_sum = i32::from(x_sums[at / F::GROUP]);
            let group_dot = dot(&codes[at..][..F::GROUP], &x.codes[at..][..F::GROUP]);
            product += i32::from(header.scales[group]) * (group_dot - F::ZERO * x_sum);
            offset += i32::from(header.offsets[group]) * x_sum;
        }
        sum += header.scale * x.scales[i] * product as f32;
        if F::HAS_OFFSET {
            sum -= header.offset * x.scales[i] * offset as f32;
        }
    }
    sum
}

fn dot(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum()
}

/// The first 32 codes of a slice that has them.
fn as_group(codes: &mut [i8]) -> &mut [i8; 32] {
    codes.first_chunk_mut().expect("rows are whole blocks")
}
