//! Root-mean-square norms.

use super::FiniteFlag;
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Threads of the largest block.
const THREADS_MAX: usize = 1024;

/// A norm over rows of `width` elements: `weight * x / sqrt(mean(x^2) + epsilon)`.
#[derive(Clone, Copy)]
pub struct Norm {
    /// `[width]`, aligned to 16 bytes.
    pub weight: DevicePtr<f32>,
    pub width: usize,
    pub epsilon: f32,
}

impl Norm {
    /// Threads for a row: two quads of elements for each, while there are enough threads. By the width alone, since
    /// the order of the sum depends on it.
    fn threads(&self) -> u32 {
        (self.width / 8).next_power_of_two().clamp(32, THREADS_MAX) as u32
    }

    fn check(&self, rows: &[DevicePtr<f32>]) {
        assert!(self.width > 0, "a norm of empty rows");
        let aligned = |pointer: &DevicePtr<f32>| pointer.address().is_multiple_of(16);
        assert!(
            !self.width.is_multiple_of(4) || rows.iter().chain([&self.weight]).all(aligned),
            "norms read 16 bytes at once"
        );
    }
}

impl Gpu {
    /// `out = norm(x)` for `rows` rows; `out` may be `x`. `flag`, if any, learns of rows that are not finite.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When pointers are not aligned to 16 bytes though `width` is a multiple of 4.
    pub fn rms_norm(
        &self,
        x: DevicePtr<f32>,
        norm: &Norm,
        out: DevicePtr<f32>,
        rows: usize,
        flag: Option<FiniteFlag>,
    ) -> Result<(), CudaError> {
        norm.check(&[x, out]);
        let flag = flag.unwrap_or(FiniteFlag::none());
        let (grid, block) = ((rows as u32, 1, 1), (norm.threads(), 1, 1));
        Launch::new(self.kernel("norm", "rms_norm")?, grid, block)
            .ptr(x)
            .ptr(norm.weight)
            .ptr(out)
            .int(norm.width)
            .float(norm.epsilon)
            .ptr(flag.flag)
            .int(flag.first_tag)
            .run(self)
    }

    /// `x += add`, then `out = norm(x)`: the end of one block and the beginning of the next.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// As [`Gpu::rms_norm`].
    pub fn add_rms_norm(
        &self,
        x: DevicePtr<f32>,
        add: DevicePtr<f32>,
        norm: &Norm,
        out: DevicePtr<f32>,
        rows: usize,
        flag: Option<FiniteFlag>,
    ) -> Result<(), CudaError> {
        norm.check(&[x, add, out]);
        let flag = flag.unwrap_or(FiniteFlag::none());
        let (grid, block) = ((rows as u32, 1, 1), (norm.threads(), 1, 1));
        Launch::new(self.kernel("norm", "add_rms_norm")?, grid, block)
            .ptr(x)
            .ptr(add)
            .ptr(norm.weight)
            .ptr(out)
            .int(norm.width)
            .float(norm.epsilon)
            .ptr(flag.flag)
            .int(flag.first_tag)
            .run(self)
    }

    /// Norms `rows` short rows in place, such as all heads of a projection.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn rms_norm_heads(
        &self,
        x: DevicePtr<f32>,
        norm: &Norm,
        rows: usize,
    ) -> Result<(), CudaError> {
        let grid = (rows.div_ceil(8) as u32, 1, 1);
        Launch::new(self.kernel("norm", "rms_norm_heads")?, grid, (256, 1, 1))
            .ptr(x)
            .ptr(norm.weight)
            .int(rows)
            .int(norm.width)
            .float(norm.epsilon)
            .run(self)
    }
}
