//! Costs of one token for a model: bytes of weights by type, multiplications, bytes of keys and values.

use std::path::Path;

use forebay_format::{Catalog, TensorType};
use forebay_model::weights::{
    AttentionWeights, DeltaWeights, FeedForwardWeights, LayerWeights, PartMatrix, StreamWeights,
    distinct,
};
use forebay_model::{Architecture, CacheSize, KvCapacity, KvInVram, Weights};
use forebay_ops::KvType;
use forebay_store::FileSet;
use forebay_stream::ModelBlocks;

use super::PlanError;
use super::memory;
use crate::SessionOptions;
use crate::inspect::ModelInfo;

/// Model with everything that a plan needs, opened without reading its weight matrices.
pub struct PlannedModel {
    pub info: ModelInfo,
    pub(crate) architecture: Architecture,
    pub weights: Weights,
}

impl PlannedModel {
    /// Opens a model and reads its headers, norms and biases.
    ///
    /// # Errors
    /// Returns an error if the file is damaged or its architecture is unknown.
    pub fn open(model: &Path) -> Result<PlannedModel, PlanError> {
        let catalog = Catalog::open(model)?;
        let architecture = Architecture::from_catalog(&catalog)?;
        let files = FileSet::of_catalog(&catalog, false)?;
        let weights = Weights::new(&catalog, &architecture, &files)?;
        let info = ModelInfo::new(&catalog, &architecture);
        Ok(PlannedModel { info, architecture, weights })
    }

    /// Returns the number of context positions that a session with `options` reserves.
    ///
    /// # Errors
    /// Returns an error if that is more than the model was trained for.
    pub fn context(&self, options: &SessionOptions) -> Result<usize, PlanError> {
        Ok(options.context_for(&self.architecture)?)
    }
}

impl PlannedModel {
    /// Returns the blocks that are in host memory when a GPU computes: the experts only.
    pub fn expert_blocks(&self) -> ModelBlocks {
        memory::experts(&self.weights)
    }

    /// Returns the bytes of keys and values in host memory for `sequences` times `context` positions.
    pub(crate) fn cache_bytes(&self, context: usize, sequences: usize, cache: KvType) -> u64 {
        let capacity = KvCapacity { context, sequences, tokens: None, in_vram: KvInVram::All };
        let size = CacheSize { kind: cache, capacity };
        forebay_model::cache_bytes(&self.architecture, size)
    }
}

/// Weight matrices that are used together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Matrices {
    /// Bytes of weights by type.
    pub bytes: Vec<(TensorType, u64)>,
    /// Multiplications for one token by type, one for each element.
    pub elements: Vec<(TensorType, u64)>,
}

impl Matrices {
    fn of(matrices: &[&PartMatrix]) -> Matrices {
        let mut all = Matrices::default();
        for matrix in matrices {
            let row = matrix.ty.row_bytes(matrix.cols as u64).unwrap_or(0);
            all.bytes.push((matrix.ty, row * matrix.rows as u64));
            all.elements.push((matrix.ty, (matrix.rows * matrix.cols) as u64));
        }
        all
    }

    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// Largest number of prompt tokens that a GPU takes through the layers together, unless its plan says otherwise.
const GPU_BATCH_TOKENS: usize = 512;

/// Experts of one layer.
#[derive(Clone, Debug)]
pub(crate) struct ExpertCosts {
    pub count: usize,
    pub used: usize,
    /// Matrices of one expert.
    pub matrices: Matrices,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerCosts {
    pub dense: Matrices,
    /// Gate, up and down of a dense layer. They are also part of `dense`.
    pub feed_forward: Option<Matrices>,
    pub experts: Option<ExpertCosts>,
    /// Number of kernels of a token on a GPU beyond those of a layer with grouped attention.
    pub more_kernels: usize,
}

/// Costs of the whole model.
#[derive(Clone, Debug)]
pub(crate) struct ModelCosts {
    pub layers: Vec<LayerCosts>,
    pub head: Matrices,
    pub kv: KvCosts,
    /// Largest number of prompt tokens that the CPU takes through the layers together.
    pub cpu_batch_tokens: usize,
    /// Largest number of prompt tokens that the GPU takes through the layers together.
    pub gpu_batch_tokens: usize,
}

/// Costs of the keys and values of a layer.
#[derive(Clone, Copy, Debug)]
struct KvLayerCosts {
    /// Positions that the layer sees; `None` if it sees the whole context.
    window: Option<usize>,
    /// Bytes of keys and values for one position.
    bytes: u64,
    /// True if the layer keeps keys and values itself.
    keeps: bool,
    /// Number of keys that a token attends to, if an indexer chooses them, and bytes of an indexer's key.
    chosen: Option<usize>,
    index_bytes: u64,
}

/// Costs of keys and values.
#[derive(Clone, Debug)]
pub(crate) struct KvCosts {
    /// Each attention layer.
    layers: Vec<KvLayerCosts>,
    /// Bytes of the states of recurrent layers that a token reads and writes.
    state_bytes: u64,
    /// Bytes of layers that see the whole context which are in VRAM, if others are read in RAM.
    in_vram_bytes: Option<f64>,
}

impl KvCosts {
    fn new(architecture: &Architecture, cache: KvType) -> KvCosts {
        let of_layer = |layer: usize| {
            let attention = architecture.attention_of(layer);
            let value_bytes = match attention.values_in_keys() {
                true => 0,
                false => row_bytes(cache, attention.value_dim),
            };
            let keys_and_values = row_bytes(cache, attention.head_dim) + value_bytes;
            KvLayerCosts {
                window: architecture.layers[layer].window,
                chosen: attention.indexer.map(|of| of.pools().positions_max()),
                bytes: attention.kv_heads as u64 * keys_and_values,
                index_bytes: attention.indexer.map_or(0, |of| row_bytes(cache, of.key_width())),
                keeps: architecture.keys_of(layer) == layer,
            }
        };
        // Compressed entries are like another layer that sees the whole context, with a share of an entry for each position.
        let of_entries = |layer: usize| {
            let of = architecture.entries_of(layer)?;
            let share = |dim: usize| row_bytes(cache, dim) / of.ratio as u64;
            Some(KvLayerCosts {
                window: None,
                chosen: of.indexer.map(|indexer| indexer.top_k.saturating_mul(of.ratio)),
                bytes: share(architecture.attention_of(layer).head_dim),
                index_bytes: of.indexer.map_or(0, |indexer| share(indexer.head_dim)),
                keeps: true,
            })
        };
        let entries = architecture.attention_layers().filter_map(of_entries);
        KvCosts {
            layers: architecture.attention_layers().map(of_layer).chain(entries).collect(),
            state_bytes: 2 * architecture.state_bytes(),
            in_vram_bytes: None,
        }
    }

    /// Returns the costs if a GPU keeps `in_vram` of the keys and values for `positions` positions in VRAM, as a share from 0 to 1.
    pub fn with_in_vram(self, in_vram: f64, positions: usize) -> KvCosts {
        let in_vram_bytes = (in_vram < 1.0).then(|| self.bytes_kept(positions) * in_vram);
        KvCosts { in_vram_bytes, ..self }
    }

    /// Returns the bytes of keys and values for `positions` positions in the layers that see the whole context.
    pub fn bytes_kept(&self, positions: usize) -> f64 {
        let kept = self.layers.iter().filter(|of| of.window.is_none() && of.keeps);
        kept.map(|of| positions as u64 * (of.bytes + of.index_bytes)).sum::<u64>() as f64
    }

    /// Returns the bytes of keys and values that a GPU reads in RAM if sequences with `positions` positions in all generate a
    /// token each. Blocks in VRAM are given out first.
    pub fn bytes_read_in_ram(&self, positions: usize) -> f64 {
        let in_vram = self.in_vram_bytes.unwrap_or(f64::INFINITY);
        (self.bytes_kept(positions) - in_vram).max(0.0)
    }

    /// Returns the bytes of keys and values that a token after `depth` others reads, and those of states that it reads and
    /// writes.
    pub fn bytes_read(&self, depth: usize) -> f64 {
        let bytes = |of: &KvLayerCosts| {
            let seen = of.window.map_or(depth, |window| window.min(depth));
            let attended = of.chosen.map_or(seen, |chosen| chosen.min(seen));
            attended as u64 * of.bytes + seen as u64 * of.index_bytes
        };
        self.layers.iter().map(bytes).sum::<u64>() as f64 + self.state_bytes as f64
    }
}

/// Returns the bytes of the keys, or of the values, of one head at one position in a GPU's cache.
pub(crate) fn row_bytes(cache: KvType, dim: usize) -> u64 {
    let dim = dim as u64;
    match cache {
        KvType::F16 => 2 * dim.next_multiple_of(8),
        KvType::F32 => 4 * dim.next_multiple_of(8),
        KvType::Q8_0 => 34 * dim.div_ceil(32),
        KvType::Q4_0 => 18 * dim.div_ceil(32),
    }
}

/// Returns how many kernels a token takes in a layer beyond the 8 of grouped attention and experts, as counted in CUDA graphs of
/// the second fixture set's models.
fn more_kernels(architecture: &Architecture, index: usize, layer: &LayerWeights) -> usize {
    let indexer = || 3 * usize::from(architecture.attention_of(index).indexer.is_some());
    let delta = |of: &DeltaWeights| {
        let selective = if of.selective.is_some() { 3 } else { 0 };
        1 + of.second.len() + selective + usize::from(of.factors.is_some())
    };
    let attention = match &layer.attention {
        AttentionWeights::None => 0,
        AttentionWeights::Grouped(_) => indexer(),
        AttentionWeights::Latent(_) => 7 + indexer(),
        AttentionWeights::Shared(_) => 4,
        AttentionWeights::Delta(of) => delta(of),
    };
    let beside = layer.beside.as_ref().map_or(0, |of| 3 + delta(&of.delta));
    let entries = architecture.entries_of(index);
    let entries = entries.map_or(0, |of| 2 + 3 * usize::from(of.indexer.is_some()));
    let shared = match &layer.feed_forward {
        FeedForwardWeights::Experts { shared: Some(_), .. } => 2,
        _ => 0,
    };
    let latent = match &layer.feed_forward {
        // The projections, the sum of the outputs, and that with the shared experts.
        FeedForwardWeights::Experts { latent: Some(_), .. } => 5,
        _ => 0,
    };
    let post_norms = [&layer.attention_post_norm, &layer.feed_forward_post_norm];
    let post_norms = post_norms.into_iter().flatten().count();
    let rows =
        5 * usize::from(layer.embeddings.is_some()) + 6 * usize::from(layer.ngrams.is_some());
    let predicted = 8 * usize::from(layer.predicted.is_some());
    let streams = 3 * layer.streams().count() + predicted;
    attention + beside + entries + shared + latent + streams + post_norms + rows
}

impl ModelCosts {
    /// Computes the costs of a model with keys and values in f16.
    pub fn new(architecture: &Architecture, weights: &Weights, context: usize) -> ModelCosts {
        let layers = weights.layers.iter().enumerate().map(|(index, layer)| {
            let mixer = layer.mixer_matrices();
            let mut dense: Vec<&PartMatrix> = mixer.iter().collect();
            let mut feed_forward = None;
            let experts = match &layer.feed_forward {
                FeedForwardWeights::None => None,
                FeedForwardWeights::Dense { gate, up, down } => {
                    let matrices = [*gate, *up, *down];
                    let of: Vec<&PartMatrix> = distinct(&matrices).collect();
                    feed_forward = Some(Matrices::of(&of));
                    dense.extend([gate, down]);
                    dense.extend((up.part != gate.part).then_some(up));
                    None
                }
                FeedForwardWeights::Experts { router, gate, up, down, shared, latent, .. } => {
                    dense.push(router);
                    dense.extend(shared.iter().flat_map(distinct));
                    dense.extend(latent.iter().flatten());
                    let count = weights.blocks.experts[index].len();
                    Some(ExpertCosts {
                        count,
                        used: weights.blocks.experts_per_token.min(count),
                        matrices: Matrices::of(&distinct(&[*gate, *up, *down]).collect::<Vec<_>>()),
                    })
                }
            };
            dense.extend(layer.streams().flat_map(StreamWeights::matrices));
            if let Some(of) = &layer.predicted {
                dense.extend([&of.left, &of.right]);
            }
            if let Some(of) = &layer.ngrams {
                dense.extend([&of.key, &of.value]);
            }
            if let Some(of) = &layer.embeddings {
                dense.extend([&of.project, &of.gate, &of.out]);
            }
            let more_kernels = more_kernels(architecture, index, layer);
            LayerCosts { dense: Matrices::of(&dense), feed_forward, experts, more_kernels }
        });
        let head: Vec<&PartMatrix> = weights.head.iter().map(|chunk| &chunk.matrix).collect();
        let cpu_batch_tokens = forebay_model::batch_tokens(architecture, context).max(1);
        ModelCosts {
            layers: layers.collect(),
            head: Matrices::of(&head),
            kv: KvCosts::new(architecture, KvType::F16),
            cpu_batch_tokens,
            gpu_batch_tokens: GPU_BATCH_TOKENS,
        }
    }

    /// Replaces the type of keys and values by `cache`.
    pub fn with_cache(self, architecture: &Architecture, cache: KvType) -> ModelCosts {
        ModelCosts { kv: KvCosts::new(architecture, cache), ..self }
    }

    /// Returns the bytes of weights that one token reads.
    pub fn token_bytes(&self) -> u64 {
        let of_layer = |layer: &LayerCosts| {
            let experts = layer.experts.as_ref();
            let experts = experts.map_or(0, |of| of.used as u64 * of.matrices.total_bytes());
            layer.dense.total_bytes() + experts
        };
        self.head.total_bytes() + self.layers.iter().map(of_layer).sum::<u64>()
    }

    pub fn expert_layers(&self) -> impl Iterator<Item = &ExpertCosts> {
        self.layers.iter().filter_map(|layer| layer.experts.as_ref())
    }

    /// Returns the number of experts in all layers.
    pub fn experts(&self) -> usize {
        self.expert_layers().map(|experts| experts.count).sum()
    }

    /// Returns the number of experts that a token uses in all layers.
    pub fn lookups_per_token(&self) -> f64 {
        self.expert_layers().map(|experts| experts.used as f64).sum()
    }

    /// Returns the mean share of a layer's experts that a token uses.
    pub fn used_share(&self) -> f64 {
        self.lookups_per_token() / self.experts().max(1) as f64
    }

    /// Returns the mean size of an expert in bytes.
    pub fn bytes_per_expert(&self) -> f64 {
        let bytes = |of: &ExpertCosts| of.count as u64 * of.matrices.total_bytes();
        let all: u64 = self.expert_layers().map(bytes).sum();
        all as f64 / self.experts().max(1) as f64
    }
}
