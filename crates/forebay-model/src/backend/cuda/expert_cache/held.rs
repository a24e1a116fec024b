//! What kernels of a run with two lanes may still use: experts in VRAM that they compute with, and experts in host memory
//! that they copy.
//!
//! The lanes take turns with answers. A lane asks for a layer's experts after it has computed with those of the layer
//! before. So the experts of the last answer but one are free when an answer is given, and those of the last one are
//! not.

use forebay_stream::{ExpertIndex, LayerIndex, Lease};

/// An expert that kernels of a lane may still compute with.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldExpert {
    pub layer: LayerIndex,
    pub expert: ExpertIndex,
    pub pool: usize,
    pub slot: u32,
    /// True if the answer brought it, so that the tables on the GPU do not name it.
    pub is_new: bool,
}

/// What an answer holds.
pub(super) struct Held {
    pub experts: Vec<HeldExpert>,
    pub leases: Vec<(ExpertIndex, Lease)>,
}

impl Held {
    /// Reserves room for `pairs` pairs of a row and an expert.
    pub fn new(pairs: usize) -> Held {
        Held { experts: Vec::with_capacity(pairs), leases: Vec::with_capacity(pairs) }
    }

    /// Returns the experts of a layer.
    pub fn of_layer(&self, layer: LayerIndex) -> impl Iterator<Item = &HeldExpert> {
        self.experts.iter().filter(move |of| of.layer == layer)
    }

    /// Returns true if it holds slot number `slot` of a pool.
    pub fn has_slot(&self, pool: usize, slot: u32) -> bool {
        self.experts.iter().any(|of| (of.pool, of.slot) == (pool, slot))
    }
}
