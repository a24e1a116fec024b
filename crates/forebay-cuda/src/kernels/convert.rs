//! Weights in the form in which other files hold the same values, from device memory to device memory.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

const GRID_Y_MAX: usize = 65_535;
/// As in the kernels.
const BLOCKS: usize = 128;
/// Bytes of a block of [`forebay_format::TensorType::MXFP4`].
const BLOCK_BYTES: usize = 17;
const TILE: usize = 32;
const TILE_ROWS: usize = 8;

/// gpt-oss's MXFP4 as safetensors hold it.
#[derive(Clone, Copy)]
pub struct SplitMxfp4 {
    /// `[rows, row_blocks, 16]`, aligned to 16 bytes.
    pub blocks: DevicePtr<u8>,
    /// `[rows, row_blocks]`
    pub scales: DevicePtr<u8>,
    pub rows: usize,
    pub row_blocks: usize,
}

/// Matrices `[rows, cols]` at equal distances, of elements of `size` bytes.
#[derive(Clone, Copy)]
pub struct Matrices {
    pub count: usize,
    pub rows: usize,
    pub cols: usize,
    /// 2 or 4.
    pub size: usize,
    /// Elements from one matrix to the next.
    pub stride: usize,
}

impl Gpu {
    /// `from` in the form of [`forebay_format::TensorType::MXFP4`], at any address. With two outputs, even rows go to the
    /// first and odd ones to the second, as gate and up lie in one tensor; else `odd` is null.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small, or `blocks` is not aligned to 16 bytes.
    pub fn mxfp4_blocks(
        &self,
        from: &SplitMxfp4,
        even: DevicePtr<u8>,
        odd: DevicePtr<u8>,
    ) -> Result<(), CudaError> {
        assert!(from.blocks.address().is_multiple_of(16), "mxfp4_blocks reads 16 bytes at once");
        let odd_rows = if odd.is_null() { 0 } else { from.rows / 2 };
        let grid = (from.row_blocks.div_ceil(BLOCKS) as u32, from.rows.min(GRID_Y_MAX) as u32, 1);
        Launch::new(self.kernel("convert", "mxfp4_blocks")?, grid, (BLOCKS as u32, 1, 1))
            .ptr(from.blocks, 16 * from.rows * from.row_blocks)
            .ptr(from.scales, from.rows * from.row_blocks)
            .ptr(even, BLOCK_BYTES * from.row_blocks * (from.rows - odd_rows))
            .optional(odd, BLOCK_BYTES * from.row_blocks * odd_rows)
            .int(from.rows)
            .int(from.row_blocks)
            .run(self)
    }

    /// The transposes `[cols, rows]` of `matrices` of `from`, at distances of `to_stride` elements of `to`.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small, elements are not of 2 or 4 bytes or not aligned, or with more than 65,535 matrices or tiles of rows.
    pub fn transpose(
        &self,
        matrices: &Matrices,
        from: DevicePtr<u8>,
        to: DevicePtr<u8>,
        to_stride: usize,
    ) -> Result<(), CudaError> {
        let Matrices { count, rows, cols, size, stride } = *matrices;
        let name = match size {
            2 => "transpose_2",
            4 => "transpose_4",
            _ => panic!("transpose: elements of {size} bytes"),
        };
        let aligned = |pointer: DevicePtr<u8>| pointer.address().is_multiple_of(size as u64);
        assert!(aligned(from) && aligned(to), "transpose: elements are not aligned");
        let bytes = |stride: usize| size * (count.saturating_sub(1) * stride + rows * cols);
        let (tiles, tiles_down) = (cols.div_ceil(TILE), rows.div_ceil(TILE));
        assert!(tiles_down.max(count) <= GRID_Y_MAX, "transpose: {count} of {rows} rows");
        let grid = (tiles as u32, tiles_down as u32, count as u32);
        Launch::new(self.kernel("convert", name)?, grid, (TILE as u32, TILE_ROWS as u32, 1))
            .ptr(from, bytes(stride))
            .ptr(to, bytes(to_stride))
            .int(rows)
            .int(cols)
            .u64(stride as u64)
            .u64(to_stride as u64)
            .run(self)
    }
}
