//! Names of blocks, and where their bytes lie on disk.

use std::fmt;

use forebay_store::{BlockLabel, Extent};
use serde::Serialize;

/// A layer of the decoder, 0 first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct LayerIndex(pub u32);

/// An expert of one layer, 0 first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct ExpertIndex(pub u32);

/// A block: what is moved and evicted whole.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub enum BlockId {
    /// A dense block by its position in execution order: the layers, then the chunks of the head.
    Dense(u32),
    /// One expert of one layer: gate, up and down together.
    Expert(LayerIndex, ExpertIndex),
}

impl fmt::Display for BlockId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlockId::Dense(index) => write!(out, "dense block {index}"),
            BlockId::Expert(layer, expert) => write!(out, "layer {} expert {}", layer.0, expert.0),
        }
    }
}

impl BlockId {
    /// The store's name for it.
    pub(crate) fn label(self) -> BlockLabel {
        match self {
            BlockId::Dense(index) => BlockLabel::Dense(index),
            BlockId::Expert(layer, expert) => {
                BlockLabel::Expert { layer: layer.0, expert: expert.0 }
            }
        }
    }
}

/// The blocks of a model that are streamed: everything that grows with the model.
#[derive(Clone, Debug, Default)]
pub struct ModelBlocks {
    /// Extents of every dense block in execution order: layer 0, layer 1, ..., then the chunks of the head.
    pub dense: Vec<Vec<Extent>>,
    /// `[layer][expert]` -> extents; no experts for a dense layer.
    pub experts: Vec<Vec<Vec<Extent>>>,
    /// How many experts a token uses in one layer.
    pub experts_per_token: usize,
}

impl ModelBlocks {
    /// Bytes of all blocks on disk.
    pub fn total_bytes(&self) -> u64 {
        let of = |extents: &Vec<Extent>| {
            extents.iter().fold(0_u64, |sum, e| sum.saturating_add(e.length))
        };
        let dense = self.dense.iter().map(of).fold(0_u64, u64::saturating_add);
        self.experts.iter().flatten().map(of).fold(dense, u64::saturating_add)
    }
}
