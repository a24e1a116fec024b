//! Device memory: its ownership, typed addresses into it, and copies on the compute stream.

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaStream, result};

use crate::error::{bind, is_out_of_memory};
use crate::lifetime::{Lifetime, Owner, while_alive};
use crate::{CudaError, Gpu};

/// The address of a `T`, or of several in a row, in memory that kernels reach. This is device memory, or pinned host
/// memory that is never borrowed. The address knows how many bytes follow it and whether the memory still exists.
/// Every use checks both, so nothing else can be reached through it.
pub struct DevicePtr<T> {
    address: u64,
    /// Number of bytes from here to the end of the memory.
    bytes: u64,
    owner: Owner,
    element: PhantomData<fn() -> T>,
}

// Derived implementations would require the same traits of `T`.
impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DevicePtr<T> {}

impl<T> DevicePtr<T> {
    /// Returns the address of the first of `bytes` bytes.
    ///
    /// # Safety
    /// The bytes must be memory that kernels reach and that no Rust reference ever points to. They must stay valid
    /// until the [`Lifetime`] of `owner` is dropped and all work queued by then has ended.
    pub(crate) unsafe fn of_memory(address: u64, bytes: usize, owner: Owner) -> DevicePtr<T> {
        DevicePtr { address, bytes: bytes as u64, owner, element: PhantomData }
    }

    /// Returns the null address, the value of an optional argument that is absent.
    pub fn null() -> DevicePtr<T> {
        DevicePtr { address: 0, bytes: 0, owner: Owner::nothing(), element: PhantomData }
    }

    /// Returns the number that kernels see. The only way back is [`DevicePtr::at`].
    pub fn address(self) -> u64 {
        self.address
    }

    pub fn is_null(self) -> bool {
        self.address == 0
    }

    /// Returns the number of elements from here to the end of the memory.
    pub fn len(self) -> usize {
        self.bytes as usize / size_of::<T>()
    }

    /// Returns true if no element follows.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    pub(crate) fn owner(self) -> Owner {
        self.owner
    }

    /// Returns the address `elements` further on.
    ///
    /// # Panics
    /// Panics if it is beyond the end of the memory.
    pub fn offset(self, elements: usize) -> DevicePtr<T> {
        assert!(elements <= self.len(), "element {elements} of {} on the GPU", self.len());
        let bytes = (elements * size_of::<T>()) as u64;
        DevicePtr { address: self.address + bytes, bytes: self.bytes - bytes, ..self }
    }

    /// Returns the element at `address`, a number computed from [`DevicePtr::address`]. Returns `None` if it does not
    /// lie at or behind this one in the same memory.
    pub fn at(self, address: u64) -> Option<DevicePtr<T>> {
        let bytes = address.checked_sub(self.address)?;
        let is_inside = bytes <= self.bytes;
        is_inside.then(|| DevicePtr { address, bytes: self.bytes - bytes, ..self })
    }

    /// Returns the same address with only `elements` behind it.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub(crate) fn first(self, elements: usize) -> DevicePtr<T> {
        self.check(elements);
        DevicePtr { bytes: (elements * size_of::<T>()) as u64, ..self }
    }

    /// Returns the same address as an address of any other type.
    ///
    /// # Safety
    /// Everything that kernels write through the new address must be valid values of `T`, as far as kernels use them
    /// as such.
    pub(crate) unsafe fn cast_any<U>(self) -> DevicePtr<U> {
        let DevicePtr { address, bytes, owner, .. } = self;
        DevicePtr { address, bytes, owner, element: PhantomData }
    }

    /// Checks that at least `elements` elements follow.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub(crate) fn check(self, elements: usize) {
        let bytes = (elements as u64).checked_mul(size_of::<T>() as u64);
        assert!(
            bytes.is_some_and(|bytes| bytes <= self.bytes),
            "{elements} elements in a buffer of {} on the GPU",
            self.len()
        );
    }
}

impl<T: Pod> DevicePtr<T> {
    /// Returns the same address as an address of another type.
    pub fn cast<U: Pod>(self) -> DevicePtr<U> {
        let DevicePtr { address, bytes, owner, .. } = self;
        DevicePtr { address, bytes, owner, element: PhantomData }
    }
}

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
        let lifetime = Some(Lifetime::new());
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
