//! A little pinned memory for what goes to the GPU and comes back with every token: copies of pageable memory would
//! make the host wait, and cannot be recorded.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;
use cudarc::driver::{CudaStream, result, sys};

use crate::error::bind;
use crate::lifetime::{Lifetime, Owner, while_alive};
use crate::{CudaError, DevicePtr, Gpu};

/// 32-bit words that stay where they are. Written and read through copies, never borrowed: the GPU may be at it.
pub struct HostWords {
    first: *mut u32,
    count: usize,
    /// `None` once the memory is about to be freed.
    lifetime: Option<Lifetime>,
    stream: Arc<CudaStream>,
}

// SAFETY: memory of this process, owned by this value alone.
unsafe impl Send for HostWords {}

impl HostWords {
    /// Puts `values`, of whole words each, at word `at`. Nothing that is queued may still have to read the words there.
    ///
    /// # Panics
    /// Beyond the end.
    pub fn write<T: Pod>(&mut self, at: usize, values: &[T]) {
        let values: &[u32] = bytemuck::cast_slice(values);
        assert!(at + values.len() <= self.count, "words beyond the end");
        // SAFETY: inside the allocation, which nobody borrows.
        unsafe { self.first.add(at).copy_from_nonoverlapping(values.as_ptr(), values.len()) }
    }

    /// Copies the words from `at` on into `values`, of 4 bytes each. What the GPU writes is there once it was waited for.
    ///
    /// # Panics
    /// Beyond the end.
    pub fn read<T: Pod>(&self, at: usize, values: &mut [T]) {
        let values: &mut [u32] = bytemuck::cast_slice_mut(values);
        assert!(at + values.len() <= self.count, "words beyond the end");
        // SAFETY: inside the allocation, which nobody borrows.
        unsafe { values.as_mut_ptr().copy_from_nonoverlapping(self.first.add(at), values.len()) }
    }

    /// A word that the GPU may write meanwhile; what it wrote before can be read afterwards.
    ///
    /// # Panics
    /// Beyond the end.
    pub fn load_acquire(&self, at: usize) -> u32 {
        assert!(at < self.count, "words beyond the end");
        // SAFETY: inside the allocation, aligned, and written as a whole word by whoever does.
        unsafe { AtomicU32::from_ptr(self.first.add(at)) }.load(Ordering::Acquire)
    }

    /// Writes a word that the GPU may be waiting for; it sees what was written before, too.
    ///
    /// # Panics
    /// Beyond the end.
    pub fn store_release(&mut self, at: usize, word: u32) {
        assert!(at < self.count, "words beyond the end");
        // SAFETY: as in `load_acquire`.
        unsafe { AtomicU32::from_ptr(self.first.add(at)) }.store(word, Ordering::Release);
    }

    /// The address of a word for kernels, which reach pinned memory by the host's own addresses.
    ///
    /// # Panics
    /// Beyond the end.
    pub fn device(&self, at: usize) -> DevicePtr<u32> {
        let owner = self.lifetime.as_ref().map_or(Owner::nothing(), Lifetime::owner);
        // SAFETY: never borrowed; dropping it drops the lifetime first, and then waits for the device.
        let first: DevicePtr<u32> =
            unsafe { DevicePtr::of_memory(self.first as u64, 4 * self.count, owner) };
        first.offset(at)
    }

    /// Appends `count` words from `at` on to `values`, as floats.
    ///
    /// # Panics
    /// Beyond the end.
    pub fn append(&self, at: usize, count: usize, values: &mut Vec<f32>) {
        assert!(at + count <= self.count, "words beyond the end");
        values.reserve(count);
        let length = values.len();
        // SAFETY: inside the allocation, which nobody borrows, and inside the room that was made: `count` floats, which
        // every word is, are initialised behind the first `length`.
        unsafe {
            let room = values.as_mut_ptr().add(length);
            room.copy_from_nonoverlapping(self.first.add(at).cast(), count);
            values.set_len(length + count);
        }
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        self.lifetime = None;
        if bind(self.stream.context()).is_ok() {
            // What is queued, on any stream, may still read or write; its errors are reported elsewhere.
            let _ = self.stream.context().synchronize();
            // SAFETY: came from the driver and is freed once.
            let _ = unsafe { result::free_host(self.first.cast()) };
        }
    }
}

impl Gpu {
    /// `count` words, all 0.
    ///
    /// # Errors
    /// Whatever the driver says: a limit on locked memory, above all.
    pub fn host_words(&self, count: usize) -> Result<HostWords, CudaError> {
        self.bind()?;
        let bytes = 4 * count.max(1);
        // SAFETY: freed by `HostWords` alone.
        let first = unsafe { result::malloc_host(bytes, 0) }
            .map_err(CudaError::of("reserving pinned memory"))?
            .cast::<u32>();
        // SAFETY: as many bytes as were reserved.
        unsafe { first.cast::<u8>().write_bytes(0, bytes) };
        let lifetime = Some(Lifetime::new());
        Ok(HostWords { first, count, lifetime, stream: self.shared_stream() })
    }

    /// Queues a copy of words `range` to the device. They must stay as they are until it is done.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When the range is beyond the end, more words than are at the other place, or that memory was freed.
    pub fn queue_upload(
        &self,
        from: &HostWords,
        range: Range<usize>,
        to: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        assert!(range.start <= range.end && range.end <= from.count, "words beyond the end");
        self.bind()?;
        to.check(range.len());
        let owners = [to.owner(), from.device(0).owner()];
        // SAFETY: pinned memory that outlives what is queued: its drop waits. There is room at `to`, by the check.
        while_alive(&owners, || unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                to.address(),
                from.first.add(range.start).cast(),
                4 * range.len(),
                self.stream().cu_stream(),
            )
        })
        .result()
        .map_err(CudaError::of("copying to the GPU"))?;
        self.note_recorded(&owners);
        Ok(())
    }

    /// Queues a copy from the device into words `range`, to be read after [`Gpu::synchronize`].
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When the range is beyond the end, more words than are at the other place, or that memory was freed.
    pub fn queue_download(
        &self,
        from: DevicePtr<u32>,
        to: &HostWords,
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        assert!(range.start <= range.end && range.end <= to.count, "words beyond the end");
        self.bind()?;
        from.check(range.len());
        let owners = [from.owner(), to.device(0).owner()];
        // SAFETY: pinned memory that outlives what is queued: its drop waits. Nobody borrows it. As many words are at `from`, by
        // the check.
        while_alive(&owners, || unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                to.first.add(range.start).cast(),
                from.address(),
                4 * range.len(),
                self.stream().cu_stream(),
            )
        })
        .result()
        .map_err(CudaError::of("copying from the GPU"))?;
        self.note_recorded(&owners);
        Ok(())
    }
}
