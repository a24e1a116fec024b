//! Copies from and to host memory that run concurrently with the kernels. Each has an event that tells when its memory
//! is free again.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{CudaEvent, CudaStream, result};
use forebay_device::while_alive;

use crate::error::{bind, is_not_ready};
use crate::memory::copy_in;
use crate::{CudaError, DevicePtr, Gpu};

/// A separate stream for copies to the device and back. Several threads may use it at the same time.
pub struct CopyStream {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    stream: Arc<CudaStream>,
    /// Events for which threads wait. The GPU interrupts the processor at each, so that they sleep until then.
    awaited: Events,
    /// Events for which only streams wait. They cost the processor nothing when they come.
    ordering: Events,
}

/// Events of one kind.
struct Events {
    flags: u32,
    /// Those that are not in use.
    spare: Mutex<Vec<Event>>,
}

pub(crate) struct Event(pub(crate) sys::CUevent);

// SAFETY: every thread may use the driver's handles.
unsafe impl Send for Event {}
// SAFETY: as for `Send`.
unsafe impl Sync for Event {}

impl Shared {
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        bind(self.stream.context())
    }

    /// Returns an event for which streams wait.
    pub(crate) fn ordering_event(&self) -> Result<Event, CudaError> {
        self.ordering.take()
    }

    /// Takes back an event for which streams wait. Those that do keep what it stood for.
    pub(crate) fn reuse_ordering_event(&self, event: Event) {
        self.ordering.put(event);
    }

    /// Creates an event that has the time at which it came.
    pub(crate) fn new_clock(&self) -> Result<CudaEvent, CudaError> {
        let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        self.stream.context().new_event(flags).map_err(CudaError::of("creating an event"))
    }

    pub(crate) fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(event.0) }.map_err(CudaError::of("copying to the GPU"))
    }
}

impl Events {
    fn of(flags: u32) -> Events {
        Events { flags, spare: Mutex::default() }
    }

    fn take(&self) -> Result<Event, CudaError> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(event) = spare {
            return Ok(event);
        }
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver writes the handle to a live variable.
        unsafe { sys::cuEventCreate(&mut event, self.flags) }
            .result()
            .map_err(CudaError::of("creating an event"))?;
        Ok(Event(event))
    }

    fn put(&self, event: Event) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        for events in [&mut self.awaited, &mut self.ordering] {
            for event in events.spare.get_mut().unwrap_or_else(PoisonError::into_inner) {
                // SAFETY: the event was created here and is destroyed once.
                let _ = unsafe { result::event::destroy(event.0) };
            }
        }
    }
}

impl Gpu {
    /// Creates a stream for copies.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn copy_stream(&self) -> Result<CopyStream, CudaError> {
        let stream = self.shared_context().new_stream();
        let stream = stream.map_err(CudaError::of("creating a stream"))?;
        let ordering = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        let awaited = ordering | CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        let (awaited, ordering) = (Events::of(awaited), Events::of(ordering));
        Ok(CopyStream { shared: Arc::new(Shared { stream, awaited, ordering }) })
    }
}

impl CopyStream {
    pub(crate) fn handle(&self) -> sys::CUstream {
        self.shared.stream.cu_stream()
    }

    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.shared.bind()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Starts to copy ranges of `memory` to the GPU, after all copies started before. If `memory` is pinned, the call
    /// returns at once.
    ///
    /// # Errors
    /// Returns an error if a driver call fails. If some copies had started by then, the memory is never freed.
    ///
    /// # Panics
    /// Panics if a range is not inside `memory` or is longer than what follows its address on the GPU, or if that
    /// memory was freed.
    pub fn upload<M: AsRef<[u8]> + Send + Sync + 'static>(
        &self,
        memory: M,
        copies: impl IntoIterator<Item = (Range<usize>, DevicePtr<u8>)>,
    ) -> Result<InFlight<M>, CudaError> {
        self.upload_then(memory, copies, || Ok(()))
    }

    /// Starts to copy like [`CopyStream::upload`], and then calls `then`, which may start more work of this stream. What is
    /// returned waits for all of it.
    ///
    /// # Errors
    /// Returns the errors of [`CopyStream::upload`], and that of `then`. The memory is then never freed.
    ///
    /// # Panics
    /// Panics like [`CopyStream::upload`].
    pub fn upload_then<M: AsRef<[u8]> + Send + Sync + 'static>(
        &self,
        memory: M,
        copies: impl IntoIterator<Item = (Range<usize>, DevicePtr<u8>)>,
        then: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<InFlight<M>, CudaError> {
        self.shared.bind()?;
        let event = self.shared.awaited.take()?;
        // The memory is behind a pointer, so that bytes which lie in `M` itself do not move. Nothing may free it, not
        // even a panic, until an event tells that the device has read it.
        let memory = ManuallyDrop::new(Arc::new(memory));
        let bytes = (**memory).as_ref();
        let stream = self.shared.stream.cu_stream();
        for (range, to) in copies {
            tracing::trace!(bytes = range.len(), "copy to the GPU");
            to.check(range.len());
            // SAFETY: there is no other reference to the memory, and it stays until the event has come. There is room
            // at `to`, by the check.
            while_alive(&[to.owner()], || unsafe {
                result::memcpy_htod_async(to.address(), &bytes[range], stream)
            })
            .map_err(CudaError::of("copying to the GPU"))?;
        }
        then()?;
        self.end_of(memory, event)
    }

    /// Starts to copy `bytes` bytes within device memory, after all work that this stream has queued before.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if fewer bytes follow `from` or `to`, or if the memory of either was freed.
    pub fn copy(
        &self,
        from: DevicePtr<u8>,
        to: DevicePtr<u8>,
        bytes: usize,
    ) -> Result<(), CudaError> {
        self.shared.bind()?;
        copy_in(&self.shared.stream, from, to, bytes)
    }

    /// Starts to copy from the device to ranges of `memory`, after all copies started before. If `memory` is pinned,
    /// the call returns at once.
    ///
    /// # Errors
    /// Returns an error if a driver call fails. If some copies had started by then, the memory is never freed.
    ///
    /// # Panics
    /// Panics if a range is not inside `memory` or is longer than what follows its address on the GPU, or if that
    /// memory was freed.
    pub fn download<M: AsMut<[u8]> + Send + Sync + 'static>(
        &self,
        memory: M,
        copies: impl IntoIterator<Item = (DevicePtr<u8>, Range<usize>)>,
    ) -> Result<InFlight<M>, CudaError> {
        self.shared.bind()?;
        let event = self.shared.awaited.take()?;
        // Behind a pointer and not freed on a panic, for the reasons given in `upload`.
        let mut memory = ManuallyDrop::new(Arc::new(memory));
        let bytes = Arc::get_mut(&mut memory).expect("no other code has it yet").as_mut();
        let stream = self.shared.stream.cu_stream();
        for (from, range) in copies {
            tracing::trace!(bytes = range.len(), "copy from the GPU");
            from.check(range.len());
            // SAFETY: there is no other reference to the memory; it stays and is not read until the event has come.
            // That many bytes follow `from`, by the check.
            while_alive(&[from.owner()], || unsafe {
                result::memcpy_dtoh_async(&mut bytes[range], from.address(), stream)
            })
            .map_err(CudaError::of("copying from the GPU"))?;
        }
        self.end_of(memory, event)
    }

    /// Records `event` behind all copies started so far, and ties `memory` to it.
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

/// A point in the compute stream.
pub struct Marker {
    event: Option<Event>,
    shared: Arc<Shared>,
}

impl Drop for Marker {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.shared.reuse_ordering_event(event);
        }
    }
}

impl CopyStream {
    /// Returns the point at which everything queued on `gpu` so far is done.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn mark(&self, gpu: &Gpu) -> Result<Marker, CudaError> {
        self.shared.bind()?;
        let event = self.shared.ordering_event()?;
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(event.0, gpu.stream().cu_stream()) }
            .map_err(CudaError::of("recording an event"))?;
        Ok(Marker { event: Some(event), shared: self.shared.clone() })
    }

    /// Makes copies started from now on wait for `marker`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn wait_for(&self, marker: &Marker) -> Result<(), CudaError> {
        let Some(event) = &marker.event else { return Ok(()) };
        self.shared.bind()?;
        wait(self.shared.stream.cu_stream(), event)
    }

    /// Makes work queued on `gpu` from now on wait for `copies`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn hold<M>(&self, gpu: &Gpu, copies: &InFlight<M>) -> Result<(), CudaError> {
        let Some(event) = &copies.event else { return Ok(()) };
        self.shared.bind()?;
        wait(gpu.stream().cu_stream(), event)
    }
}

pub(crate) fn wait(stream: sys::CUstream, event: &Event) -> Result<(), CudaError> {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: event and stream are alive; the driver remembers what the event stands for at this call.
    unsafe { result::stream::wait_event(stream, event.0, flags) }
        .map_err(CudaError::of("ordering copies and kernels"))
}

/// Running copies, with the memory that they read or write. Dropping it waits for them.
pub struct InFlight<M> {
    memory: Option<Arc<M>>,
    event: Option<Event>,
    shared: Arc<Shared>,
}

impl<M> InFlight<M> {
    /// Returns true if the copies are done. Does not wait.
    ///
    /// # Errors
    /// Returns the error of copies that failed on the device.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let Some(event) = &self.event else { return Ok(true) };
        self.shared.bind()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(event.0) } {
            Ok(()) => Ok(true),
            Err(error) if is_not_ready(&error) => Ok(false),
            Err(error) => Err(CudaError::of("copying to the GPU")(error)),
        }
    }

    /// Waits for the copies and gives the memory back.
    ///
    /// # Errors
    /// Returns the error of copies that failed on the device. The memory is lost then, because the device may still
    /// use it.
    pub fn finish(mut self) -> Result<M, CudaError> {
        self.end()?;
        let memory = self.memory.take().and_then(Arc::into_inner);
        Ok(memory.expect("a copy in flight has its memory, and no other code does"))
    }

    fn end(&mut self) -> Result<(), CudaError> {
        let Some(event) = self.event.take() else { return Ok(()) };
        if let Err(error) = self.shared.wait(&event) {
            std::mem::forget(self.memory.take());
            return Err(error);
        }
        self.shared.awaited.put(event);
        Ok(())
    }
}

impl<M> Drop for InFlight<M> {
    fn drop(&mut self) {
        // If this fails, `end` has leaked the memory, so the device can still use it.
        let _ = self.end();
    }
}
