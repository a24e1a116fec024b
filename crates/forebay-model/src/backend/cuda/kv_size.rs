//! Size of a KV cache on a GPU, and the shapes of its layers.

use forebay_cuda::KvLayerShape;
use forebay_ops::KvType;

use crate::arch::{Attention, KvCapacity, KvInVram};

/// Maximum number of rows of logits that are on the device at once.
pub const HEAD_ROWS: usize = 32;

/// Size of a KV cache on a GPU.
#[derive(Debug, Clone, Copy)]
pub struct KvSize {
    pub element: KvType,
    /// Most positions of one sequence.
    pub context: usize,
    /// Most sequences at a time.
    pub sequences: usize,
    /// Positions of all sequences together ([`KvCapacity::tokens`]).
    pub tokens: Option<usize>,
    pub in_vram: KvInVram,
}

impl KvSize {
    pub fn capacity(&self) -> KvCapacity {
        let KvSize { context, sequences, tokens, in_vram, .. } = *self;
        KvCapacity { context, sequences, tokens, in_vram }
    }

    /// Returns the shape of a layer with this attention.
    pub fn shape(&self, attention: &Attention) -> KvLayerShape {
        let dims = (attention.head_dim, attention.value_dim);
        KvLayerShape {
            values_in_keys: attention.values_in_keys(),
            biased: attention.relative.is_some(),
            chosen: attention.indexer.is_some() || attention.shared.is_some(),
            ..KvLayerShape::new(self.element, attention.kv_heads, dims, self.context)
        }
    }
}
