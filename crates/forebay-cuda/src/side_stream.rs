//! A second stream for kernels that run beside those of the compute stream.

use std::sync::Arc;

use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use crate::error::bind;
use crate::{CudaError, Gpu, LANES};

/// A stream whose kernels run between a fork from a lane of the compute stream and a join with it. All may be part of a
/// CUDA graph. Its blocks of threads start before those of other streams that wait for room.
pub struct SideStream {
    stream: sys::CUstream,
    context: Arc<CudaContext>,
    forked: CudaEvent,
    /// Ends of the work that lanes wait for later.
    marks: [CudaEvent; LANES],
}

impl Gpu {
    /// Creates a side stream.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn side_stream(&self) -> Result<SideStream, CudaError> {
        self.bind()?;
        let context = self.shared_context();
        let event = || new_event(&context);
        let (forked, marks) = (event()?, [event()?, event()?]);
        let stream = result::stream::get_priority_range().and_then(|(_, highest)| {
            result::stream::create_with_priority(StreamKind::NonBlocking, highest)
        });
        let stream = stream.map_err(CudaError::of("creating a stream"))?;
        Ok(SideStream { stream, context, forked, marks })
    }
}

// SAFETY: every thread may use the driver's handles.
unsafe impl Send for SideStream {}

impl Drop for SideStream {
    fn drop(&mut self) {
        if bind(&self.context).is_ok() {
            // SAFETY: it is destroyed once. The driver first finishes what is queued there.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
    }
}

impl SideStream {
    /// Makes kernels queued here from now on wait for everything that is queued in the current lane of `gpu`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn fork(&self, gpu: &Gpu) -> Result<(), CudaError> {
        gpu.bind()?;
        order(&self.forked, gpu.stream().cu_stream(), self.stream)
    }

    /// Sets mark number `lane` behind the kernels that are queued here.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn set_mark(&self, lane: usize) -> Result<(), CudaError> {
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(self.marks[lane].cu_event(), self.stream) }
            .map_err(CudaError::of("ordering two streams"))
    }

    /// Makes work queued in the current lane of `gpu` from now on wait for the kernels before mark number `lane`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn join_mark(&self, gpu: &Gpu, lane: usize) -> Result<(), CudaError> {
        gpu.bind()?;
        wait(gpu.stream().cu_stream(), &self.marks[lane])?;
        gpu.lanes().note_join();
        Ok(())
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.stream
    }
}

pub(crate) fn new_stream(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>, CudaError> {
    context.new_stream().map_err(CudaError::of("creating a stream"))
}

/// Creates an event that only orders work.
pub(crate) fn new_event(context: &Arc<CudaContext>) -> Result<CudaEvent, CudaError> {
    let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING;
    context.new_event(Some(flags)).map_err(CudaError::of("creating an event"))
}

/// Makes work queued on `later` from now on wait for what is queued on `earlier`.
pub(crate) fn order(
    event: &CudaEvent,
    earlier: sys::CUstream,
    later: sys::CUstream,
) -> Result<(), CudaError> {
    // SAFETY: event and stream are alive.
    unsafe { result::event::record(event.cu_event(), earlier) }
        .map_err(CudaError::of("ordering two streams"))?;
    wait(later, event)
}

fn wait(later: sys::CUstream, event: &CudaEvent) -> Result<(), CudaError> {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: event and stream are alive.
    unsafe { result::stream::wait_event(later, event.cu_event(), flags) }
        .map_err(CudaError::of("ordering two streams"))
}
