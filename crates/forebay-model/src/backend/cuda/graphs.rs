//! CUDA graphs of decode rows. The work of a pass is captured once and then queued with one call.
//!
//! Passes differ in what lies in memory: tokens, positions, the KV cache. Their kernels and arguments differ only by
//! [`GraphKey`], so each key has a graph of its own.

use std::collections::{HashMap, HashSet};

use forebay_cuda::{CudaError, Gpu, Graph};

use crate::backend::End;

/// Properties by which graphs differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphKey {
    /// Number of decode rows.
    pub rows: usize,
    /// Largest number of parts into which attention cuts the context of one of the tokens, added up over the shapes of attention.
    pub splits: usize,
    pub end: End,
    /// What the weight source decided. The source itself is the same for all passes of a backend, so it is no part of
    /// the key.
    pub source: SourceKey,
}

/// Decisions of a weight source that differ between passes and change the kernels of a graph.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct SourceKey {
    /// True if the CPU computes some of the experts that are not on the GPU.
    pub cpu_offloads: bool,
    /// Number of rows in the first of two lanes; `None` if all rows are in one.
    pub first_lane: Option<usize>,
}

/// State of the current batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Kernels are queued one by one.
    Direct,
    /// The batch is being captured.
    Recording(GraphKey),
    /// A graph captured earlier is replayed.
    Recorded(GraphKey),
}

/// Graphs by key, and the state of the current batch.
pub struct Graphs {
    graphs: HashMap<GraphKey, Graph>,
    state: State,
    /// Numbers of rows and ends with which a pass has run without a graph, so that all kernels it needs are loaded.
    /// Modules cannot be loaded during a capture.
    warm: HashSet<(usize, End)>,
    enabled: bool,
}

impl Graphs {
    /// Creates an empty set of graphs. Captures nothing unless `enabled`.
    pub fn new(enabled: bool) -> Graphs {
        Graphs { graphs: HashMap::new(), state: State::Direct, warm: HashSet::new(), enabled }
    }

    /// Ends the capture of a batch that failed or was interrupted. The caller cannot wait for the GPU before.
    pub fn abandon(&mut self, gpu: &Gpu) {
        if let State::Recording(_) = std::mem::replace(&mut self.state, State::Direct) {
            gpu.abort_capture();
        }
    }

    /// Starts a batch, after [`Graphs::abandon`]. A batch that can be captured has a key. Returns true if the batch replays a graph. If the batch is to be
    /// captured, the caller may still wait for the GPU until [`Graphs::begin_capture`].
    pub fn begin(&mut self, key: Option<GraphKey>) -> bool {
        let Some(key) = key.filter(|_| self.enabled) else { return false };
        if self.graphs.contains_key(&key) {
            self.state = State::Recorded(key);
        } else if !self.warm.insert((key.rows, key.end)) {
            self.state = State::Recording(key);
        }
        matches!(self.state, State::Recorded(_))
    }

    /// Starts the capture of a batch that is to be captured.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn begin_capture(&self, gpu: &Gpu) -> Result<(), CudaError> {
        if self.is_capturing() { gpu.begin_capture() } else { Ok(()) }
    }

    /// Returns the key of the current batch, if it has one.
    pub fn key(&self) -> Option<GraphKey> {
        match self.state {
            State::Direct => None,
            State::Recording(key) | State::Recorded(key) => Some(key),
        }
    }

    /// Returns true if the current batch replays a graph.
    pub fn is_replayed(&self) -> bool {
        matches!(self.state, State::Recorded(_))
    }

    /// Returns true if the current batch is or will be captured.
    pub fn is_capturing(&self) -> bool {
        matches!(self.state, State::Recording(_))
    }

    /// Ends a batch and its capture. Returns the graph to queue, or `None` if the kernels are already queued.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
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
