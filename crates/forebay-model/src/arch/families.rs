//! The families that the decoder runs: what sets each apart, as a table.

use super::{HfExpertNames, QkNorm};
use forebay_compute::RopeLayout;

/// What a family fixes that its metadata does not say.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    pub name: &'static str,
    /// `general.architecture` of its GGUF form.
    pub gguf: &'static str,
    /// `model_type` of its Hugging Face form.
    pub huggingface: &'static str,
    /// Pairs that rotate together in the GGUF form: its converter reorders q and k for some families.
    pub gguf_rope: RopeLayout,
    /// q, k and v always carry a bias.
    pub qkv_bias: bool,
    pub qk_norm: QkNorm,
    /// The feed-forward is a mixture of experts.
    pub experts: bool,
    /// Default where the metadata does not say whether expert weights are renormalised.
    pub renormalise: bool,
    pub hf_experts: HfExpertNames,
}

const BASE: Family = Family {
    name: "",
    gguf: "",
    huggingface: "",
    gguf_rope: RopeLayout::Neox,
    qkv_bias: false,
    qk_norm: QkNorm::None,
    experts: false,
    renormalise: true,
    hf_experts: HfExpertNames::Mlp,
};

/// Families by name. Mixtral and Mistral are `llama` in GGUF: mixtral is the one with experts, and
/// mistral's sliding window is not carried by the format.
const FAMILIES: &[Family] = &[
    Family {
        name: "llama",
        gguf: "llama",
        huggingface: "llama",
        gguf_rope: RopeLayout::Interleaved,
        ..BASE
    },
    Family {
        name: "mixtral",
        gguf: "llama",
        huggingface: "mixtral",
        gguf_rope: RopeLayout::Interleaved,
        experts: true,
        hf_experts: HfExpertNames::BlockSparse,
        ..BASE
    },
    Family {
        name: "mistral",
        gguf: "mistral",
        huggingface: "mistral",
        gguf_rope: RopeLayout::Interleaved,
        ..BASE
    },
    Family { name: "qwen2", gguf: "qwen2", huggingface: "qwen2", qkv_bias: true, ..BASE },
    Family { name: "qwen3", gguf: "qwen3", huggingface: "qwen3", qk_norm: QkNorm::PerHead, ..BASE },
    Family {
        name: "qwen3moe",
        gguf: "qwen3moe",
        huggingface: "qwen3_moe",
        qk_norm: QkNorm::PerHead,
        experts: true,
        ..BASE
    },
    Family {
        name: "olmoe",
        gguf: "olmoe",
        huggingface: "olmoe",
        qk_norm: QkNorm::WholeProjection,
        experts: true,
        renormalise: false,
        ..BASE
    },
];

/// The family of a GGUF file, told apart by its experts where two families share a name.
pub fn from_gguf(architecture: &str, has_experts: bool) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.gguf == architecture && family.experts == has_experts)
}

/// The family of a Hugging Face `model_type`.
pub fn from_huggingface(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.huggingface == model_type)
}

/// Names of all families, for messages and documentation.
pub fn known_families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.name)
}

/// The names in one line.
pub fn known_list() -> String {
    known_families().collect::<Vec<_>>().join(", ")
}
