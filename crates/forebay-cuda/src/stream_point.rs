//! Points in streams, by which copies and the work of other libraries wait for each other.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaEvent, result, sys};

use crate::copy_stream::{Event, Shared, wait};
use crate::error::is_not_ready;
use crate::{CopyStream, CudaError, Gpu};

/// Time after which a thread that waits for a point looks again.
const LOOKS_AFTER: Duration = Duration::from_micros(50);

/// A stream of another library in this process, such as the current one of PyTorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ForeignStream(u64);

impl ForeignStream {
    /// Names a stream by its handle, a `CUstream`. 0 is the default stream.
    ///
    /// # Safety
    /// The stream is one of the primary context of the GPU of every [`CopyStream`] that gets it, and is not destroyed while it is used here.
    pub unsafe fn of_handle(handle: u64) -> ForeignStream {
        ForeignStream(handle)
    }

    fn handle(self) -> sys::CUstream {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }
}

impl Gpu {
    /// Names the stream of kernels, as another library would name its own. The GPU must live as long as this is used.
    pub fn compute_stream(&self) -> ForeignStream {
        ForeignStream(self.stream().cu_stream().expose_provenance() as u64)
    }
}

/// A point in a stream. It is reached when all work that was queued before has ended.
#[derive(Clone)]
pub struct StreamPoint(Arc<Recorded>);

struct Recorded {
    event: Option<Event>,
    shared: Arc<Shared>,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.shared.reuse_ordering_event(event);
        }
    }
}

impl Recorded {
    fn event(&self) -> &Event {
        self.event.as_ref().expect("a point has its event until it is dropped")
    }
}

impl StreamPoint {
    /// Returns true if the point is reached. Does not wait.
    ///
    /// # Errors
    /// Returns the error of work that failed on the device.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        self.0.shared.bind()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.0.event().0) } {
            Ok(()) => Ok(true),
            Err(error) if is_not_ready(&error) => Ok(false),
            Err(error) => Err(CudaError::of("waiting for the GPU")(error)),
        }
    }

    /// Waits until the point is reached. The thread looks again and again, and sleeps between.
    ///
    /// # Errors
    /// Returns the error of work that failed on the device.
    pub fn reach(&self) -> Result<(), CudaError> {
        while !self.is_reached()? {
            std::thread::sleep(LOOKS_AFTER);
        }
        Ok(())
    }
}

/// A moment in a stream, with the GPU's own clock.
pub struct StreamMoment(CudaEvent);

impl StreamMoment {
    /// Waits for both moments, and returns the seconds to a later one.
    ///
    /// # Errors
    /// Returns the error of work that failed on the device.
    pub fn seconds_to(&self, later: &StreamMoment) -> Result<f64, CudaError> {
        let milliseconds = self.0.elapsed_ms(&later.0).map_err(CudaError::of("reading a clock"))?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl CopyStream {
    fn moment_in(&self, stream: sys::CUstream) -> Result<StreamMoment, CudaError> {
        self.bind()?;
        let event = self.shared().new_clock()?;
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(event.cu_event(), stream) }
            .map_err(CudaError::of("recording an event"))?;
        Ok(StreamMoment(event))
    }

    /// Returns the moment at which everything is done that this stream has queued so far.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn moment(&self) -> Result<StreamMoment, CudaError> {
        self.moment_in(self.handle())
    }

    /// Returns the moment at which everything is done that another library has queued so far.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn moment_of(&self, stream: ForeignStream) -> Result<StreamMoment, CudaError> {
        self.moment_in(stream.handle())
    }

    fn record(&self, stream: sys::CUstream) -> Result<StreamPoint, CudaError> {
        self.bind()?;
        let event = self.shared().ordering_event()?;
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(event.0, stream) }
            .map_err(CudaError::of("recording an event"))?;
        let shared = Arc::clone(self.shared());
        Ok(StreamPoint(Arc::new(Recorded { event: Some(event), shared })))
    }

    /// Returns the point behind everything that this stream has queued so far.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn point(&self) -> Result<StreamPoint, CudaError> {
        self.record(self.handle())
    }

    /// Lets work of this stream that is queued from now on wait for a point.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn wait_for_point(&self, point: &StreamPoint) -> Result<(), CudaError> {
        self.bind()?;
        wait(self.handle(), point.0.event())
    }

    /// Returns the point behind everything that another library has queued so far.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn point_of(&self, stream: ForeignStream) -> Result<StreamPoint, CudaError> {
        self.record(stream.handle())
    }

    /// Lets work of another library that is queued from now on wait for a point.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn hold_stream(&self, stream: ForeignStream, point: &StreamPoint) -> Result<(), CudaError> {
        self.bind()?;
        wait(stream.handle(), point.0.event())
    }
}
