//! A second stream for kernels that run beside those of the compute stream.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{CudaStream, result};

use crate::error::bind;
use crate::{CudaError, Gpu};

/// A stream whose kernels run between a fork from the compute stream and a join with it. Both may be part of a CUDA graph.
pub struct SideStream {
    stream: Arc<CudaStream>,
    forked: sys::CUevent,
    joined: sys::CUevent,
}

// SAFETY: every thread may use the driver's handles.
unsafe impl Send for SideStream {}
// SAFETY: as for `Send`.
unsafe impl Sync for SideStream {}

impl Drop for SideStream {
    fn drop(&mut self) {
        if bind(self.stream.context()).is_err() {
            return;
        }
        for event in [self.forked, self.joined] {
            // SAFETY: the event was created by `Gpu::side_stream` and is destroyed once.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}

impl Gpu {
    /// Creates a side stream.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn side_stream(&self) -> Result<SideStream, CudaError> {
        let stream = self.shared_context().new_stream();
        let stream = stream.map_err(CudaError::of("creating a stream"))?;
        let event = || {
            let mut event = std::ptr::null_mut();
            // SAFETY: the driver writes the handle to a live variable.
            unsafe {
                sys::cuEventCreate(&mut event, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
            }
            .result()
            .map_err(CudaError::of("creating an event"))?;
            Ok(event)
        };
        Ok(SideStream { stream, forked: event()?, joined: event()? })
    }
}

impl SideStream {
    /// Makes kernels queued here from now on wait for everything that is queued on `gpu`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn fork(&self, gpu: &Gpu) -> Result<(), CudaError> {
        gpu.bind()?;
        order(self.forked, gpu.stream().cu_stream(), self.stream.cu_stream())
    }

    /// Makes work queued on `gpu` from now on wait for all kernels here.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn join(&self, gpu: &Gpu) -> Result<(), CudaError> {
        gpu.bind()?;
        order(self.joined, self.stream.cu_stream(), gpu.stream().cu_stream())?;
        gpu.note_join();
        Ok(())
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }
}

/// Makes work queued on `later` from now on wait for what is queued on `earlier`.
fn order(
    event: sys::CUevent,
    earlier: sys::CUstream,
    later: sys::CUstream,
) -> Result<(), CudaError> {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: event and streams are alive.
    unsafe {
        result::event::record(event, earlier)
            .and_then(|()| result::stream::wait_event(later, event, flags))
    }
    .map_err(CudaError::of("ordering two streams"))
}
