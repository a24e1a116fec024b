//! Measurement of copy rates between host and device, which limit every load.

use std::time::{Duration, Instant};

use cudarc::driver::{CudaStream, result};

use crate::{CudaError, DevicePtr, Gpu};

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    ToDevice,
    FromDevice,
}

/// Bytes of copies that are queued before the host waits for the device. They follow one another without a gap, as in
/// a load.
const QUEUED_BYTES: usize = 256 << 20;
const QUEUED_MAX: usize = 256;

/// Pinned memory from the driver, for measurements.
struct PinnedBuffer {
    start: *mut u8,
    bytes: usize,
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: the memory came from the driver and is freed once, after all copies.
        let _ = unsafe { result::free_host(self.start.cast()) };
    }
}

impl Gpu {
    /// Measures copies of `bytes` each between pinned memory and the device for about `time`. Returns bytes per
    /// second. The copies cycle through `span` bytes of host memory.
    ///
    /// # Errors
    /// Returns an error if there is not enough memory or if a driver call fails.
    pub fn pinned_copy_rate(
        &self,
        direction: Direction,
        bytes: usize,
        span: usize,
        time: Duration,
    ) -> Result<f64, CudaError> {
        self.bind()?;
        let span = (span / bytes).max(1) * bytes;
        // SAFETY: `PinnedBuffer` alone frees the memory, which is never seen as a Rust value before it is filled.
        let start = unsafe { result::malloc_host(span, 0) };
        let start = start.map_err(CudaError::of("allocating pinned memory"))?;
        let buffer = PinnedBuffer { start: start.cast(), bytes: span };
        // SAFETY: the driver allocated that many bytes.
        unsafe { buffer.start.write_bytes(1, buffer.bytes) };
        self.copy_rate(direction, &buffer, bytes, time)
    }

    /// Measures the same as [`Gpu::pinned_copy_rate`] from memory that is not pinned: the driver first copies it to
    /// its own memory.
    ///
    /// # Errors
    /// Returns an error if there is not enough memory or if a driver call fails.
    pub fn pageable_copy_rate(&self, bytes: usize, time: Duration) -> Result<f64, CudaError> {
        let values = vec![1_u8; bytes];
        let device = self.allocate(bytes)?;
        self.upload(&values, device.ptr())?;
        let (started, mut copies) = (Instant::now(), 0);
        while started.elapsed() < time {
            self.upload(&values, device.ptr())?;
            copies += 1;
        }
        Ok((copies * bytes) as f64 / started.elapsed().as_secs_f64())
    }

    fn copy_rate(
        &self,
        direction: Direction,
        host: &PinnedBuffer,
        bytes: usize,
        time: Duration,
    ) -> Result<f64, CudaError> {
        let device = self.allocate(bytes)?;
        let stream = self.shared_context().new_stream();
        let stream = stream.map_err(CudaError::of("creating a stream"))?;
        let places = host.bytes / bytes;
        let round = (QUEUED_BYTES / bytes).clamp(2, QUEUED_MAX);
        let copy_round = || -> Result<(), CudaError> {
            let mut queued = Ok(());
            for turn in 0..round {
                let at = turn % places * bytes;
                queued = queue(direction, host, at, device.ptr(), bytes, &stream);
                if queued.is_err() {
                    break;
                }
            }
            // Wait even after an error, because copies queued before it use the memory.
            let waited = stream.synchronize().map_err(CudaError::of("waiting for the GPU"));
            queued.and(waited)
        };
        copy_round()?;
        let (started, mut rounds) = (Instant::now(), 0);
        while rounds == 0 || started.elapsed() < time {
            copy_round()?;
            rounds += 1;
        }
        Ok((rounds * round * bytes) as f64 / started.elapsed().as_secs_f64())
    }
}

fn queue(
    direction: Direction,
    host: &PinnedBuffer,
    at: usize,
    device: DevicePtr<u8>,
    bytes: usize,
    stream: &CudaStream,
) -> Result<(), CudaError> {
    assert!(at + bytes <= host.bytes, "a copy of {bytes} bytes at {at} of {}", host.bytes);
    // SAFETY: the range lies in the buffer, which the caller keeps until it has waited for the stream. Only one
    // direction uses it at a time. The order of copies to one address does not matter.
    let copied = unsafe {
        let start = host.start.add(at);
        let stream = stream.cu_stream();
        match direction {
            Direction::ToDevice => {
                let from = std::slice::from_raw_parts(start, bytes);
                result::memcpy_htod_async(device.address(), from, stream)
            }
            Direction::FromDevice => {
                let to = std::slice::from_raw_parts_mut(start, bytes);
                result::memcpy_dtoh_async(to, device.address(), stream)
            }
        }
    };
    copied.map_err(CudaError::of("copying between host and GPU"))
}
