//! One token's work, recorded and queued with one call.
//!
//! Tokens differ in what lies in memory: their id, their position, the cache. The kernels and their arguments are the
//! same, but for a few ways: each makes a recording of its own.

use std::collections::{HashMap, HashSet};

use forebay_cuda::{CudaError, Gpu, Graph};

use crate::backend::End;

/// What tells recordings apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Way {
    /// Parts that the context is cut into.
    pub splits: usize,
    pub end: End,
    /// The CPU computes some of the experts that are not on the GPU.
    pub cpu_helps: bool,
}

/// What is done with the batch at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Work is queued as it comes.
    Direct,
    /// It is written down.
    Recording(Way),
    /// It was written down before.
    Recorded(Way),
}

/// Recordings by their way.
pub struct Recordings {
    graphs: HashMap<Way, Graph>,
    state: State,
    /// Ends that a token came to directly, so that all kernels on the way are loaded: that cannot be recorded.
    warm: HashSet<End>,
    enabled: bool,
}

impl Recordings {
    /// None yet; never any unless `enabled`.
    pub fn new(enabled: bool) -> Recordings {
        Recordings { graphs: HashMap::new(), state: State::Direct, warm: HashSet::new(), enabled }
    }

    /// Begins a batch: one that can be recorded has a way. Whether it is recorded already.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn begin(&mut self, gpu: &Gpu, way: Option<Way>) -> Result<bool, CudaError> {
        if let State::Recording(_) = self.state {
            // The batch before failed.
            gpu.abandon_recording();
        }
        self.state = State::Direct;
        let Some(way) = way.filter(|_| self.enabled) else { return Ok(false) };
        if self.graphs.contains_key(&way) {
            self.state = State::Recorded(way);
        } else if !self.warm.insert(way.end) {
            gpu.start_recording()?;
            self.state = State::Recording(way);
        }
        Ok(matches!(self.state, State::Recorded(_)))
    }

    /// Whether the batch at hand is recorded already.
    pub fn is_recorded(&self) -> bool {
        matches!(self.state, State::Recorded(_))
    }

    /// Whether the batch at hand is being recorded.
    pub fn is_recording(&self) -> bool {
        matches!(self.state, State::Recording(_))
    }

    /// Ends a batch: what was recorded, now or before, is to be queued; `None`: all was queued as it came.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn finish(&mut self, gpu: &Gpu) -> Result<Option<&Graph>, CudaError> {
        let way = match std::mem::replace(&mut self.state, State::Direct) {
            State::Direct => return Ok(None),
            State::Recording(way) => {
                self.graphs.insert(way, gpu.finish_recording()?);
                way
            }
            State::Recorded(way) => way,
        };
        Ok(self.graphs.get(&way))
    }
}
