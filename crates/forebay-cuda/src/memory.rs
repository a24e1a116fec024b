//! Device memory: its ownership, and copies on the compute stream.

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaStream, result};
use forebay_device::{DevicePtr, Lifetime, Owner, while_alive};

use crate::error::{bind, is_out_of_memory};

use crate::{CudaError, Gpu};

/// Device memory that is freed on drop, after all work queued before. It is aligned to 256 bytes.
pub struct DeviceMemory {
    address: u64,
    bytes: usize,
    /// `None` once the memory is about to be freed.
    lifetime: Option<Lifetime>,
    stream: Arc<CudaStream>,
}

impl DeviceMemory {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of the first byte, typed as `T`.
    pub fn ptr<T: Pod>(&self) -> DevicePtr<T> {
        self.first()
    }

    /// Returns the same as [`DeviceMemory::ptr`], also for types that the host does not write.
    pub(crate) fn first<T>(&self) -> DevicePtr<T> {
        let owner = self.lifetime.as_ref().map_or(Owner::nothing(), Lifetime::owner);
        // SAFETY: this is our own device memory. Dropping it drops the lifetime first, and freeing it waits for the
        // device.
        unsafe { DevicePtr::of_memory(self.address, self.bytes, owner) }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.lifetime = None;
        // Freeing waits for the whole device by itself. Its errors come from earlier work and are reported elsewhere.
        if bind(self.stream.context()).is_ok() {
            // SAFETY: the address came from the driver and is freed once.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

impl Gpu {
    /// Allocates `bytes` of device memory with undefined contents.
    ///
    /// # Errors
    /// Returns [`CudaError::OutOfMemory`] if the GPU does not have enough free memory, or another error if a driver
    /// call fails.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory, CudaError> {
        self.bind()?;
        // SAFETY: this is memory of the device, which only `DeviceMemory` frees.
        let address = match unsafe { result::malloc_sync(bytes.max(1)) } {
            Ok(address) => address,
            Err(error) if is_out_of_memory(&error) => {
                let free_bytes = self.memory_bytes()?.0;
                return Err(CudaError::OutOfMemory { bytes: bytes as u64, free_bytes });
            }
            Err(error) => return Err(CudaError::of("allocating device memory")(error)),
        };
        let lifetime = Some(Lifetime::new(self.id()));
        Ok(DeviceMemory { address, bytes, lifetime, stream: self.shared_stream() })
    }

    /// Allocates device memory and copies `values` to it.
    ///
    /// # Errors
    /// Returns the errors of [`Gpu::allocate`] and [`Gpu::upload`].
    pub fn allocate_with<T: Pod>(&self, values: &[T]) -> Result<DeviceMemory, CudaError> {
        let memory = self.allocate(size_of_val(values))?;
        self.upload(values, memory.ptr())?;
        Ok(memory)
    }

    /// Copies `values` to the device, in stream order. The caller may drop them as soon as this returns.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if `values` do not fit at `to`, or if its memory was freed.
    pub fn upload<T: Pod>(&self, values: &[T], to: DevicePtr<T>) -> Result<(), CudaError> {
        self.upload_to(values, to)
    }

    /// Does the same as [`Gpu::upload`], also for types that only this crate writes.
    pub(crate) fn upload_to<T>(&self, values: &[T], to: DevicePtr<T>) -> Result<(), CudaError> {
        self.bind()?;
        to.check(values.len());
        // SAFETY: there is room at `to`, by the check. The driver copies pageable memory to its staging area before
        // the call returns. If the memory is pinned, the wait below ends the copy.
        let copied = while_alive(&[to.owner()], || unsafe {
            result::memcpy_htod_async(to.address(), values, self.stream().cu_stream())
        });
        let waited = self.synchronize();
        copied.map_err(CudaError::of("copying to the GPU"))?;
        waited
    }

    /// Copies `count` values from the device after all queued work, and waits for them.
    ///
    /// # Errors
    /// Returns the errors of [`Gpu::download_into`].
    pub fn download<T: Pod>(&self, from: DevicePtr<T>, count: usize) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::zeroed(); count];
        self.download_into(from, &mut values)?;
        Ok(values)
    }

    /// Copies values from the device after all queued work, and waits for them.
    ///
    /// # Errors
    /// Returns the error of queued work that failed, or an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if fewer values follow `from`, or if its memory was freed.
    pub fn download_into<T: Pod>(
        &self,
        from: DevicePtr<T>,
        values: &mut [T],
    ) -> Result<(), CudaError> {
        self.bind()?;
        from.check(values.len());
        // SAFETY: that many values follow `from`, by the check; the slice is borrowed until the stream has been waited
        // for.
        let copied = while_alive(&[from.owner()], || unsafe {
            result::memcpy_dtoh_async(values, from.address(), self.stream().cu_stream())
        });
        let waited = self.synchronize();
        copied.map_err(CudaError::of("copying from the GPU"))?;
        waited
    }

    /// Sets `bytes` bytes to `value`, in stream order.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if fewer bytes follow `to`, or if its memory was freed.
    pub fn fill(&self, to: DevicePtr<u8>, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.bind()?;
        to.check(bytes);
        // SAFETY: that many bytes follow `to`, by the check, and nothing borrows them.
        while_alive(&[to.owner()], || unsafe {
            result::memset_d8_async(to.address(), value, bytes, self.stream().cu_stream())
        })
        .map_err(CudaError::of("filling device memory"))?;
        self.note_recorded(&[to.owner()]);
        Ok(())
    }

    /// Copies `bytes` bytes within device memory, in stream order.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if fewer bytes follow `from` or `to`, or if the memory of either was freed.
    pub fn copy(
        &self,
        from: DevicePtr<u8>,
        to: DevicePtr<u8>,
        bytes: usize,
    ) -> Result<(), CudaError> {
        self.bind()?;
        copy_in(self.stream(), from, to, bytes)?;
        self.note_recorded(&[from.owner(), to.owner()]);
        Ok(())
    }
}

/// Queues a copy within device memory in a stream whose context is bound.
///
/// # Panics
/// Panics if fewer bytes follow `from` or `to`, or if the memory of either was freed.
pub(crate) fn copy_in(
    stream: &CudaStream,
    from: DevicePtr<u8>,
    to: DevicePtr<u8>,
    bytes: usize,
) -> Result<(), CudaError> {
    from.check(bytes);
    to.check(bytes);
    // SAFETY: that many bytes follow both addresses, by the checks, and nothing borrows them.
    while_alive(&[from.owner(), to.owner()], || unsafe {
        result::memcpy_dtod_async(to.address(), from.address(), bytes, stream.cu_stream())
    })
    .map_err(CudaError::of("copying inside the GPU"))
}
