//! A second stream for kernels that run beside those of the compute stream.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use crate::{CudaError, Gpu, LANES};

/// A stream whose kernels run between a fork from a lane of the compute stream and a join with it. All may be part of a
/// CUDA graph.
pub struct SideStream {
    stream: Arc<CudaStream>,
    forked: CudaEvent,
    joined: CudaEvent,
    /// Ends of the work that lanes wait for later.
    marks: [CudaEvent; LANES],
}

impl Gpu {
    /// Creates a side stream.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn side_stream(&self) -> Result<SideStream, CudaError> {
        let context = self.shared_context();
        let event = || new_event(&context);
        Ok(SideStream {
            stream: new_stream(&context)?,
            forked: event()?,
            joined: event()?,
            marks: [event()?, event()?],
        })
    }
}

impl SideStream {
    /// Makes kernels queued here from now on wait for everything that is queued in the current lane of `gpu`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn fork(&self, gpu: &Gpu) -> Result<(), CudaError> {
        gpu.bind()?;
        order(&self.forked, gpu.stream(), &self.stream)
    }

    /// Makes work queued in the current lane of `gpu` from now on wait for all kernels here.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn join(&self, gpu: &Gpu) -> Result<(), CudaError> {
        gpu.bind()?;
        order(&self.joined, &self.stream, gpu.stream())?;
        gpu.lanes().note_join();
        Ok(())
    }

    /// Sets mark number `lane` behind the kernels that are queued here.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn set_mark(&self, lane: usize) -> Result<(), CudaError> {
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(self.marks[lane].cu_event(), self.stream.cu_stream()) }
            .map_err(CudaError::of("ordering two streams"))
    }

    /// Makes work queued in the current lane of `gpu` from now on wait for the kernels before mark number `lane`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn join_mark(&self, gpu: &Gpu, lane: usize) -> Result<(), CudaError> {
        gpu.bind()?;
        wait(gpu.stream(), &self.marks[lane])?;
        gpu.lanes().note_join();
        Ok(())
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.stream.cu_stream()
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
    earlier: &CudaStream,
    later: &CudaStream,
) -> Result<(), CudaError> {
    // SAFETY: event and stream are alive.
    unsafe { result::event::record(event.cu_event(), earlier.cu_stream()) }
        .map_err(CudaError::of("ordering two streams"))?;
    wait(later, event)
}

fn wait(later: &CudaStream, event: &CudaEvent) -> Result<(), CudaError> {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: event and stream are alive.
    unsafe { result::stream::wait_event(later.cu_stream(), event.cu_event(), flags) }
        .map_err(CudaError::of("ordering two streams"))
}
