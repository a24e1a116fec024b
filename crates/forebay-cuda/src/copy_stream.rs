//! Copies from and to host memory that go on beside the kernels, each with an event that tells when its memory is free again.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{CudaStream, result};

use crate::error::bind;
use crate::lifetime::while_alive;
use crate::{CudaError, DevicePtr, Gpu};

/// A stream of its own for copies to the device and back. May be used by many threads at a time.
pub struct CopyStream {
    shared: Arc<Shared>,
}

struct Shared {
    stream: Arc<CudaStream>,
    /// Events that nobody waits for.
    events: Mutex<Vec<Event>>,
}

struct Event(sys::CUevent);

// SAFETY: handles of the driver may be used from every thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Shared {
    fn bind(&self) -> Result<(), CudaError> {
        bind(self.stream.context())
    }

    fn event(&self) -> Result<Event, CudaError> {
        let spare = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(event) = spare {
            return Ok(event);
        }
        // Threads that wait sleep: others need the core to copy.
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
            | CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver writes the handle that it is given a place for.
        unsafe { sys::cuEventCreate(&mut event, flags) }
            .result()
            .map_err(CudaError::of("creating an event"))?;
        Ok(Event(event))
    }

    fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(event.0) }.map_err(CudaError::of("copying to the GPU"))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        for event in self.events.get_mut().unwrap_or_else(PoisonError::into_inner) {
            // SAFETY: the event was created here and is destroyed once.
            let _ = unsafe { result::event::destroy(event.0) };
        }
    }
}

impl Gpu {
    /// # Errors
    /// Whatever the driver says.
    pub fn copy_stream(&self) -> Result<CopyStream, CudaError> {
        let stream = self.shared_context().new_stream();
        let stream = stream.map_err(CudaError::of("creating a stream"))?;
        Ok(CopyStream { shared: Arc::new(Shared { stream, events: Mutex::default() }) })
    }
}

impl CopyStream {
    /// Begins to copy ranges of `memory` to their places, after all copies begun before. From pinned memory the call
    /// returns at once.
    ///
    /// # Errors
    /// Whatever the driver says. If copies of some ranges had begun then, the memory is never freed.
    ///
    /// # Panics
    /// When a range is not one of `memory`, or longer than what follows its place on the GPU, or that memory was freed.
    pub fn upload<M: AsRef<[u8]> + Send + Sync + 'static>(
        &self,
        memory: M,
        copies: impl IntoIterator<Item = (Range<usize>, DevicePtr<u8>)>,
    ) -> Result<InFlight<M>, CudaError> {
        self.shared.bind()?;
        let event = self.shared.event()?;
        // Behind a pointer, so that bytes which lie in `M` itself do not move. Until there is an event that tells when
        // the device has read it, nothing may free it, a panic included.
        let memory = ManuallyDrop::new(Arc::new(memory));
        let bytes = (**memory).as_ref();
        let stream = self.shared.stream.cu_stream();
        for (range, to) in copies {
            tracing::trace!(bytes = range.len(), "copy to the GPU");
            to.check(range.len());
            // SAFETY: the memory, of which nobody else has a reference, stays until the event has come; there is room at `to`,
            // by the check.
            while_alive(&[to.owner()], || unsafe {
                result::memcpy_htod_async(to.address(), &bytes[range], stream)
            })
            .map_err(CudaError::of("copying to the GPU"))?;
        }
        self.end_of(memory, event)
    }

    /// Begins to copy from the device to ranges of `memory`, after all copies begun before. To pinned memory the call returns
    /// at once.
    ///
    /// # Errors
    /// Whatever the driver says. If copies of some ranges had begun then, the memory is never freed.
    ///
    /// # Panics
    /// When a range is not one of `memory`, or longer than what follows its place on the GPU, or that memory was freed.
    pub fn download<M: AsMut<[u8]> + Send + Sync + 'static>(
        &self,
        memory: M,
        copies: impl IntoIterator<Item = (DevicePtr<u8>, Range<usize>)>,
    ) -> Result<InFlight<M>, CudaError> {
        self.shared.bind()?;
        let event = self.shared.event()?;
        // As above.
        let mut memory = ManuallyDrop::new(Arc::new(memory));
        let bytes = Arc::get_mut(&mut memory).expect("nobody else has it yet").as_mut();
        let stream = self.shared.stream.cu_stream();
        for (from, range) in copies {
            tracing::trace!(bytes = range.len(), "copy from the GPU");
            from.check(range.len());
            // SAFETY: the memory, of which nobody else has a reference, stays and is not looked at until the event has
            // come; as many bytes are at `from`, by the check.
            while_alive(&[from.owner()], || unsafe {
                result::memcpy_dtoh_async(&mut bytes[range], from.address(), stream)
            })
            .map_err(CudaError::of("copying from the GPU"))?;
        }
        self.end_of(memory, event)
    }

    /// Copies of `memory` are over when all that was begun by now is.
    fn end_of<M>(
        &self,
        memory: ManuallyDrop<Arc<M>>,
        event: Event,
    ) -> Result<InFlight<M>, CudaError> {
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(event.0, self.shared.stream.cu_stream()) }
            .map_err(CudaError::of("recording an event"))?;
        let (memory, event) = (Some(ManuallyDrop::into_inner(memory)), Some(event));
        Ok(InFlight { memory, event, shared: self.shared.clone() })
    }
}

/// A moment in the compute stream.
pub struct Marker {
    event: Option<Event>,
    shared: Arc<Shared>,
}

impl Drop for Marker {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.shared.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        }
    }
}

impl CopyStream {
    /// The moment in which all that is queued on `gpu` by now is done.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn mark(&self, gpu: &Gpu) -> Result<Marker, CudaError> {
        self.shared.bind()?;
        let event = self.shared.event()?;
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(event.0, gpu.stream().cu_stream()) }
            .map_err(CudaError::of("recording an event"))?;
        Ok(Marker { event: Some(event), shared: self.shared.clone() })
    }

    /// Copies begun from now on wait for the moment.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn wait_for(&self, marker: &Marker) -> Result<(), CudaError> {
        let Some(event) = &marker.event else { return Ok(()) };
        self.shared.bind()?;
        wait(self.shared.stream.cu_stream(), event)
    }

    /// What is queued on `gpu` from now on waits for the copies.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn hold<M>(&self, gpu: &Gpu, copies: &InFlight<M>) -> Result<(), CudaError> {
        let Some(event) = &copies.event else { return Ok(()) };
        self.shared.bind()?;
        wait(gpu.stream().cu_stream(), event)
    }
}

fn wait(stream: sys::CUstream, event: &Event) -> Result<(), CudaError> {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: event and stream are alive; the driver remembers what the event stands for now.
    unsafe { result::stream::wait_event(stream, event.0, flags) }
        .map_err(CudaError::of("ordering copies and kernels"))
}

/// Copies that go on, with the memory that they read or write. Dropping it waits.
pub struct InFlight<M> {
    memory: Option<Arc<M>>,
    event: Option<Event>,
    shared: Arc<Shared>,
}

impl<M> InFlight<M> {
    /// Whether they are done, without waiting.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let Some(event) = &self.event else { return Ok(true) };
        self.shared.bind()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(event.0) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(CudaError::of("copying to the GPU")(error)),
        }
    }

    /// Waits for them and gives the memory back.
    ///
    /// # Errors
    /// What went wrong on the device; the memory is lost then, since the device may still read it.
    pub fn finish(mut self) -> Result<M, CudaError> {
        self.end()?;
        let memory = self.memory.take().and_then(Arc::into_inner);
        Ok(memory.expect("a copy in flight has its memory, and nobody else does"))
    }

    fn end(&mut self) -> Result<(), CudaError> {
        let Some(event) = self.event.take() else { return Ok(()) };
        if let Err(error) = self.shared.wait(&event) {
            std::mem::forget(self.memory.take());
            return Err(error);
        }
        self.shared.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        Ok(())
    }
}

impl<M> Drop for InFlight<M> {
    fn drop(&mut self) {
        // An error has made sure that the memory stays.
        let _ = self.end();
    }
}
