//! Small pinned buffers for the data that goes to the GPU and back with every token. Copies of pageable memory would
//! make the host wait and cannot be captured in a CUDA graph.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;
use cudarc::driver::{CudaStream, result, sys};
use forebay_device::{Lifetime, Owner, while_alive};

use crate::error::bind;
use crate::{CudaError, DevicePtr, Gpu};

/// 32-bit words at a fixed address. They are written and read by copying and never borrowed, because the GPU may use
/// them at any time.
pub struct HostWords {
    first: *mut u32,
    count: usize,
    /// `None` once the memory is about to be freed.
    lifetime: Option<Lifetime>,
    stream: Arc<CudaStream>,
}

// SAFETY: the memory belongs to this process, and this value alone owns it.
unsafe impl Send for HostWords {}

impl HostWords {
    /// Writes `values`, of whole words in all, at word `at`. No queued work may still have to read the words there.
    ///
    /// # Panics
    /// Panics if the values are not whole words, or if the words are beyond the end.
    pub fn write<T: Pod>(&mut self, at: usize, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.check(at, bytes.len());
        // SAFETY: the words lie inside the allocation, and nothing borrows it.
        unsafe {
            let to = self.first.add(at).cast::<u8>();
            to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    /// Copies the words from `at` on into `values`, of whole words in all. What the GPU writes is visible only after waiting
    /// for that work.
    ///
    /// # Panics
    /// Panics if the values are not whole words, or if the words are beyond the end.
    pub fn read<T: Pod>(&self, at: usize, values: &mut [T]) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        self.check(at, bytes.len());
        // SAFETY: the words lie inside the allocation, and nothing borrows it.
        unsafe {
            let from = self.first.add(at).cast::<u8>();
            bytes.as_mut_ptr().copy_from_nonoverlapping(from, bytes.len());
        }
    }

    fn check(&self, at: usize, bytes: usize) {
        assert!(bytes.is_multiple_of(4) && at + bytes / 4 <= self.count, "words beyond the end");
    }

    /// Reads a word that the GPU may write at the same time. What the GPU wrote before that word can be read
    /// afterwards.
    ///
    /// # Panics
    /// Panics if the words are beyond the end.
    pub fn load_acquire(&self, at: usize) -> u32 {
        assert!(at < self.count, "words beyond the end");
        // SAFETY: the word lies inside the allocation, is aligned, and every writer writes it as a whole.
        unsafe { AtomicU32::from_ptr(self.first.add(at)) }.load(Ordering::Acquire)
    }

    /// Writes a word that the GPU may be waiting for. The GPU then also sees what was written before.
    ///
    /// # Panics
    /// Panics if the words are beyond the end.
    pub fn store_release(&mut self, at: usize, word: u32) {
        assert!(at < self.count, "words beyond the end");
        // SAFETY: as in `load_acquire`.
        unsafe { AtomicU32::from_ptr(self.first.add(at)) }.store(word, Ordering::Release);
    }

    /// Returns a word's address for kernels, which reach pinned memory by the host's own addresses.
    ///
    /// # Panics
    /// Panics if the words are beyond the end.
    pub fn device(&self, at: usize) -> DevicePtr<u32> {
        let owner = self.lifetime.as_ref().map_or(Owner::nothing(), Lifetime::owner);
        // SAFETY: the memory is never borrowed. Dropping it drops the lifetime first and then waits for the device.
        let first: DevicePtr<u32> =
            unsafe { DevicePtr::of_memory(self.first as u64, 4 * self.count, owner) };
        first.offset(at)
    }

    /// Appends `count` words from `at` on to `values`, as floats.
    ///
    /// # Panics
    /// Panics if the words are beyond the end.
    pub fn append(&self, at: usize, count: usize, values: &mut Vec<f32>) {
        assert!(at + count <= self.count, "words beyond the end");
        values.reserve(count);
        let length = values.len();
        // SAFETY: the words lie inside the allocation, which nothing borrows, and `reserve` made room for them. Every
        // word is a valid float, so `count` floats are initialised behind the first `length`.
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
            // Queued work, on any stream, may still read or write the memory. Its errors are reported elsewhere.
            let _ = self.stream.context().synchronize();
            // SAFETY: the memory came from the driver and is freed once.
            let _ = unsafe { result::free_host(self.first.cast()) };
        }
    }
}

impl Gpu {
    /// Allocates `count` words, all 0.
    ///
    /// # Errors
    /// Returns an error if a driver call fails, most often because of a limit on locked memory.
    pub fn host_words(&self, count: usize) -> Result<HostWords, CudaError> {
        self.bind()?;
        let bytes = 4 * count.max(1);
        // SAFETY: only `HostWords` frees the memory.
        let first = unsafe { result::malloc_host(bytes, 0) }
            .map_err(CudaError::of("reserving pinned memory"))?
            .cast::<u32>();
        // SAFETY: that many bytes were reserved.
        unsafe { first.cast::<u8>().write_bytes(0, bytes) };
        let lifetime = Some(Lifetime::new(self.id()));
        Ok(HostWords { first, count, lifetime, stream: self.shared_stream() })
    }

    /// Queues a copy of the words `range` to the device. The words must not change until it is done.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the range is beyond the end, if fewer words follow `to`, or if its memory was freed.
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
        // SAFETY: the pinned memory outlives queued work, because its drop waits. There is room at `to`, by the check.
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

    /// Queues a copy from the device into the words `range`. The caller may read them after [`Gpu::synchronize`].
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the range is beyond the end, if fewer words follow `from`, or if its memory was freed.
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
        // SAFETY: the pinned memory outlives queued work, because its drop waits, and nothing borrows it. That many
        // words follow `from`, by the check.
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
