//! Two lanes of the compute stream, for passes whose rows go through the layers in two parts. While one part waits for
//! weights, the other computes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use crate::side_stream::{new_event, new_stream, order};
use crate::{CudaError, Gpu};

/// Number of lanes. Work is queued in the first one unless [`Gpu::enter_lane`] says otherwise.
pub const LANES: usize = 2;

/// The streams of the lanes, and the lane in which work is queued.
pub(crate) struct Lanes {
    streams: [Arc<CudaStream>; LANES],
    current: AtomicUsize,
    /// By lane, true if the next kernel waits for kernels of another stream, too.
    joins: [AtomicBool; LANES],
    forked: CudaEvent,
    joined: CudaEvent,
}

impl Lanes {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Lanes, CudaError> {
        Ok(Lanes {
            streams: [new_stream(context)?, new_stream(context)?],
            current: AtomicUsize::new(0),
            joins: [AtomicBool::new(false), AtomicBool::new(false)],
            forked: new_event(context)?,
            joined: new_event(context)?,
        })
    }

    /// Returns the stream of the first lane.
    pub(crate) fn first(&self) -> &Arc<CudaStream> {
        &self.streams[0]
    }

    /// Returns the stream of the lane in which work is queued.
    pub(crate) fn current(&self) -> &Arc<CudaStream> {
        &self.streams[self.current.load(Ordering::Relaxed)]
    }

    /// Notes that the next kernel of the current lane waits for kernels of another stream, too.
    pub(crate) fn note_join(&self) {
        self.joins[self.current.load(Ordering::Relaxed)].store(true, Ordering::Relaxed);
    }

    /// Returns true if the kernel that is queued now waits for kernels of another stream, too.
    pub(crate) fn takes_join(&self) -> bool {
        let joins = &self.joins[self.current.load(Ordering::Relaxed)];
        joins.load(Ordering::Relaxed) && joins.swap(false, Ordering::Relaxed)
    }
}

impl Gpu {
    /// Queues work in lane number `lane` from now on.
    ///
    /// # Panics
    /// Panics if there is no such lane.
    pub fn enter_lane(&self, lane: usize) {
        assert!(lane < LANES, "lane {lane}");
        self.lanes().current.store(lane, Ordering::Relaxed);
    }

    /// Makes work of the second lane wait for everything that is queued in the first.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn fork_lanes(&self) -> Result<(), CudaError> {
        self.order_lanes(&self.lanes().forked, 0, 1)
    }

    /// Makes work of the first lane wait for everything that is queued in the second.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn join_lanes(&self) -> Result<(), CudaError> {
        self.order_lanes(&self.lanes().joined, 1, 0)
    }

    fn order_lanes(&self, event: &CudaEvent, from: usize, to: usize) -> Result<(), CudaError> {
        self.bind()?;
        let Lanes { streams, joins, .. } = self.lanes();
        order(event, streams[from].cu_stream(), streams[to].cu_stream())?;
        joins[to].store(true, Ordering::Relaxed);
        Ok(())
    }
}
