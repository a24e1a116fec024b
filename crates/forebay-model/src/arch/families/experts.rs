//! Further models with experts.

use forebay_ops::{GateFunction, Gating, Scoring};

use super::super::architecture::{OutputGate, QkNorm};
use super::super::family::{
    Attention, Ends, Family, FeedForward, Files, Indexers, Layers, OwnNames, Rotation, WindowTheta,
    Windows,
};
use super::super::mtp_shape::{MtpForm, MtpRule};
use super::super::shapes::NormLayout;
use super::super::unrotated::Unrotated;

const HUNYUAN: Family = Family {
    files: Files { names: HUNYUAN_NAMES, ..Files::BASE },
    attention: Attention { qk_norm: QkNorm::PerRotatedHead, ..Attention::BASE },
    ..Family::BASE
};

/// Predicting layers that take states before the model's last norm.
const OF_RAW_STATES: MtpRule = MtpRule { raw_states: true, ..MtpRule::of(MtpForm::InGguf) };

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "mimo2",
        files: Files {
            gguf: &["mimo2"],
            huggingface: &["mimo_v2_flash"],
            names: &[("sinks", "attn_sinks.weight", "self_attn.attention_sink_bias")],
            mtp: Some(OF_RAW_STATES),
            ..Files::BASE
        },
        rotation: Rotation { of_windows: Some(WindowTheta::Of(10_000.0)), ..Rotation::BASE },
        feed_forward: FeedForward::CORRECTED_EXPERTS,
        ..Family::BASE
    },
    Family {
        name: "glm4moe",
        files: Files {
            gguf: &["glm4moe"],
            huggingface: &["glm4_moe"],
            mtp: Some(MtpRule::of(MtpForm::Behind)),
            names: &[(
                "feed_forward_norm",
                "post_attention_norm.weight",
                "post_attention_layernorm.weight",
            )],
            ..Files::BASE
        },
        attention: Attention { qk_norm: QkNorm::PerHead, ..Attention::BASE },
        feed_forward: FeedForward::CORRECTED_EXPERTS,
        ..Family::BASE
    },
    Family {
        name: "dots1",
        files: Files { gguf: &["dots1"], huggingface: &["dots1"], ..Files::BASE },
        attention: Attention { qk_norm: QkNorm::PerHead, ..Attention::BASE },
        feed_forward: FeedForward::CORRECTED_EXPERTS,
        ..Family::BASE
    },
    Family {
        name: "hy_v3",
        files: Files {
            gguf: &["hy_v3"],
            huggingface: &["hy_v3"],
            mtp: Some(MtpRule::of(MtpForm::Behind)),
            names: &[
                ("router", "", "mlp.router.gate.weight"),
                ("correction_bias", "", "mlp.expert_bias"),
                ("shared_gate", "", "mlp.shared_mlp.gate_proj.weight"),
                ("shared_up", "", "mlp.shared_mlp.up_proj.weight"),
                ("shared_down", "", "mlp.shared_mlp.down_proj.weight"),
            ],
            ..Files::BASE
        },
        attention: Attention { qk_norm: QkNorm::PerHead, ..Attention::BASE },
        feed_forward: FeedForward::CORRECTED_EXPERTS,
        ..Family::BASE
    },
    Family {
        name: "exaone-moe",
        files: Files {
            gguf: &["exaone-moe"],
            huggingface: &["exaone_moe"],
            names: &[("correction_bias", "", "mlp.e_score_correction_bias")],
            ..Files::BASE
        },
        attention: Attention {
            windows: Windows::ButEvery(4),
            qk_norm: QkNorm::PerHead,
            ..Attention::BASE
        },
        rotation: Rotation { unrotated: Some(Unrotated::WithoutWindow), ..Rotation::BASE },
        feed_forward: FeedForward::CORRECTED_EXPERTS,
        ..Family::BASE
    },
    Family {
        name: "afmoe",
        files: Files {
            gguf: &["afmoe"],
            huggingface: &["afmoe"],
            names: &[
                ("output_gate", "", "self_attn.gate_proj.weight"),
                ("feed_forward_norm", "", "pre_mlp_layernorm.weight"),
                ("feed_forward_post_norm", "", "post_mlp_layernorm.weight"),
                ("router", "", "mlp.router.gate.weight"),
                ("correction_bias", "", "mlp.expert_bias"),
            ],
            ..Files::BASE
        },
        attention: Attention {
            windows: Windows::ButEvery(4),
            qk_norm: QkNorm::PerHead,
            output_gate: OutputGate::ByElement(GateFunction::Sigmoid),
            ..Attention::BASE
        },
        rotation: Rotation { unrotated: Some(Unrotated::WithoutWindow), ..Rotation::BASE },
        feed_forward: FeedForward::CORRECTED_EXPERTS,
        layers: Layers { norms: NormLayout::Sandwich, ..Layers::BASE },
        ends: Ends { scaled_embedding: true, ..Ends::BASE },
        ..Family::BASE
    },
    Family {
        name: "laguna",
        files: Files {
            gguf: &["laguna"],
            huggingface: &["laguna"],
            names: &[
                ("correction_bias", "", "mlp.experts.e_score_correction_bias"),
                ("shared_gate", "", "mlp.shared_expert.gate_proj.weight"),
                ("shared_up", "", "mlp.shared_expert.up_proj.weight"),
                ("shared_down", "", "mlp.shared_expert.down_proj.weight"),
            ],
            ..Files::BASE
        },
        attention: Attention {
            windows: Windows::ButFirstOf(4),
            qk_norm: QkNorm::PerHead,
            output_gate: OutputGate::ByHead(GateFunction::Softplus),
            ..Attention::BASE
        },
        rotation: Rotation { of_windows: Some(WindowTheta::Of(10_000.0)), ..Rotation::BASE },
        feed_forward: FeedForward { shared: 1, ..FeedForward::CORRECTED_EXPERTS },
        ..Family::BASE
    },
    Family {
        name: "step35",
        files: Files {
            gguf: &["step35"],
            huggingface: &["step3p5"],
            names: &[
                ("router", "", "moe.gate.weight"),
                ("correction_bias", "", "moe.router_bias"),
                ("expert_gate", "", "moe.gate_proj.weight"),
                ("expert_up", "", "moe.up_proj.weight"),
                ("expert_down", "", "moe.down_proj.weight"),
                ("shared_gate", "", "share_expert.gate_proj.weight"),
                ("shared_up", "", "share_expert.up_proj.weight"),
                ("shared_down", "", "share_expert.down_proj.weight"),
            ],
            norms_less_one: true,
            mtp: Some(OF_RAW_STATES),
            ..Files::BASE
        },
        attention: Attention {
            qk_norm: QkNorm::PerHead,
            output_gate: OutputGate::ByHead(GateFunction::Sigmoid),
            ..Attention::BASE
        },
        rotation: Rotation {
            of_windows: Some(WindowTheta::Same),
            half_in_gguf: true,
            ..Rotation::BASE
        },
        feed_forward: FeedForward {
            shared: 1,
            limits_by_layer: true,
            ..FeedForward::CORRECTED_EXPERTS
        },
        ..Family::BASE
    },
    Family {
        name: "glm4",
        files: Files {
            gguf: &["glm4"],
            huggingface: &["glm4"],
            names: &[
                ("attention_post_norm", "", "post_self_attn_layernorm.weight"),
                ("feed_forward_post_norm", "", "post_mlp_layernorm.weight"),
                ("gate_up", "ffn_up.weight", ""),
            ],
            ..Files::BASE
        },
        rotation: Rotation::PAIRS,
        layers: Layers { norms: NormLayout::Sandwich, ..Layers::BASE },
        ..Family::BASE
    },
    Family {
        name: "minimax-m2",
        files: Files {
            gguf: &["minimax-m2"],
            huggingface: &["minimax_m2"],
            names: &[
                ("router", "ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
                ("correction_bias", "exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"),
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
        attention: Attention { qk_norm: QkNorm::WholeProjection, ..Attention::BASE },
        feed_forward: FeedForward::CORRECTED_EXPERTS,
        ..Family::BASE
    },
    Family {
        name: "minimax-m3",
        files: Files {
            gguf: &["minimax-m3"],
            huggingface: &["minimax_m3_vl_text"],
            norms_less_one: true,
            names: MINIMAX_M3,
            ..Files::BASE
        },
        attention: Attention {
            qk_norm: QkNorm::PerHead,
            indexer: Some(Indexers::Blocks),
            ..Attention::BASE
        },
        feed_forward: FeedForward {
            gating: Gating::Clamped { alpha: 1.702, limit: 7.0 },
            shared: 1,
            ..FeedForward::CORRECTED_EXPERTS
        },
        ..Family::BASE
    },
    Family {
        name: "ernie4_5-moe",
        files: Files {
            gguf: &["ernie4_5-moe"],
            huggingface: &["ernie4_5_moe"],
            names: &[(
                "correction_bias",
                "exp_probs_b.bias",
                "mlp.moe_statics.e_score_correction_bias",
            )],
            ..Files::BASE
        },
        rotation: Rotation::PAIRS,
        feed_forward: FeedForward {
            experts: true,
            corrected: Some(Scoring::Softmax),
            ..FeedForward::BASE
        },
        ends: Ends { tied: true, ..Ends::BASE },
        ..Family::BASE
    },
    Family {
        name: "hunyuan-moe",
        files: Files { gguf: &["hunyuan-moe"], huggingface: &["hunyuan_v1_moe"], ..HUNYUAN.files },
        feed_forward: FeedForward { experts: true, shared: 1, ..HUNYUAN.feed_forward },
        ..HUNYUAN
    },
    Family {
        name: "hunyuan-dense",
        files: Files {
            gguf: &["hunyuan-dense", "hunyuan_vl"],
            huggingface: &["hunyuan_v1_dense", "hunyuan_vl_text", "hunyuan_vl"],
            ..HUNYUAN.files
        },
        ..HUNYUAN
    },
];

const MINIMAX_M3: OwnNames = &[
    ("indexer_q", "indexer.q_proj.weight", "self_attn.index_q_proj.weight"),
    ("indexer_k", "indexer.k_proj.weight", "self_attn.index_k_proj.weight"),
    ("indexer_q_norm", "", "self_attn.index_q_norm.weight"),
    ("indexer_k_norm", "", "self_attn.index_k_norm.weight"),
    ("router", "", "block_sparse_moe.gate.weight"),
    ("correction_bias", "", "block_sparse_moe.e_score_correction_bias"),
    ("expert_gate", "", "block_sparse_moe.experts.{expert}.w1.weight"),
    ("expert_up", "", "block_sparse_moe.experts.{expert}.w3.weight"),
    ("expert_down", "", "block_sparse_moe.experts.{expert}.w2.weight"),
    ("shared_gate", "", "block_sparse_moe.shared_experts.gate_proj.weight"),
    ("shared_up", "", "block_sparse_moe.shared_experts.up_proj.weight"),
    ("shared_down", "", "block_sparse_moe.shared_experts.down_proj.weight"),
];

const HUNYUAN_NAMES: OwnNames = &[
    ("q_norm", "attn_q_norm.weight", "self_attn.query_layernorm.weight"),
    ("k_norm", "attn_k_norm.weight", "self_attn.key_layernorm.weight"),
    ("router", "ffn_gate_inp.weight", "mlp.gate.wg.weight"),
    ("shared_gate", "ffn_gate_shexp.weight", "mlp.shared_mlp.gate_proj.weight"),
    ("shared_up", "ffn_up_shexp.weight", "mlp.shared_mlp.up_proj.weight"),
    ("shared_down", "ffn_down_shexp.weight", "mlp.shared_mlp.down_proj.weight"),
];
