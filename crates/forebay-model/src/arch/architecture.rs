//! Model architectures that the decoder can run.

use forebay_compute::{
    KvShape, NormForm, RopeConfig, RopeLayout, RopeScaling, RopeTable, RouterRule, Temperature,
    rows_for_window,
};
use forebay_ops::{GateFunction, Gating, KV_BLOCK, KvType, RouterGroups, Scoring};
use serde::Serialize;

use super::mtp_shape::Mtp;
use super::recurrent::Recurrent;
use super::shapes::{
    ExpertInput, Indexer, LatentExperts, NGrams, NormLayout, RelativeBias, SharedKeys, Streams,
};
use crate::ModelError;

/// Description of a model that the decoder can run.
#[derive(Debug, Clone, Serialize)]
pub struct Architecture {
    /// Common name of the family, for example `qwen3moe`.
    pub family: &'static str,
    /// Name given by the model's author, if the file has one.
    pub name: Option<String>,
    pub hidden: usize,
    pub vocabulary: usize,
    /// Number of rows of the embedding table, which may have more rows than there are logits (Inkling).
    pub embedding_rows: usize,
    /// Number of positions the model was trained for.
    pub context_trained: usize,
    pub norm_epsilon: f32,
    /// Number that norms of the outputs of blocks add to the mean of squares.
    pub post_norm_epsilon: f32,
    /// Position of the norms in a layer, unless [`Recurrent::norms`] gives another one for recurrent layers.
    pub norms: NormLayout,
    /// What the norms of the residual stream compute.
    #[serde(skip)]
    pub norm_form: NormForm,
    /// Residual streams beside each other; `None` means that there is one, to which outputs are added.
    pub streams: Option<Streams>,
    /// Factor for the rows of the embedding table, which are the first residual stream.
    pub embedding_scale: f32,
    /// Norm of the scaled rows of the embedding table.
    pub embedding_norm: EmbeddingNorm,
    /// True if every layer ends by multiplying the residual stream by a number of its own (Gemma 4).
    pub layer_scales: bool,
    /// Embeddings of every token for each layer, if there are any.
    pub layer_embeddings: Option<LayerEmbeddings>,
    /// Embeddings of n-grams that some layers add, if there are any.
    pub ngrams: Option<NGrams>,
    /// Factor for the output of every attention, recurrence and feed-forward before it is added to the residual stream (Granite).
    /// The stream is kept divided by it: then outputs are added as they are, and norms need another epsilon only.
    pub residual_scale: f32,
    /// Factor of the normed rows to which the outputs of attention, recurrence and feed-forward are added, if these rows take the place
    /// of the residual stream (MiniMax-01). Without it, outputs are added to the rows as they are before the norm.
    pub normed_residual: Option<f32>,
    /// Temperature of the gates by which every block mixes the residual stream with its output, if it does not add them (Muse
    /// Spark).
    pub residual_gates: Option<f32>,
    /// Number of tokens that the short convolutions of every layer see, if layers have such (Inkling). They are added to keys,
    /// values, and the outputs of attention and feed-forward.
    pub convolutions: Option<usize>,
    /// True if the output of every feed-forward is multiplied by a number of its own (Inkling).
    pub feed_forward_scales: bool,
    /// Factor for the normed input of every feed-forward, which is in the weights of the norms (Falcon-H1).
    pub feed_forward_input_scale: f32,
    /// Factor for the logits.
    pub logit_scale: f32,
    /// Cap of the logits, which become `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f32>,
    /// Shapes of attention. Every attention layer has one of them ([`Layer::attention`]).
    pub attentions: Vec<Attention>,
    /// Shape of the recurrent layers, if there are any.
    pub recurrent: Option<Recurrent>,
    /// Rotary embeddings; each layer uses one of them or none.
    pub ropes: Vec<Rope>,
    /// Factor of queries in some layers, if it grows with the position ([`Layer::tempered`]).
    #[serde(skip)]
    pub temperature: Option<Temperature>,
    /// Gating of feed-forwards, including those of experts, in layers that have none of their own.
    #[serde(skip)]
    pub gating: Gating,
    /// One entry per layer. The last one is the predicting layer if there is [`Architecture::mtp`].
    pub layers: Vec<Layer>,
    /// The layer that predicts the token after the next one, if it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtp: Option<Mtp>,
    /// True if the output projection is the embedding table.
    pub tied_embeddings: bool,
    /// Tensor naming of the source.
    pub naming: Naming,
}

/// Embeddings of every token for each layer (Gemma 4). After its feed-forward, a layer gates the row of its own part of a table
/// and adds a projection of it to the residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LayerEmbeddings {
    /// Number of elements of a token's row for one layer.
    pub width: usize,
    /// Number of tokens that have rows. Others, which stand for images and sound, use the first row.
    pub tokens: usize,
}

impl LayerEmbeddings {
    /// Returns the factor for the rows of the table: that of the rows, and that of the sum of a row and a projection.
    pub(crate) fn scale(self) -> f32 {
        (self.width as f32).sqrt() * std::f32::consts::FRAC_1_SQRT_2
    }
}

/// Norm of every token's embedding, before the first layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum EmbeddingNorm {
    None,
    /// The embedding is divided by its root mean square (Muse).
    Weightless,
    /// The same, times a weight for each element (Inkling).
    Weighted,
}

/// Shape of the attention of some layers, as the KV cache sees it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    /// Number of elements of a query and of a key.
    pub head_dim: usize,
    /// Number of elements of a value.
    pub value_dim: usize,
    /// Factor for every score.
    pub scale: f32,
    /// Cap of the scores, which become `cap * tanh(score / cap)` (Gemma 2).
    pub softcap: Option<f32>,
    /// True if every head has a sink: a score that takes its share of the softmax and has no value (gpt-oss).
    pub sinks: bool,
    /// True if every head's sum of values is divided by its root mean square, before a gate (Muse Spark).
    pub output_norm: bool,
    pub output_gate: OutputGate,
    pub bias: AttentionBias,
    /// Largest absolute value of an element of queries, keys and values, before they are rotated (DBRX).
    pub clamp: Option<f32>,
    pub qk_norm: QkNorm,
    pub values: Values,
    /// Biases of scores by the distance of the key.
    pub relative: Option<RelativeBias>,
    /// Shape of latent attention, in which keys and values are projections of one small vector. Only this vector is
    /// cached.
    pub latent: Option<Latent>,
    /// The choice of the keys that a token attends to; `None` means all keys of its window.
    pub indexer: Option<Indexer>,
    /// Attention whose heads share keys that are values, possibly with compressed entries (DeepSeek-V4).
    pub shared: Option<SharedKeys>,
}

impl Attention {
    /// Returns the number of elements of a token's output before the output projection.
    pub fn output_width(&self) -> usize {
        match self.shared {
            Some(shared) => shared.output_groups * shared.output_rank,
            None => self.heads * self.latent.map_or(self.value_dim, |latent| latent.value),
        }
    }

    /// Returns true if values are part of their keys.
    pub fn values_in_keys(&self) -> bool {
        self.latent.is_some() || self.shared.is_some()
    }

    /// Returns the form of keys and values in the cache.
    pub fn kv_shape(&self) -> KvShape {
        KvShape {
            kv_heads: self.kv_heads,
            head_dim_k: self.head_dim,
            head_dim_v: self.value_dim,
            values_in_keys: self.values_in_keys(),
        }
    }

    /// Returns the number of adjacent elements of heads that are mixed before the cache stores them as `kind` ([`KvShape::mixed`]).
    /// What is compressed stays as it is.
    pub fn mixed(&self, kind: KvType) -> usize {
        if self.shared.is_some() { 1 } else { self.kv_shape().mixed(kind) }
    }

    /// Returns the rows of the query projection of grouped-query attention.
    pub fn query_rows(&self) -> usize {
        self.heads * self.head_dim * if self.output_gate == OutputGate::InQueries { 2 } else { 1 }
    }

    /// Returns the rows of the projection to gates of the output; 0 if there is none.
    pub fn gate_rows(&self) -> usize {
        match self.output_gate {
            OutputGate::None | OutputGate::InQueries => 0,
            OutputGate::ByElement(_) => self.output_width(),
            OutputGate::ByHead(_) => self.heads,
        }
    }
}

/// Multi-head latent attention (DeepSeek-V2, section 2.1), computed in latent space. The matrices that would turn the
/// latent vector into keys and values are multiplied with queries and outputs instead. A cached key consists of the
/// latent vector and the rotating part; its value is the latent vector in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Latent {
    /// Width of the low-rank query projection, if there is one.
    pub query_rank: Option<usize>,
    /// Number of elements of the latent vector.
    pub rank: usize,
    /// Number of elements of a head's query that do not rotate.
    pub plain: usize,
    /// Number of elements of a head's query that rotate.
    pub rotary: usize,
    /// Number of elements of a head's value.
    pub value: usize,
    /// True if the part of the key that rotates is normed before it rotates (Dots 3).
    pub key_norm: bool,
    /// True if compressed queries and latent vectors are multiplied by the root of the hidden size over their length behind their norms.
    /// GGUF files have these factors in the weights of the norms.
    pub rescaled: bool,
}

/// Gates by which attention's output is multiplied before the output projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum OutputGate {
    None,
    /// The query projection also gives the gates. Its rows are, head by head, the query and then a gate for every element, whose
    /// sigmoid multiplies the element (Qwen3-Next).
    InQueries,
    /// A projection of the input gives a gate for every element (Trinity).
    ByElement(#[serde(skip)] GateFunction),
    /// A projection of the input gives a gate for every head (Laguna).
    ByHead(#[serde(skip)] GateFunction),
}

/// What values are, beside the projection of the input.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Values {
    /// True if a value is the projection of its key, before that is normed and rotated. There is no projection of values then
    /// (Gemma 4).
    pub of_keys: bool,
    /// True if every value is divided by its root mean square (Gemma 4).
    pub normed: bool,
    /// Factor of every value (MiMo-V2).
    pub scale: f32,
}

impl Values {
    /// Plain values.
    pub const PLAIN: Values = Values { of_keys: false, normed: false, scale: 1.0 };
}

/// Projections that have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum AttentionBias {
    None,
    /// q, k and v have a bias, but not the output projection (qwen2).
    Qkv,
    /// All four projections have a bias (llama with `attention_bias`).
    All,
}

/// Root-mean-square norm of queries and keys, before the rotation if nothing else is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum QkNorm {
    None,
    /// One weight vector of `head_dim`, applied to every head (qwen3).
    PerHead,
    /// The same behind the rotation, with which the weights do not commute (Hunyuan).
    PerRotatedHead,
    /// One weight vector over the whole projection (olmoe).
    WholeProjection,
    /// A norm of every head without weights, which commutes with the rotation: in all layers (Muse), or in those with rotation
    /// only (llama4).
    Weightless {
        unrotated_too: bool,
    },
}

impl Latent {
    /// Returns the equivalent attention in latent space. Queries and keys are both scaled by `magnitude`.
    pub(super) fn attention(self, heads: usize, magnitude: f32) -> Attention {
        Attention {
            heads,
            kv_heads: 1,
            head_dim: self.rank.saturating_add(self.rotary),
            value_dim: self.rank,
            scale: magnitude * magnitude / (self.plain.saturating_add(self.rotary) as f32).sqrt(),
            softcap: None,
            sinks: false,
            output_norm: false,
            output_gate: OutputGate::None,
            bias: AttentionBias::None,
            clamp: None,
            qk_norm: QkNorm::None,
            values: Values::PLAIN,
            relative: None,
            latent: Some(self),
            indexer: None,
            shared: None,
        }
    }
}

/// Rotary position embedding.
#[derive(Debug, Clone, Serialize)]
pub struct Rope {
    pub theta: f64,
    /// Number of dimensions of each head that rotate.
    pub rotary_dim: usize,
    /// The first of these dimensions.
    pub from: usize,
    #[serde(skip)]
    pub layout: RopeLayout,
    #[serde(skip)]
    pub scaling: RopeScaling,
    /// Factors of the frequencies, if the configuration has them. A GGUF file has them as tensors.
    #[serde(skip)]
    pub factors: Option<RopeFactors>,
}

/// Tensors with LongRoPE's factors in a GGUF file: for contexts beyond the original one, and up to it.
pub(crate) const LONG_FACTORS: &str = "rope_factors_long.weight";
pub(crate) const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// Divisors of the rotary frequencies, one for each pair.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeFactors {
    /// The frequencies stay as they are, even if the file has factors.
    None,
    Always(Vec<f32>),
    /// LongRoPE's factors up to its original context, and beyond it.
    ByContext {
        short: Vec<f32>,
        long: Vec<f32>,
    },
}

impl RopeFactors {
    /// Returns the factors for a KV cache of `context` positions. They depend on the size of the cache and not on its
    /// contents. A rotation therefore never changes for keys that are already cached, and the same text gives the same
    /// logits however it is split into batches.
    fn at(&self, scaling: RopeScaling, context: usize) -> Option<&[f32]> {
        match (self, scaling) {
            (RopeFactors::None, _) => None,
            (RopeFactors::Always(factors), _) => Some(factors),
            (RopeFactors::ByContext { short, long }, RopeScaling::LongRope { .. }) => {
                Some(if scaling.is_long(context) { long } else { short })
            }
            (RopeFactors::ByContext { .. }, _) => None,
        }
    }
}

/// What a layer does before its feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Mixer {
    /// One of [`Architecture::attentions`].
    Attention,
    /// [`Architecture::recurrent`]
    Recurrent,
    /// Both of the same normed input. Their outputs are added (Falcon-H1).
    AttentionAndRecurrent,
    /// The layer is only a feed-forward.
    None,
}

impl Mixer {
    /// Returns true if the layer has attention.
    pub fn attends(self) -> bool {
        matches!(self, Mixer::Attention | Mixer::AttentionAndRecurrent)
    }

    /// Returns true if the layer has a recurrence.
    pub fn recurs(self) -> bool {
        matches!(self, Mixer::Recurrent | Mixer::AttentionAndRecurrent)
    }
}

/// One decoder layer.
#[derive(Debug, Clone, Serialize)]
pub struct Layer {
    pub mixer: Mixer,
    /// Number of positions that a token attends to, including itself; `None` means all.
    pub window: Option<usize>,
    /// True if windows do not slide: positions are divided into chunks as long as the window, and a token attends to those of its
    /// own chunk.
    pub chunked: bool,
    /// Index into [`Architecture::attentions`].
    pub attention: usize,
    /// The layer before this one whose keys and values it uses, if it has none of its own (Gemma 4).
    pub keys_of: Option<usize>,
    /// Index into [`Architecture::ropes`]; `None` if queries and keys are not rotated.
    pub rope: Option<usize>,
    /// True if queries are multiplied by [`Architecture::temperature`].
    pub tempered: bool,
    pub feed_forward: FeedForward,
    /// Gatings of the layer, if they are not [`Architecture::gating`].
    #[serde(skip)]
    pub gatings: Option<Gatings>,
}

/// Gatings of a layer's feed-forwards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gatings {
    pub experts: Gating,
    /// Gating of a dense feed-forward, or of shared experts.
    pub others: Gating,
}

impl Layer {
    /// Returns the number of experts of the layer; 0 for a dense layer.
    pub fn experts(&self) -> usize {
        match &self.feed_forward {
            FeedForward::None | FeedForward::Dense { .. } => 0,
            FeedForward::Experts(experts) => experts.count,
        }
    }
}

#[derive(Debug, Clone, Serialize)]
pub enum FeedForward {
    /// The layer is only attention or a recurrence.
    None,
    /// Feed-forward of this width.
    Dense {
        width: usize,
        /// What is subtracted from a token's gates before their function, in standard deviations above their mean. Gates below it
        /// are 0 (Gemma 3n).
        cut: Option<f32>,
    },
    Experts(Experts),
}

impl FeedForward {
    pub fn is_none(&self) -> bool {
        matches!(self, FeedForward::None)
    }

    pub fn has_experts(&self) -> bool {
        matches!(self, FeedForward::Experts(_))
    }
}

/// A mixture of experts.
#[derive(Debug, Clone, Serialize)]
pub struct Experts {
    pub count: usize,
    pub used: usize,
    /// Number of experts, the last ones, that every token uses and that the router scores with the others. They count among
    /// `used`.
    pub always: usize,
    pub width: usize,
    /// What router and experts take.
    pub input: ExpertInput,
    /// The space in which the experts compute, if it is not that of the residual stream.
    pub latent: Option<LatentExperts>,
    /// True if the output of every expert is multiplied by a vector and then divided by its root mean square (Muse Spark).
    pub output_norms: bool,
    /// Factor of the router's logits.
    pub logit_scale: f32,
    /// Function that turns the router's logits into scores.
    #[serde(skip)]
    pub scoring: Scoring,
    /// True if the weights of the chosen experts are divided by their sum.
    pub renormalise: bool,
    pub scale: f32,
    /// True if a bias is added to the scores for the selection only.
    pub correction_bias: bool,
    /// True if a table gives the experts of every token, and the router their weights only (DeepSeek-V4).
    pub by_token: bool,
    /// Groups of experts, if a token first chooses groups.
    #[serde(skip)]
    pub groups: Option<RouterGroups>,
    /// True if the router and all expert matrices have biases.
    pub bias: bool,
    /// Width of the shared experts that every token uses; 0 if there are none.
    pub shared_width: usize,
    /// True if the output of the shared experts is multiplied by the sigmoid of a product of the input with a vector.
    pub shared_gate: bool,
    /// True if the output is the mean of that of the experts and that of the shared experts. Half of it is in [`Experts::scale`].
    pub averaged: bool,
    /// True if the input of an expert is multiplied by its weight, and not the output (llama4).
    pub scaled_input: bool,
    /// True if a Hugging Face folder holds the transposed matrices of all experts as two tensors.
    pub transposed: bool,
    /// True if the router and the experts have norms of their own before them, and experts and shared experts after them (Gemma
    /// 4).
    pub own_norms: bool,
    /// True if every expert has a factor for its weight.
    pub expert_scales: bool,
}

/// Returns the expert groups of a router, if there are several. Models with a correction bias score a group by its best
/// two experts (DeepSeek-V3), and others by its best one (DeepSeek-V2).
pub(super) fn groups(
    n_groups: usize,
    groups_kept: usize,
    correction_bias: bool,
) -> Option<RouterGroups> {
    let experts_scored = if correction_bias { 2 } else { 1 };
    (n_groups > 1).then_some(RouterGroups { n_groups, groups_kept, experts_scored })
}

impl Experts {
    /// Returns the experts with a table that gives those of every token, if `by_token`. No bias corrects such a choice.
    pub(super) fn chosen_by_token(self, by_token: bool) -> Experts {
        let correction_bias = self.correction_bias && !by_token;
        Experts { by_token, correction_bias, ..self }
    }

    /// Returns the number of elements of an expert's input and output in a model with this hidden size.
    pub fn outer_width(&self, hidden: usize) -> usize {
        self.latent.map_or(hidden, |latent| latent.width)
    }

    /// Returns the router's selection rule, with a layer's correction bias and factors of experts.
    pub fn rule<'a>(
        &self,
        correction_bias: Option<&'a [f32]>,
        expert_scales: Option<&'a [f32]>,
    ) -> RouterRule<'a> {
        RouterRule {
            logit_scale: self.logit_scale,
            scoring: self.scoring,
            always: self.always,
            renormalise: self.renormalise,
            scale: self.scale,
            expert_scales,
            correction_bias,
            groups: self.groups,
        }
    }
}

/// Naming scheme of the tensors in the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Naming {
    Gguf,
    /// Hugging Face names. All but the head's name start with `root`: `model.`, or a longer prefix if the language
    /// model is part of a larger one.
    /// `layers` stands between the root and a layer's number.
    HuggingFace {
        root: &'static str,
        layers: &'static str,
    },
}

/// Number and length of the sequences that a KV cache has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCapacity {
    /// Most positions of one sequence.
    pub context: usize,
    /// Most sequences at a time.
    pub sequences: usize,
    /// Positions of all sequences together, and of those that have ended and are kept. `None` gives every sequence room for the
    /// whole context.
    pub tokens: Option<usize>,
    /// How much of a GPU's cache is in VRAM.
    pub in_vram: KvInVram,
}

/// How much of the KV cache is in VRAM. The rest is in pinned host memory, where the GPU reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvInVram {
    All,
    /// As much as so many bytes of VRAM hold, with the memory for copies of one layer.
    Bytes(u64),
    /// As much as fits beside the dense weights. Experts get what is left: in every token, the GPU reads all keys and values of
    /// the context, but only a part of the experts.
    #[default]
    AsMuchAsFits,
}

impl KvCapacity {
    /// Returns the capacity of one sequence.
    pub fn alone(context: usize) -> KvCapacity {
        KvCapacity { context, sequences: 1, tokens: None, in_vram: KvInVram::All }
    }
}

impl Architecture {
    /// Returns the number of KV blocks that each group's pool needs for a capacity and passes of up to `batch` rows of a
    /// sequence, with block 0. One sequence always has room for the whole context.
    pub fn kv_blocks(&self, batch: usize, capacity: KvCapacity) -> Vec<usize> {
        let KvCapacity { context, sequences, tokens, .. } = capacity;
        let positions = |window: Option<usize>| {
            window.map_or(context, |window| rows_for_window(window, batch, context))
        };
        // Neither end of a window lies at the end of a block.
        let blocks = |window: Option<usize>| {
            let all = context.div_ceil(KV_BLOCK);
            (positions(window).div_ceil(KV_BLOCK) + 1).min(all)
        };
        // The last block of every sequence may be filled in part.
        let together = tokens.map_or(usize::MAX, |tokens| tokens.div_ceil(KV_BLOCK) + sequences);
        // More positions than the sequences need are for prompts that come again, each with its own windows.
        let kept = tokens.map_or(0, |tokens| tokens.div_ceil(context.max(1))).max(sequences);
        let pool = |window| (kept * blocks(window)).min(together.max(blocks(window)));
        self.kv_groups().into_iter().map(|group| 1 + pool(group.window)).collect()
    }

    /// Returns the number of experts a token uses in a layer, as the maximum over the layers; 0 for a dense model.
    pub fn experts_per_token(&self) -> usize {
        self.expert_layers().map(|experts| experts.used).max().unwrap_or(0)
    }

    /// Returns the descriptions of the expert layers, in order.
    pub fn expert_layers(&self) -> impl Iterator<Item = &Experts> {
        self.layers.iter().filter_map(|layer| match &layer.feed_forward {
            FeedForward::Experts(experts) => Some(experts),
            FeedForward::None | FeedForward::Dense { .. } => None,
        })
    }

    /// Returns the width of the widest dense feed-forward; 0 if every layer has experts.
    pub(crate) fn dense_width(&self) -> usize {
        let widths = self.layers.iter().map(|layer| match layer.feed_forward {
            FeedForward::Dense { width, .. } => width,
            FeedForward::None | FeedForward::Experts(_) => 0,
        });
        widths.max().unwrap_or(0)
    }

    /// Returns the gatings of a layer's feed-forwards.
    pub fn gatings_of(&self, layer: usize) -> Gatings {
        let usual = Gatings { experts: self.gating, others: self.gating };
        self.layers[layer].gatings.unwrap_or(usual)
    }

    /// Returns the width of the widest shared experts.
    pub(crate) fn shared_width(&self) -> usize {
        self.expert_layers().map(|experts| experts.shared_width).max().unwrap_or(0)
    }

    /// Returns the rotary tables for `context` positions. `factors` are those of the file, used for ropes without their
    /// own.
    ///
    /// # Errors
    /// Returns an error if the parameters give a table that cannot be computed.
    pub(crate) fn rope_tables(
        &self,
        factors: Option<&RopeFactors>,
        context: usize,
    ) -> Result<Vec<RopeTable>, ModelError> {
        let table = |rope: &Rope| {
            let factors = rope.factors.as_ref().or(factors);
            RopeTable::new(&RopeConfig {
                rotary_dim: rope.rotary_dim,
                rotary_from: rope.from,
                theta: rope.theta,
                layout: rope.layout,
                scaling: rope.scaling,
                frequency_factors: factors.and_then(|factors| factors.at(rope.scaling, context)),
                context,
            })
        };
        Ok(self.ropes.iter().map(table).collect::<Result<_, _>>()?)
    }

    /// Returns the epsilon of the norm of an embedding's projection for a layer. The projection would be divided by the root of
    /// the hidden size before, which changes no more than what the epsilon is compared with.
    pub(crate) fn layer_norm_epsilon(&self) -> f32 {
        self.norm_epsilon * self.hidden as f32
    }

    /// Returns the number that norms of recurrent layers' outputs add to the mean of squares.
    pub(crate) fn delta_epsilon(&self) -> f32 {
        self.recurrent.and_then(|of| of.norm_epsilon).unwrap_or(self.norm_epsilon)
    }

    /// Returns the number that norms of the residual stream add to the mean of squares.
    pub fn stream_epsilon(&self) -> f32 {
        self.norm_epsilon / (self.residual_scale * self.residual_scale)
    }
}
