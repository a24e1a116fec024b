//! Reading device memory as fast as it goes: what rates are compared with.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

impl Gpu {
    /// Words that [`Gpu::read_all`] writes.
    pub fn read_all_words(&self) -> usize {
        self.multiprocessors() as usize * 4
    }

    /// Reads `bytes` bytes, a multiple of 16, and leaves their parity in `out`, which has room for
    /// [`Gpu::read_all_words`].
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small.
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
