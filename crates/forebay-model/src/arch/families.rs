//! The model families that the decoder runs, as a table of their differences.

use super::architecture::{NormLayout, QkNorm};
use super::family_names::{
    DEEPSEEK_4_NAMES, GEMMA4_NAMES, GLM5_NEXT, GRANITE_HYBRID, HUNYUAN_NAMES, KIMI_LINEAR,
    LFM2_NAMES, MINIMAX_M3, NEMOTRON_H_NAMES, QWEN4_EXP,
};
use super::mtp_shape::MtpForm;
use super::recurrent::{HeadOrder, StateRule};
use super::shapes::{StreamForm, StreamsEnd};
use super::unrotated::Unrotated;
use crate::ModelError;
use forebay_compute::{Gating, RopeLayout, Scoring};

/// Properties of a family that its metadata does not give.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    pub name: &'static str,
    /// `general.architecture` of the family's GGUF files; empty if forebay reads Hugging Face models only.
    pub gguf: &'static str,
    /// Every `model_type` of the family's Hugging Face models.
    pub huggingface: &'static [&'static str],
    /// Layout of the pairs that rotate together. GGUF's converter reorders q and k for some families.
    pub gguf_rope: RopeLayout,
    pub hf_rope: RopeLayout,
    /// Base of the rotation in windowed layers, if these have a rotation of their own. Such a rotation is not scaled.
    pub window_theta: Option<WindowTheta>,
    pub windows: Windows,
    /// Window of layers that have one, if files need not say it.
    pub window: Option<usize>,
    /// Caps of attention's scores and of logits, if files need not say them.
    pub caps: Option<[f32; 2]>,
    /// Layers without rotation, if some layers have none.
    pub unrotated: Option<Unrotated>,
    /// True if q, k and v always have a bias.
    pub qkv_bias: bool,
    pub qk_norm: QkNorm,
    pub sinks: bool,
    /// Factor of the scores of attention, if the family has one that its files do not give.
    pub attention_scale: Option<f32>,
    /// True if values are divided by their root mean square.
    pub normed_values: bool,
    /// True if layers without a window have keys as values, as far as the files have no matrix for values.
    pub keys_as_values: bool,
    /// True if the query projection also gives a gate of attention's output.
    pub output_gate: bool,
    /// False if queries and keys are not rotated, unless a configuration says so.
    pub rotates: bool,
    /// True if a layer is only a mixer or only a feed-forward.
    pub one_block: bool,
    /// True if tokens pass through an MLP of a width of its own beside the experts, or instead of them if there are none.
    pub shared_mlp: bool,
    /// How tokens change the states of recurrent layers, if the family has such layers.
    pub recurrent: Option<StateRule>,
    /// Which value heads a key head of recurrent layers serves in a GGUF file. In Hugging Face models they are consecutive.
    pub gguf_heads: HeadOrder,
    /// Logarithm of the fastest decay of recurrent layers when the metadata does not say it; 0 if there is none.
    pub decay_bound: f32,
    /// True if attention is multi-head latent attention.
    pub latent: bool,
    /// The rule of indexers, if the family chooses keys with them.
    pub indexer: Option<Indexers>,
    /// True if attention sees a window and compressed entries. All layers have experts then.
    pub compressed: bool,
    pub norms: NormLayout,
    /// The rule of residual streams beside each other, if the family has several.
    pub streams: Option<StreamForm>,
    /// True if Hugging Face norm weights lack 1, which is added to them when they are read.
    pub norms_less_one: bool,
    /// True if the embedding is multiplied by the square root of the hidden size.
    pub scaled_embedding: bool,
    /// True if the output projection is the embedding table, unless a folder says otherwise.
    pub ties: bool,
    pub gating: Gating,
    /// True if the feed-forward is a mixture of experts, at least in some layers.
    pub experts: bool,
    /// True if the input of an expert is multiplied by its weight.
    pub scaled_input: bool,
    /// True if Hugging Face folders hold the transposed matrices of experts.
    pub transposed_experts: bool,
    /// Number of shared experts if the metadata does not say it.
    pub shared: usize,
    /// True if some models of the family have no experts.
    pub dense_too: bool,
    /// True if experts are beside a dense feed-forward, which counts as a shared expert, with norms and factors of their own.
    pub beside_dense: bool,
    /// True if every layer ends by multiplying the residual stream by a number of its own.
    pub layer_scales: bool,
    /// True if router and experts have biases.
    pub expert_bias: bool,
    /// True if `config.json` gives the width of feed-forwards before it is adjusted, unless it says otherwise.
    pub adjusted_width: bool,
    /// True if the output of shared experts has a gate.
    pub shared_gate: bool,
    /// True if expert weights are renormalised when the metadata does not say so.
    pub renormalise: bool,
    /// Scoring of the experts when the metadata does not say it.
    pub scoring: Scoring,
    /// Scoring of the experts when the metadata does not say it and a bias corrects the choice. If this is given, Hugging Face
    /// models have such a bias unless their configuration denies it.
    pub corrected: Option<Scoring>,
    /// Where Hugging Face folders have layers that predict further tokens, if forebay can use those of the family.
    pub mtp: Option<MtpForm>,
    /// Tensor names that differ from the usual ones: role, GGUF name, Hugging Face name.
    pub names: &'static [(&'static str, &'static str, &'static str)],
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
}

/// Base of the rotation in windowed layers, if the metadata does not give it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WindowTheta {
    /// The base of the other layers.
    Same,
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

/// Stands for the GGUF name of families that are read from Hugging Face folders only.
const NONE: &str = "";

pub(super) const BASE: Family = Family {
    name: "",
    gguf: "",
    huggingface: &[],
    gguf_rope: RopeLayout::Neox,
    hf_rope: RopeLayout::Neox,
    window_theta: None,
    windows: Windows::AsSaid,
    window: None,
    caps: None,
    unrotated: None,
    qkv_bias: false,
    qk_norm: QkNorm::None,
    sinks: false,
    attention_scale: None,
    normed_values: false,
    keys_as_values: false,
    output_gate: false,
    rotates: true,
    one_block: false,
    shared_mlp: false,
    recurrent: None,
    gguf_heads: HeadOrder::Consecutive,
    decay_bound: 0.0,
    latent: false,
    indexer: None,
    compressed: false,
    norms: NormLayout::Pre,
    streams: None,
    norms_less_one: false,
    scaled_embedding: false,
    ties: false,
    gating: Gating::Silu,
    experts: false,
    scaled_input: false,
    transposed_experts: false,
    shared: 0,
    dense_too: false,
    beside_dense: false,
    layer_scales: false,
    expert_bias: false,
    adjusted_width: false,
    shared_gate: false,
    renormalise: true,
    scoring: Scoring::Softmax,
    corrected: None,
    mtp: None,
    names: &[],
};

/// Common properties of all Gemma models.
const GEMMA: Family = Family {
    norms: NormLayout::Sandwich,
    norms_less_one: true,
    scaled_embedding: true,
    ties: true,
    gating: Gating::GeluTanh,
    names: &[
        ("feed_forward_norm", "ffn_norm.weight", "pre_feedforward_layernorm.weight"),
        ("attention_post_norm", "post_attention_norm.weight", "post_attention_layernorm.weight"),
    ],
    ..BASE
};

/// Common properties of models with gated DeltaNet layers.
const QWEN_NEXT: Family = Family {
    qk_norm: QkNorm::PerHead,
    output_gate: true,
    recurrent: Some(StateRule::GatedDelta),
    norms_less_one: true,
    shared_gate: true,
    mtp: Some(MtpForm::Beside),
    names: &[
        ("feed_forward_norm", "post_attention_norm.weight", "post_attention_layernorm.weight"),
        ("shared_gate", "ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
        ("shared_up", "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
        ("shared_down", "ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
    ],
    ..BASE
};

/// Common properties of models with latent attention to keys that an indexer chooses.
const INDEXED: Family = Family {
    gguf_rope: RopeLayout::Interleaved,
    hf_rope: RopeLayout::Interleaved,
    latent: true,
    experts: true,
    corrected: Some(Scoring::Sigmoid),
    mtp: Some(MtpForm::Behind),
    ..BASE
};

const DEEPSEEK_4: Family = Family {
    name: "deepseek4",
    gguf: "deepseek4",
    huggingface: &["deepseek_v4"],
    gguf_rope: RopeLayout::Interleaved,
    hf_rope: RopeLayout::Interleaved,
    compressed: true,
    sinks: true,
    streams: Some(StreamForm::Mixed(StreamsEnd::Weighted)),
    gating: Gating::ClampedSilu { limit: 10.0 },
    experts: true,
    corrected: Some(Scoring::SqrtSoftplus),
    names: DEEPSEEK_4_NAMES,
    ..BASE
};

/// All families. Mixtral and Mistral are both `llama` in GGUF: mixtral is the one with experts, and the format does not
/// carry mistral's sliding window.
const FAMILIES: &[Family] = &[
    Family {
        name: "llama",
        gguf: "llama",
        huggingface: &["llama"],
        gguf_rope: RopeLayout::Interleaved,
        ..BASE
    },
    Family {
        name: "mixtral",
        gguf: "llama",
        huggingface: &["mixtral"],
        gguf_rope: RopeLayout::Interleaved,
        windows: Windows::NotInGguf,
        experts: true,
        names: &[
            ("router", "ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
            ("expert_gate", "ffn_gate_exps.weight", "block_sparse_moe.experts.{expert}.w1.weight"),
            ("expert_up", "ffn_up_exps.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
            ("expert_down", "ffn_down_exps.weight", "block_sparse_moe.experts.{expert}.w2.weight"),
        ],
        ..BASE
    },
    Family {
        name: "mistral",
        gguf: "mistral",
        huggingface: &["mistral"],
        gguf_rope: RopeLayout::Interleaved,
        windows: Windows::NotInGguf,
        ..BASE
    },
    Family { name: "qwen2", gguf: "qwen2", huggingface: &["qwen2"], qkv_bias: true, ..BASE },
    Family {
        name: "qwen3",
        gguf: "qwen3",
        huggingface: &["qwen3"],
        qk_norm: QkNorm::PerHead,
        ..BASE
    },
    Family {
        name: "qwen3moe",
        gguf: "qwen3moe",
        huggingface: &["qwen3_moe"],
        qk_norm: QkNorm::PerHead,
        experts: true,
        ..BASE
    },
    Family {
        name: "olmoe",
        gguf: "olmoe",
        huggingface: &["olmoe"],
        qk_norm: QkNorm::WholeProjection,
        experts: true,
        renormalise: false,
        ..BASE
    },
    Family {
        name: "gpt-oss",
        gguf: "gpt-oss",
        huggingface: &["gpt_oss"],
        windows: Windows::ButEvery(2),
        sinks: true,
        gating: Gating::Clamped { alpha: 1.702, limit: 7.0 },
        experts: true,
        expert_bias: true,
        names: &[
            ("feed_forward_norm", "post_attention_norm.weight", "post_attention_layernorm.weight"),
            ("router", "ffn_gate_inp.weight", "mlp.router.weight"),
            ("router_bias", "ffn_gate_inp.bias", "mlp.router.bias"),
            ("expert_down", "ffn_down_exps.weight", "mlp.experts.down_proj"),
        ],
        ..BASE
    },
    Family {
        name: "gemma3",
        gguf: "gemma3",
        huggingface: &["gemma3_text", "gemma3"],
        window_theta: Some(WindowTheta::Of(10_000.0)),
        windows: Windows::ButEvery(6),
        qk_norm: QkNorm::PerHead,
        ..GEMMA
    },
    Family {
        name: "gemma2",
        gguf: "gemma2",
        huggingface: &["gemma2"],
        windows: Windows::ButEvery(2),
        window: Some(4096),
        caps: Some([50.0, 30.0]),
        ..GEMMA
    },
    Family {
        name: "gemma4",
        gguf: "gemma4",
        huggingface: &["gemma4_text"],
        window_theta: Some(WindowTheta::Of(10_000.0)),
        windows: Windows::ButEvery(6),
        qk_norm: QkNorm::PerHead,
        attention_scale: Some(1.0),
        normed_values: true,
        keys_as_values: true,
        norms_less_one: false,
        experts: true,
        dense_too: true,
        beside_dense: true,
        layer_scales: true,
        names: GEMMA4_NAMES,
        ..GEMMA
    },
    Family {
        name: "mimo2",
        gguf: NONE,
        huggingface: &["mimo_v2_flash"],
        window_theta: Some(WindowTheta::Of(10_000.0)),
        experts: true,
        corrected: Some(Scoring::Sigmoid),
        names: &[("sinks", "attn_sinks.weight", "self_attn.attention_sink_bias")],
        ..BASE
    },
    Family {
        name: "deepseek2",
        gguf: "deepseek2",
        huggingface: &["deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"],
        gguf_rope: RopeLayout::Interleaved,
        hf_rope: RopeLayout::Interleaved,
        latent: true,
        experts: true,
        renormalise: false,
        mtp: Some(MtpForm::Behind),
        ..BASE
    },
    Family {
        name: "deepseek32",
        gguf: "deepseek32",
        huggingface: &["deepseek_v32"],
        indexer: Some(Indexers::Keys(RopeLayout::Neox)),
        ..INDEXED
    },
    Family {
        name: "glm-dsa",
        gguf: "glm-dsa",
        huggingface: &["glm_moe_dsa"],
        indexer: Some(Indexers::Keys(RopeLayout::Interleaved)),
        ..INDEXED
    },
    Family {
        name: "glm4moe",
        gguf: "glm4moe",
        huggingface: &["glm4_moe"],
        qk_norm: QkNorm::PerHead,
        experts: true,
        corrected: Some(Scoring::Sigmoid),
        mtp: Some(MtpForm::Behind),
        names: &[(
            "feed_forward_norm",
            "post_attention_norm.weight",
            "post_attention_layernorm.weight",
        )],
        ..BASE
    },
    Family {
        name: "qwen3next",
        gguf: "qwen3next",
        huggingface: &["qwen3_next"],
        experts: true,
        ..QWEN_NEXT
    },
    Family {
        name: "qwen35",
        gguf: "qwen35",
        huggingface: &["qwen3_5_text", "qwen3_5"],
        gguf_heads: HeadOrder::Tiled,
        ..QWEN_NEXT
    },
    Family {
        name: "qwen35moe",
        gguf: "qwen35moe",
        huggingface: &["qwen3_5_moe_text", "qwen3_5_moe"],
        gguf_heads: HeadOrder::Tiled,
        experts: true,
        ..QWEN_NEXT
    },
    // Only folders are read: of GGUF files there is no reference.
    Family {
        name: "qwen4-exp",
        gguf: NONE,
        huggingface: &["qwen4_exp_text"],
        norms: NormLayout::None,
        streams: Some(StreamForm::Gated),
        indexer: Some(Indexers::MeanPools),
        experts: true,
        mtp: None,
        names: QWEN4_EXP,
        ..QWEN_NEXT
    },
    // The third generation has windows, and the second has none. Both have the same name in GGUF.
    Family {
        name: "olmo2",
        gguf: "olmo2",
        huggingface: &["olmo2", "olmo3"],
        window_theta: Some(WindowTheta::Same),
        windows: Windows::ButEvery(4),
        qk_norm: QkNorm::WholeProjection,
        norms: NormLayout::Post,
        ..BASE
    },
    Family {
        name: "llama4",
        gguf: "llama4",
        huggingface: &["llama4_text"],
        hf_rope: RopeLayout::Interleaved,
        unrotated: Some(Unrotated::LLAMA_4),
        qk_norm: QkNorm::Weightless,
        experts: true,
        scaled_input: true,
        transposed_experts: true,
        shared: 1,
        renormalise: false,
        scoring: Scoring::Sigmoid,
        names: &[
            ("gate", "ffn_gate.weight", "feed_forward.gate_proj.weight"),
            ("up", "ffn_up.weight", "feed_forward.up_proj.weight"),
            ("down", "ffn_down.weight", "feed_forward.down_proj.weight"),
            ("router", "ffn_gate_inp.weight", "feed_forward.router.weight"),
            ("expert_gate_up", "", "feed_forward.experts.gate_up_proj"),
            ("expert_down_stack", "", "feed_forward.experts.down_proj"),
            ("shared_gate", "ffn_gate_shexp.weight", "feed_forward.shared_expert.gate_proj.weight"),
            ("shared_up", "ffn_up_shexp.weight", "feed_forward.shared_expert.up_proj.weight"),
            ("shared_down", "ffn_down_shexp.weight", "feed_forward.shared_expert.down_proj.weight"),
        ],
        ..BASE
    },
    // Queries, keys and values are one matrix, and gate and up are another.
    Family {
        name: "phi3",
        gguf: "phi3",
        huggingface: &["phi3"],
        windows: Windows::All,
        names: &[("gate_up", "ffn_up.weight", "mlp.gate_up_proj.weight")],
        ..BASE
    },
    Family {
        name: "minimax-m2",
        gguf: "minimax-m2",
        huggingface: &["minimax_m2"],
        qk_norm: QkNorm::WholeProjection,
        experts: true,
        corrected: Some(Scoring::Sigmoid),
        names: &[
            ("router", "ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
            ("correction_bias", "exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"),
            ("expert_gate", "ffn_gate_exps.weight", "block_sparse_moe.experts.{expert}.w1.weight"),
            ("expert_up", "ffn_up_exps.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
            ("expert_down", "ffn_down_exps.weight", "block_sparse_moe.experts.{expert}.w2.weight"),
        ],
        ..BASE
    },
    Family {
        name: "glm5-next",
        gguf: NONE,
        huggingface: &["glm5_next_text"],
        rotates: false,
        recurrent: Some(StateRule::KimiDelta),
        decay_bound: -5.0,
        latent: true,
        indexer: Some(Indexers::GatedPools),
        streams: Some(StreamForm::Mixed(StreamsEnd::Mean)),
        gating: Gating::ClampedSilu { limit: 10.0 },
        experts: true,
        corrected: Some(Scoring::Sigmoid),
        names: GLM5_NEXT,
        ..BASE
    },
    Family {
        name: "minimax-m3",
        gguf: NONE,
        huggingface: &["minimax_m3_vl_text"],
        qk_norm: QkNorm::PerHead,
        norms_less_one: true,
        indexer: Some(Indexers::Blocks),
        gating: Gating::Clamped { alpha: 1.702, limit: 7.0 },
        experts: true,
        shared: 1,
        corrected: Some(Scoring::Sigmoid),
        names: MINIMAX_M3,
        ..BASE
    },
    Family {
        name: "qwen2moe",
        gguf: "qwen2moe",
        huggingface: &["qwen2_moe"],
        qkv_bias: true,
        experts: true,
        shared_gate: true,
        renormalise: false,
        names: &[
            ("shared_gate", "ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
            ("shared_up", "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
            ("shared_down", "ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
        ],
        ..BASE
    },
    Family {
        name: "ernie4_5-moe",
        gguf: "ernie4_5-moe",
        huggingface: &["ernie4_5_moe"],
        ties: true,
        gguf_rope: RopeLayout::Interleaved,
        hf_rope: RopeLayout::Interleaved,
        experts: true,
        corrected: Some(Scoring::Softmax),
        names: &[(
            "correction_bias",
            "exp_probs_b.bias",
            "mlp.moe_statics.e_score_correction_bias",
        )],
        ..BASE
    },
    Family {
        name: "kimi-linear",
        gguf: "kimi-linear",
        huggingface: &["kimi_linear"],
        rotates: false,
        recurrent: Some(StateRule::KimiDelta),
        latent: true,
        experts: true,
        corrected: Some(Scoring::Sigmoid),
        names: KIMI_LINEAR,
        ..BASE
    },
    Family { name: "nemotron_h", gguf: "nemotron_h", ..NEMOTRON_H },
    Family {
        name: "nemotron_h_moe",
        gguf: "nemotron_h_moe",
        // Configurations of both name the same type. Their layers say which have experts.
        huggingface: &["nemotron_h"],
        experts: true,
        corrected: Some(Scoring::Sigmoid),
        ..NEMOTRON_H
    },
    Family { name: "lfm2", huggingface: &["lfm2"], adjusted_width: true, ..LFM2 },
    Family {
        name: "lfm2moe",
        huggingface: &["lfm2_moe"],
        experts: true,
        corrected: Some(Scoring::Sigmoid),
        ..LFM2
    },
    Family {
        name: "granitemoehybrid",
        huggingface: &["granitemoehybrid"],
        rotates: false,
        recurrent: Some(StateRule::Mamba2),
        experts: true,
        shared_mlp: true,
        names: GRANITE_HYBRID,
        ..BASE
    },
    DEEPSEEK_4,
    Family {
        name: "hunyuan-moe",
        gguf: "hunyuan-moe",
        huggingface: &["hunyuan_v1_moe"],
        experts: true,
        shared: 1,
        ..HUNYUAN
    },
    Family {
        name: "hunyuan-dense",
        gguf: "hunyuan-dense",
        huggingface: &["hunyuan_v1_dense"],
        ..HUNYUAN
    },
];

const HUNYUAN: Family = Family { qk_norm: QkNorm::PerRotatedHead, names: HUNYUAN_NAMES, ..BASE };

const LFM2: Family = Family {
    ties: true,
    qk_norm: QkNorm::PerHead,
    recurrent: Some(StateRule::ShortConvolution),
    names: LFM2_NAMES,
    ..BASE
};

const NEMOTRON_H: Family = Family {
    rotates: false,
    one_block: true,
    recurrent: Some(StateRule::Mamba2),
    gating: Gating::SquaredRelu,
    names: NEMOTRON_H_NAMES,
    ..BASE
};

impl Family {
    /// Returns the factor for the rows of the embedding table.
    pub fn embedding_scale(&self, hidden: usize) -> f32 {
        if self.scaled_embedding { (hidden as f32).sqrt() } else { 1.0 }
    }

    /// Returns the index of the rotation of a layer with this window; `None` if there is no rotation.
    pub fn rope_of(&self, window: Option<usize>, rotates: bool) -> Option<usize> {
        rotates.then(|| usize::from(self.window_theta.is_some() && window.is_some()))
    }
}

impl Windows {
    /// Returns true if layer `index` has a window when the metadata gives a window without naming layers.
    pub fn slides(self, index: usize) -> bool {
        match self {
            Windows::NotInGguf | Windows::AsSaid | Windows::All => true,
            Windows::ButEvery(period) => !(index + 1).is_multiple_of(period),
        }
    }
}

/// Returns the family of a GGUF file. If two families share a name, experts distinguish them.
pub fn from_gguf(architecture: &str, has_experts: bool) -> Option<&'static Family> {
    let fits = |family: &Family| family.experts == has_experts || family.dense_too && !has_experts;
    FAMILIES.iter().find(|of| of.gguf == architecture && of.gguf != NONE && fits(of))
}

/// Returns the family of a Hugging Face `model_type`.
pub fn from_huggingface(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.huggingface.contains(&model_type))
}

/// Returns a family by its [`Family::name`].
pub fn by_name(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name)
}

/// Returns the names of all families, for messages and documentation.
pub fn known_families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.name)
}

/// Returns the names of the families of which forebay can use layers that predict further tokens.
pub fn with_mtp() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().filter(|family| family.mtp.is_some()).map(|family| family.name)
}

/// Returns the error for a GGUF file's architecture that no family has. Says so if forebay runs the family from folders.
pub fn unknown_gguf(name: &str) -> ModelError {
    let is_same = |family: &&Family| {
        let types = family.huggingface.iter();
        family.gguf == NONE && types.chain([&family.name]).any(|other| plain(other) == plain(name))
    };
    match FAMILIES.iter().find(is_same) {
        Some(_) => ModelError::FolderOnly { name: name.to_owned() },
        None => {
            let known = FAMILIES.iter().map(|family| family.gguf).filter(|name| *name != NONE);
            ModelError::UnknownArchitecture { name: name.to_owned(), known: in_one_line(known) }
        }
    }
}

/// Returns the error for a `model_type` that no family has. Says so if forebay runs the family from GGUF files.
pub fn unknown_huggingface(name: &str) -> ModelError {
    let is_same = |family: &&Family| {
        let names = [family.gguf, family.name];
        family.huggingface.is_empty() && names.iter().any(|other| plain(other) == plain(name))
    };
    match FAMILIES.iter().find(is_same) {
        Some(_) => ModelError::GgufOnly { name: name.to_owned() },
        None => {
            let known = FAMILIES.iter().flat_map(|family| family.huggingface).copied();
            ModelError::UnknownArchitecture { name: name.to_owned(), known: in_one_line(known) }
        }
    }
}

/// Returns a name without the marks in which GGUF and Hugging Face differ.
fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase()
}

fn in_one_line(names: impl Iterator<Item = &'static str>) -> String {
    let names: std::collections::BTreeSet<&str> = names.collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}
