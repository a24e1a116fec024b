//! Products with F32 activations. Weights are widened or dequantised one row at a time.

use std::ops::Range;

use forebay_format::{TensorType, dequantize};
use half::{bf16, f16};

use super::task::{Scratch, Task};

/// Number of sums that run side by side, so that the compiler can use vectors.
const LANES: usize = 16;

/// Computes rows of any type.
///
/// # Safety
/// The requirements of [`super::task::Kernel`] hold.
pub(crate) unsafe fn rows_portable(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    let weights = scratch.floats.first(task.cols);
    for row in rows {
        widen_row(task.ty, task.row(row), weights);
        for selected in 0..task.token_count {
            let value = dot(weights, task.activations().floats(task.token(selected)));
            // SAFETY: this chunk's rows are this worker's.
            unsafe { task.store(selected, row, value) };
        }
    }
}

/// Widens or dequantises a row to F32.
pub(crate) fn widen_row(ty: TensorType, bytes: &[u8], weights: &mut [f32]) {
    match ty {
        TensorType::F32 => {
            for (weight, bytes) in weights.iter_mut().zip(bytes.as_chunks().0) {
                *weight = f32::from_le_bytes(*bytes);
            }
        }
        TensorType::F16 => {
            for (weight, bytes) in weights.iter_mut().zip(bytes.as_chunks().0) {
                *weight = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        TensorType::BF16 => {
            for (weight, bytes) in weights.iter_mut().zip(bytes.as_chunks().0) {
                *weight = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        _ => dequantize(ty, bytes, weights).expect("matmul has checked type and length"),
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
