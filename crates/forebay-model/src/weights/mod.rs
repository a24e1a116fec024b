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
use crate::arch::{
    Architecture, AttentionBias, Experts, FeedForward, Latent, Naming, NormLayout, QkNorm, by_name,
};
pub(crate) use names::Names;
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
        let family = by_name(architecture.family).expect("descriptions are of known families");
        let names = Names::new(architecture.naming, family);
        let mut tensors = Tensors::new(catalog, files, names);
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
        let final_norm = tensors.norm(&names.final_norm(), architecture.hidden)?;
        let pairs = architecture.ropes[0].rotary_dim / 2;
        let rope_factors = tensors.optional_vector("rope_freqs.weight", pairs)?;
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
            layer.attention.matrices().iter().chain([&layer.o]).for_each(&mut add);
            match &layer.feed_forward {
                FeedForwardWeights::Dense { gate, up, down } => {
                    [gate, up, down].into_iter().for_each(&mut add);
                }
                FeedForwardWeights::Experts { gate, up, down, shared, .. } => {
                    [gate, up, down].into_iter().chain(shared.iter().flatten()).for_each(&mut add);
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
        let mut dense = Vec::new();
        let attention = match shape.latent {
            None => AttentionWeights::Grouped(self.grouped(tensors, &mut dense)?),
            Some(latent) => AttentionWeights::Latent(self.latent(tensors, &mut dense, &latent)?),
        };
        let o = self.matrix(tensors, &mut dense, "o", hidden, shape.output_width())?;
        let attention_parts = dense.len();
        let mut matrix =
            |role: &str, rows, cols| self.matrix(tensors, &mut dense, role, rows, cols);
        let (feed_forward, experts) = match &self.architecture.layers[self.index].feed_forward {
            FeedForward::Dense { width } => {
                let gate = matrix("gate", *width, hidden)?;
                let up = matrix("up", *width, hidden)?;
                let down = matrix("down", hidden, *width)?;
                (FeedForwardWeights::Dense { gate, up, down }, Vec::new())
            }
            FeedForward::Experts(experts) => {
                let router = matrix("router", experts.count, hidden)?;
                let shared = match experts.shared_width {
                    0 => None,
                    width => Some([
                        matrix("shared_gate", width, hidden)?,
                        matrix("shared_up", width, hidden)?,
                        matrix("shared_down", hidden, width)?,
                    ]),
                };
                let (parts, extents) = self.experts(tensors, experts)?;
                let [gate, up, down] = parts;
                let vectors = Box::new(self.expert_vectors(tensors, experts)?);
                let weights =
                    FeedForwardWeights::Experts { router, gate, up, down, shared, vectors };
                (weights, extents)
            }
        };
        let sandwich = self.architecture.norms == NormLayout::Sandwich;
        let post = |wanted: bool| wanted.then_some(hidden);
        let layer = LayerWeights {
            attention_norm: tensors.norm(&self.name("attention_norm"), hidden)?,
            attention_post_norm: self.norm(tensors, "attention_post_norm", post(sandwich))?,
            feed_forward_norm: tensors.norm(&self.name("feed_forward_norm"), hidden)?,
            feed_forward_post_norm: self.norm(tensors, "feed_forward_post_norm", post(sandwich))?,
            attention,
            sinks: self.vector(tensors, "sinks", shape.sinks.then_some(shape.heads))?,
            o,
            o_bias: self.vector(
                tensors,
                "o_bias",
                (shape.bias == AttentionBias::All).then_some(hidden),
            )?,
            attention_parts,
            feed_forward,
        };
        Ok((layer, dense, experts))
    }

    /// The next part of the dense block.
    fn matrix(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Vec<Extent>,
        role: &str,
        rows: usize,
        cols: usize,
    ) -> Result<PartMatrix, ModelError> {
        let (matrix, extent) = tensors.matrix(&self.name(role), rows, cols, dense.len())?;
        dense.push(extent);
        Ok(matrix)
    }

    /// A vector of a length, if one is wanted.
    fn vector(
        &self,
        tensors: &mut Tensors<'_>,
        role: &str,
        length: Option<usize>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        length.map(|length| tensors.vector(&self.name(role), length)).transpose()
    }

    fn norm(
        &self,
        tensors: &mut Tensors<'_>,
        role: &str,
        length: Option<usize>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        length.map(|length| tensors.norm(&self.name(role), length)).transpose()
    }

    fn grouped(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Vec<Extent>,
    ) -> Result<GroupedWeights, ModelError> {
        let shape = &self.architecture.attention;
        let hidden = self.architecture.hidden;
        let q_width = shape.heads * shape.head_dim;
        let (k_width, v_width) =
            (shape.kv_heads * shape.head_dim, shape.kv_heads * shape.value_dim);
        let biased = |width: usize| (shape.bias != AttentionBias::None).then_some(width);
        let (q_norm, k_norm) = match shape.qk_norm {
            QkNorm::None => (None, None),
            QkNorm::PerHead => (Some(shape.head_dim), Some(shape.head_dim)),
            QkNorm::WholeProjection => (Some(q_width), Some(k_width)),
        };
        Ok(GroupedWeights {
            q: self.matrix(tensors, dense, "q", q_width, hidden)?,
            k: self.matrix(tensors, dense, "k", k_width, hidden)?,
            v: self.matrix(tensors, dense, "v", v_width, hidden)?,
            q_bias: self.vector(tensors, "q_bias", biased(q_width))?,
            k_bias: self.vector(tensors, "k_bias", biased(k_width))?,
            v_bias: self.vector(tensors, "v_bias", biased(v_width))?,
            q_norm: self.norm(tensors, "q_norm", q_norm)?,
            k_norm: self.norm(tensors, "k_norm", k_norm)?,
        })
    }

    fn latent(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Vec<Extent>,
        latent: &Latent,
    ) -> Result<LatentWeights, ModelError> {
        let (heads, hidden) = (self.architecture.attention.heads, self.architecture.hidden);
        let Latent { query_rank, rank, plain, rotary, value } = *latent;
        let q_width = heads * (plain + rotary);
        let (q_a, q) = match query_rank {
            None => (None, self.matrix(tensors, dense, "q", q_width, hidden)?),
            Some(width) => {
                let matrix = self.matrix(tensors, dense, "q_a", width, hidden)?;
                let norm = tensors.norm(&self.name("q_a_norm"), width)?;
                (Some((matrix, norm)), self.matrix(tensors, dense, "q_b", q_width, width)?)
            }
        };
        let kv_a = self.matrix(tensors, dense, "kv_a", rank + rotary, hidden)?;
        let mut stack = |role: &str, rows: usize, cols: usize| {
            let (matrix, extent) =
                tensors.stack(&self.name(role), heads, rows, cols, dense.len())?;
            dense.push(extent);
            let bytes = extent.length as usize / heads;
            Ok::<_, ModelError>(HeadMatrices { matrix, bytes, heads })
        };
        let (k_b, v_b) = (stack("k_b", rank, plain)?, stack("v_b", value, rank)?);
        let kv_a_norm = tensors.norm(&self.name("kv_a_norm"), rank)?;
        Ok(LatentWeights { q_a, q, kv_a, kv_a_norm, k_b, v_b })
    }

    fn expert_vectors(
        &self,
        tensors: &mut Tensors<'_>,
        experts: &Experts,
    ) -> Result<ExpertVectors, ModelError> {
        let count = experts.count;
        let router_bias = self.vector(tensors, "router_bias", experts.bias.then_some(count))?;
        let corrected = experts.correction_bias.then_some(count);
        let correction_bias = self.vector(tensors, "correction_bias", corrected)?;
        let biases = match experts.bias {
            false => None,
            true => Some(self.expert_biases(tensors, experts)?),
        };
        Ok(ExpertVectors { router_bias, correction_bias, biases })
    }

    /// Of gate, up and down, `[experts, rows]` each.
    fn expert_biases(
        &self,
        tensors: &mut Tensors<'_>,
        experts: &Experts,
    ) -> Result<[Vec<f32>; 3], ModelError> {
        let (count, width, hidden) = (experts.count, experts.width, self.architecture.hidden);
        let mut rows = |role: &str, width: usize| tensors.rows(&self.name(role), count, width);
        let [gate, up] = match self.architecture.naming {
            Naming::Gguf => [rows("expert_gate_bias", width)?, rows("expert_up_bias", width)?],
            // Values of gate and up by turns.
            Naming::HuggingFace { .. } => {
                let both = rows("expert_gate_up_bias", 2 * width)?;
                [0, 1].map(|first| both.iter().skip(first).step_by(2).copied().collect())
            }
        };
        Ok([gate, up, rows("expert_down_bias", hidden)?])
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
