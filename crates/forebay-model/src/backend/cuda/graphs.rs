//! One token's work, recorded and queued with one call.
//!
//! Tokens differ in what lies in memory: their id, their position, the cache. The kernels and their arguments are the
//! same, but for a few ways: each makes a recording of its own.

use std::collections::{HashMap, HashSet};

use forebay_cuda::{CudaError, Gpu, Graph};

use crate::backend::End;

/// What tells recordings apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphKey {
    /// Parts that the context is cut into.
    pub splits: usize,
    pub end: End,
    /// The CPU computes some of the experts that are not on the GPU.
    pub cpu_offloads: bool,
}

/// What is done with the batch at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Work is queued as it comes.
    Direct,
    /// It is written down.
    Recording(GraphKey),
    /// It was written down before.
    Recorded(GraphKey),
}

/// Recordings by their way.
pub struct Graphs {
    graphs: HashMap<GraphKey, Graph>,
    state: State,
    /// Ends that a token came to directly, so that all kernels on the way are loaded: that cannot be recorded.
    warm: HashSet<End>,
    enabled: bool,
}

impl Graphs {
    /// None yet; never any unless `enabled`.
    pub fn new(enabled: bool) -> Graphs {
        Graphs { graphs: HashMap::new(), state: State::Direct, warm: HashSet::new(), enabled }
    }

    /// Begins a batch: one that can be recorded has a way. Whether it is recorded already.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn begin(&mut self, gpu: &Gpu, key: Option<GraphKey>) -> Result<bool, CudaError> {
        if let State::Recording(_) = self.state {
            // The batch before failed.
            gpu.abort_capture();
        }
        self.state = State::Direct;
        let Some(key) = key.filter(|_| self.enabled) else { return Ok(false) };
        if self.graphs.contains_key(&key) {
            self.state = State::Recorded(key);
        } else if !self.warm.insert(key.end) {
            gpu.begin_capture()?;
            self.state = State::Recording(key);
        }
        Ok(matches!(self.state, State::Recorded(_)))
    }

    /// Whether the batch at hand is recorded already.
    pub fn is_replayed(&self) -> bool {
        matches!(self.state, State::Recorded(_))
    }

    /// Whether the batch at hand is being recorded.
    pub fn is_capturing(&self) -> bool {
        matches!(self.state, State::Recording(_))
    }

    /// Ends a batch: what was recorded, now or before, is to be queued; `None`: all was queued as it came.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn finish(&mut self, gpu: &Gpu) -> Result<Option<&Graph>, CudaError> {
        let key = match std::mem::replace(&mut self.state, State::Direct) {
            State::Direct => return Ok(None),
            State::Recording(key) => {
                self.graphs.insert(key, gpu.end_capture()?);
                key
            }
            State::Recorded(key) => key,
        };
        Ok(self.graphs.get(&key))
    }
}
