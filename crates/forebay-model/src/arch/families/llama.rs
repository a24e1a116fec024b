//! The Llama models and those that began as such: Mistral, Phi, GPT-OSS, OLMo.

use forebay_compute::RopeLayout;
use forebay_ops::{Gating, Scoring};

use super::super::architecture::QkNorm;
use super::super::family::{
    Attention, Ends, Factors, Family, FeedForward, Files, Layers, Rotation, WindowTheta, Windows,
};
use super::super::shapes::NormLayout;
use super::super::unrotated::Unrotated;

/// Common properties of Granite models with attention only.
const GRANITE: Family = Family {
    rotation: Rotation { gguf: RopeLayout::Interleaved, ..Rotation::BASE },
    ends: Ends { gguf_factors: Factors::AllOfGranite, ..Ends::BASE },
    ..Family::BASE
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "llama",
        files: Files {
            gguf: &["llama"],
            huggingface: &["llama", "internlm3", "iquestcoder"],
            ..Files::BASE
        },
        rotation: Rotation { gguf: RopeLayout::Interleaved, ..Rotation::BASE },
        ..Family::BASE
    },
    Family {
        name: "mixtral",
        files: Files {
            gguf: &["llama"],
            huggingface: &["mixtral"],
            names: &[
                ("router", "ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
                (
                    "expert_gate",
                    "ffn_gate_exps.weight",
                    "block_sparse_moe.experts.{expert}.w1.weight",
                ),
                ("expert_up", "ffn_up_exps.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
                (
                    "expert_down",
                    "ffn_down_exps.weight",
                    "block_sparse_moe.experts.{expert}.w2.weight",
                ),
            ],
            ..Files::BASE
        },
        attention: Attention { windows: Windows::NotInGguf, ..Attention::BASE },
        rotation: Rotation { gguf: RopeLayout::Interleaved, ..Rotation::BASE },
        feed_forward: FeedForward { experts: true, ..FeedForward::BASE },
        ..Family::BASE
    },
    Family {
        name: "mistral",
        files: Files { gguf: &["mistral"], huggingface: &["mistral", "ministral"], ..Files::BASE },
        attention: Attention { windows: Windows::NotInGguf, ..Attention::BASE },
        rotation: Rotation { gguf: RopeLayout::Interleaved, ..Rotation::BASE },
        ..Family::BASE
    },
    Family {
        name: "mistral3",
        files: Files { gguf: &["mistral3"], huggingface: &["ministral3"], ..Files::BASE },
        attention: Attention { windows: Windows::NotInGguf, ..Attention::BASE },
        rotation: Rotation { gguf: RopeLayout::Interleaved, tempered: true, ..Rotation::BASE },
        feed_forward: FeedForward { experts: true, dense_too: true, ..FeedForward::BASE },
        ..Family::BASE
    },
    // Every fourth layer has no rotation.
    Family {
        name: "smollm3",
        files: Files { gguf: &["smollm3"], huggingface: &["smollm3"], ..Files::BASE },
        rotation: Rotation {
            gguf: RopeLayout::Interleaved,
            unrotated: Some(Unrotated::Every(4)),
            ..Rotation::BASE
        },
        ..Family::BASE
    },
    Family {
        name: "seed_oss",
        files: Files {
            gguf: &["seed_oss"],
            huggingface: &["seed_oss"],
            names: &[("feed_forward_norm", "post_attention_norm.weight", "")],
            ..Files::BASE
        },
        attention: Attention { qkv_bias: true, ..Attention::BASE },
        ..Family::BASE
    },
    Family {
        name: "exaone4",
        files: Files { gguf: &["exaone4"], huggingface: &["exaone4"], ..Files::BASE },
        attention: Attention {
            windows: Windows::ButEvery(4),
            qk_norm: QkNorm::PerHead,
            ..Attention::BASE
        },
        rotation: Rotation { unrotated: Some(Unrotated::WithoutWindow), ..Rotation::BASE },
        layers: Layers { norms: NormLayout::Post, ..Layers::BASE },
        ..Family::BASE
    },
    Family {
        name: "granite",
        files: Files { gguf: &["granite"], huggingface: &["granite"], ..Files::BASE },
        ..GRANITE
    },
    Family {
        name: "granitemoe",
        files: Files {
            gguf: &["granitemoe"],
            huggingface: &["granitemoe"],
            names: &[
                ("router", "", "block_sparse_moe.router.layer.weight"),
                ("expert_gate_up", "", "block_sparse_moe.input_linear.weight"),
                ("expert_down_stack", "", "block_sparse_moe.output_linear.weight"),
            ],
            ..Files::BASE
        },
        feed_forward: FeedForward { experts: true, ..FeedForward::BASE },
        ..GRANITE
    },
    Family {
        name: "olmoe",
        files: Files { gguf: &["olmoe"], huggingface: &["olmoe"], ..Files::BASE },
        attention: Attention { qk_norm: QkNorm::WholeProjection, ..Attention::BASE },
        feed_forward: FeedForward { experts: true, renormalise: false, ..FeedForward::BASE },
        ..Family::BASE
    },
    Family {
        name: "gpt-oss",
        files: Files {
            gguf: &["gpt-oss"],
            huggingface: &["gpt_oss"],
            names: &[
                (
                    "feed_forward_norm",
                    "post_attention_norm.weight",
                    "post_attention_layernorm.weight",
                ),
                ("router", "ffn_gate_inp.weight", "mlp.router.weight"),
                ("router_bias", "ffn_gate_inp.bias", "mlp.router.bias"),
                ("expert_down", "ffn_down_exps.weight", "mlp.experts.down_proj"),
            ],
            ..Files::BASE
        },
        attention: Attention { windows: Windows::ButEvery(2), sinks: true, ..Attention::BASE },
        feed_forward: FeedForward {
            gating: Gating::Clamped { alpha: 1.702, limit: 7.0 },
            experts: true,
            bias: true,
            ..FeedForward::BASE
        },
        ..Family::BASE
    },
    // The third generation has windows, and the second has none. Both have the same name in GGUF.
    Family {
        name: "olmo2",
        files: Files { gguf: &["olmo2"], huggingface: &["olmo2", "olmo3"], ..Files::BASE },
        attention: Attention {
            windows: Windows::ButEvery(4),
            qk_norm: QkNorm::WholeProjection,
            ..Attention::BASE
        },
        rotation: Rotation { of_windows: Some(WindowTheta::Same), ..Rotation::BASE },
        layers: Layers { norms: NormLayout::Post, ..Layers::BASE },
        ..Family::BASE
    },
    Family {
        name: "llama4",
        files: Files {
            gguf: &["llama4"],
            huggingface: &["llama4_text"],
            transposed_experts: true,
            names: &[
                ("gate", "ffn_gate.weight", "feed_forward.gate_proj.weight"),
                ("up", "ffn_up.weight", "feed_forward.up_proj.weight"),
                ("down", "ffn_down.weight", "feed_forward.down_proj.weight"),
                ("router", "ffn_gate_inp.weight", "feed_forward.router.weight"),
                ("expert_gate_up", "", "feed_forward.experts.gate_up_proj"),
                ("expert_down_stack", "", "feed_forward.experts.down_proj"),
                (
                    "shared_gate",
                    "ffn_gate_shexp.weight",
                    "feed_forward.shared_expert.gate_proj.weight",
                ),
                ("shared_up", "ffn_up_shexp.weight", "feed_forward.shared_expert.up_proj.weight"),
                (
                    "shared_down",
                    "ffn_down_shexp.weight",
                    "feed_forward.shared_expert.down_proj.weight",
                ),
            ],
            ..Files::BASE
        },
        attention: Attention {
            qk_norm: QkNorm::Weightless { unrotated_too: false },
            ..Attention::BASE
        },
        rotation: Rotation { unrotated: Some(Unrotated::LLAMA_4), ..Rotation::PAIRS },
        feed_forward: FeedForward {
            experts: true,
            scaled_input: true,
            shared: 1,
            renormalise: false,
            scoring: Scoring::Sigmoid,
            ..FeedForward::BASE
        },
        ..Family::BASE
    },
    // Queries, keys and values are one matrix, and gate and up are another.
    Family {
        name: "phi3",
        files: Files {
            gguf: &["phi3"],
            huggingface: &["phi3"],
            names: &[("gate_up", "ffn_up.weight", "mlp.gate_up_proj.weight")],
            ..Files::BASE
        },
        attention: Attention { windows: Windows::All, ..Attention::BASE },
        ..Family::BASE
    },
];
