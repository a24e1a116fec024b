//! Host memory that the GPU reads and writes by itself: pages that stay where they are.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use crate::error::bind;
use crate::{CudaError, Gpu};

/// Memory that was there already, pinned until this is dropped. Takes about a quarter of a second for each GiB.
pub struct Pinned {
    addresses: Range<usize>,
    /// The first one, as kernels see it.
    device: u64,
    context: Arc<CudaContext>,
    /// What keeps the memory mapped.
    _owner: Box<dyn Send + Sync>,
}

impl Pinned {
    pub fn bytes(&self) -> usize {
        self.addresses.len()
    }

    /// Where kernels find `bytes` of this memory. Who gives that to a kernel which writes has to own them until it has run.
    ///
    /// # Panics
    /// When they are not of this memory.
    pub(crate) fn device_address(&self, bytes: &[u8]) -> u64 {
        let Range { start, end } = bytes.as_ptr_range();
        let is_inside =
            self.addresses.start <= start as usize && end as usize <= self.addresses.end;
        assert!(is_inside, "memory that is not pinned");
        self.device + (start as usize - self.addresses.start) as u64
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if bind(&self.context).is_ok() {
            // SAFETY: the range was registered by `Gpu::pin` and is given back once. Copies that still go on have
            // been waited for: they own their part of the memory, and an error here changes nothing.
            let _ = unsafe { sys::cuMemHostUnregister(self.addresses.start as *mut _) };
        }
    }
}

impl Gpu {
    /// Pins memory of this process, which `owner` keeps mapped: whole pages that are in memory.
    ///
    /// By itself this lets no kernel reach the memory: addresses of it go to kernels through [`crate::ExpertMailbox`] alone, which
    /// asks for the bytes themselves.
    ///
    /// # Errors
    /// Whatever the driver says: a limit on locked memory, above all.
    pub fn pin(
        &self,
        addresses: Range<usize>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Pinned, CudaError> {
        self.bind()?;
        let (first, flags) = (addresses.start as *mut _, sys::CU_MEMHOSTREGISTER_DEVICEMAP);
        // SAFETY: pinning touches no byte, and the driver refuses what is not mapped. The range stays mapped as long
        // as its owner, which lives as long as the registration.
        unsafe { sys::cuMemHostRegister_v2(first, addresses.len(), flags) }
            .result()
            .map_err(CudaError::of("pinning host memory"))?;
        let (context, owner) = (self.shared_context(), Box::new(owner));
        let mut pinned = Pinned { addresses, device: 0, context, _owner: owner };
        // SAFETY: the driver writes the address that it is given a place for.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut pinned.device, first, 0) }
            .result()
            .map_err(CudaError::of("finding pinned memory"))?;
        Ok(pinned)
    }
}
