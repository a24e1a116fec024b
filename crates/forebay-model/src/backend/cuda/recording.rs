//! One token's work, recorded and queued with one call.
//!
//! Tokens differ in what lies in memory: their id, their position, the cache. The kernels and their arguments are the
//! same, except that long contexts are cut into more parts, which makes a recording of its own.

use std::collections::HashMap;

use forebay_cuda::{CudaError, Gpu, Graph};

/// What is done with the batch at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Work is queued as it comes.
    Direct,
    /// It is written down, for contexts cut into so many parts.
    Recording(usize),
    /// It was written down before.
    Recorded(usize),
}

/// Recordings by parts of the context.
pub struct Recordings {
    graphs: HashMap<usize, Graph>,
    state: State,
    /// Whether one token went through the layers directly, so that all kernels are loaded: that cannot be recorded.
    warm: bool,
    enabled: bool,
}

impl Recordings {
    /// None yet; never any unless `enabled`.
    pub fn new(enabled: bool) -> Recordings {
        Recordings { graphs: HashMap::new(), state: State::Direct, warm: false, enabled }
    }

    /// Begins a batch: one that can be recorded has a key. Whether it is recorded already.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn begin(&mut self, gpu: &Gpu, key: Option<usize>) -> Result<bool, CudaError> {
        if let State::Recording(_) = self.state {
            // The batch before failed.
            gpu.abandon_recording();
        }
        self.state = State::Direct;
        let Some(key) = key.filter(|_| self.enabled) else { return Ok(false) };
        if self.graphs.contains_key(&key) {
            self.state = State::Recorded(key);
        } else if self.warm {
            gpu.start_recording()?;
            self.state = State::Recording(key);
        }
        self.warm = true;
        Ok(matches!(self.state, State::Recorded(_)))
    }

    /// Whether the batch at hand is recorded already.
    pub fn is_recorded(&self) -> bool {
        matches!(self.state, State::Recorded(_))
    }

    /// Ends a batch: what was recorded, now or before, is queued.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn queue(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        let key = match std::mem::replace(&mut self.state, State::Direct) {
            State::Direct => return Ok(()),
            State::Recording(key) => {
                self.graphs.insert(key, gpu.finish_recording()?);
                key
            }
            State::Recorded(key) => key,
        };
        gpu.queue_graph(&self.graphs[&key])
    }
}
