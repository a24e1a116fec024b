//! Reading of device memory at full speed, as the reference for other rates.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

impl Gpu {
    /// Returns the number of words that [`Gpu::read_all`] writes.
    pub fn read_all_words(&self) -> usize {
        self.multiprocessors() as usize * 4
    }

    /// Reads `bytes` bytes, a multiple of 16, and writes their parity to `out`, which must have room for
    /// [`Gpu::read_all_words`] words.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn read_all(
        &self,
        x: DevicePtr<u8>,
        bytes: usize,
        out: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        let grid = (self.read_all_words() as u32, 1, 1);
        Launch::new(self.kernel("bandwidth", "bandwidth_read")?, grid, (512, 1, 1))
            .ptr(x, bytes)
            .ptr(out, self.read_all_words())
            .u64(bytes as u64 / 16)
            .run(self)
    }
}
