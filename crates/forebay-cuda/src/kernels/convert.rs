//! Relayout of weights from device memory to device memory: the same values in the form of another file format.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

const GRID_Y_MAX: usize = 65_535;
/// Number of threads of a block; the same as in the kernels.
const BLOCKS: usize = 128;
/// Number of bytes of a block of [`forebay_format::TensorType::MXFP4`].
const BLOCK_BYTES: usize = 17;
const TILE: usize = 32;
const TILE_ROWS: usize = 8;

/// gpt-oss's MXFP4 weights as stored in safetensors.
#[derive(Clone, Copy)]
pub struct SplitMxfp4 {
    /// Codes `[rows, row_blocks, 16]`, aligned to 16 bytes.
    pub blocks: DevicePtr<u8>,
    /// Scales `[rows, row_blocks]`.
    pub scales: DevicePtr<u8>,
    pub rows: usize,
    pub row_blocks: usize,
}

/// Equally spaced matrices `[rows, cols]` with elements of `size` bytes.
#[derive(Clone, Copy)]
pub struct Matrices {
    pub count: usize,
    pub rows: usize,
    pub cols: usize,
    /// Number of bytes of an element, 2 or 4.
    pub size: usize,
    /// Number of elements from the start of one matrix to the start of the next.
    pub stride: usize,
}

impl Gpu {
    /// Converts `from` to [`forebay_format::TensorType::MXFP4`], written at any address. With two outputs, even rows
    /// go to `even` and odd rows to `odd`, because gate and up lie in one tensor. Otherwise `odd` is null.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if `blocks` is not aligned to 16 bytes.
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

    /// Transposes `matrices` of `from`. Writes the results `[cols, rows]` to `to`, spaced `to_stride` elements apart.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, elements do not have 2 or 4 bytes or are not aligned, or there are more than
    /// 65,535 matrices or tiles of rows.
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
