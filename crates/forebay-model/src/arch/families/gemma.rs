//! The Gemma models.

use forebay_ops::Gating;

use super::super::architecture::QkNorm;
use super::super::family::{
    Attention, Ends, Family, FeedForward, Files, Layers, OwnNames, Rotation, SparseLayers,
    WindowTheta, Windows,
};
use super::super::shapes::{NormLayout, StreamForm};

/// Common properties of all Gemma models.
const GEMMA: Family = Family {
    files: Files {
        norms_less_one: true,
        names: &[
            ("feed_forward_norm", "ffn_norm.weight", "pre_feedforward_layernorm.weight"),
            (
                "attention_post_norm",
                "post_attention_norm.weight",
                "post_attention_layernorm.weight",
            ),
        ],
        ..Files::BASE
    },
    feed_forward: FeedForward { gating: Gating::GeluTanh, ..FeedForward::BASE },
    layers: Layers { norms: NormLayout::Sandwich, ..Layers::BASE },
    ends: Ends { scaled_embedding: true, tied: true, ..Ends::BASE },
    ..Family::BASE
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "gemma3",
        files: Files { gguf: &["gemma3"], huggingface: &["gemma3_text", "gemma3"], ..GEMMA.files },
        attention: Attention {
            windows: Windows::ButEvery(6),
            qk_norm: QkNorm::PerHead,
            ..GEMMA.attention
        },
        rotation: Rotation { of_windows: Some(WindowTheta::Of(10_000.0)), ..GEMMA.rotation },
        ..GEMMA
    },
    // The first Gemma has no norms behind blocks.
    Family {
        name: "gemma",
        files: Files { gguf: &["gemma"], huggingface: &["gemma"], names: &[], ..GEMMA.files },
        layers: Layers::BASE,
        ..GEMMA
    },
    Family {
        name: "gemma2",
        files: Files { gguf: &["gemma2"], huggingface: &["gemma2"], ..GEMMA.files },
        attention: Attention {
            windows: Windows::ButEvery(2),
            window: Some(4096),
            softcap: Some(50.0),
            ..GEMMA.attention
        },
        ends: Ends { logit_softcap: Some(30.0), ..GEMMA.ends },
        ..GEMMA
    },
    Family {
        name: "gemma4",
        files: Files {
            gguf: &["gemma4"],
            huggingface: &["gemma4_text"],
            norms_less_one: false,
            names: GEMMA4_NAMES,
            ..GEMMA.files
        },
        attention: Attention {
            windows: Windows::ButEvery(6),
            qk_norm: QkNorm::PerHead,
            scale: Some(1.0),
            normed_values: true,
            keys_as_values: true,
            ..GEMMA.attention
        },
        rotation: Rotation { of_windows: Some(WindowTheta::Of(10_000.0)), ..GEMMA.rotation },
        feed_forward: FeedForward {
            experts: true,
            dense_too: true,
            beside_dense: true,
            ..GEMMA.feed_forward
        },
        layers: Layers { scales: true, ..GEMMA.layers },
        ..GEMMA
    },
    Family {
        name: "vaultgemma",
        files: Files {
            huggingface: &["vaultgemma"],
            names: &[("feed_forward_norm", "", "pre_feedforward_layernorm.weight")],
            ..GEMMA.files
        },
        attention: Attention {
            windows: Windows::ButEvery(2),
            window: Some(4096),
            softcap: Some(50.0),
            ..GEMMA.attention
        },
        layers: Layers::BASE,
        ends: Ends { logit_softcap: Some(30.0), ..GEMMA.ends },
        ..GEMMA
    },
    Family {
        name: "gemma3n",
        files: Files {
            gguf: &["gemma3n"],
            huggingface: &["gemma3n_text"],
            norms_less_one: false,
            names: GEMMA3N_NAMES,
            ..GEMMA.files
        },
        attention: Attention {
            windows: Windows::ButEvery(5),
            window: Some(512),
            qk_norm: QkNorm::PerHead,
            scale: Some(1.0),
            normed_values: true,
            ..GEMMA.attention
        },
        rotation: Rotation { of_windows: Some(WindowTheta::Of(10_000.0)), ..GEMMA.rotation },
        feed_forward: FeedForward {
            sparse_layers: Some(SparseLayers { layers: 10, share: 0.95 }),
            ..GEMMA.feed_forward
        },
        layers: Layers { streams: Some(StreamForm::Predicted), ..GEMMA.layers },
        ends: Ends { logit_softcap: Some(30.0), ..GEMMA.ends },
        ..GEMMA
    },
];

const GEMMA3N_NAMES: OwnNames = &[
    ("feed_forward_norm", "", "pre_feedforward_layernorm.weight"),
    ("streams_router", "altup_router.weight", "altup.modality_router.weight"),
    ("streams_router_norm", "altup_router_norm.weight", "altup.router_norm.weight"),
    ("streams_prediction", "altup_predict_coef.weight", "altup.prediction_coefs.weight"),
    ("streams_correction", "altup_correct_coef.weight", "altup.correction_coefs.weight"),
    ("streams_output_scale", "altup_correct_scale.weight", "altup.correct_output_scale"),
    ("branch_left", "laurel_l.weight", "laurel.linear_left.weight"),
    ("branch_right", "laurel_r.weight", "laurel.linear_right.weight"),
    ("branch_norm", "laurel_post_norm.weight", "laurel.post_laurel_norm.weight"),
];

const GEMMA4_NAMES: OwnNames = &[
    ("feed_forward_norm", "ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("attention_post_norm", "post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("router", "ffn_gate_inp.weight", "router.proj.weight"),
    ("router_norm", "ffn_gate_inp.scale", "router.scale"),
    ("expert_scales", "ffn_down_exps.scale", "router.per_expert_scale"),
    ("expert_norm", "pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    ("expert_post_norm", "post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
    ("shared_post_norm", "post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    ("expert_gate_up", "ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    ("expert_down_stack", "ffn_down_exps.weight", "experts.down_proj"),
    ("shared_gate", "ffn_gate.weight", "mlp.gate_proj.weight"),
    ("shared_up", "ffn_up.weight", "mlp.up_proj.weight"),
    ("shared_down", "ffn_down.weight", "mlp.down_proj.weight"),
];
