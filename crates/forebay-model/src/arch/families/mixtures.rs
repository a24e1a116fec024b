//! Models with experts whose parts other families have, too.

use forebay_compute::RopeLayout;
use forebay_ops::Gating;

use super::super::architecture::QkNorm;
use super::super::family::{
    Attention, Ends, Factors, Family, FeedForward, Files, Layers, OwnNames, Rotation, WindowTheta,
    Windows,
};
use super::super::shapes::{ExpertInput, NormLayout};
use super::super::unrotated::Unrotated;

/// Files may hold gate and up of all experts as one stack.
const STACKED: OwnNames = &[
    ("expert_gate_up", "ffn_gate_up_exps.weight", ""),
    ("expert_down_stack", "ffn_down_exps.weight", ""),
];

pub(super) const FAMILIES: &[Family] = &[
    // DeepSeek-MoE.
    Family {
        name: "deepseek",
        files: Files { gguf: &["deepseek"], names: STACKED, ..Files::BASE },
        rotation: LLAMA,
        feed_forward: FeedForward { experts: true, renormalise: false, ..FeedForward::BASE },
        ..Family::BASE
    },
    // The text part of DeepSeek-OCR.
    Family {
        name: "deepseek2-ocr",
        files: Files { gguf: &["deepseek2-ocr"], names: STACKED, ..Files::BASE },
        feed_forward: FeedForward { experts: true, renormalise: false, ..FeedForward::BASE },
        ..Family::BASE
    },
    // Ling-lite and Ling-plus.
    Family {
        name: "bailingmoe",
        files: Files { gguf: &["bailingmoe"], ..Files::BASE },
        rotation: LLAMA,
        feed_forward: FeedForward { experts: true, renormalise: false, ..FeedForward::BASE },
        ..Family::BASE
    },
    // Ling 2 and Ring 2, and Sarvam.
    Family {
        name: "bailingmoe2",
        files: Files { gguf: &["bailingmoe2"], ..Files::BASE },
        attention: Attention { qk_norm: QkNorm::PerHead, ..Attention::BASE },
        feed_forward: FeedForward { renormalise: false, ..FeedForward::CORRECTED_EXPERTS },
        ..Family::BASE
    },
    Family {
        name: "minicpm",
        files: Files { gguf: &["minicpm"], ..Files::BASE },
        rotation: LLAMA,
        feed_forward: FeedForward { experts: true, dense_too: true, ..FeedForward::BASE },
        ends: Ends { gguf_factors: Factors::OfMiniCpm, ..Ends::BASE },
        ..Family::BASE
    },
    Family {
        name: "mellum",
        files: Files { gguf: &["mellum"], huggingface: &["mellum"], ..Files::BASE },
        attention: Attention {
            windows: Windows::ButEvery(4),
            qk_norm: QkNorm::PerHead,
            ..Attention::BASE
        },
        rotation: Rotation { of_windows: Some(WindowTheta::Same), ..Rotation::BASE },
        feed_forward: FeedForward { experts: true, ..FeedForward::BASE },
        ..Family::BASE
    },
    Family {
        name: "maple",
        files: Files { gguf: &["maple"], ..Files::BASE },
        attention: Attention { qk_norm: QkNorm::PerHead, ..Attention::BASE },
        rotation: Rotation {
            of_windows: Some(WindowTheta::SameScaled),
            unrotated: Some(Unrotated::WithoutWindow),
            ..Rotation::BASE
        },
        feed_forward: FeedForward {
            gating: Gating::ClampedSilu { limit: 7.0 },
            experts: true,
            ..FeedForward::BASE
        },
        ..Family::BASE
    },
    // Granite with windows, with experts and without.
    Family {
        name: "granite_swa",
        files: Files {
            gguf: &["granite_swa"],
            huggingface: &["granite_swa", "granitemoe_swa"],
            names: &[
                ("router", "", "block_sparse_moe.router.weight"),
                (
                    "expert_gate_up",
                    "ffn_gate_up_exps.weight",
                    "block_sparse_moe.experts.gate_up_proj",
                ),
                ("expert_down_stack", "ffn_down_exps.weight", "block_sparse_moe.experts.down_proj"),
                ("shared_gate_up", "ffn_up_shexp.weight", "shared_mlp.input_linear.weight"),
                ("shared_down", "", "shared_mlp.output_linear.weight"),
            ],
            ..Files::BASE
        },
        attention: Attention { windows: Windows::ButFirstOf(4), sinks: true, ..Attention::BASE },
        rotation: Rotation { unrotated: Some(Unrotated::AsSaid), ..LLAMA },
        feed_forward: FeedForward {
            experts: true,
            dense_too: true,
            shared: 1,
            ..FeedForward::BASE
        },
        ends: Ends { tied: true, gguf_factors: Factors::AllOfGranite, ..Ends::BASE },
        ..Family::BASE
    },
    Family {
        name: "smallthinker",
        files: Files { gguf: &["smallthinker"], ..Files::BASE },
        attention: Attention { windows: Windows::ButFirstOf(4), ..Attention::BASE },
        rotation: Rotation { unrotated: Some(Unrotated::WithoutWindow), ..Rotation::BASE },
        feed_forward: FeedForward {
            gating: Gating::Relu,
            experts: true,
            input: ExpertInput::RouterOfLayer,
            ..FeedForward::BASE
        },
        ..Family::BASE
    },
    // Experts are beside attention and a dense feed-forward.
    Family {
        name: "arctic",
        files: Files {
            gguf: &["arctic"],
            names: &[
                ("expert_norm", "ffn_norm_exps.weight", ""),
                ("shared_gate", "ffn_gate.weight", ""),
                ("shared_up", "ffn_up.weight", ""),
                ("shared_down", "ffn_down.weight", ""),
            ],
            ..Files::BASE
        },
        rotation: LLAMA,
        feed_forward: FeedForward {
            experts: true,
            input: ExpertInput::OfLayer,
            ..FeedForward::BASE
        },
        ..Family::BASE
    },
    // Grok 1.
    Family {
        name: "grok",
        files: Files {
            gguf: &["grok"],
            names: &[
                ("attention_post_norm", "attn_output_norm.weight", ""),
                ("feed_forward_post_norm", "layer_output_norm.weight", ""),
            ],
            ..Files::BASE
        },
        attention: Attention { scale: Some(0.088_388_35), softcap: Some(30.0), ..Attention::BASE },
        feed_forward: FeedForward { gating: Gating::GeluTanh, experts: true, ..FeedForward::BASE },
        layers: Layers { norms: NormLayout::Sandwich, ..Layers::BASE },
        ends: Ends { gguf_factors: Factors::OfGrok, ..Ends::BASE },
        ..Family::BASE
    },
    Family {
        name: "granitemoeshared",
        files: Files {
            huggingface: &["granitemoeshared"],
            names: &[
                ("router", "", "block_sparse_moe.router.layer.weight"),
                ("expert_gate_up", "", "block_sparse_moe.input_linear.weight"),
                ("expert_down_stack", "", "block_sparse_moe.output_linear.weight"),
                ("shared_gate_up", "", "shared_mlp.input_linear.weight"),
                ("shared_down", "", "shared_mlp.output_linear.weight"),
            ],
            ..Files::BASE
        },
        feed_forward: FeedForward { experts: true, shared: 1, ..FeedForward::BASE },
        ..Family::BASE
    },
    Family {
        name: "flex_olmo",
        files: Files { huggingface: &["flex_olmo"], ..Files::BASE },
        attention: Attention { qk_norm: QkNorm::WholeProjection, ..Attention::BASE },
        feed_forward: FeedForward { experts: true, renormalise: false, ..FeedForward::BASE },
        layers: Layers { norms: NormLayout::Post, ..Layers::BASE },
        ..Family::BASE
    },
    Family {
        name: "solar_open",
        files: Files { huggingface: &["solar_open"], ..Files::BASE },
        feed_forward: FeedForward::CORRECTED_EXPERTS,
        ..Family::BASE
    },
];

/// Llama's rotation, whose converter reorders queries and keys.
const LLAMA: Rotation = Rotation { gguf: RopeLayout::Interleaved, ..Rotation::BASE };
