//! Device memory for weights at fixed addresses. The pool reserves a range of addresses and maps memory to it when it
//! grows. It unmaps memory when it shrinks, so tensors keep their addresses.

use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemLocation, CUmemLocationType,
};
use cudarc::driver::{CudaContext, DriverError};
use forebay_device::{Lifetime, Owner};

use crate::error::{bind, is_out_of_memory};
use crate::{CudaError, DeviceMemory, DevicePtr, Gpu};

/// Memory for weights whose addresses never change.
pub struct WeightsPool {
    kind: Kind,
}

enum Kind {
    Virtual(Mapped),
    /// All memory, allocated at the start, for a driver that cannot map memory.
    Plain(DeviceMemory),
}

/// A range of addresses, mapped from its start.
struct Mapped {
    address: u64,
    reserved_bytes: usize,
    chunk_bytes: usize,
    /// `None` once the memory is about to be freed.
    lifetime: Option<Lifetime>,
    /// Mapped chunks, in the order of their addresses. Only the one at the end of the range may be shorter.
    chunks: Vec<sys::CUmemGenericAllocationHandle>,
    location: CUmemLocation,
    context: Arc<CudaContext>,
}

impl Gpu {
    /// Reserves addresses for up to `bytes` and maps nothing yet. [`WeightsPool::grow`] maps memory in chunks of
    /// `chunk_bytes`; the last one is shorter. Both sizes are rounded up to the granularity of the GPU (2 MiB). If the
    /// GPU cannot map memory, all of it is allocated now.
    ///
    /// # Errors
    /// Returns [`CudaError::OutOfMemory`], or another error if a driver call fails.
    pub fn weights_pool(&self, bytes: usize, chunk_bytes: usize) -> Result<WeightsPool, CudaError> {
        self.bind()?;
        let context = self.shared_context();
        let attribute = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
        let ask = CudaError::of("asking whether the GPU maps memory");
        if context.attribute(attribute).map_err(ask)? == 0 {
            return Ok(WeightsPool { kind: Kind::Plain(self.allocate(bytes)?) });
        }
        let kind = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let location = CUmemLocation { type_: kind, id: context.ordinal() as i32 };
        let mut granularity = 0;
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both pointers are to live values.
        unsafe {
            sys::cuMemGetAllocationGranularity(&mut granularity, &properties(location), minimum)
        }
        .result()
        .map_err(CudaError::of("asking how the GPU maps memory"))?;
        let granularity = granularity.max(1);
        let chunk_bytes = chunk_bytes.max(1).next_multiple_of(granularity);
        let reserved_bytes = bytes.max(1).next_multiple_of(granularity);
        let mut address = 0;
        // SAFETY: the driver writes the address to a live variable; reserving addresses touches no memory.
        unsafe { sys::cuMemAddressReserve(&mut address, reserved_bytes, 0, 0, 0) }
            .result()
            .map_err(CudaError::of("reserving addresses of the GPU"))?;
        let chunks = Vec::with_capacity(reserved_bytes.div_ceil(chunk_bytes));
        let lifetime = Some(Lifetime::new(self.id()));
        let mapped =
            Mapped { address, reserved_bytes, chunk_bytes, lifetime, chunks, location, context };
        Ok(WeightsPool { kind: Kind::Virtual(mapped) })
    }
}

impl WeightsPool {
    /// Returns the address of the first of the bytes that can be used now. It is aligned to at least 256.
    pub fn ptr(&self) -> DevicePtr<u8> {
        match &self.kind {
            Kind::Virtual(mapped) => {
                let owner = mapped.lifetime.as_ref().map_or(Owner::nothing(), Lifetime::owner);
                // SAFETY: this is our own device memory. Dropping it drops the lifetime first and then waits for the
                // device. Addresses that `shrink` unmaps stay reserved: the GPU refuses them, and nothing else is ever
                // mapped there.
                unsafe { DevicePtr::of_memory(mapped.address, self.bytes(), owner) }
            }
            Kind::Plain(memory) => memory.ptr(),
        }
    }

    /// Returns the number of bytes that can be used now.
    pub fn bytes(&self) -> usize {
        match &self.kind {
            Kind::Virtual(mapped) => mapped.bytes(),
            Kind::Plain(memory) => memory.bytes(),
        }
    }

    /// Returns true if the pool grows and shrinks. Otherwise all memory was allocated at the start.
    pub fn is_elastic(&self) -> bool {
        matches!(self.kind, Kind::Virtual(_))
    }

    /// Maps memory until the first `bytes` can be used.
    ///
    /// # Errors
    /// Returns [`CudaError::OutOfMemory`] if there is not enough memory, or another error if a driver call fails. What
    /// was mapped before stays mapped.
    ///
    /// # Panics
    /// Panics if `bytes` is more than was reserved.
    pub fn grow(&mut self, gpu: &Gpu, bytes: usize) -> Result<(), CudaError> {
        let Kind::Virtual(mapped) = &mut self.kind else {
            assert!(bytes <= self.bytes(), "a pool of {} bytes cannot have {bytes}", self.bytes());
            return Ok(());
        };
        let reserved = mapped.reserved_bytes;
        assert!(bytes <= reserved, "a pool of {reserved} bytes cannot have {bytes}");
        gpu.bind()?;
        let wanted = bytes.div_ceil(mapped.chunk_bytes);
        while mapped.chunks.len() < wanted {
            let missing = (reserved.min(wanted * mapped.chunk_bytes) - mapped.bytes()) as u64;
            match mapped.add() {
                Ok(()) => {}
                Err(error) if is_out_of_memory(&error) => {
                    let free_bytes = gpu.memory_bytes()?.0;
                    return Err(CudaError::OutOfMemory { bytes: missing, free_bytes });
                }
                Err(error) => return Err(CudaError::of("mapping device memory")(error)),
            }
        }
        Ok(())
    }

    /// Unmaps the chunks that lie wholly behind the first `bytes`. No queued work may still use them.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn shrink(&mut self, gpu: &Gpu, bytes: usize) -> Result<(), CudaError> {
        let Kind::Virtual(mapped) = &mut self.kind else { return Ok(()) };
        gpu.bind()?;
        let kept = bytes.div_ceil(mapped.chunk_bytes);
        while mapped.chunks.len() > kept {
            mapped.remove_last().map_err(CudaError::of("giving device memory back"))?;
        }
        Ok(())
    }
}

fn properties(location: CUmemLocation) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location,
        win32HandleMetaData: std::ptr::null_mut(),
        // SAFETY: the structure holds numbers and bytes, for which zero is the default.
        allocFlags: unsafe { std::mem::zeroed() },
    }
}

impl Mapped {
    /// Returns the number of mapped bytes.
    fn bytes(&self) -> usize {
        self.reserved_bytes.min(self.chunks.len() * self.chunk_bytes)
    }

    /// Returns the address behind the mapped bytes.
    fn end(&self) -> u64 {
        self.address + self.bytes() as u64
    }

    /// Maps one chunk behind the last.
    fn add(&mut self) -> Result<(), DriverError> {
        let (at, bytes) = (self.end(), self.chunk_bytes.min(self.reserved_bytes - self.bytes()));
        let access = CUmemAccessDesc {
            location: self.location,
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let mut handle = 0;
        // SAFETY: the pointers are to live values; the range is reserved and not mapped yet. After a failed step,
        // every earlier step is undone once.
        unsafe {
            sys::cuMemCreate(&mut handle, bytes, &properties(self.location), 0).result()?;
            if let Err(error) = sys::cuMemMap(at, bytes, 0, handle, 0).result() {
                let _ = sys::cuMemRelease(handle);
                return Err(error);
            }
            if let Err(error) = sys::cuMemSetAccess(at, bytes, &access, 1).result() {
                let _ = sys::cuMemUnmap(at, bytes);
                let _ = sys::cuMemRelease(handle);
                return Err(error);
            }
        }
        self.chunks.push(handle);
        Ok(())
    }

    fn remove_last(&mut self) -> Result<(), DriverError> {
        let end = self.end();
        let Some(handle) = self.chunks.pop() else { return Ok(()) };
        let at = self.end();
        // SAFETY: `add` mapped the chunk there, and it is unmapped and released once.
        unsafe {
            sys::cuMemUnmap(at, (end - at) as usize).result()?;
            sys::cuMemRelease(handle).result()
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.lifetime = None;
        // Unmapping does not wait for the device, so wait here. Errors come from earlier work and are reported
        // elsewhere.
        if bind(&self.context).is_err() || self.context.synchronize().is_err() {
            return;
        }
        while !self.chunks.is_empty() {
            if self.remove_last().is_err() {
                return;
            }
        }
        // SAFETY: the range was reserved once and nothing is mapped there any more.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.reserved_bytes) };
    }
}
