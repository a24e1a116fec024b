//! Pinned host memory, and a stream that copies from it to the device while kernels run.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};
use forebay_device::while_alive;

use crate::error::{bind, is_not_ready};
use crate::pinned::{Pinned, Pinner};
use crate::side_stream::{new_event, order};
use crate::{CudaError, DevicePtr, Gpu};

/// Pinned memory from which [`HostUploads`] copy.
pub struct HostBytes<M> {
    _pinned: Pinned,
    memory: M,
    stream: Arc<CudaStream>,
    /// True if copies from the memory may be under way.
    is_read: AtomicBool,
}

impl<M> HostBytes<M> {
    /// Waits for copies from the memory.
    fn wait(&self) {
        if self.is_read.swap(false, Ordering::AcqRel) && bind(self.stream.context()).is_ok() {
            // After an error, nothing is copied any more.
            let _ = self.stream.synchronize();
        }
    }
}

impl<M: AsRef<[u8]>> AsRef<[u8]> for HostBytes<M> {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_ref()
    }
}

impl<M: AsMut<[u8]>> AsMut<[u8]> for HostBytes<M> {
    /// Waits for copies from the memory first.
    fn as_mut(&mut self) -> &mut [u8] {
        self.wait();
        self.memory.as_mut()
    }
}

impl<M> Drop for HostBytes<M> {
    fn drop(&mut self) {
        self.wait();
    }
}

/// Pins memory for [`HostUploads`], on any thread.
#[derive(Clone)]
pub struct HostPinner {
    pinner: Pinner,
    stream: Arc<CudaStream>,
}

impl HostPinner {
    /// Pins `memory` at `addresses`, which must be whole pages that are in memory and that `memory` owns.
    ///
    /// # Errors
    /// Returns an error if a driver call fails, most often because of a limit on locked memory.
    pub fn pin<M>(&self, addresses: Range<usize>, memory: M) -> Result<HostBytes<M>, CudaError> {
        let pinned = self.pinner.pin(addresses, ())?;
        let stream = self.stream.clone();
        Ok(HostBytes { _pinned: pinned, memory, stream, is_read: AtomicBool::new(false) })
    }
}

/// Copies from pinned memory to the device, in groups, on a stream of their own.
pub struct HostUploads {
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
    forked: CudaEvent,
    /// Numbers and ends of the groups that may be under way, in order.
    groups: VecDeque<(u64, CudaEvent)>,
    spare_events: Vec<CudaEvent>,
    /// True if copies were queued since the last group ended.
    is_open: bool,
    /// Numbers of the last group, and of the last one that has ended. Groups are counted from 1.
    last: u64,
    ended: u64,
}

impl Gpu {
    /// Creates a stream for copies from pinned memory.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn host_uploads(&self) -> Result<HostUploads, CudaError> {
        self.bind()?;
        let context = self.shared_context();
        let stream = context.new_stream().map_err(CudaError::of("creating a stream"))?;
        let forked = new_event(&context)?;
        let (groups, spare_events) = (VecDeque::new(), Vec::new());
        let (is_open, last, ended) = (false, 0, 0);
        Ok(HostUploads { stream, context, forked, groups, spare_events, is_open, last, ended })
    }
}

impl HostUploads {
    /// Returns what pins memory for these copies.
    pub fn pinner(&self) -> HostPinner {
        let pinner = Pinner { context: self.context.clone() };
        HostPinner { pinner, stream: self.stream.clone() }
    }

    /// Queues a copy of `range` of `from` to the device. The first copy of a group waits for everything that is queued on `gpu`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the range is not in `from`, if the bytes do not fit at `to`, or if its memory was freed.
    pub fn upload<M: AsRef<[u8]>>(
        &mut self,
        gpu: &Gpu,
        from: &HostBytes<M>,
        range: Range<usize>,
        to: DevicePtr<u8>,
    ) -> Result<(), CudaError> {
        let bytes = &from.as_ref()[range];
        to.check(bytes.len());
        gpu.check_may_wait();
        gpu.bind()?;
        if !self.is_open {
            order(&self.forked, gpu.stream().cu_stream(), self.stream.cu_stream())?;
            self.is_open = true;
        }
        from.is_read.store(true, Ordering::Release);
        // SAFETY: there is room at `to`, by the check. Until the copies of the stream have ended, `from` neither lets anyone
        // change the memory nor is dropped.
        while_alive(&[to.owner()], || unsafe {
            result::memcpy_htod_async(to.address(), bytes, self.stream.cu_stream())
        })
        .map_err(CudaError::of("copying to the GPU"))
    }

    /// Ends a group of copies, and returns its number. Returns that of the last group if nothing was queued since.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn end_group(&mut self) -> Result<u64, CudaError> {
        if !self.is_open {
            return Ok(self.last);
        }
        let event = match self.spare_events.pop() {
            Some(event) => event,
            None => new_event(&self.context)?,
        };
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(event.cu_event(), self.stream.cu_stream()) }
            .map_err(CudaError::of("recording an event"))?;
        self.is_open = false;
        self.last += 1;
        self.groups.push_back((self.last, event));
        Ok(self.last)
    }

    /// Returns true if all copies up to those of a group have ended. Waits for them if `waits`.
    ///
    /// # Errors
    /// Returns the error of copies that failed, or an error if a driver call fails.
    pub fn has_ended(&mut self, group: u64, waits: bool) -> Result<bool, CudaError> {
        while self.ended < group
            && let Some((number, event)) = self.groups.front()
        {
            bind(&self.context)?;
            // SAFETY: the event is alive.
            let has_ended = unsafe {
                match waits {
                    true => result::event::synchronize(event.cu_event()),
                    false => result::event::query(event.cu_event()),
                }
            };
            match has_ended {
                Err(error) if is_not_ready(&error) => break,
                other => other.map_err(CudaError::of("copying to the GPU"))?,
            }
            self.ended = *number;
            self.spare_events.extend(self.groups.pop_front().map(|(_, event)| event));
        }
        Ok(self.ended >= group)
    }
}
