//! Gates of the outputs of attention and of shared experts, and factors of rows.

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

/// Factors of rows that grow with their positions `p`: `1 + rate * ln(1 + floor((p + first) / step))`, or
/// `1 + rate * ln(max((p + first) / step, 1))`.
#[derive(Clone, Copy, Debug)]
pub struct RowTemperature {
    pub rate: f32,
    pub step: f32,
    pub first: u32,
    /// True for the second form.
    pub by_ratio: bool,
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

    /// Multiplies every head of `x` `[rows, heads, dim]` by the logistic function of its gate, or by its softplus. `gates` is
    /// `[rows, heads]`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn gate_whole_heads(
        &self,
        x: DevicePtr<f32>,
        (gates, is_softplus): (DevicePtr<f32>, bool),
        [heads, dim]: [usize; 2],
        rows: usize,
    ) -> Result<(), CudaError> {
        let grid = (blocks(heads * dim), rows.min(GRID_Y_MAX) as u32, 1);
        Launch::new(self.kernel("row_gate", "gate_whole_heads")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * heads * dim)
            .ptr(gates, rows * heads)
            .int(heads)
            .int(dim)
            .int(usize::from(is_softplus))
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
    /// Computes `out = x * factor` for every row of `x` `[rows, width]`. The factors `[rows]` become 1.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn take_factors(
        &self,
        x: DevicePtr<f32>,
        factors: DevicePtr<f32>,
        out: DevicePtr<f32>,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        let grid = (rows as u32, 1, 1);
        Launch::new(self.kernel("row_gate", "take_factors")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * width)
            .ptr(factors, rows)
            .ptr(out, rows * width)
            .int(width)
            .run(self)
    }

    /// Multiplies every row of `x` `[rows, width]` by the factor of its position, where `positions` `[rows]` are those of the rows.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn temper_rows(
        &self,
        x: DevicePtr<f32>,
        positions: DevicePtr<u32>,
        of: RowTemperature,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        let grid = (rows as u32, 1, 1);
        Launch::new(self.kernel("row_gate", "temper_rows")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * width)
            .ptr(positions, rows)
            .float(of.rate)
            .float(of.step)
            .int(of.first as usize)
            .int(usize::from(of.by_ratio))
            .int(width)
            .run(self)
    }
}
