//! Random weights of every type, on the host and on the device.

use anyhow::Result;
use forebay_cuda::{CudaError, DeviceMemory, DevicePtr, supports_weights, weight_alignment};
use forebay_format::{TensorType, dequantize};

use crate::harness::Context;
use crate::random::Random;
pub use crate::random::random_weights;

/// Returns every type for which there are matrix products.
pub fn types() -> impl Iterator<Item = TensorType> {
    TensorType::all().iter().copied().filter(|&ty| supports_weights(ty))
}

/// A matrix `[rows, cols]` on the host and on the device.
pub struct Weights {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<u8>,
    /// Exact values of the weights.
    pub values: Vec<f32>,
    _memory: DeviceMemory,
    pub ptr: DevicePtr<u8>,
}

impl Weights {
    /// Creates a random matrix. Its device address has the worst alignment that the type allows, and is followed by the
    /// margin that kernels may read.
    pub fn random(
        context: &Context,
        ty: TensorType,
        rows: usize,
        cols: usize,
        random: &mut Random,
    ) -> Result<Weights> {
        Weights::of(context, ty, rows, cols, random_weights(ty, rows * cols, random))
    }

    /// Places the matrix `data` like a random one.
    pub fn of(
        context: &Context,
        ty: TensorType,
        rows: usize,
        cols: usize,
        data: Vec<u8>,
    ) -> Result<Weights> {
        let mut values = vec![0.0; rows * cols];
        dequantize(ty, &data, &mut values)?;
        let (_memory, ptr) = place(context, &data, 16 + weight_alignment(ty) % 16)?;
        Ok(Weights { rows, cols, data, values, _memory, ptr })
    }

    /// Returns the exact product of row `row` with `x`, and the product of their norms.
    pub fn dot(&self, row: usize, x: &[f64]) -> (f64, f64) {
        let row = &self.values[row * self.cols..][..self.cols];
        let (mut sum, mut row_norm, mut x_norm) = (0.0, 0.0, 0.0);
        for (w, x) in row.iter().zip(x) {
            let w = f64::from(*w);
            sum += w * x;
            row_norm += w * w;
            x_norm += x * x;
        }
        (sum, (row_norm * x_norm).sqrt())
    }
}

/// Copies `data` to byte `offset` of device memory whose other bytes are 0xff.
pub fn place(
    context: &Context,
    data: &[u8],
    offset: usize,
) -> Result<(DeviceMemory, DevicePtr<u8>), CudaError> {
    let bytes = offset + data.len() + 16;
    let memory = context.gpu.allocate(bytes)?;
    context.gpu.fill(memory.ptr(), 0xff, bytes)?;
    let ptr = memory.ptr::<u8>().offset(offset);
    context.gpu.upload(data, ptr)?;
    Ok((memory, ptr))
}
