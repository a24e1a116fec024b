//! Device memory: who owns it, typed addresses into it, and copies on the compute stream.

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaStream, result};

use crate::error::{bind, is_out_of_memory};
use crate::lifetime::{Lifetime, Owner, while_alive};
use crate::{CudaError, Gpu};

/// The address of a `T`, or of several in a row, in memory that kernels reach: device memory, or pinned host memory that is never
/// borrowed. It knows how many bytes follow it and whether the memory still exists. Both are checked whenever it is used, so
/// nothing else can be reached through it.
pub struct DevicePtr<T> {
    address: u64,
    /// Up to the end of the memory.
    bytes: u64,
    owner: Owner,
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
    /// The first of `bytes` bytes.
    ///
    /// # Safety
    /// The bytes are memory that kernels reach and that no Rust reference ever points to. They stay valid until the [`Lifetime`]
    /// of `owner` is dropped, and until all work that was queued by then has ended.
    pub(crate) unsafe fn of_memory(address: u64, bytes: usize, owner: Owner) -> DevicePtr<T> {
        DevicePtr { address, bytes: bytes as u64, owner, element: PhantomData }
    }

    /// No memory: the value of optional arguments that are absent.
    pub fn null() -> DevicePtr<T> {
        DevicePtr { address: 0, bytes: 0, owner: Owner::nothing(), element: PhantomData }
    }

    /// The number that kernels see. The only way back is [`DevicePtr::at`].
    pub fn address(self) -> u64 {
        self.address
    }

    pub fn is_null(self) -> bool {
        self.address == 0
    }

    /// Elements from here to the end of the memory.
    pub fn len(self) -> usize {
        self.bytes as usize / size_of::<T>()
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    pub(crate) fn owner(self) -> Owner {
        self.owner
    }

    /// The address `elements` further on.
    ///
    /// # Panics
    /// When that is beyond the end of the memory.
    pub fn offset(self, elements: usize) -> DevicePtr<T> {
        assert!(elements <= self.len(), "element {elements} of {} on the GPU", self.len());
        let bytes = (elements * size_of::<T>()) as u64;
        DevicePtr { address: self.address + bytes, bytes: self.bytes - bytes, ..self }
    }

    /// The element at `address`, a number that was computed from [`DevicePtr::address`]; `None` if it does not lie behind this
    /// one in the same memory.
    pub fn at(self, address: u64) -> Option<DevicePtr<T>> {
        let bytes = address.checked_sub(self.address)?;
        let is_inside = bytes <= self.bytes;
        is_inside.then(|| DevicePtr { address, bytes: self.bytes - bytes, ..self })
    }

    /// The same address, with only `elements` behind it.
    ///
    /// # Panics
    /// When there are fewer.
    pub(crate) fn first(self, elements: usize) -> DevicePtr<T> {
        self.check(elements);
        DevicePtr { bytes: (elements * size_of::<T>()) as u64, ..self }
    }

    /// The same address, seen as any other type.
    ///
    /// # Safety
    /// What is written there has to be values of `T` for all that kernels do with them.
    pub(crate) unsafe fn cast_any<U>(self) -> DevicePtr<U> {
        let DevicePtr { address, bytes, owner, .. } = self;
        DevicePtr { address, bytes, owner, element: PhantomData }
    }

    /// Makes sure that `elements` follow.
    ///
    /// # Panics
    /// When there are fewer.
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
    /// The same address, seen as another type.
    pub fn cast<U: Pod>(self) -> DevicePtr<U> {
        let DevicePtr { address, bytes, owner, .. } = self;
        DevicePtr { address, bytes, owner, element: PhantomData }
    }
}

/// Device memory that is freed when dropped, after all work queued before. Aligned to 256 bytes.
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

    /// The first byte, as the address of `T`s.
    pub fn ptr<T: Pod>(&self) -> DevicePtr<T> {
        self.first()
    }

    /// As [`DeviceMemory::ptr`], for types that the host does not write.
    pub(crate) fn first<T>(&self) -> DevicePtr<T> {
        let owner = self.lifetime.as_ref().map_or(Owner::nothing(), Lifetime::owner);
        // SAFETY: device memory of ours; dropping it drops the lifetime first, and freeing it waits for the device.
        unsafe { DevicePtr::of_memory(self.address, self.bytes, owner) }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.lifetime = None;
        // Freeing waits for the whole device by itself. Errors are those of earlier work and are reported elsewhere.
        if bind(self.stream.context()).is_ok() {
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
        let lifetime = Some(Lifetime::new());
        Ok(DeviceMemory { address, bytes, lifetime, stream: self.shared_stream() })
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
    ///
    /// # Panics
    /// When there are more than fit at `to`, or its memory was freed.
    pub fn upload<T: Pod>(&self, values: &[T], to: DevicePtr<T>) -> Result<(), CudaError> {
        self.upload_to(values, to)
    }

    /// As [`Gpu::upload`], for types that only this crate writes.
    pub(crate) fn upload_to<T>(&self, values: &[T], to: DevicePtr<T>) -> Result<(), CudaError> {
        self.bind()?;
        to.check(values.len());
        // SAFETY: there is room at `to`, by the check. Pageable memory is copied to the driver's staging area before the call
        // returns; should it be pinned, the wait makes sure.
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
    ///
    /// # Panics
    /// When more is wanted than there is, or the memory was freed.
    pub fn download_into<T: Pod>(
        &self,
        from: DevicePtr<T>,
        values: &mut [T],
    ) -> Result<(), CudaError> {
        self.bind()?;
        from.check(values.len());
        // SAFETY: as many values are there, by the check; the slice is borrowed until the stream has been waited for.
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
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When there are fewer, or the memory was freed.
    pub fn fill(&self, to: DevicePtr<u8>, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.bind()?;
        to.check(bytes);
        // SAFETY: as many bytes are there, by the check, and nothing borrows them.
        while_alive(&[to.owner()], || unsafe {
            result::memset_d8_async(to.address(), value, bytes, self.stream().cu_stream())
        })
        .map_err(CudaError::of("filling device memory"))?;
        self.note_recorded(&[to.owner()]);
        Ok(())
    }

    /// Copies `bytes` bytes inside the device, in stream order.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When there are fewer at either place, or the memory was freed.
    pub fn copy(
        &self,
        from: DevicePtr<u8>,
        to: DevicePtr<u8>,
        bytes: usize,
    ) -> Result<(), CudaError> {
        self.bind()?;
        from.check(bytes);
        to.check(bytes);
        let owners = [from.owner(), to.owner()];
        // SAFETY: as many bytes are at both places, by the checks, and nothing borrows them.
        while_alive(&owners, || unsafe {
            result::memcpy_dtod_async(
                to.address(),
                from.address(),
                bytes,
                self.stream().cu_stream(),
            )
        })
        .map_err(CudaError::of("copying inside the GPU"))?;
        self.note_recorded(&owners);
        Ok(())
    }
}
