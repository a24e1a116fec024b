//! Models with layer norms. Many of them compute attention and feed-forward side by side.

use forebay_compute::RopeLayout;
use forebay_ops::{Gating, Scoring};

use super::super::family::{
    Attention, Ends, Factors, Family, FeedForward, Files, Layers, Rotation, Windows,
};
use super::super::unrotated::Unrotated;

/// Common properties of Cohere's models.
const COHERE: Family = Family {
    rotation: Rotation::PAIRS,
    layers: Layers::PARALLEL,
    ends: Ends { tied: true, logit_scale: 0.0625, gguf_factors: Factors::OfLogits, ..Ends::BASE },
    ..Family::BASE
};

/// Those of which some layers have a window, and rotate.
const COHERE_2: Family = Family {
    attention: Attention { windows: Windows::ButEvery(4), window: Some(4096), ..Attention::BASE },
    rotation: Rotation { unrotated: Some(Unrotated::WithoutWindow), ..Rotation::PAIRS },
    ..COHERE
};

/// Common properties of models whose tensors say which biases there are.
const BIASED: Family = Family {
    attention: Attention { bias_by_tensors: true, ..Attention::BASE },
    layers: Layers::LAYER_NORMS,
    ..Family::BASE
};

/// Feed-forwards without a gate.
const PLAIN_GELU: FeedForward = FeedForward { gating: Gating::PlainGeluTanh, ..FeedForward::BASE };

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "command-r",
        files: Files { gguf: &["command-r"], huggingface: &["cohere"], ..Files::BASE },
        ..COHERE
    },
    Family {
        name: "cohere2",
        files: Files { gguf: &["cohere2"], huggingface: &["cohere2"], ..Files::BASE },
        ..COHERE_2
    },
    Family {
        name: "cohere2moe",
        files: Files { gguf: &["cohere2moe"], huggingface: &["cohere2_moe"], ..Files::BASE },
        feed_forward: FeedForward {
            experts: true,
            chosen_by_logits: true,
            averaged: true,
            ..FeedForward::BASE
        },
        ..COHERE_2
    },
    Family {
        name: "starcoder2",
        files: Files {
            gguf: &["starcoder2"],
            huggingface: &["starcoder2"],
            names: &[("up", "", "mlp.c_fc.weight"), ("down", "", "mlp.c_proj.weight")],
            ..Files::BASE
        },
        attention: Attention { windows: Windows::NotInGguf, ..BIASED.attention },
        feed_forward: PLAIN_GELU,
        ends: Ends { tied: true, ..Ends::BASE },
        ..BIASED
    },
    Family {
        name: "stablelm",
        files: Files { gguf: &["stablelm"], huggingface: &["stablelm"], ..Files::BASE },
        layers: Layers { one_norm: true, parallel_by_key: true, ..Layers::LAYER_NORMS },
        ..BIASED
    },
    Family {
        name: "olmo",
        files: Files { gguf: &["olmo"], huggingface: &["olmo"], ..Files::BASE },
        attention: Attention { clamps: true, ..BIASED.attention },
        rotation: Rotation { gguf: RopeLayout::Interleaved, ..Rotation::BASE },
        layers: Layers { weightless_norms: true, ..Layers::LAYER_NORMS },
        ..BIASED
    },
    Family {
        name: "nemotron",
        files: Files {
            gguf: &["nemotron"],
            huggingface: &["nemotron"],
            norms_less_one: true,
            ..Files::BASE
        },
        feed_forward: FeedForward { gating: Gating::SquaredRelu, ..FeedForward::BASE },
        ..BIASED
    },
    Family {
        name: "phi2",
        files: Files {
            gguf: &["phi2"],
            huggingface: &["phi"],
            names: &[
                ("final_norm", "", "final_layernorm.weight"),
                ("o", "", "self_attn.dense.weight"),
                ("o_bias", "", "self_attn.dense.bias"),
                ("up", "", "mlp.fc1.weight"),
                ("down", "", "mlp.fc2.weight"),
            ],
            ..Files::BASE
        },
        feed_forward: PLAIN_GELU,
        layers: Layers::PARALLEL,
        ..BIASED
    },
    Family {
        name: "dbrx",
        files: Files {
            gguf: &["dbrx"],
            names: &[("feed_forward_norm", "attn_output_norm.weight", "")],
            ..Files::BASE
        },
        attention: Attention { clamps: true, ..Attention::BASE },
        feed_forward: FeedForward { experts: true, ..FeedForward::BASE },
        ..BIASED
    },
    Family { name: "orion", files: Files { gguf: &["orion"], ..Files::BASE }, ..BIASED },
    Family {
        name: "codeshell",
        files: Files { gguf: &["codeshell"], ..Files::BASE },
        feed_forward: PLAIN_GELU,
        ..BIASED
    },
    Family {
        name: "jais2",
        files: Files { gguf: &["jais2"], ..Files::BASE },
        feed_forward: FeedForward { gating: Gating::SquaredRelu, ..FeedForward::BASE },
        ..BIASED
    },
    // GPT-NeoX and Pythia.
    Family {
        name: "gptneox",
        files: Files { gguf: &["gptneox"], ..Files::BASE },
        feed_forward: PLAIN_GELU,
        layers: Layers { parallel_by_key: true, one_norm: false, ..Layers::PARALLEL },
        ..BIASED
    },
    // Falcon 7B has one norm for both blocks, and 40B has two.
    Family {
        name: "falcon",
        files: Files {
            gguf: &["falcon"],
            names: &[
                ("attention_norm", "attn_norm_2.weight", ""),
                ("feed_forward_norm", "attn_norm.weight", ""),
            ],
            ..Files::BASE
        },
        feed_forward: PLAIN_GELU,
        layers: Layers { one_norm: false, ..Layers::PARALLEL },
        ..BIASED
    },
    // Phi-3.5-MoE.
    Family {
        name: "phimoe",
        files: Files {
            gguf: &["phimoe"],
            huggingface: &["phimoe"],
            names: &[
                ("router", "", "block_sparse_moe.gate.weight"),
                ("expert_gate", "", "block_sparse_moe.experts.{expert}.w1.weight"),
                ("expert_up", "", "block_sparse_moe.experts.{expert}.w3.weight"),
                ("expert_down", "", "block_sparse_moe.experts.{expert}.w2.weight"),
            ],
            ..Files::BASE
        },
        attention: Attention { windows: Windows::All, ..BIASED.attention },
        rotation: Rotation { theta: 1_000_000.0, ..Rotation::BASE },
        feed_forward: FeedForward {
            experts: true,
            scoring: Scoring::SparseMixer,
            renormalise: false,
            ..FeedForward::BASE
        },
        ..BIASED
    },
];
