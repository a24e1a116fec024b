//! Names of blocks, and where their bytes lie on disk.

use std::fmt;

use forebay_store::{Block, BlockLabel};
use serde::Serialize;

/// Index of a decoder layer, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct LayerIndex(pub u32);

/// Index of an expert in its layer, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct ExpertIndex(pub u32);

/// Name of a block, the unit that is moved and evicted as a whole.
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
    /// Returns the store's name for the block.
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
    /// Every dense block in execution order: layer 0, layer 1, ..., then the chunks of the head.
    pub dense: Vec<Block>,
    /// Experts as `[layer][expert]`; a dense layer has none.
    pub experts: Vec<Vec<Block>>,
    /// Number of experts that a token uses in one layer.
    pub experts_per_token: usize,
}

impl ModelBlocks {
    /// Returns the bytes of all blocks on disk.
    pub fn total_bytes(&self) -> u64 {
        self.all().map(Block::bytes).fold(0_u64, u64::saturating_add)
    }

    /// Returns the bytes of the largest relayout. Converting a block after reading needs this much memory beside its
    /// slot.
    pub fn relayout_bytes(&self) -> u64 {
        let relayouts = self.all().filter_map(|block| block.relayout.as_ref());
        relayouts.map(|relayout| relayout.bytes() as u64).max().unwrap_or(0)
    }

    /// Returns the dense blocks and then the experts of all layers.
    pub fn all(&self) -> impl Iterator<Item = &Block> {
        self.dense.iter().chain(self.experts.iter().flatten())
    }
}
