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

    /// Values from the first row's first to the last one's last.
    fn values(&self, rows: usize) -> usize {
        rows.saturating_sub(1) * self.stride + self.cols
    }
}

impl Gpu {
    /// `out [rows, a.cols + b.cols]`: of each row the columns of `a`, then those of `b`.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small, or a row has fewer columns than are asked for.
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
