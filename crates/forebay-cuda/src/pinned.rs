//! Host memory that the GPU reads and writes by itself: pages that stay where they are.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use crate::{CudaError, Gpu};

/// Memory that was there already, pinned until this is dropped. Takes about a quarter of a second for each GiB.
pub struct Pinned {
    addresses: Range<usize>,
    context: Arc<CudaContext>,
    /// What keeps the memory mapped.
    _owner: Box<dyn Send + Sync>,
}

impl Pinned {
    pub fn bytes(&self) -> usize {
        self.addresses.len()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the range was registered by `Gpu::pin` and is given back once. Copies that still go on have
            // been waited for: they own their part of the memory, and an error here changes nothing.
            let _ = unsafe { sys::cuMemHostUnregister(self.addresses.start as *mut _) };
        }
    }
}

impl Gpu {
    /// Pins memory of this process, which `owner` keeps mapped: whole pages that are in memory.
    ///
    /// # Errors
    /// Whatever the driver says: a limit on locked memory, above all.
    pub fn pin(
        &self,
        addresses: Range<usize>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Pinned, CudaError> {
        self.bind()?;
        // SAFETY: pinning touches no byte, and the driver refuses what is not mapped. The range stays mapped as long
        // as its owner, which lives as long as the registration.
        unsafe { sys::cuMemHostRegister_v2(addresses.start as *mut _, addresses.len(), 0) }
            .result()
            .map_err(CudaError::of("pinning host memory"))?;
        Ok(Pinned { addresses, context: self.shared_context(), _owner: Box::new(owner) })
    }
}
