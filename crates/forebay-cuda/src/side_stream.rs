//! A second stream for kernels that run beside those of the compute stream.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{CudaEvent, CudaStream, result};

use crate::{CudaError, Gpu};

/// A stream whose kernels run between a fork from the compute stream and a join with it. Both may be part of a CUDA graph.
pub struct SideStream {
    stream: Arc<CudaStream>,
    forked: CudaEvent,
    joined: CudaEvent,
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
            let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING;
            self.shared_context().new_event(Some(flags)).map_err(CudaError::of("creating an event"))
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
        order(&self.forked, gpu.stream().cu_stream(), self.stream.cu_stream())
    }

    /// Makes work queued on `gpu` from now on wait for all kernels here.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn join(&self, gpu: &Gpu) -> Result<(), CudaError> {
        gpu.bind()?;
        order(&self.joined, self.stream.cu_stream(), gpu.stream().cu_stream())?;
        gpu.note_join();
        Ok(())
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }
}

/// Makes work queued on `later` from now on wait for what is queued on `earlier`.
fn order(event: &CudaEvent, earlier: sys::CUstream, later: sys::CUstream) -> Result<(), CudaError> {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: event and streams are alive.
    unsafe {
        result::event::record(event.cu_event(), earlier)
            .and_then(|()| result::stream::wait_event(later, event.cu_event(), flags))
    }
    .map_err(CudaError::of("ordering two streams"))
}
