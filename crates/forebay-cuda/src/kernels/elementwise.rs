//! Biases, soft caps, the sum of the experts' outputs, a check for values that are not finite, and copies of words
//! from the host.

use std::ops::Range;

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu, HostWords};

pub(super) const THREADS: usize = 256;
/// Most blocks that a grid's second dimension may have.
pub(super) const GRID_Y_MAX: usize = 65_535;

/// Flag to which kernels report rows with values that are not finite. It keeps the smallest `first_tag + row`.
#[derive(Clone, Copy)]
pub struct FiniteFlag {
    /// One word, `u32::MAX` as long as all rows are finite.
    pub flag: DevicePtr<u32>,
    /// Tag of row 0. It is below 2^31 and small enough that no tag reaches 2^31.
    pub first_tag: usize,
}

impl FiniteFlag {
    pub(crate) fn none() -> FiniteFlag {
        FiniteFlag { flag: DevicePtr::null(), first_tag: 0 }
    }
}

/// Outputs of the experts of every token, and how to add them up. The result is the sum over j, in order, of
/// `weights[t, j] * (parts[row_of_pair[t, j]] + bias[ids[t, j]])`, and then `shared[t]`.
#[derive(Clone, Copy)]
pub struct ExpertOutputs {
    /// Outputs `[pairs, width]` in the order in which they were computed.
    pub parts: DevicePtr<f32>,
    /// `[tokens, k]`
    pub weights: DevicePtr<f32>,
    /// Row of `parts` for each pair `[tokens, k]`.
    pub row_of_pair: DevicePtr<u32>,
    /// Biases of the experts `[experts, width]`; null if there are none.
    pub bias: DevicePtr<f32>,
    /// Chosen experts `[tokens, k]`. A slot with [`super::NO_EXPERT`] adds nothing.
    pub ids: DevicePtr<u32>,
    /// Outputs of a shared expert `[tokens, width]`; null if there is none.
    pub shared: DevicePtr<f32>,
    pub width: usize,
    pub k: usize,
}

impl ExpertOutputs {
    pub(super) fn none(width: usize) -> ExpertOutputs {
        let (none, none_of) = (DevicePtr::null(), DevicePtr::null());
        ExpertOutputs {
            parts: none,
            weights: none,
            row_of_pair: none_of,
            bias: none,
            ids: none_of,
            shared: none,
            width,
            k: 0,
        }
    }
}

/// Returns the number of blocks for `count` threads.
pub(super) fn blocks(count: usize) -> u32 {
    u32::try_from(count.div_ceil(THREADS)).expect("a grid fits 32 bits")
}

impl Gpu {
    /// Computes `x [rows, width] += bias [width]`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn add_bias_rows(
        &self,
        x: DevicePtr<f32>,
        bias: DevicePtr<f32>,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        let grid = (blocks(width), rows.min(GRID_Y_MAX) as u32, 1);
        Launch::new(self.kernel("elementwise", "add_bias_rows")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * width)
            .ptr(bias, width)
            .int(width)
            .int(rows)
            .run(self)
    }

    /// Computes `x [rows, width] *= factors [width]`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn multiply_columns(
        &self,
        x: DevicePtr<f32>,
        factors: DevicePtr<f32>,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        let grid = (blocks(width), rows.min(GRID_Y_MAX) as u32, 1);
        Launch::new(self.kernel("elementwise", "multiply_columns")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * width)
            .ptr(factors, width)
            .int(width)
            .int(rows)
            .run(self)
    }

    /// Adds `count` values of `y`, times `factor`, to those of `x`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn add_scaled(
        &self,
        x: DevicePtr<f32>,
        y: DevicePtr<f32>,
        count: usize,
        factor: f32,
    ) -> Result<(), CudaError> {
        self.scaled("add_scaled", [x, y], count, factor)
    }

    /// Writes `count` values of `y`, times `factor`, to `x`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn copy_scaled(
        &self,
        x: DevicePtr<f32>,
        y: DevicePtr<f32>,
        count: usize,
        factor: f32,
    ) -> Result<(), CudaError> {
        self.scaled("copy_scaled", [x, y], count, factor)
    }

    /// Launches a kernel that takes `count` values of `x`, as many of `y`, and a factor.
    fn scaled(
        &self,
        kernel: &'static str,
        [x, y]: [DevicePtr<f32>; 2],
        count: usize,
        factor: f32,
    ) -> Result<(), CudaError> {
        let grid = (blocks(count), 1, 1);
        Launch::new(self.kernel("elementwise", kernel)?, grid, (THREADS as u32, 1, 1))
            .ptr(x, count)
            .ptr(y, count)
            .u64(count as u64)
            .float(factor)
            .run(self)
    }

    /// Copies `words` of pinned memory to the device by a kernel. Unlike [`Gpu::queue_upload`], it does not wait for
    /// copies of other streams, which the copy engine processes one after the other.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the range is empty or beyond the end, or if `to` is too small.
    pub fn read_words(
        &self,
        from: &HostWords,
        words: Range<usize>,
        to: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        // Taking the address of the last word checks that the whole range exists.
        let (first, count) = (from.device(words.start), words.len());
        let _ = from.device(words.end - 1);
        let grid = (blocks(count), 1, 1);
        Launch::new(self.kernel("elementwise", "copy_words")?, grid, (THREADS as u32, 1, 1))
            .ptr(first, count)
            .ptr(to, count)
            .int(count)
            .run(self)
    }

    /// Multiplies `count` values of `x` by `factor`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if `x` is too small.
    pub fn scale(&self, x: DevicePtr<f32>, count: usize, factor: f32) -> Result<(), CudaError> {
        let grid = (blocks(count), 1, 1);
        Launch::new(self.kernel("elementwise", "scale")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, count)
            .u64(count as u64)
            .float(factor)
            .run(self)
    }

    /// Bounds `count` values of `x` by `-limit` and `limit`. NaN stays NaN.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if `x` is too small.
    pub fn clamp(&self, x: DevicePtr<f32>, count: usize, limit: f32) -> Result<(), CudaError> {
        let grid = (blocks(count), 1, 1);
        Launch::new(self.kernel("elementwise", "clamp_values")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, count)
            .u64(count as u64)
            .float(limit)
            .run(self)
    }

    /// Computes `x = cap * tanh(x / cap)` for `x [rows, width]`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if `x` is too small.
    pub fn softcap(
        &self,
        x: DevicePtr<f32>,
        rows: usize,
        width: usize,
        cap: f32,
    ) -> Result<(), CudaError> {
        let grid = (blocks(rows * width), 1, 1);
        Launch::new(self.kernel("elementwise", "softcap")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * width)
            .u64((rows * width) as u64)
            .float(cap)
            .run(self)
    }

    /// Reports rows of `x [rows, width]` with values that are not finite.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if there are more than 65,535 rows or if a buffer is too small.
    pub fn check_finite(
        &self,
        x: DevicePtr<f32>,
        rows: usize,
        width: usize,
        flag: FiniteFlag,
    ) -> Result<(), CudaError> {
        assert!(rows <= GRID_Y_MAX, "check_finite: {rows} rows");
        // Every thread checks a few elements, so that a row of logits takes no longer than reading it from memory.
        let grid = (blocks(width.div_ceil(8)), rows as u32, 1);
        Launch::new(self.kernel("elementwise", "check_finite")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * width)
            .int(width)
            .ptr(flag.flag, 1)
            .int(flag.first_tag)
            .run(self)
    }
}
