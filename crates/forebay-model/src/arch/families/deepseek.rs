//! Models with the latent attention of DeepSeek, and DeepSeek-V4.

use forebay_compute::RopeLayout;
use forebay_ops::{DeltaRule, GateFunction, Gating, Scoring};

use super::super::architecture::OutputGate;
use super::super::family::{
    Attention, Family, FeedForward, Files, Indexers, Layers, OwnNames, Recurrence, Rotation,
    WindowTheta,
};
use super::super::mtp_shape::{MtpForm, MtpRule};
use super::super::shapes::{LatentNorm, StreamForm, StreamsEnd};

/// Common properties of models with latent attention to keys that an indexer chooses.
const INDEXED: Family = Family {
    files: Files { mtp: Some(MtpRule::of(MtpForm::Behind)), ..Files::BASE },
    attention: Attention { latent: true, ..Attention::BASE },
    rotation: Rotation::PAIRS,
    feed_forward: FeedForward::CORRECTED_EXPERTS,
    ..Family::BASE
};

const DEEPSEEK_4: Family = Family {
    name: "deepseek4",
    files: Files {
        gguf: &["deepseek4"],
        huggingface: &["deepseek_v4"],
        mtp: Some(MtpRule { raw_states: true, ..MtpRule::of(MtpForm::InGguf) }),
        names: DEEPSEEK_4_NAMES,
        ..Files::BASE
    },
    attention: Attention { compressed: true, sinks: true, ..Attention::BASE },
    rotation: Rotation::PAIRS,
    feed_forward: FeedForward {
        gating: Gating::ClampedSilu { limit: 10.0 },
        experts: true,
        corrected: Some(Scoring::SqrtSoftplus),
        ..FeedForward::BASE
    },
    layers: Layers { streams: Some(StreamForm::Mixed(StreamsEnd::Weighted)), ..Layers::BASE },
    ..Family::BASE
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "deepseek2",
        files: Files {
            gguf: &["deepseek2"],
            huggingface: &["deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"],
            mtp: Some(MtpRule::of(MtpForm::Behind)),
            ..Files::BASE
        },
        attention: Attention { latent: true, ..Attention::BASE },
        rotation: Rotation::PAIRS,
        feed_forward: FeedForward { experts: true, renormalise: false, ..FeedForward::BASE },
        ..Family::BASE
    },
    Family {
        name: "mistral4",
        files: Files {
            gguf: &["mistral4"],
            huggingface: &["mistral4"],
            names: &[
                ("expert_gate_up", "ffn_gate_up_exps.weight", ""),
                ("expert_down_stack", "ffn_down_exps.weight", ""),
            ],
            ..Files::BASE
        },
        attention: Attention { latent: true, ..Attention::BASE },
        rotation: Rotation { tempered: true, ..Rotation::PAIRS },
        feed_forward: FeedForward { experts: true, ..FeedForward::BASE },
        ..Family::BASE
    },
    Family {
        name: "deepseek32",
        files: Files { gguf: &["deepseek32"], huggingface: &["deepseek_v32"], ..INDEXED.files },
        attention: Attention {
            indexer: Some(Indexers::Keys(RopeLayout::Neox)),
            ..INDEXED.attention
        },
        ..INDEXED
    },
    // The text part of Dots 3.
    Family {
        name: "dots3note",
        files: Files {
            gguf: &["dots3note"],
            huggingface: &["dots3_note_text", "dots3_note"],
            ..Files::BASE
        },
        attention: Attention {
            normed_rotary: true,
            output_gate: OutputGate::ByHead(GateFunction::Sigmoid),
            window: Some(512),
            indexer: Some(Indexers::Keys(RopeLayout::Interleaved)),
            ..INDEXED.attention
        },
        rotation: Rotation { of_windows: Some(WindowTheta::Of(50_000.0)), ..Rotation::PAIRS },
        ..INDEXED
    },
    Family {
        name: "glm-dsa",
        files: Files { gguf: &["glm-dsa"], huggingface: &["glm_moe_dsa"], ..INDEXED.files },
        attention: Attention {
            indexer: Some(Indexers::Keys(RopeLayout::Interleaved)),
            ..INDEXED.attention
        },
        ..INDEXED
    },
    Family {
        name: "glm5-next",
        files: Files {
            gguf: &["glm5-next", "glm5next"],
            huggingface: &["glm5_next_text"],
            names: GLM5_NEXT,
            ..Files::BASE
        },
        attention: Attention {
            latent: true,
            indexer: Some(Indexers::GatedPools),
            ..Attention::BASE
        },
        rotation: Rotation { rotates: false, ..Rotation::BASE },
        recurrence: Recurrence {
            rule: Some(DeltaRule::KimiDelta),
            decay_bound: -5.0,
            ..Recurrence::BASE
        },
        feed_forward: FeedForward {
            gating: Gating::ClampedSilu { limit: 10.0 },
            ..FeedForward::CORRECTED_EXPERTS
        },
        layers: Layers { streams: Some(StreamForm::Mixed(StreamsEnd::Mean)), ..Layers::BASE },
        ..Family::BASE
    },
    Family {
        name: "bailingmoe3",
        files: Files {
            gguf: &["bailingmoe3"],
            huggingface: &["bailing_hybrid"],
            mtp: Some(MtpRule::of(MtpForm::Behind)),
            names: BAILING,
            ..Files::BASE
        },
        attention: Attention {
            latent: true,
            output_gate: OutputGate::ByHead(GateFunction::Sigmoid),
            ..Attention::BASE
        },
        rotation: Rotation::PAIRS,
        recurrence: Recurrence {
            rule: Some(DeltaRule::KimiDelta),
            decay_bound: -5.0,
            positive_rates: true,
            ..Recurrence::BASE
        },
        feed_forward: FeedForward::CORRECTED_EXPERTS,
        ..Family::BASE
    },
    Family {
        name: "kimi-linear",
        files: Files {
            gguf: &["kimi-linear"],
            huggingface: &["kimi_linear"],
            names: KIMI_LINEAR,
            ..Files::BASE
        },
        attention: Attention { latent: true, ..Attention::BASE },
        rotation: Rotation { rotates: false, ..Rotation::BASE },
        recurrence: Recurrence { rule: Some(DeltaRule::KimiDelta), ..Recurrence::BASE },
        feed_forward: FeedForward::CORRECTED_EXPERTS,
        ..Family::BASE
    },
    Family {
        name: "hy_v4",
        files: Files { gguf: &["hy_v4"], huggingface: &["hy_v4"], names: HY4, ..Files::BASE },
        attention: Attention {
            latent: true,
            sinks: true,
            output_gate: OutputGate::ByElement(GateFunction::Sigmoid),
            indexer: Some(Indexers::Keys(RopeLayout::Interleaved)),
            shares_choices: true,
            indexer_rotates_last: true,
            ..Attention::BASE
        },
        rotation: Rotation::PAIRS,
        feed_forward: FeedForward {
            gating: Gating::ClampedSilu { limit: 10.0 },
            gating_of_others: Some(Gating::Silu),
            ..FeedForward::CORRECTED_EXPERTS
        },
        layers: Layers { streams: Some(StreamForm::Independent), ..Layers::BASE },
        ..Family::BASE
    },
    Family {
        name: "kimi-k3",
        files: Files { gguf: &["kimi-k3"], names: KIMI_K3, ..Files::BASE },
        attention: Attention {
            latent: true,
            output_gate: OutputGate::ByElement(GateFunction::Sigmoid),
            ..Attention::BASE
        },
        rotation: Rotation { rotates: false, ..Rotation::BASE },
        recurrence: Recurrence {
            rule: Some(DeltaRule::KimiDelta),
            decay_bound: -5.0,
            ..Recurrence::BASE
        },
        feed_forward: FeedForward {
            // Files give the limits.
            gating: Gating::Situ { limit: 1.0, up_limit: 1.0 },
            latent: Some(LatentNorm::After),
            ..FeedForward::CORRECTED_EXPERTS
        },
        layers: Layers { streams: Some(StreamForm::Bank), ..Layers::BASE },
        ..Family::BASE
    },
    DEEPSEEK_4,
];

const HY4: OwnNames = &[
    ("output_gate", "", "self_attn.linear_gate.weight"),
    ("sinks", "", "self_attn.learnable_sink_param"),
    ("attention_streams_mix", "", "hc_attn_layer.hc_pre.hc_fn"),
    ("attention_streams_base", "", "hc_attn_layer.hc_pre.hc_base"),
    ("attention_streams_scale", "", "hc_attn_layer.hc_pre.hc_scale"),
    ("feed_forward_streams_mix", "", "hc_mlp_layer.hc_pre.hc_fn"),
    ("feed_forward_streams_base", "", "hc_mlp_layer.hc_pre.hc_base"),
    ("feed_forward_streams_scale", "", "hc_mlp_layer.hc_pre.hc_scale"),
    ("streams_end_mix", "", "model.hc_head.hc_head_fn"),
    ("streams_end_base", "", "model.hc_head.hc_head_base"),
    ("streams_end_scale", "", "model.hc_head.hc_head_scale"),
];

const KIMI_K3: OwnNames = &[("delta_g", "ssm_g.weight", ""), ("delta_o", "attn_output.weight", "")];

const BAILING: OwnNames = &[
    ("embedding", "", "word_embeddings.weight"),
    ("q", "", "attention.q_proj.weight"),
    ("k", "", "attention.k_proj.weight"),
    ("v", "", "attention.v_proj.weight"),
    ("o", "", "attention.dense.weight"),
    ("output_gate", "", "attention.g_proj.weight"),
    ("kv_a", "", "attention.kv_a_proj_with_mqa.weight"),
    ("kv_a_norm", "", "attention.kv_a_layernorm.weight"),
    ("kv_b", "", "attention.kv_b_proj.weight"),
    ("q_a", "", "attention.q_a_proj.weight"),
    ("q_a_norm", "", "attention.q_a_layernorm.weight"),
    ("q_b", "", "attention.q_b_proj.weight"),
    ("delta_b", "", "attention.b_proj.weight"),
    ("delta_f", "", "attention.f_proj.weight"),
    ("delta_g", "", "attention.g_proj.weight"),
    ("delta_decay", "", "attention.A_log"),
    ("delta_step", "", "attention.dt_bias"),
    ("delta_convolution_q", "", "attention.q_conv1d.weight"),
    ("delta_convolution_k", "", "attention.k_conv1d.weight"),
    ("delta_convolution_v", "", "attention.v_conv1d.weight"),
    ("delta_norm", "", "attention.o_norm.weight"),
    ("delta_o", "attn_output.weight", "attention.dense.weight"),
    ("correction_bias", "", "mlp.gate.expert_bias"),
];

const KIMI_LINEAR: OwnNames = &[
    ("delta_b", "ssm_beta.weight", "self_attn.b_proj.weight"),
    ("delta_decay", "ssm_a", "self_attn.A_log"),
    ("delta_step", "ssm_dt.bias", "self_attn.dt_bias"),
    ("delta_norm", "ssm_norm.weight", "self_attn.o_norm.weight"),
    ("delta_o", "attn_output.weight", "self_attn.o_proj.weight"),
    ("router", "ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
    ("correction_bias", "exp_probs_b.bias", "block_sparse_moe.gate.e_score_correction_bias"),
    ("expert_gate", "ffn_gate_exps.weight", "block_sparse_moe.experts.{expert}.w1.weight"),
    ("expert_up", "ffn_up_exps.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
    ("expert_down", "ffn_down_exps.weight", "block_sparse_moe.experts.{expert}.w2.weight"),
    ("shared_gate", "ffn_gate_shexp.weight", "block_sparse_moe.shared_experts.gate_proj.weight"),
    ("shared_up", "ffn_up_shexp.weight", "block_sparse_moe.shared_experts.up_proj.weight"),
    ("shared_down", "ffn_down_shexp.weight", "block_sparse_moe.shared_experts.down_proj.weight"),
];

const GLM5_NEXT: OwnNames = &[
    ("delta_b", "", "self_attn.b_proj.weight"),
    ("delta_decay", "", "self_attn.A_log"),
    ("delta_step", "", "self_attn.dt_bias"),
    ("delta_norm", "", "self_attn.o_norm.weight"),
    ("delta_o", "attn_output.weight", "self_attn.o_proj.weight"),
];

const DEEPSEEK_4_NAMES: OwnNames = &[
    ("embedding", "token_embd.weight", "embed.weight"),
    ("head", "output.weight", "head.weight"),
    ("attention_norm", "attn_norm.weight", "attn_norm.weight"),
    ("feed_forward_norm", "ffn_norm.weight", "ffn_norm.weight"),
    ("sinks", "attn_sinks.weight", "attn.attn_sink"),
    ("q_a", "attn_q_a.weight", "attn.wq_a.weight"),
    ("q_a_norm", "attn_q_a_norm.weight", "attn.q_norm.weight"),
    ("q_b", "attn_q_b.weight", "attn.wq_b.weight"),
    ("shared_key", "attn_kv.weight", "attn.wkv.weight"),
    ("shared_key_norm", "attn_kv_a_norm.weight", "attn.kv_norm.weight"),
    ("o_a", "attn_output_a.weight", "attn.wo_a.weight"),
    ("o", "attn_output_b.weight", "attn.wo_b.weight"),
    ("entry_values", "attn_compressor_kv.weight", "attn.compressor.wkv.weight"),
    ("entry_gates", "attn_compressor_gate.weight", "attn.compressor.wgate.weight"),
    ("entry_bias", "attn_compressor_ape.weight", "attn.compressor.ape"),
    ("entry_norm", "attn_compressor_norm.weight", "attn.compressor.norm.weight"),
    ("indexer_q", "indexer.attn_q_b.weight", "attn.indexer.wq_b.weight"),
    ("indexer_weights", "indexer.proj.weight", "attn.indexer.weights_proj.weight"),
    ("indexer_values", "indexer_compressor_kv.weight", "attn.indexer.compressor.wkv.weight"),
    ("indexer_gates", "indexer_compressor_gate.weight", "attn.indexer.compressor.wgate.weight"),
    ("indexer_bias", "indexer_compressor_ape.weight", "attn.indexer.compressor.ape"),
    ("indexer_norm", "indexer_compressor_norm.weight", "attn.indexer.compressor.norm.weight"),
    ("router", "ffn_gate_inp.weight", "ffn.gate.weight"),
    ("correction_bias", "exp_probs_b.bias", "ffn.gate.bias"),
    ("token_experts", "ffn_gate_tid2eid.weight", "ffn.gate.tid2eid"),
    ("expert_gate", "ffn_gate_exps.weight", "ffn.experts.{expert}.w1.weight"),
    ("expert_up", "ffn_up_exps.weight", "ffn.experts.{expert}.w3.weight"),
    ("expert_down", "ffn_down_exps.weight", "ffn.experts.{expert}.w2.weight"),
    ("shared_gate", "ffn_gate_shexp.weight", "ffn.shared_experts.w1.weight"),
    ("shared_up", "ffn_up_shexp.weight", "ffn.shared_experts.w3.weight"),
    ("shared_down", "ffn_down_shexp.weight", "ffn.shared_experts.w2.weight"),
];
