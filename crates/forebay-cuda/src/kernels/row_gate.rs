//! Gates of the outputs of attention and of shared experts.

use super::elementwise::{GRID_Y_MAX, THREADS, blocks};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Gates of heads: those of head `h` of a row begin at element `first` of part `h` of the row, whose parts have `stride`
/// elements.
#[derive(Clone, Copy)]
pub struct HeadGates {
    pub gates: DevicePtr<f32>,
    pub heads: usize,
    pub dim: usize,
    pub first: usize,
    pub stride: usize,
}

impl Gpu {
    /// Multiplies every element of `x` `[rows, heads, dim]` by the logistic function of its gate.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if the gates of a head do not fit its part.
    pub fn gate_heads(
        &self,
        x: DevicePtr<f32>,
        of: &HeadGates,
        rows: usize,
    ) -> Result<(), CudaError> {
        let HeadGates { gates, heads, dim, first, stride } = *of;
        assert!(first + dim <= stride, "gates {first} to {} of {stride}", first + dim);
        let grid = (blocks(heads * dim), rows.min(GRID_Y_MAX) as u32, 1);
        Launch::new(self.kernel("row_gate", "gate_heads")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * heads * dim)
            .ptr(gates, rows * heads * stride)
            .int(heads)
            .int(dim)
            .int(first)
            .int(stride)
            .int(rows)
            .run(self)
    }

    /// Multiplies every row of `out` `[rows, width]` by the logistic function of the product of a row of `x` `[rows, cols]`
    /// with `weight`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn gate_rows(
        &self,
        (out, width): (DevicePtr<f32>, usize),
        x: DevicePtr<f32>,
        (weight, cols): (DevicePtr<f32>, usize),
        rows: usize,
    ) -> Result<(), CudaError> {
        let grid = (rows as u32, 1, 1);
        Launch::new(self.kernel("row_gate", "gate_rows")?, grid, (THREADS as u32, 1, 1))
            .ptr(out, rows * width)
            .ptr(x, rows * cols)
            .ptr(weight, cols)
            .int(cols)
            .int(width)
            .run(self)
    }
}
