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
}
