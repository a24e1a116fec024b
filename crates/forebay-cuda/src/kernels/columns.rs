//! Rows composed of columns of other rows.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

const THREADS: usize = 256;
/// Maximum number of blocks; with more elements, each thread processes several.
const BLOCKS_MAX: usize = 4096;

/// The first columns of rows that begin every `stride` elements.
#[derive(Clone, Copy)]
pub struct Columns {
    pub from: DevicePtr<f32>,
    pub stride: usize,
    pub cols: usize,
}

impl Columns {
    /// Returns a value that stands for no columns.
    pub fn none() -> Columns {
        Columns { from: DevicePtr::null(), stride: 0, cols: 0 }
    }

    /// Returns the number of values from the first of the first row to the last of the last row.
    fn values(&self, rows: usize) -> usize {
        rows.saturating_sub(1) * self.stride + self.cols
    }
}

impl Gpu {
    /// Writes `out [rows, a.cols + b.cols]`: for each row, the columns of `a`, then those of `b`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if a row has fewer columns than are taken from it.
    pub fn join_columns(
        &self,
        [a, b]: [Columns; 2],
        out: DevicePtr<f32>,
        rows: usize,
    ) -> Result<(), CudaError> {
        let is_there = |columns: Columns| columns.cols == 0 || !columns.from.is_null();
        assert!(is_there(a) && is_there(b), "columns of nothing");
        assert!(a.cols <= a.stride && b.cols <= b.stride, "rows are shorter than their columns");
        let blocks = (rows * (a.cols + b.cols)).div_ceil(THREADS).clamp(1, BLOCKS_MAX);
        let grid = (blocks as u32, 1, 1);
        Launch::new(self.kernel("columns", "join_columns")?, grid, (THREADS as u32, 1, 1))
            .optional(a.from, a.values(rows))
            .int(a.stride)
            .int(a.cols)
            .optional(b.from, b.values(rows))
            .int(b.stride)
            .int(b.cols)
            .ptr(out, rows * (a.cols + b.cols))
            .int(rows)
            .run(self)
    }
}
