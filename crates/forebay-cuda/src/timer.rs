//! Measurement of queued work by the GPU's own clock.

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, result};

use crate::{CudaError, Gpu};

/// Two marks on the compute stream.
pub struct Timer {
    start: CudaEvent,
    end: CudaEvent,
}

impl Timer {
    /// Creates the marks of a timer.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn new(gpu: &Gpu) -> Result<Timer, CudaError> {
        let event = || {
            let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
            gpu.stream().context().new_event(flags).map_err(CudaError::of("creating an event"))
        };
        Ok(Timer { start: event()?, end: event()? })
    }

    /// Returns the seconds that the work queued by `work` takes, from its start to its end.
    ///
    /// # Errors
    /// Returns the errors of `work`, or an error if a driver call fails.
    pub fn time(
        &self,
        gpu: &Gpu,
        work: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        gpu.bind()?;
        let mark = |event: &CudaEvent| {
            // SAFETY: event and stream are alive.
            unsafe { result::event::record(event.cu_event(), gpu.stream().cu_stream()) }
                .map_err(CudaError::of("recording an event"))
        };
        mark(&self.start)?;
        work()?;
        mark(&self.end)?;
        gpu.synchronize()?;
        let milliseconds =
            self.start.elapsed_ms(&self.end).map_err(CudaError::of("reading a timer"))?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}
