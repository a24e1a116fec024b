//! What layers are made of: matrices as parts of blocks, and vectors.

use forebay_format::TensorType;

/// A matrix `[rows, cols]` that is part `part` of its block.
#[derive(Debug, Clone, Copy)]
pub struct PartMatrix {
    pub part: usize,
    pub ty: TensorType,
    pub rows: usize,
    pub cols: usize,
}

/// One layer's matrices (by part of the layer's dense block) and resident vectors.
#[derive(Debug)]
pub struct LayerWeights {
    pub attention_norm: Vec<f32>,
    /// Of the block's output, where the description has such norms.
    pub attention_post_norm: Option<Vec<f32>>,
    pub feed_forward_norm: Vec<f32>,
    pub feed_forward_post_norm: Option<Vec<f32>>,
    pub attention: AttentionWeights,
    /// One for each head.
    pub sinks: Option<Vec<f32>>,
    pub o: PartMatrix,
    pub o_bias: Option<Vec<f32>>,
    /// Parts of the dense block that belong to attention. Those of the feed-forward, or a router and shared experts,
    /// follow.
    pub attention_parts: usize,
    pub feed_forward: FeedForwardWeights,
}

/// What makes queries, keys and values.
#[derive(Debug)]
pub enum AttentionWeights {
    Grouped(GroupedWeights),
    Latent(LatentWeights),
}

/// Every key/value head serves a group of query heads.
#[derive(Debug)]
pub struct GroupedWeights {
    pub q: PartMatrix,
    pub k: PartMatrix,
    pub v: PartMatrix,
    pub q_bias: Option<Vec<f32>>,
    pub k_bias: Option<Vec<f32>>,
    pub v_bias: Option<Vec<f32>>,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
}

/// Multi-head latent attention.
#[derive(Debug)]
pub struct LatentWeights {
    /// Where queries pass through a smaller width: the matrix to it, and the norm there.
    pub q_a: Option<(PartMatrix, Vec<f32>)>,
    /// `[heads * (plain + rotary), ..]`
    pub q: PartMatrix,
    /// `[rank + rotary, hidden]`: the latent vector, and the part of all keys that rotates.
    pub kv_a: PartMatrix,
    pub kv_a_norm: Vec<f32>,
    /// `[rank, plain]` for each head: from a query to one in latent space.
    pub k_b: HeadMatrices,
    /// `[value, rank]` for each head: from a sum of latent vectors to one of values.
    pub v_b: HeadMatrices,
}

/// A matrix for each head, one behind the other.
#[derive(Debug, Clone, Copy)]
pub struct HeadMatrices {
    /// Of one head.
    pub matrix: PartMatrix,
    /// Bytes of one head.
    pub bytes: usize,
    pub heads: usize,
}

impl HeadMatrices {
    /// Of all heads in one.
    pub fn all(&self) -> PartMatrix {
        PartMatrix { rows: self.heads * self.matrix.rows, ..self.matrix }
    }
}

impl AttentionWeights {
    /// All matrices but the output projection, those of all heads in one.
    pub fn matrices(&self) -> Vec<PartMatrix> {
        match self {
            AttentionWeights::Grouped(of) => vec![of.q, of.k, of.v],
            AttentionWeights::Latent(of) => {
                let q_a = of.q_a.as_ref().map(|(matrix, _)| *matrix);
                q_a.into_iter().chain([of.q, of.kv_a, of.k_b.all(), of.v_b.all()]).collect()
            }
        }
    }
}

#[derive(Debug)]
pub enum FeedForwardWeights {
    /// Matrices in the layer's dense block.
    Dense { gate: PartMatrix, up: PartMatrix, down: PartMatrix },
    /// The router is in the dense block, as is the feed-forward that every token has; gate, up and down are the parts of
    /// each expert's block.
    Experts {
        router: PartMatrix,
        gate: PartMatrix,
        up: PartMatrix,
        down: PartMatrix,
        /// Gate, up and down.
        shared: Option<[PartMatrix; 3]>,
        vectors: Box<ExpertVectors>,
    },
}

/// What routers and experts have beside their matrices.
#[derive(Debug, Default)]
pub struct ExpertVectors {
    /// `[experts]`, added to the logits.
    pub router_bias: Option<Vec<f32>>,
    /// `[experts]`, added to the scores for the choice alone.
    pub correction_bias: Option<Vec<f32>>,
    /// Of gate and up `[experts, width]`, of down `[experts, hidden]`.
    pub biases: Option<[Vec<f32>; 3]>,
}

/// Rows `first_row ..` of the output projection: one dense block.
#[derive(Debug, Clone, Copy)]
pub struct HeadChunk {
    pub first_row: usize,
    pub matrix: PartMatrix,
}
