//! Rows put together from columns of others.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

const THREADS: usize = 256;
/// Blocks beyond which threads take several elements.
const BLOCKS_MAX: usize = 4096;

/// The first columns of rows that begin every `stride` elements.
#[derive(Clone, Copy)]
pub struct Columns {
    pub from: DevicePtr<f32>,
    pub stride: usize,
    pub cols: usize,
}

impl Columns {
    /// No columns.
    pub fn none() -> Columns {
        Columns { from: DevicePtr::null(), stride: 0, cols: 0 }
    }
}

impl Gpu {
    /// `out [rows, a.cols + b.cols]`: of each row the columns of `a`, then those of `b`.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a row has fewer columns than are asked for.
    pub fn join_columns(
        &self,
        [a, b]: [Columns; 2],
        out: DevicePtr<f32>,
        rows: usize,
    ) -> Result<(), CudaError> {
        assert!(a.cols <= a.stride && b.cols <= b.stride, "rows are shorter than their columns");
        let blocks = (rows * (a.cols + b.cols)).div_ceil(THREADS).clamp(1, BLOCKS_MAX);
        let grid = (blocks as u32, 1, 1);
        Launch::new(self.kernel("columns", "join_columns")?, grid, (THREADS as u32, 1, 1))
            .ptr(a.from)
            .int(a.stride)
            .int(a.cols)
            .ptr(b.from)
            .int(b.stride)
            .int(b.cols)
            .ptr(out)
            .int(rows)
            .run(self)
    }
}
