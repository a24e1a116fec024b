//! Inkling.

use forebay_ops::Scoring;

use super::super::architecture::{EmbeddingNorm, QkNorm};
use super::super::family::{
    Attention, Ends, Family, FeedForward, Files, Layers, OwnNames, Rotation, Windows,
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "inkling",
    files: Files {
        huggingface: &["inkling_text"],
        names: NAMES,
        interleaved_gate_up: true,
        ..Files::BASE
    },
    attention: Attention {
        windows: Windows::ButEvery(6),
        window: Some(512),
        qk_norm: QkNorm::PerHead,
        relative: true,
        ..Attention::BASE
    },
    rotation: Rotation { rotates: false, ..Rotation::BASE },
    feed_forward: FeedForward {
        scored_shared: true,
        scoring: Scoring::Sigmoid,
        scale: 8.0,
        ..FeedForward::CORRECTED_EXPERTS
    },
    layers: Layers { convolutions: true, feed_forward_scales: true, ..Layers::BASE },
    ends: Ends { embedding_norm: EmbeddingNorm::Weighted, width_scale: Some(24.0), ..Ends::BASE },
    ..Family::BASE
}];

const NAMES: OwnNames = &[
    ("embedding", "", "embed.weight"),
    ("head", "", "model.unembed.weight"),
    ("attention_norm", "", "attn_norm.weight"),
    ("feed_forward_norm", "", "mlp_norm.weight"),
    ("q", "", "attn.wq_du.weight"),
    ("k", "", "attn.wk_dv.weight"),
    ("v", "", "attn.wv_dv.weight"),
    ("o", "", "attn.wo_ud.weight"),
    ("q_norm", "", "attn.q_norm.weight"),
    ("k_norm", "", "attn.k_norm.weight"),
    ("relative", "", "attn.wr_du.weight"),
    ("relative_profiles", "", "attn.rel_logits_proj.proj"),
    ("k_convolution", "", "attn.k_sconv.weight"),
    ("v_convolution", "", "attn.v_sconv.weight"),
    ("attention_convolution", "", "attn_sconv.weight"),
    ("feed_forward_convolution", "", "mlp_sconv.weight"),
    ("gate_up", "", "mlp.w13_dn.weight"),
    ("down", "", "mlp.w2_md.weight"),
    ("dense_scale", "", "mlp.global_scale"),
    ("expert_scale", "", "mlp.gate.global_scale"),
    ("correction_bias", "", "mlp.gate.bias"),
    ("expert_gate_up", "", "mlp.experts.w13_weight"),
    ("expert_down_stack", "", "mlp.experts.w2_weight"),
    ("always_gate_up", "", "mlp.shared_experts.shared_w13_weight"),
    ("always_down_stack", "", "mlp.shared_experts.shared_w2_weight"),
];
