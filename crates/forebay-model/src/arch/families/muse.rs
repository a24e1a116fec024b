//! The Muse models.

use forebay_compute::RopeLayout;
use forebay_ops::{GateFunction, Scoring};

use super::super::architecture::{EmbeddingNorm, OutputGate, QkNorm};
use super::super::family::{
    Attention, Ends, Factors, Family, FeedForward, Files, Layers, OwnNames, Rotation, Windows,
};
use super::super::shapes::{LatentNorm, NormLayout};
use super::super::unrotated::{Bases, Unrotated};

/// Base of the rotation, and number of layers from one without a window to the next.
const BASE: f64 = 500_000.0;
const PERIOD: usize = 4;

/// Common properties of both models.
const MUSE: Family = Family {
    files: Files { norms_less_one: true, whole_final_norm: true, ..Files::BASE },
    attention: Attention {
        windows: Windows::ButEveryFromEnd(PERIOD),
        window: Some(2048),
        qk_norm: QkNorm::Weightless { unrotated_too: true },
        output_gate: OutputGate::ByElement(GateFunction::Sigmoid),
        ..Attention::BASE
    },
    rotation: Rotation {
        gguf: RopeLayout::Interleaved,
        theta: BASE,
        unrotated: Some(Unrotated::ByBase(Bases { period: PERIOD, usual: BASE })),
        ..Rotation::BASE
    },
    layers: Layers { norms: NormLayout::Sandwich, post_norm_epsilon: Some(1e-8), ..Layers::BASE },
    ends: Ends {
        embedding_norm: EmbeddingNorm::Weightless,
        logit_softcap: Some(20.0),
        ..Ends::BASE
    },
    ..Family::BASE
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "muse-glimmer",
        files: Files {
            gguf: &["muse-glimmer"],
            huggingface: &["muse_glimmer_text"],
            names: GLIMMER_NAMES,
            ..MUSE.files
        },
        attention: Attention { query_scale: 3.87, ..MUSE.attention },
        ends: Ends { logit_scale: 0.196_116_13, gguf_factors: Factors::OfLogits, ..MUSE.ends },
        ..MUSE
    },
    Family {
        name: "muse-spark",
        files: Files { huggingface: &["muse_spark_text"], names: SPARK_NAMES, ..MUSE.files },
        attention: Attention { query_scale: 5.473_006_5, output_norm: true, ..MUSE.attention },
        feed_forward: FeedForward {
            latent: Some(LatentNorm::Before),
            output_norms: true,
            scaled_router: true,
            scoring: Scoring::Sigmoid,
            ..FeedForward::CORRECTED_EXPERTS
        },
        layers: Layers { gated_residuals: true, ..MUSE.layers },
        ends: Ends { logit_scale: 0.176_776_7, ..MUSE.ends },
        ..MUSE
    },
];

const GLIMMER_NAMES: OwnNames = &[
    ("output_gate", "", "self_attn.gate_proj.weight"),
    ("feed_forward_norm", "", "pre_feedforward_layernorm.weight"),
];

const SPARK_NAMES: OwnNames = &[
    ("output_gate", "", "self_attn.gate_proj.weight"),
    ("feed_forward_norm", "", "pre_feedforward_layernorm.weight"),
    ("attention_residual_gate", "", "post_attention_residual_gate.gate"),
    ("feed_forward_residual_gate", "", "post_feedforward_residual_gate.gate"),
    ("latent_down", "", "mlp.pre_expert_proj.weight"),
    ("latent_norm", "", "mlp.pre_expert_norm.weight"),
    ("latent_up", "", "mlp.post_expert_proj.weight"),
    ("expert_output_norm", "", "mlp.experts.post_expert_norm.weight"),
];
