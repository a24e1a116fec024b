//! The description of a model family: what its files do not say.

use forebay_compute::{NormForm, RopeLayout};
use forebay_ops::{DeltaRule, Gating, Scoring};

use super::architecture::{EmbeddingNorm, Gatings, OutputGate, QkNorm};
use super::mtp_shape::MtpRule;
use super::recurrent::HeadOrder;
use super::shapes::{ExpertInput, LatentNorm, NormLayout, StreamForm};
use super::unrotated::Unrotated;

/// Properties of a family that its metadata does not give, by subject.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    pub name: &'static str,
    pub files: Files,
    pub attention: Attention,
    pub rotation: Rotation,
    pub recurrence: Recurrence,
    pub feed_forward: FeedForward,
    pub layers: Layers,
    pub ends: Ends,
}

/// Names and forms in the family's files.
#[derive(Debug, Clone, Copy)]
pub struct Files {
    /// Every `general.architecture` of the family's GGUF files; none if forebay reads Hugging Face folders only.
    pub gguf: &'static [&'static str],
    /// Every `model_type` of the family's Hugging Face models; none if forebay reads GGUF files only.
    pub huggingface: &'static [&'static str],
    /// Tensor names that differ from the usual ones.
    pub names: OwnNames,
    /// True if Hugging Face norm weights lack 1, which is added to them when they are read.
    pub norms_less_one: bool,
    /// True if the norm before the output projection does not lack it.
    pub whole_final_norm: bool,
    /// True if Hugging Face folders hold the transposed matrices of experts.
    pub transposed_experts: bool,
    /// True if Hugging Face folders hold gate and up as one matrix whose rows are those of gate and of up alternately.
    pub interleaved_gate_up: bool,
    /// How layers that predict further tokens are, if forebay can use those of the family.
    pub mtp: Option<MtpRule>,
}

/// Role, GGUF name and Hugging Face name of tensors. An empty name stands for the usual one.
pub type OwnNames = &'static [(&'static str, &'static str, &'static str)];

/// Attention of the layers that have it.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// True for multi-head latent attention.
    pub latent: bool,
    /// True if the part of latent attention's keys that rotates is normed.
    pub normed_rotary: bool,
    /// True if attention sees a window and compressed entries. All layers have experts then.
    pub compressed: bool,
    /// The rule of indexers, if the family chooses keys with them.
    pub indexer: Option<Indexers>,
    /// True if layers may take the choice of a layer before them instead of having an indexer.
    pub shares_choices: bool,
    /// True if the last elements of the indexer's queries and keys rotate, and not the first.
    pub indexer_rotates_last: bool,
    pub windows: Windows,
    /// Window of layers that have one, if files need not say it.
    pub window: Option<usize>,
    pub qk_norm: QkNorm,
    /// True if q, k and v always have a bias.
    pub qkv_bias: bool,
    /// True if the tensors of a folder say which projections have biases, and not the configuration.
    pub bias_by_tensors: bool,
    pub sinks: bool,
    /// True if files may bound queries, keys and values.
    pub clamps: bool,
    /// Factor of the scores, if the family has one that its files do not give.
    pub scale: Option<f32>,
    /// Factor of queries after their norm, if Hugging Face folders need not say it. GGUF files have it in the weights of the norm.
    pub query_scale: f32,
    /// Cap of the scores, if files need not say it.
    pub softcap: Option<f32>,
    /// True if values are divided by their root mean square.
    pub normed_values: bool,
    /// True if layers without a window have keys as values, as far as the files have no matrix for values.
    pub keys_as_values: bool,
    /// True if every head's sum of values is divided by its root mean square.
    pub output_norm: bool,
    pub output_gate: OutputGate,
    /// True if scores have biases by the distance of the key. Scores are then divided by the length of the heads.
    pub relative: bool,
}

/// Rotation of queries and keys.
#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    /// False if queries and keys are not rotated, unless a file says so.
    pub rotates: bool,
    /// Base of the rotation, if Hugging Face folders need not say it.
    pub theta: f64,
    /// True if `config.json` says that queries and keys are rotated by giving the base of the rotation.
    pub rotates_with_base: bool,
    /// Layout of the pairs that rotate together. GGUF's converter reorders q and k for some families.
    pub gguf: RopeLayout,
    pub huggingface: RopeLayout,
    /// Base of the rotation in windowed layers, if these have a rotation of their own.
    pub of_windows: Option<WindowTheta>,
    /// True if half of a head rotates in layers without a window, and GGUF files do not say it.
    pub half_in_gguf: bool,
    /// Layers without rotation, if some layers have none.
    pub unrotated: Option<Unrotated>,
    /// True if the parameters of the rotation may have a factor of queries that grows with the position.
    pub tempered: bool,
}

/// Recurrent layers.
#[derive(Debug, Clone, Copy)]
pub struct Recurrence {
    /// How tokens change the states, if the family has such layers.
    pub rule: Option<DeltaRule>,
    /// True if every layer has attention beside the recurrence.
    pub beside_attention: bool,
    /// Which value heads a key head serves in a GGUF file. In Hugging Face models they are consecutive.
    pub gguf_heads: HeadOrder,
    /// Logarithm of the fastest decay when the metadata does not say it; 0 if there is none.
    pub decay_bound: f32,
    /// True if the sigmoid of the gate gates the output of the gated delta rule, unless a configuration says otherwise.
    pub sigmoid_gate: bool,
    /// True if GGUF files hold rates of decay as positive numbers.
    pub positive_rates: bool,
    /// Factor of the share of replacement of the gated delta rule, unless a configuration says otherwise.
    pub share_scale: f32,
    /// Number that the norm of outputs of the gated delta rule adds to the mean of squares, if it is not that of other norms.
    pub norm_epsilon: Option<f32>,
    /// Position of the norms in layers with the gated delta rule, if it is not that in other layers.
    pub norms: Option<NormLayout>,
}

/// Feed-forwards and mixtures of experts.
#[derive(Debug, Clone, Copy)]
pub struct FeedForward {
    pub gating: Gating,
    /// Gating of feed-forwards other than routed experts, if it is another.
    pub gating_of_others: Option<Gating>,
    /// True if the feed-forward is a mixture of experts, at least in some layers.
    pub experts: bool,
    /// True if some models of the family have no experts.
    pub dense_too: bool,
    /// Scoring of the experts when the metadata does not say it.
    pub scoring: Scoring,
    /// Scoring of the experts when the metadata does not say it and a bias corrects the choice. If this is given, Hugging Face
    /// models have such a bias unless their configuration denies it.
    pub corrected: Option<Scoring>,
    /// True if logits choose experts, and their sigmoids are weights only.
    pub chosen_by_logits: bool,
    /// True if the output is the mean of that of experts and that of shared experts, unless a configuration says otherwise.
    pub averaged: bool,
    /// True if expert weights are renormalised when the metadata does not say so.
    pub renormalise: bool,
    /// True if the router scores shared experts, too, and their weights are among those that are renormalised.
    pub scored_shared: bool,
    /// Factor of the weights of experts, if Hugging Face folders need not say it.
    pub scale: f32,
    /// True if the factor of the logits is one of the router's logits, too.
    pub scaled_router: bool,
    /// Position of the norm in the space of the experts, if they have a space of their own.
    pub latent: Option<LatentNorm>,
    /// True if the output of every expert is scaled and normed.
    pub output_norms: bool,
    /// True if the input of an expert is multiplied by its weight.
    pub scaled_input: bool,
    /// What router and experts take.
    pub input: ExpertInput,
    /// True if router and experts have biases.
    pub bias: bool,
    /// Number of shared experts if the metadata does not say it.
    pub shared: usize,
    /// True if the output of shared experts has a gate.
    pub shared_gate: bool,
    /// True if tokens pass through an MLP of a width of its own beside the experts, or instead of them if there are none.
    pub shared_mlp: bool,
    /// True if experts are beside a dense feed-forward, which counts as a shared expert, with norms and factors of their own.
    pub beside_dense: bool,
    /// True if files give every layer limits behind SiLU ([`Gating::SiluClamped`]).
    pub limits_by_layer: bool,
    /// True if `config.json` gives the width of feed-forwards before it is adjusted, unless it says otherwise.
    pub adjusted_width: bool,
    /// True if GGUF files give the widths of gate and up together (Qwen 1).
    pub doubled_width: bool,
    /// The first layers whose gates are sparse unless `config.json` says something else.
    pub sparse_layers: Option<SparseLayers>,
}

/// Layers with sparse gates.
#[derive(Debug, Clone, Copy)]
pub struct SparseLayers {
    /// Number of these layers, of models that have more layers. Others have none.
    pub layers: usize,
    /// Share of the gates that are 0.
    pub share: f64,
}

/// The order of a layer's parts, and what it does with the residual stream.
#[derive(Debug, Clone, Copy)]
pub struct Layers {
    pub norms: NormLayout,
    /// Number that norms of the outputs of blocks add to the mean of squares, if it is another than that of the other norms and
    /// files need not say it.
    pub post_norm_epsilon: Option<f32>,
    pub norm_form: NormForm,
    /// True if files have no weights for the norms.
    pub weightless_norms: bool,
    /// True if blocks beside each other have one norm.
    pub one_norm: bool,
    /// True if a key of the files says if blocks are beside each other. Without it, [`Layers::norms`] says so.
    pub parallel_by_key: bool,
    /// The rule of residual streams beside each other, if the family has several.
    pub streams: Option<StreamForm>,
    /// True if gates mix the residual stream with the outputs of blocks.
    pub gated_residuals: bool,
    /// True if outputs of blocks are added to their normed inputs, times a factor ([`super::Architecture::normed_residual`]).
    pub normed_residual: bool,
    /// True if short convolutions are added to keys, values and the outputs of blocks.
    pub convolutions: bool,
    /// True if the output of every feed-forward is multiplied by a number of its own.
    pub feed_forward_scales: bool,
    /// True if every layer ends by multiplying the residual stream by a number of its own.
    pub scales: bool,
    /// True if a layer is only a mixer or only a feed-forward.
    pub one_block: bool,
    /// True if layers without heads have no attention, and layers without a width no feed-forward.
    pub may_lack_blocks: bool,
}

/// Embeddings and logits.
#[derive(Debug, Clone, Copy)]
pub struct Ends {
    /// True if the embedding is multiplied by the square root of the hidden size.
    pub scaled_embedding: bool,
    pub embedding_norm: EmbeddingNorm,
    /// True if the output projection is the embedding table, unless a folder says otherwise.
    pub tied: bool,
    /// Cap of the logits, if files need not say it.
    pub logit_softcap: Option<f32>,
    /// Factor of the logits, if Hugging Face folders need not say it.
    pub logit_scale: f32,
    /// Divisor of the logits, if Hugging Face folders need not say it.
    pub width_scale: Option<f32>,
    /// What the factors of GGUF files are for.
    pub gguf_factors: Factors,
}

/// Meaning of `embedding_scale`, `residual_scale` and `logit_scale` in GGUF files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Factors {
    /// Files have no such factors.
    None,
    /// Factors of embeddings and of outputs added to the residual stream, and a divisor of logits (Granite).
    AllOfGranite,
    /// As [`Factors::AllOfGranite`], with the published values where files do not say them (MiniCPM).
    OfMiniCpm,
    /// Factors of embeddings and of logits, with the published values where files do not say them (Grok).
    OfGrok,
    /// A factor of logits, and no others (Cohere).
    OfLogits,
    /// The factor of the normed inputs to which outputs of blocks are added (MiniMax-01).
    OfNormedResidual,
}

/// Layers with a sliding window, if the metadata does not name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// No layer of a GGUF file, because the format does not carry the window for these families. In Hugging Face
    /// models, every layer if the configuration has a window.
    NotInGguf,
    /// The layers for which the metadata gives a window.
    AsSaid,
    /// All layers.
    All,
    /// All layers except every n-th one: with 6, the last of each six has no window.
    ButEvery(usize),
    /// All layers except every n-th one, counted back from the last layer, which has no window.
    ButEveryFromEnd(usize),
    /// All layers except the first of each n.
    ButFirstOf(usize),
}

/// Base of the rotation in windowed layers, if the metadata does not give it. It is not scaled, if nothing else is said.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WindowTheta {
    /// The base of the other layers.
    Same,
    /// The base and the scaling of the other layers.
    SameScaled,
    Of(f64),
}

/// The rule of the indexers of a family: the things that they choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Indexers {
    /// Positions. The layout is that of the rotation of queries and keys.
    Keys(RopeLayout),
    /// Blocks of positions, for each key/value head ([`super::IndexerRule::Blocks`]).
    Blocks,
    /// Pools of positions with gates ([`super::IndexerRule::GatedPools`]).
    GatedPools,
    /// Pools of positions with the mean of their keys ([`super::IndexerRule::MeanPools`]).
    MeanPools,
}

impl Family {
    /// A dense model as most are: the entries of the table say what differs.
    pub(super) const BASE: Family = Family {
        name: "",
        files: Files::BASE,
        attention: Attention::BASE,
        rotation: Rotation::BASE,
        recurrence: Recurrence::BASE,
        feed_forward: FeedForward::BASE,
        layers: Layers::BASE,
        ends: Ends::BASE,
    };

    /// Returns the factor for the rows of the embedding table.
    pub fn embedding_scale(&self, hidden: usize) -> f32 {
        if self.ends.scaled_embedding { (hidden as f32).sqrt() } else { 1.0 }
    }

    /// Returns the gatings of layers whose experts have the gating `experts`, if others have another.
    pub fn gatings(&self, experts: Gating) -> Option<Gatings> {
        self.feed_forward.gating_of_others.map(|others| Gatings { experts, others })
    }

    /// Returns the index of the rotation of a layer with this window; `None` if there is no rotation.
    pub fn rope_of(&self, window: Option<usize>, rotates: bool) -> Option<usize> {
        rotates.then(|| usize::from(self.rotation.of_windows.is_some() && window.is_some()))
    }
}

impl Files {
    pub(super) const BASE: Files = Files {
        gguf: &[],
        huggingface: &[],
        names: &[],
        norms_less_one: false,
        whole_final_norm: false,
        transposed_experts: false,
        interleaved_gate_up: false,
        mtp: None,
    };
}

impl Attention {
    pub(super) const BASE: Attention = Attention {
        latent: false,
        normed_rotary: false,
        compressed: false,
        indexer: None,
        shares_choices: false,
        indexer_rotates_last: false,
        windows: Windows::AsSaid,
        window: None,
        qk_norm: QkNorm::None,
        qkv_bias: false,
        bias_by_tensors: false,
        sinks: false,
        clamps: false,
        scale: None,
        query_scale: 1.0,
        softcap: None,
        normed_values: false,
        keys_as_values: false,
        output_norm: false,
        output_gate: OutputGate::None,
        relative: false,
    };
}

impl Rotation {
    pub(super) const BASE: Rotation = Rotation {
        rotates: true,
        theta: 10_000.0,
        rotates_with_base: false,
        gguf: RopeLayout::Neox,
        huggingface: RopeLayout::Neox,
        of_windows: None,
        half_in_gguf: false,
        unrotated: None,
        tempered: false,
    };

    /// Pairs of neighbours rotate together in both containers.
    pub(super) const PAIRS: Rotation = Rotation {
        gguf: RopeLayout::Interleaved,
        huggingface: RopeLayout::Interleaved,
        ..Rotation::BASE
    };
}

impl Recurrence {
    pub(super) const BASE: Recurrence = Recurrence {
        rule: None,
        beside_attention: false,
        gguf_heads: HeadOrder::Consecutive,
        decay_bound: 0.0,
        sigmoid_gate: false,
        positive_rates: false,
        share_scale: 1.0,
        norm_epsilon: None,
        norms: None,
    };
}

impl FeedForward {
    pub(super) const BASE: FeedForward = FeedForward {
        gating: Gating::Silu,
        gating_of_others: None,
        experts: false,
        dense_too: false,
        scoring: Scoring::Softmax,
        corrected: None,
        chosen_by_logits: false,
        averaged: false,
        renormalise: true,
        scored_shared: false,
        scale: 1.0,
        scaled_router: false,
        latent: None,
        output_norms: false,
        scaled_input: false,
        input: ExpertInput::OfFeedForward,
        bias: false,
        shared: 0,
        shared_gate: false,
        shared_mlp: false,
        beside_dense: false,
        limits_by_layer: false,
        adjusted_width: false,
        doubled_width: false,
        sparse_layers: None,
    };

    /// Experts that a sigmoid scores and a bias corrects (DeepSeek-V3).
    pub(super) const CORRECTED_EXPERTS: FeedForward =
        FeedForward { experts: true, corrected: Some(Scoring::Sigmoid), ..FeedForward::BASE };
}

impl Layers {
    pub(super) const BASE: Layers = Layers {
        norms: NormLayout::Pre,
        post_norm_epsilon: None,
        norm_form: NormForm::RootMeanSquare,
        weightless_norms: false,
        one_norm: false,
        parallel_by_key: false,
        streams: None,
        gated_residuals: false,
        normed_residual: false,
        convolutions: false,
        feed_forward_scales: false,
        scales: false,
        one_block: false,
        may_lack_blocks: false,
    };

    /// A layer norm before attention, and one before the feed-forward.
    pub(super) const LAYER_NORMS: Layers = Layers { norm_form: NormForm::Layer, ..Layers::BASE };

    /// One layer norm for attention and feed-forward, which take the same input.
    pub(super) const PARALLEL: Layers =
        Layers { norms: NormLayout::Parallel, one_norm: true, ..Layers::LAYER_NORMS };
}

impl Ends {
    pub(super) const BASE: Ends = Ends {
        scaled_embedding: false,
        embedding_norm: EmbeddingNorm::None,
        tied: false,
        logit_softcap: None,
        logit_scale: 1.0,
        width_scale: None,
        gguf_factors: Factors::None,
    };
}

impl Windows {
    /// Returns true if layer `index` of `count` has a window when the metadata gives a window without naming layers.
    pub fn slides(self, index: usize, count: usize) -> bool {
        match self {
            Windows::NotInGguf | Windows::AsSaid | Windows::All => true,
            Windows::ButEvery(period) => !(index + 1).is_multiple_of(period),
            Windows::ButEveryFromEnd(period) => !count.abs_diff(index + 1).is_multiple_of(period),
            Windows::ButFirstOf(period) => !index.is_multiple_of(period),
        }
    }
}
