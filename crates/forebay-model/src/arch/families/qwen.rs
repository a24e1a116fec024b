//! The Qwen models.

use forebay_ops::DeltaRule;

use super::super::architecture::{OutputGate, QkNorm};
use super::super::family::{
    Attention, Family, FeedForward, Files, Indexers, Layers, OwnNames, Recurrence,
};
use super::super::mtp_shape::{MtpForm, MtpRule};
use super::super::recurrent::HeadOrder;
use super::super::shapes::{NormLayout, StreamForm};

/// Common properties of models with gated DeltaNet layers.
const QWEN_NEXT: Family = Family {
    files: Files {
        norms_less_one: true,
        mtp: Some(MtpRule::of(MtpForm::Beside)),
        names: &[
            ("feed_forward_norm", "post_attention_norm.weight", "post_attention_layernorm.weight"),
            ("shared_gate", "ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
            ("shared_up", "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
            ("shared_down", "ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
        ],
        ..Files::BASE
    },
    attention: Attention {
        qk_norm: QkNorm::PerHead,
        output_gate: OutputGate::InQueries,
        ..Attention::BASE
    },
    recurrence: Recurrence { rule: Some(DeltaRule::GatedDelta), ..Recurrence::BASE },
    feed_forward: FeedForward { shared_gate: true, ..FeedForward::BASE },
    ..Family::BASE
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "qwen2",
        files: Files {
            gguf: &["qwen2", "qwen2vl"],
            huggingface: &["qwen2", "qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl"],
            ..Files::BASE
        },
        attention: Attention { qkv_bias: true, ..Attention::BASE },
        ..Family::BASE
    },
    Family {
        name: "qwen3",
        files: Files {
            gguf: &["qwen3", "qwen3vl"],
            huggingface: &["qwen3", "qwen3_vl_text"],
            ..Files::BASE
        },
        attention: Attention { qk_norm: QkNorm::PerHead, ..Attention::BASE },
        ..Family::BASE
    },
    Family {
        name: "qwen3moe",
        files: Files { gguf: &["qwen3moe"], huggingface: &["qwen3_moe"], ..Files::BASE },
        attention: Attention { qk_norm: QkNorm::PerHead, ..Attention::BASE },
        feed_forward: FeedForward { experts: true, ..FeedForward::BASE },
        ..Family::BASE
    },
    // The text part of Qwen3-VL. Its folders hold the transposed matrices of experts.
    Family {
        name: "qwen3vlmoe",
        files: Files {
            gguf: &["qwen3vlmoe"],
            huggingface: &["qwen3_vl_moe_text"],
            transposed_experts: true,
            ..Files::BASE
        },
        attention: Attention { qk_norm: QkNorm::PerHead, ..Attention::BASE },
        feed_forward: FeedForward { experts: true, ..FeedForward::BASE },
        ..Family::BASE
    },
    Family {
        name: "qwen3next",
        files: Files { gguf: &["qwen3next"], huggingface: &["qwen3_next"], ..QWEN_NEXT.files },
        feed_forward: FeedForward { experts: true, ..QWEN_NEXT.feed_forward },
        ..QWEN_NEXT
    },
    Family {
        name: "qwen35",
        files: Files {
            gguf: &["qwen35"],
            huggingface: &["qwen3_5_text", "qwen3_5"],
            ..QWEN_NEXT.files
        },
        recurrence: Recurrence { gguf_heads: HeadOrder::Tiled, ..QWEN_NEXT.recurrence },
        ..QWEN_NEXT
    },
    Family {
        name: "qwen35moe",
        files: Files {
            gguf: &["qwen35moe"],
            huggingface: &["qwen3_5_moe_text", "qwen3_5_moe"],
            ..QWEN_NEXT.files
        },
        recurrence: Recurrence { gguf_heads: HeadOrder::Tiled, ..QWEN_NEXT.recurrence },
        feed_forward: FeedForward { experts: true, ..QWEN_NEXT.feed_forward },
        ..QWEN_NEXT
    },
    Family {
        name: "qwen4-exp",
        files: Files {
            gguf: &["qwen4exp"],
            huggingface: &["qwen4_exp_text"],
            mtp: None,
            names: QWEN4_EXP,
            ..QWEN_NEXT.files
        },
        attention: Attention { indexer: Some(Indexers::MeanPools), ..QWEN_NEXT.attention },
        recurrence: Recurrence {
            gguf_heads: HeadOrder::Tiled,
            sigmoid_gate: true,
            ..QWEN_NEXT.recurrence
        },
        feed_forward: FeedForward { experts: true, ..QWEN_NEXT.feed_forward },
        layers: Layers {
            norms: NormLayout::None,
            streams: Some(StreamForm::Gated),
            ..QWEN_NEXT.layers
        },
        ..QWEN_NEXT
    },
    Family {
        name: "qwen2moe",
        files: Files {
            gguf: &["qwen2moe"],
            huggingface: &["qwen2_moe"],
            names: &[
                ("shared_gate", "ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
                ("shared_up", "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
                ("shared_down", "ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
            ],
            ..Files::BASE
        },
        attention: Attention { qkv_bias: true, ..Attention::BASE },
        feed_forward: FeedForward {
            experts: true,
            shared_gate: true,
            renormalise: false,
            ..FeedForward::BASE
        },
        ..Family::BASE
    },
];

const QWEN4_EXP: OwnNames = &[
    ("indexer_q", "indexer.q_proj.weight", ""),
    ("indexer_k", "indexer.k_proj.weight", ""),
    ("indexer_k_norm", "", "self_attn.indexer.k_layernorm.weight"),
    ("shared_gate", "", "mlp.shared_expert.gate_proj.weight"),
    ("shared_up", "", "mlp.shared_expert.up_proj.weight"),
    ("shared_down", "", "mlp.shared_expert.down_proj.weight"),
];
