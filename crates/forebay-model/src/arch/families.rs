//! The families that the decoder runs: what sets each apart, as a table.

use super::architecture::{NormLayout, QkNorm};
use forebay_compute::{Gating, RopeLayout};

/// What a family fixes that its metadata does not say.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    pub name: &'static str,
    /// `general.architecture` of its GGUF form.
    pub gguf: &'static str,
    /// Every `model_type` of its Hugging Face form.
    pub huggingface: &'static [&'static str],
    /// Pairs that rotate together: GGUF's converter reorders q and k for some families.
    pub gguf_rope: RopeLayout,
    pub hf_rope: RopeLayout,
    /// Base of the rotation in windowed layers, where it is another and not scaled.
    pub window_theta: Option<f64>,
    pub windows: Windows,
    /// q, k and v always carry a bias.
    pub qkv_bias: bool,
    pub qk_norm: QkNorm,
    pub sinks: bool,
    /// Attention is multi-head latent attention.
    pub latent: bool,
    pub norms: NormLayout,
    /// Hugging Face's weights of norms lack the 1 that they are added to.
    pub norms_less_one: bool,
    /// The embedding is multiplied by the root of the hidden size.
    pub scaled_embedding: bool,
    pub gating: Gating,
    /// The feed-forward is a mixture of experts, at least in some layers.
    pub experts: bool,
    /// Router and experts have biases.
    pub expert_bias: bool,
    /// Default where the metadata does not say whether expert weights are renormalised.
    pub renormalise: bool,
    /// Names of tensors that are not the usual ones: role, in GGUF, in Hugging Face's form.
    pub names: &'static [(&'static str, &'static str, &'static str)],
}

/// Which layers have a sliding window, where the metadata does not name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// None of GGUF, all of Hugging Face that say a window: GGUF does not carry it for these families.
    NotInGguf,
    /// Those that the metadata says.
    AsSaid,
    /// All but each of this number: of 6 the last.
    ButEvery(usize),
}

const BASE: Family = Family {
    name: "",
    gguf: "",
    huggingface: &[],
    gguf_rope: RopeLayout::Neox,
    hf_rope: RopeLayout::Neox,
    window_theta: None,
    windows: Windows::AsSaid,
    qkv_bias: false,
    qk_norm: QkNorm::None,
    sinks: false,
    latent: false,
    norms: NormLayout::Pre,
    norms_less_one: false,
    scaled_embedding: false,
    gating: Gating::Silu,
    experts: false,
    expert_bias: false,
    renormalise: true,
    names: &[],
};

/// What all Gemmas have.
const GEMMA: Family = Family {
    norms: NormLayout::Sandwich,
    norms_less_one: true,
    scaled_embedding: true,
    gating: Gating::GeluTanh,
    names: &[
        ("feed_forward_norm", "ffn_norm.weight", "pre_feedforward_layernorm.weight"),
        ("attention_post_norm", "post_attention_norm.weight", "post_attention_layernorm.weight"),
    ],
    ..BASE
};

/// Families by name. Mixtral and Mistral are `llama` in GGUF: mixtral is the one with experts, and
/// mistral's sliding window is not carried by the format.
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
        window_theta: Some(10_000.0),
        windows: Windows::ButEvery(6),
        qk_norm: QkNorm::PerHead,
        ..GEMMA
    },
    Family {
        name: "gemma2",
        gguf: "gemma2",
        huggingface: &["gemma2"],
        windows: Windows::ButEvery(2),
        ..GEMMA
    },
    Family {
        name: "deepseek2",
        gguf: "deepseek2",
        huggingface: &["deepseek_v2", "deepseek_v3"],
        gguf_rope: RopeLayout::Interleaved,
        hf_rope: RopeLayout::Interleaved,
        latent: true,
        experts: true,
        renormalise: false,
        ..BASE
    },
    Family {
        name: "glm4moe",
        gguf: "glm4moe",
        huggingface: &["glm4_moe"],
        qk_norm: QkNorm::PerHead,
        experts: true,
        names: &[(
            "feed_forward_norm",
            "post_attention_norm.weight",
            "post_attention_layernorm.weight",
        )],
        ..BASE
    },
];

impl Family {
    /// What rows of the embedding table are multiplied with.
    pub fn embedding_scale(&self, hidden: usize) -> f32 {
        if self.scaled_embedding { (hidden as f32).sqrt() } else { 1.0 }
    }

    /// Which rotation a layer with such a window has.
    pub fn rope_of(&self, window: Option<usize>) -> usize {
        usize::from(self.window_theta.is_some() && window.is_some())
    }
}

impl Windows {
    /// Whether layer `index` slides where the metadata has a window but does not name layers.
    pub fn slides(self, index: usize) -> bool {
        match self {
            Windows::NotInGguf | Windows::AsSaid => true,
            Windows::ButEvery(period) => !(index + 1).is_multiple_of(period),
        }
    }
}

/// The family of a GGUF file, told apart by its experts where two families share a name.
pub fn from_gguf(architecture: &str, has_experts: bool) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.gguf == architecture && family.experts == has_experts)
}

/// The family of a Hugging Face `model_type`.
pub fn from_huggingface(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.huggingface.contains(&model_type))
}

/// A family by its name here.
pub fn by_name(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name)
}

/// Names of all families, for messages and documentation.
pub fn known_families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.name)
}

/// The names in one line.
pub fn known_list() -> String {
    known_families().collect::<Vec<_>>().join(", ")
}
