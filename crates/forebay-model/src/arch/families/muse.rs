//! The Muse models.

use forebay_compute::GateFunction;

use super::super::architecture::{EmbeddingNorm, NormLayout, OutputGate, QkNorm};
use super::super::family::{Attention, Ends, Factors, Family, Files, Layers, Rotation, Windows};
use super::super::unrotated::{Bases, Unrotated};

/// Base of the rotation, and number of layers from one without a window to the next.
const BASE: f64 = 500_000.0;
const PERIOD: usize = 4;

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "muse-glimmer",
    files: Files {
        gguf: &["muse-glimmer"],
        huggingface: &["muse_glimmer_text"],
        names: &[
            ("output_gate", "", "self_attn.gate_proj.weight"),
            ("feed_forward_norm", "", "pre_feedforward_layernorm.weight"),
        ],
        norms_less_one: true,
        whole_final_norm: true,
        ..Files::BASE
    },
    attention: Attention {
        windows: Windows::ButEveryFromEnd(PERIOD),
        window: Some(2048),
        qk_norm: QkNorm::Weightless { unrotated_too: true },
        query_scale: 3.87,
        output_gate: OutputGate::ByElement(GateFunction::Sigmoid),
        ..Attention::BASE
    },
    rotation: Rotation {
        theta: BASE,
        unrotated: Some(Unrotated::ByBase(Bases { period: PERIOD, usual: BASE })),
        ..Rotation::BASE
    },
    layers: Layers { norms: NormLayout::Sandwich, post_norm_epsilon: Some(1e-8), ..Layers::BASE },
    ends: Ends {
        embedding_norm: EmbeddingNorm::Weightless,
        logit_softcap: Some(20.0),
        logit_scale: 0.196_116_135,
        gguf_factors: Factors::OfLogits,
        ..Ends::BASE
    },
    ..Family::BASE
}];
