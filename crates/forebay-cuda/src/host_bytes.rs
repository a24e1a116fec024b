//! Pinned host memory that no kernel uses: copies to and from it run at the full rate of the bus.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result};

use crate::error::bind;
use crate::{CudaError, Gpu};

/// Pinned memory of this process for [`Gpu::upload`] and [`Gpu::download_into`]. Both wait for their copy, so nothing uses
/// the memory while it is not borrowed.
pub struct HostBytes {
    first: NonNull<u8>,
    count: usize,
    stream: Arc<CudaStream>,
}

// SAFETY: the memory belongs to this process, and this value alone owns it.
unsafe impl Send for HostBytes {}

impl AsRef<[u8]> for HostBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: that many bytes were reserved and initialised, and they are borrowed as this value is.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

impl AsMut<[u8]> for HostBytes {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_ref`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.count) }
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        if bind(self.stream.context()).is_ok() {
            // SAFETY: the memory came from the driver, no copy is under way, and it is freed once.
            let _ = unsafe { result::free_host(self.first.as_ptr().cast()) };
        }
    }
}

impl Gpu {
    /// Reserves `count` bytes of pinned memory, all 0.
    ///
    /// # Errors
    /// Returns an error if a driver call fails, most often because of a limit on locked memory.
    pub fn host_bytes(&self, count: usize) -> Result<HostBytes, CudaError> {
        self.bind()?;
        let bytes = count.max(1);
        // SAFETY: only `HostBytes` frees the memory.
        let first = unsafe { result::malloc_host(bytes, 0) }
            .map_err(CudaError::of("reserving pinned memory"))?
            .cast::<u8>();
        let first = NonNull::new(first).expect("the driver returns memory or an error");
        // SAFETY: that many bytes were reserved.
        unsafe { first.as_ptr().write_bytes(0, bytes) };
        Ok(HostBytes { first, count, stream: self.shared_stream() })
    }
}
