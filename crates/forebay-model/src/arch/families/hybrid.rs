//! Models with recurrent layers of the kinds of Mamba and LFM.

use forebay_compute::{NormForm, RopeLayout};
use forebay_ops::{DeltaRule, Gating, Scoring};

use super::super::architecture::QkNorm;
use super::super::family::{
    Attention, Ends, Factors, Family, FeedForward, Files, Layers, OwnNames, Recurrence, Rotation,
};
use super::super::mtp_shape::{MtpForm, MtpRule};
use super::super::shapes::NormLayout;

const LFM2: Family = Family {
    files: Files { names: LFM2_NAMES, ..Files::BASE },
    attention: Attention { qk_norm: QkNorm::PerHead, ..Attention::BASE },
    recurrence: Recurrence { rule: Some(DeltaRule::ShortConvolution), ..Recurrence::BASE },
    ends: Ends { tied: true, ..Ends::BASE },
    ..Family::BASE
};

/// The norm before the logits of the predicting layer subtracts the mean.
const NEMOTRON_H_MTP: MtpRule =
    MtpRule { norm_form: NormForm::Layer, ..MtpRule::of(MtpForm::InGguf) };

const NEMOTRON_H: Family = Family {
    files: Files { names: NEMOTRON_H_NAMES, mtp: Some(NEMOTRON_H_MTP), ..Files::BASE },
    rotation: Rotation { rotates: false, ..Rotation::BASE },
    recurrence: Recurrence { rule: Some(DeltaRule::Mamba2), ..Recurrence::BASE },
    feed_forward: FeedForward { gating: Gating::SquaredRelu, ..FeedForward::BASE },
    layers: Layers { one_block: true, ..Layers::BASE },
    ..Family::BASE
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "nemotron_h",
        files: Files { gguf: &["nemotron_h"], ..NEMOTRON_H.files },
        ..NEMOTRON_H
    },
    // Configurations of both name the same type. Their layers say which have experts.
    Family {
        name: "nemotron_h_moe",
        files: Files {
            gguf: &["nemotron_h_moe"],
            huggingface: &["nemotron_h"],
            ..NEMOTRON_H.files
        },
        feed_forward: FeedForward {
            experts: true,
            corrected: Some(Scoring::Sigmoid),
            ..NEMOTRON_H.feed_forward
        },
        ..NEMOTRON_H
    },
    Family {
        name: "lfm2",
        files: Files { gguf: &["lfm2"], huggingface: &["lfm2"], ..LFM2.files },
        feed_forward: FeedForward { adjusted_width: true, ..LFM2.feed_forward },
        ..LFM2
    },
    Family {
        name: "lfm2moe",
        files: Files { gguf: &["lfm2moe"], huggingface: &["lfm2_moe"], ..LFM2.files },
        feed_forward: FeedForward {
            experts: true,
            corrected: Some(Scoring::Sigmoid),
            ..LFM2.feed_forward
        },
        ..LFM2
    },
    Family {
        name: "granitemoehybrid",
        files: Files {
            gguf: &["granitehybrid"],
            huggingface: &["granitemoehybrid"],
            names: GRANITE_HYBRID,
            ..Files::BASE
        },
        rotation: Rotation { rotates: false, gguf: RopeLayout::Interleaved, ..Rotation::BASE },
        recurrence: Recurrence { rule: Some(DeltaRule::Mamba2), ..Recurrence::BASE },
        feed_forward: FeedForward {
            experts: true,
            dense_too: true,
            shared_mlp: true,
            ..FeedForward::BASE
        },
        ends: Ends { gguf_factors: Factors::AllOfGranite, ..Ends::BASE },
        ..Family::BASE
    },
    Family {
        name: "falcon-h1",
        files: Files {
            gguf: &["falcon-h1"],
            huggingface: &["falcon_h1"],
            names: FALCON_H1,
            ..Files::BASE
        },
        recurrence: Recurrence {
            rule: Some(DeltaRule::Mamba2),
            beside_attention: true,
            ..Recurrence::BASE
        },
        ..Family::BASE
    },
    Family {
        name: "jamba",
        files: Files { gguf: &["jamba"], ..Files::BASE },
        rotation: Rotation { rotates: false, ..Rotation::BASE },
        recurrence: Recurrence { rule: Some(DeltaRule::Mamba), ..Recurrence::BASE },
        feed_forward: FeedForward {
            experts: true,
            dense_too: true,
            renormalise: false,
            ..FeedForward::BASE
        },
        ..Family::BASE
    },
    // MiniMax-Text-01 and MiniMax-M1.
    Family {
        name: "minimax-01",
        files: Files {
            gguf: &["minimax-01"],
            huggingface: &["minimax", "minimax_text_01", "minimax_m1"],
            names: MINIMAX_01,
            ..Files::BASE
        },
        recurrence: Recurrence { rule: Some(DeltaRule::Lightning), ..Recurrence::BASE },
        feed_forward: FeedForward { experts: true, ..FeedForward::BASE },
        layers: Layers { normed_residual: true, ..Layers::BASE },
        ends: Ends { gguf_factors: Factors::OfNormedResidual, ..Ends::BASE },
        ..Family::BASE
    },
    Family {
        name: "olmo_hybrid",
        files: Files { huggingface: &["olmo_hybrid"], names: OLMO_HYBRID, ..Files::BASE },
        attention: Attention { qk_norm: QkNorm::WholeProjection, ..Attention::BASE },
        rotation: Rotation { rotates: false, rotates_with_base: true, ..Rotation::BASE },
        recurrence: Recurrence {
            rule: Some(DeltaRule::GatedDelta),
            share_scale: 2.0,
            norm_epsilon: Some(1e-5),
            norms: Some(NormLayout::Pre),
            ..Recurrence::BASE
        },
        layers: Layers { norms: NormLayout::Post, ..Layers::BASE },
        ..Family::BASE
    },
];

const FALCON_H1: OwnNames = &[
    ("final_norm", "", "final_layernorm.weight"),
    ("feed_forward_norm", "ffn_norm", "pre_ff_layernorm.weight"),
    ("gate", "", "feed_forward.gate_proj.weight"),
    ("up", "", "feed_forward.up_proj.weight"),
    ("down", "", "feed_forward.down_proj.weight"),
    ("delta_decay", "", "mamba.A_log"),
    ("delta_step", "", "mamba.dt_bias"),
    ("delta_convolution", "", "mamba.conv1d.weight"),
    ("delta_convolution_bias", "", "mamba.conv1d.bias"),
    ("delta_norm", "", "mamba.norm.weight"),
    ("delta_o", "", "mamba.out_proj.weight"),
];

const MINIMAX_01: OwnNames = &[
    ("delta_qkv", "attn_qkv.weight", "self_attn.qkv_proj.weight"),
    ("delta_z", "attn_gate.weight", "self_attn.output_gate.weight"),
    ("delta_norm", "attn_norm_2.weight", "self_attn.norm.weight"),
    ("delta_o", "attn_output.weight", "self_attn.out_proj.weight"),
    ("router", "ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
    ("expert_gate", "ffn_gate_exps.weight", "block_sparse_moe.experts.{expert}.w1.weight"),
    ("expert_up", "ffn_up_exps.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
    ("expert_down", "ffn_down_exps.weight", "block_sparse_moe.experts.{expert}.w2.weight"),
];

/// Roles with `_renamed` are the names inside transformers 5, which also renames other norms when it saves a model.
const OLMO_HYBRID: OwnNames = &[
    ("attention_norm", "", "attention_layer_norm.weight"),
    ("attention_norm_renamed", "", "input_layernorm.weight"),
    ("feed_forward_norm", "", "feedforward_layer_norm.weight"),
    ("feed_forward_norm_renamed", "", "post_attention_layernorm.weight"),
    ("attention_post_norm_renamed", "", "feedforward_layer_norm.weight"),
    ("delta_z", "", "linear_attn.g_proj.weight"),
    ("delta_b", "", "linear_attn.b_proj.weight"),
    ("delta_a", "", "linear_attn.a_proj.weight"),
    ("delta_convolution_q", "", "linear_attn.q_conv1d.weight"),
    ("delta_convolution_k", "", "linear_attn.k_conv1d.weight"),
    ("delta_convolution_v", "", "linear_attn.v_conv1d.weight"),
    ("delta_norm", "", "linear_attn.o_norm.weight"),
    ("delta_o", "", "linear_attn.o_proj.weight"),
];

const NEMOTRON_H_NAMES: OwnNames = &[
    ("embedding", "token_embd.weight", "embeddings.weight"),
    ("final_norm", "output_norm.weight", "norm_f.weight"),
    ("attention_norm", "attn_norm.weight", "norm.weight"),
    ("feed_forward_norm", "attn_norm.weight", "norm.weight"),
    ("predicting_feed_forward_norm", "post_attention_norm.weight", ""),
    ("q", "attn_q.weight", "mixer.q_proj.weight"),
    ("k", "attn_k.weight", "mixer.k_proj.weight"),
    ("v", "attn_v.weight", "mixer.v_proj.weight"),
    ("o", "attn_output.weight", "mixer.o_proj.weight"),
    ("delta_in", "ssm_in.weight", "mixer.in_proj.weight"),
    ("delta_decay", "ssm_a", "mixer.A_log"),
    ("delta_step", "ssm_dt.bias", "mixer.dt_bias"),
    ("delta_convolution", "ssm_conv1d.weight", "mixer.conv1d.weight"),
    ("delta_convolution_bias", "ssm_conv1d.bias", "mixer.conv1d.bias"),
    ("delta_skip", "ssm_d", "mixer.D"),
    ("delta_norm", "ssm_norm.weight", "mixer.norm.weight"),
    ("delta_o", "ssm_out.weight", "mixer.out_proj.weight"),
    ("up", "ffn_up.weight", "mixer.up_proj.weight"),
    ("down", "ffn_down.weight", "mixer.down_proj.weight"),
    ("router", "ffn_gate_inp.weight", "mixer.gate.weight"),
    ("correction_bias", "exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
    ("expert_up", "ffn_up_exps.weight", "mixer.experts.{expert}.up_proj.weight"),
    ("expert_down", "ffn_down_exps.weight", "mixer.experts.{expert}.down_proj.weight"),
    ("shared_up", "ffn_up_shexp.weight", "mixer.shared_experts.up_proj.weight"),
    ("shared_down", "ffn_down_shexp.weight", "mixer.shared_experts.down_proj.weight"),
];

const LFM2_NAMES: OwnNames = &[
    ("final_norm", "token_embd_norm.weight", "embedding_norm.weight"),
    ("attention_norm", "", "operator_norm.weight"),
    ("feed_forward_norm", "", "ffn_norm.weight"),
    ("o", "", "self_attn.out_proj.weight"),
    ("q_norm", "", "self_attn.q_layernorm.weight"),
    ("k_norm", "", "self_attn.k_layernorm.weight"),
    ("delta_in", "shortconv.in_proj.weight", "conv.in_proj.weight"),
    ("delta_convolution", "shortconv.conv.weight", "conv.conv.weight"),
    ("delta_o", "shortconv.out_proj.weight", "conv.out_proj.weight"),
    ("gate", "", "feed_forward.w1.weight"),
    ("up", "", "feed_forward.w3.weight"),
    ("down", "", "feed_forward.w2.weight"),
    ("router", "", "feed_forward.gate.weight"),
    ("correction_bias", "", "feed_forward.expert_bias"),
    ("expert_gate", "", "feed_forward.experts.{expert}.w1.weight"),
    ("expert_up", "", "feed_forward.experts.{expert}.w3.weight"),
    ("expert_down", "", "feed_forward.experts.{expert}.w2.weight"),
];

const GRANITE_HYBRID: OwnNames = &[
    ("delta_decay", "ssm_a", "mamba.A_log"),
    ("delta_step", "ssm_dt.bias", "mamba.dt_bias"),
    ("delta_convolution", "ssm_conv1d.weight", "mamba.conv1d.weight"),
    ("delta_convolution_bias", "ssm_conv1d.bias", "mamba.conv1d.bias"),
    ("delta_norm", "ssm_norm.weight", "mamba.norm.weight"),
    ("delta_o", "ssm_out.weight", "mamba.out_proj.weight"),
    ("router", "ffn_gate_inp.weight", "block_sparse_moe.router.layer.weight"),
    ("expert_gate_up", "", "block_sparse_moe.input_linear.weight"),
    ("expert_down_stack", "", "block_sparse_moe.output_linear.weight"),
    // The MLP beside experts, and without experts.
    ("shared_gate_up", "", "shared_mlp.input_linear.weight"),
    ("shared_down", "ffn_down_shexp.weight", "shared_mlp.output_linear.weight"),
    ("gate_up", "", "shared_mlp.input_linear.weight"),
    ("down", "ffn_down.weight", "shared_mlp.output_linear.weight"),
];
