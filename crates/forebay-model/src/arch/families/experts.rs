//! Further models with experts.

use forebay_compute::{Gating, Scoring};

use super::super::architecture::QkNorm;
use super::super::family::{
    Attention, Ends, Family, FeedForward, Files, Indexers, OwnNames, Rotation, WindowTheta,
};
use super::super::mtp_shape::MtpForm;

const HUNYUAN: Family = Family {
    files: Files { names: HUNYUAN_NAMES, ..Files::BASE },
    attention: Attention { qk_norm: QkNorm::PerRotatedHead, ..Attention::BASE },
    ..Family::BASE
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "mimo2",
        files: Files {
            gguf: &["mimo2"],
            huggingface: &["mimo_v2_flash"],
            names: &[("sinks", "attn_sinks.weight", "self_attn.attention_sink_bias")],
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
            mtp: Some(MtpForm::Behind),
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
            gguf: &["hunyuan-dense"],
            huggingface: &["hunyuan_v1_dense"],
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
