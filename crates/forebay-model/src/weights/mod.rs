//! From a catalog to what the decoder needs: which bytes form which block, and the small vectors
//! that stay in memory.
//!
//! Matrices are never read here: they are described as parts of blocks, and the residency brings
//! them. Norm weights and biases are read at once, because they are small and every token needs
//! them.

mod names;
mod tensors;

use forebay_format::{Catalog, Extent, TensorType};
use forebay_store::FileSet;
use forebay_stream::ModelBlocks;

use crate::ModelError;
use crate::arch::{Architecture, AttentionBias, Experts, FeedForward, QkNorm};
use names::Names;
use tensors::Tensors;

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
    pub feed_forward_norm: Vec<f32>,
    pub q: PartMatrix,
    pub k: PartMatrix,
    pub v: PartMatrix,
    pub o: PartMatrix,
    pub q_bias: Option<Vec<f32>>,
    pub k_bias: Option<Vec<f32>>,
    pub v_bias: Option<Vec<f32>>,
    pub o_bias: Option<Vec<f32>>,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    pub feed_forward: FeedForwardWeights,
}

#[derive(Debug)]
pub enum FeedForwardWeights {
    /// Matrices in the layer's dense block.
    Dense { gate: PartMatrix, up: PartMatrix, down: PartMatrix },
    /// The router is in the dense block; gate, up and down are the parts of each expert's block.
    Experts { router: PartMatrix, gate: PartMatrix, up: PartMatrix, down: PartMatrix },
}

/// Rows `first_row ..` of the output projection: one dense block.
#[derive(Debug, Clone, Copy)]
pub struct HeadChunk {
    pub first_row: usize,
    pub matrix: PartMatrix,
}

/// The embedding table. Rows are read on demand: a token needs one row of a table that can be
/// hundreds of megabytes.
#[derive(Debug, Clone, Copy)]
pub struct Embedding {
    pub extent: Extent,
    pub ty: TensorType,
    pub row_bytes: usize,
}

/// Everything the decoder knows of the weights.
#[derive(Debug)]
pub struct Weights {
    pub layers: Vec<LayerWeights>,
    pub final_norm: Vec<f32>,
    pub head: Vec<HeadChunk>,
    pub embedding: Embedding,
    /// Per-dimension divisors of the rotary frequencies, where the file brings them.
    pub rope_factors: Option<Vec<f32>>,
    pub blocks: ModelBlocks,
    /// Bytes of the vectors held in memory.
    pub small_bytes: u64,
}

/// The extents of a layer's dense block begin with those of attention: queries, keys, values, output. Those of the
/// feed-forward, or a router, follow.
pub const ATTENTION_PARTS: usize = 4;

/// Bytes that one chunk of the output projection aims at. Small enough that the projection can
/// pass through two slots of a small budget, large enough to read at full speed.
const HEAD_CHUNK_BYTES: u64 = 8 << 20;

impl Weights {
    /// Describes the blocks of a model and reads its small vectors.
    ///
    /// # Errors
    /// Missing tensors, shapes that contradict the metadata, unreadable files.
    pub fn new(
        catalog: &Catalog,
        architecture: &Architecture,
        files: &FileSet,
    ) -> Result<Weights, ModelError> {
        let names = Names::new(architecture.naming);
        let mut tensors = Tensors::new(catalog, files, architecture.family);
        let mut blocks = ModelBlocks {
            dense: Vec::new(),
            experts: Vec::new(),
            experts_per_token: architecture.experts_per_token(),
        };
        let mut layers = Vec::with_capacity(architecture.layers.len());
        for index in 0..architecture.layers.len() {
            let builder = LayerBuilder { architecture, names: &names, index };
            let (layer, dense, experts) = builder.build(&mut tensors)?;
            layers.push(layer);
            blocks.dense.push(dense);
            blocks.experts.push(experts);
        }
        let embedding = embedding(architecture, &names, &tensors)?;
        let head = head(architecture, &names, &tensors, &mut blocks)?;
        let final_norm = tensors.vector(&names.final_norm(), architecture.hidden)?;
        let rope_factors =
            tensors.optional_vector("rope_freqs.weight", architecture.rope.rotary_dim / 2)?;
        let small_bytes = tensors.vector_bytes();
        Ok(Weights { layers, final_norm, head, embedding, rope_factors, blocks, small_bytes })
    }

    /// All weight types that the decoder's products meet, without repetition.
    pub fn matrix_types(&self) -> Vec<TensorType> {
        let mut types = self.types_without_routers();
        for router in self.routers() {
            if !types.contains(&router.ty) {
                types.push(router.ty);
            }
        }
        types
    }

    /// The routers of all layers that have one, each `[experts, hidden]`.
    pub fn routers(&self) -> impl Iterator<Item = &PartMatrix> {
        self.layers.iter().filter_map(|layer| match &layer.feed_forward {
            FeedForwardWeights::Experts { router, .. } => Some(router),
            FeedForwardWeights::Dense { .. } => None,
        })
    }

    /// As [`Weights::matrix_types`], of all matrices but routers.
    pub fn types_without_routers(&self) -> Vec<TensorType> {
        let mut types = Vec::new();
        let mut add = |matrix: &PartMatrix| {
            if !types.contains(&matrix.ty) {
                types.push(matrix.ty);
            }
        };
        for layer in &self.layers {
            [&layer.q, &layer.k, &layer.v, &layer.o].into_iter().for_each(&mut add);
            match &layer.feed_forward {
                FeedForwardWeights::Dense { gate, up, down }
                | FeedForwardWeights::Experts { gate, up, down, .. } => {
                    [gate, up, down].into_iter().for_each(&mut add);
                }
            }
        }
        self.head.iter().for_each(|chunk| add(&chunk.matrix));
        types
    }
}

/// Extents of each expert of a layer; empty where the layer has none.
type ExpertExtents = Vec<Vec<Extent>>;

struct LayerBuilder<'a> {
    architecture: &'a Architecture,
    names: &'a Names,
    index: usize,
}

impl LayerBuilder<'_> {
    fn build(
        &self,
        tensors: &mut Tensors<'_>,
    ) -> Result<(LayerWeights, Vec<Extent>, ExpertExtents), ModelError> {
        let shape = &self.architecture.attention;
        let hidden = self.architecture.hidden;
        let (q_width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let mut dense = Vec::new();
        let mut matrix = |role: &str, rows: usize, cols: usize| {
            let (matrix, extent) = tensors.matrix(&self.name(role), rows, cols, dense.len())?;
            dense.push(extent);
            Ok::<_, ModelError>(matrix)
        };
        let q = matrix("q", q_width, hidden)?;
        let k = matrix("k", kv_width, hidden)?;
        let v = matrix("v", kv_width, hidden)?;
        let o = matrix("o", hidden, q_width)?;
        let (feed_forward, experts) = match &self.architecture.layers[self.index].feed_forward {
            FeedForward::Dense { width } => {
                let gate = matrix("gate", *width, hidden)?;
                let up = matrix("up", *width, hidden)?;
                let down = matrix("down", hidden, *width)?;
                (FeedForwardWeights::Dense { gate, up, down }, Vec::new())
            }
            FeedForward::Experts(experts) => {
                let router = matrix("router", experts.count, hidden)?;
                let (parts, extents) = self.experts(tensors, experts)?;
                let [gate, up, down] = parts;
                (FeedForwardWeights::Experts { router, gate, up, down }, extents)
            }
        };
        let bias = shape.bias;
        let with = |wanted: bool| wanted.then_some(());
        let mut vector = |role: &str, length: usize| tensors.vector(&self.name(role), length);
        let qkv = with(bias != AttentionBias::None);
        let (q_norm, k_norm) = match shape.qk_norm {
            QkNorm::None => (None, None),
            QkNorm::PerHead => (Some(shape.head_dim), Some(shape.head_dim)),
            QkNorm::WholeProjection => (Some(q_width), Some(kv_width)),
        };
        let layer = LayerWeights {
            attention_norm: vector("attention_norm", hidden)?,
            feed_forward_norm: vector("feed_forward_norm", hidden)?,
            q,
            k,
            v,
            o,
            q_bias: qkv.map(|()| vector("q_bias", q_width)).transpose()?,
            k_bias: qkv.map(|()| vector("k_bias", kv_width)).transpose()?,
            v_bias: qkv.map(|()| vector("v_bias", kv_width)).transpose()?,
            o_bias: with(bias == AttentionBias::All)
                .map(|()| vector("o_bias", hidden))
                .transpose()?,
            q_norm: q_norm.map(|length| vector("q_norm", length)).transpose()?,
            k_norm: k_norm.map(|length| vector("k_norm", length)).transpose()?,
            feed_forward,
        };
        Ok((layer, dense, experts))
    }

    fn name(&self, role: &str) -> String {
        self.names.layer(self.index, role)
    }

    /// Gate, up and down of every expert, as parts 0, 1 and 2 of the expert's block.
    fn experts(
        &self,
        tensors: &Tensors<'_>,
        experts: &Experts,
    ) -> Result<([PartMatrix; 3], ExpertExtents), ModelError> {
        let hidden = self.architecture.hidden;
        let roles = [
            ("expert_gate", experts.width, hidden),
            ("expert_up", experts.width, hidden),
            ("expert_down", hidden, experts.width),
        ];
        let mut extents: ExpertExtents = vec![Vec::with_capacity(3); experts.count];
        let mut parts = Vec::with_capacity(3);
        for (part, (role, rows, cols)) in roles.into_iter().enumerate() {
            let name_of = |expert: usize| self.names.expert(self.index, expert, role);
            let (matrix, slices) =
                tensors.expert_matrices(&name_of, experts.count, rows, cols, part)?;
            parts.push(matrix);
            for (expert, slice) in slices.into_iter().enumerate() {
                extents[expert].push(slice);
            }
        }
        Ok(([parts[0], parts[1], parts[2]], extents))
    }
}

fn embedding(
    architecture: &Architecture,
    names: &Names,
    tensors: &Tensors<'_>,
) -> Result<Embedding, ModelError> {
    let (matrix, extent) =
        tensors.matrix(&names.embedding(), architecture.vocabulary, architecture.hidden, 0)?;
    let row_bytes = extent.length as usize / matrix.rows;
    Ok(Embedding { extent, ty: matrix.ty, row_bytes })
}

/// The output projection in chunks of whole rows, appended to the dense blocks.
fn head(
    architecture: &Architecture,
    names: &Names,
    tensors: &Tensors<'_>,
    blocks: &mut ModelBlocks,
) -> Result<Vec<HeadChunk>, ModelError> {
    let name = if architecture.tied_embeddings { names.embedding() } else { names.head() };
    let (matrix, extent) =
        tensors.matrix(&name, architecture.vocabulary, architecture.hidden, 0)?;
    let row_bytes = extent.length / matrix.rows as u64;
    // Whole panels of the matrix kernels: 16 rows.
    let rows_per_chunk =
        ((HEAD_CHUNK_BYTES / row_bytes.max(1)).max(1) as usize).next_multiple_of(16);
    let mut chunks = Vec::new();
    for first_row in (0..matrix.rows).step_by(rows_per_chunk) {
        let rows = rows_per_chunk.min(matrix.rows - first_row);
        let slice = Extent {
            file: extent.file,
            offset: extent.offset + first_row as u64 * row_bytes,
            length: rows as u64 * row_bytes,
        };
        blocks.dense.push(vec![slice]);
        chunks.push(HeadChunk { first_row, matrix: PartMatrix { rows, ..matrix } });
    }
    Ok(chunks)
}
