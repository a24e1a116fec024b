//! Rounding of activations to 8 bits, for products in integers.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Activations `[tokens, cols]` as 8-bit codes with a scale for every 32 of them; `cols` is a multiple of 32.
#[derive(Clone, Copy)]
pub struct RoundedActivations {
    /// `[tokens, cols]`, aligned to 16 bytes.
    pub codes: DevicePtr<i8>,
    /// `[tokens, cols / 32]` pairs: the scale, and the scale times the sum of the codes. Aligned to 8 bytes.
    pub scales: DevicePtr<[f32; 2]>,
}

impl Gpu {
    /// Rounds `x [tokens, cols]`.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When `cols` is not a multiple of 32.
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
            .ptr(x)
            .ptr(out.codes)
            .ptr(out.scales)
            .int(groups)
            .run(self)
    }
}
