//! Host memory that the GPU reads and writes directly: pages that are locked in place.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use crate::error::bind;
use crate::{CudaError, Gpu};

/// Existing memory that stays pinned until this is dropped. Pinning takes about a quarter of a second per GiB.
pub struct Pinned {
    addresses: Range<usize>,
    /// Address of the first byte, as kernels see it.
    device: u64,
    context: Arc<CudaContext>,
    /// Owner that keeps the memory mapped.
    _owner: Box<dyn Send + Sync>,
}

impl Pinned {
    pub fn bytes(&self) -> usize {
        self.addresses.len()
    }

    /// Returns the address of `bytes`, which must be in this memory, for kernels. A caller that passes it to a kernel
    /// which writes must own the bytes until the kernel has run.
    ///
    /// # Panics
    /// Panics if they are not in this memory.
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
            // SAFETY: `Gpu::pin` registered the range, and it is unregistered once. Copies still in flight have been
            // waited for, because they own their part of the memory. An error here changes nothing.
            let _ = unsafe { sys::cuMemHostUnregister(self.addresses.start as *mut _) };
        }
    }
}

impl Gpu {
    /// Pins memory of this process, which `owner` keeps mapped. It must be whole pages that are in memory.
    ///
    /// Pinning alone lets no kernel reach the memory. Kernels get addresses of it only through
    /// [`crate::ExpertMailbox`], which takes the bytes themselves.
    ///
    /// # Errors
    /// Returns an error if a driver call fails, most often because of a limit on locked memory.
    pub fn pin(
        &self,
        addresses: Range<usize>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Pinned, CudaError> {
        self.pinner().pin(addresses, owner)
    }

    /// Returns what pins memory on any thread, also when this is no longer there.
    pub fn pinner(&self) -> Pinner {
        Pinner { context: self.shared_context() }
    }
}

/// Pins memory of the host for a GPU, on any thread.
#[derive(Clone)]
pub struct Pinner {
    pub(crate) context: Arc<CudaContext>,
}

impl Pinner {
    /// Does the same as [`Gpu::pin`].
    ///
    /// # Errors
    /// Returns the errors of [`Gpu::pin`].
    pub fn pin(
        &self,
        addresses: Range<usize>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Pinned, CudaError> {
        bind(&self.context)?;
        let (first, flags) = (addresses.start as *mut _, sys::CU_MEMHOSTREGISTER_DEVICEMAP);
        // SAFETY: pinning touches no byte, and the driver refuses memory that is not mapped. The range stays mapped as
        // long as its owner, which lives as long as the registration.
        unsafe { sys::cuMemHostRegister_v2(first, addresses.len(), flags) }
            .result()
            .map_err(CudaError::of("pinning host memory"))?;
        let (context, owner) = (self.context.clone(), Box::new(owner));
        let mut pinned = Pinned { addresses, device: 0, context, _owner: owner };
        // SAFETY: the driver writes the address to a live variable.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut pinned.device, first, 0) }
            .result()
            .map_err(CudaError::of("finding pinned memory"))?;
        Ok(pinned)
    }
}
