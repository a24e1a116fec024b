//! Device memory: who owns it, typed addresses into it, and copies on the compute stream.

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaStream, result};

use crate::error::is_out_of_memory;
use crate::{CudaError, Gpu};

/// The address of a `T`, or of several in a row, in device memory. Not checked by anybody: a wrong address is an
/// error of the GPU at best. It can never reach the memory of the process.
pub struct DevicePtr<T> {
    address: u64,
    element: PhantomData<fn() -> T>,
}

// Derived implementations would ask `T` for the same.
impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DevicePtr<T> {}

impl<T> DevicePtr<T> {
    pub fn new(address: u64) -> DevicePtr<T> {
        DevicePtr { address, element: PhantomData }
    }

    /// No memory: what optional arguments are given.
    pub fn null() -> DevicePtr<T> {
        DevicePtr::new(0)
    }

    pub fn address(self) -> u64 {
        self.address
    }

    pub fn is_null(self) -> bool {
        self.address == 0
    }

    /// The address `elements` further on.
    pub fn offset(self, elements: usize) -> DevicePtr<T> {
        DevicePtr::new(self.address + (elements * size_of::<T>()) as u64)
    }

    /// The same address, seen as another type.
    pub fn cast<U>(self) -> DevicePtr<U> {
        DevicePtr::new(self.address)
    }
}

/// Device memory that is freed when dropped, after all work queued before. Aligned to 256 bytes.
pub struct DeviceMemory {
    address: u64,
    bytes: usize,
    stream: Arc<CudaStream>,
}

impl DeviceMemory {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first byte, as the address of `T`s.
    pub fn ptr<T>(&self) -> DevicePtr<T> {
        DevicePtr::new(self.address)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Freeing waits for the whole device by itself. Errors are those of earlier work and are reported elsewhere.
        if self.stream.context().bind_to_thread().is_ok() {
            // SAFETY: the address came from the driver and is freed once.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

impl Gpu {
    /// Takes `bytes` of device memory, contents undefined.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory, CudaError> {
        self.bind()?;
        // SAFETY: memory of the device; it is freed by `DeviceMemory` alone.
        let address = match unsafe { result::malloc_sync(bytes.max(1)) } {
            Ok(address) => address,
            Err(error) if is_out_of_memory(&error) => {
                let free_bytes = self.memory_bytes()?.0;
                return Err(CudaError::OutOfMemory { bytes: bytes as u64, free_bytes });
            }
            Err(error) => return Err(CudaError::of("allocating device memory")(error)),
        };
        Ok(DeviceMemory { address, bytes, stream: self.shared_stream() })
    }

    /// Device memory that holds a copy of `values`.
    ///
    /// # Errors
    /// As [`Gpu::allocate`] and [`Gpu::upload`].
    pub fn allocate_with<T: Pod>(&self, values: &[T]) -> Result<DeviceMemory, CudaError> {
        let memory = self.allocate(size_of_val(values))?;
        self.upload(values, memory.ptr())?;
        Ok(memory)
    }

    /// Copies `values` to the device, in stream order. They may be dropped as soon as this returns.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn upload<T: Pod>(&self, values: &[T], to: DevicePtr<T>) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: pageable memory is copied to the driver's staging area before the call returns; should it be
        // pinned, the wait makes sure.
        unsafe { result::memcpy_htod_async(to.address(), values, self.stream().cu_stream()) }
            .map_err(CudaError::of("copying to the GPU"))?;
        self.synchronize()
    }

    /// Copies `count` values from the device after all queued work, and waits for them.
    ///
    /// # Errors
    /// As [`Gpu::download_into`].
    pub fn download<T: Pod>(&self, from: DevicePtr<T>, count: usize) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::zeroed(); count];
        self.download_into(from, &mut values)?;
        Ok(values)
    }

    /// Copies values from the device after all queued work, and waits for them.
    ///
    /// # Errors
    /// What went wrong in queued work, or whatever the driver says.
    pub fn download_into<T: Pod>(
        &self,
        from: DevicePtr<T>,
        values: &mut [T],
    ) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the slice is borrowed until the stream has been waited for.
        let copied =
            unsafe { result::memcpy_dtoh_async(values, from.address(), self.stream().cu_stream()) };
        let waited = self.synchronize();
        copied.map_err(CudaError::of("copying from the GPU"))?;
        waited
    }

    /// Sets `bytes` bytes to `value`, in stream order.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn fill(&self, to: DevicePtr<u8>, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: device memory only.
        unsafe { result::memset_d8_async(to.address(), value, bytes, self.stream().cu_stream()) }
            .map_err(CudaError::of("filling device memory"))
    }

    /// Copies `bytes` bytes inside the device, in stream order.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn copy(
        &self,
        from: DevicePtr<u8>,
        to: DevicePtr<u8>,
        bytes: usize,
    ) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: device memory only.
        unsafe {
            result::memcpy_dtod_async(
                to.address(),
                from.address(),
                bytes,
                self.stream().cu_stream(),
            )
        }
        .map_err(CudaError::of("copying inside the GPU"))
    }
}
