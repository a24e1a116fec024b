//! Rounding of activations to 8 bits, for products in integers.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Activations `[tokens, cols]` as 8-bit codes with a scale for every 32 of them; `cols` is a multiple of 32.
#[derive(Clone, Copy)]
pub struct RoundedActivations {
    /// Codes `[tokens, 2, cols / 32, 16]`: the first halves of all groups, then the second halves. Aligned to 16
    /// bytes.
    pub codes: DevicePtr<i8>,
    /// Scales `[tokens, cols / 32]` of 8 bytes each: the scale as f32, and the sums of the two halves' codes as i16.
    pub scales: DevicePtr<[u8; 8]>,
}

impl RoundedActivations {
    /// Returns the number of bytes of codes and of scales for `x [tokens, cols]`.
    pub fn bytes(tokens: usize, cols: usize) -> (usize, usize) {
        (tokens * cols, tokens * cols / 4)
    }
}

/// The same activations in the order in which tensor cores take them, for eight tokens at a time. See `tile_codes` in `quantize.cu`.
#[derive(Clone, Copy)]
pub struct TiledActivations {
    /// Codes, aligned to 16 bytes.
    pub codes: DevicePtr<i8>,
    /// Scales of 8 bytes each, aligned to 16 bytes.
    pub scales: DevicePtr<[u8; 8]>,
}

impl TiledActivations {
    /// Returns the number of bytes of codes and of scales for `x [tokens, cols]`.
    pub fn bytes(tokens: usize, cols: usize) -> (usize, usize) {
        RoundedActivations::bytes(tokens.next_multiple_of(8), cols)
    }
}

impl Gpu {
    /// Rounds `x [tokens, cols]` to `out`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if `cols` is not a multiple of 32.
    pub fn quantize_q8(
        &self,
        x: DevicePtr<f32>,
        out: RoundedActivations,
        tokens: usize,
        cols: usize,
    ) -> Result<(), CudaError> {
        assert!(cols.is_multiple_of(32), "{cols} columns are not whole groups of 32");
        let groups = tokens * cols / 32;
        let grid = (groups.div_ceil(8) as u32, 1, 1);
        Launch::new(self.kernel("quantize", "quantize_q8")?, grid, (256, 1, 1))
            .ptr(x, tokens * cols)
            .ptr(out.codes, tokens * cols)
            .ptr(out.scales, groups)
            .int(groups)
            .int(cols / 32)
            .run(self)
    }

    /// Copies rounded activations `x [tokens, cols]` to the order of tensor cores.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned, or if `cols` is not a multiple of 32.
    pub fn tile_rounded(
        &self,
        x: RoundedActivations,
        out: TiledActivations,
        tokens: usize,
        cols: usize,
    ) -> Result<(), CudaError> {
        assert!(cols.is_multiple_of(32), "{cols} columns are not whole groups of 32");
        let is_aligned = |address: u64| address.is_multiple_of(16);
        assert!(is_aligned(out.codes.address()) && is_aligned(out.scales.address()));
        let (codes, scales) = TiledActivations::bytes(tokens, cols);
        let items = tokens.div_ceil(8) * cols / 32;
        let grid = (items.div_ceil(8) as u32, 1, 1);
        Launch::new(self.kernel("quantize", "tile_codes")?, grid, (256, 1, 1))
            .ptr(x.codes, tokens * cols)
            .ptr(x.scales, tokens * cols / 32)
            .ptr(out.codes, codes)
            .ptr(out.scales, scales / 8)
            .int(tokens)
            .int(cols / 32)
            .run(self)
    }
}
