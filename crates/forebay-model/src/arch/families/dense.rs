//! Models without experts whose parts other families have, too.

use forebay_ops::{GateFunction, Gating};

use super::super::architecture::{OutputGate, QkNorm};
use super::super::family::{
    Attention, Ends, Factors, Family, FeedForward, Files, Layers, Rotation, WindowTheta, Windows,
};
use super::super::shapes::NormLayout;

/// Llama's parts, with pairs of neighbours that rotate together in GGUF files.
const LLAMA: Family = Family {
    rotation: Rotation { huggingface: Rotation::BASE.huggingface, ..Rotation::PAIRS },
    ..Family::BASE
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "arcee",
        files: Files { gguf: &["arcee"], huggingface: &["arcee"], ..Files::BASE },
        feed_forward: FeedForward { gating: Gating::SquaredRelu, ..FeedForward::BASE },
        ..LLAMA
    },
    Family {
        name: "apertus",
        files: Files { gguf: &["apertus"], ..Files::BASE },
        attention: Attention { qk_norm: QkNorm::PerHead, ..Attention::BASE },
        feed_forward: FeedForward {
            // Files have the numbers of each layer.
            gating: Gating::Xielu { positive: 0.8, negative: 0.8, slope: 0.5, floor: -1e-6 },
            ..FeedForward::BASE
        },
        ..Family::BASE
    },
    Family { name: "baichuan", files: Files { gguf: &["baichuan"], ..Files::BASE }, ..LLAMA },
    Family { name: "internlm2", files: Files { gguf: &["internlm2"], ..Files::BASE }, ..LLAMA },
    Family { name: "xverse", files: Files { gguf: &["xverse"], ..Files::BASE }, ..LLAMA },
    // The Nemotron models that a search over Llama's layers found.
    Family {
        name: "deci",
        files: Files { gguf: &["deci"], ..Files::BASE },
        layers: Layers { may_lack_blocks: true, ..Layers::BASE },
        ..LLAMA
    },
    Family {
        name: "ernie4_5",
        files: Files { gguf: &["ernie4_5"], huggingface: &["ernie4_5"], ..Files::BASE },
        rotation: Rotation::PAIRS,
        ends: Ends { tied: true, ..Ends::BASE },
        ..Family::BASE
    },
    // EXAONE 3 and 3.5. Published folders have the names of GPT-2.
    Family {
        name: "exaone",
        files: Files {
            gguf: &["exaone"],
            huggingface: &["exaone"],
            names: &[
                ("embedding", "", "wte.weight"),
                ("final_norm", "", "ln_f.weight"),
                ("attention_norm", "", "ln_1.weight"),
                ("feed_forward_norm", "", "ln_2.weight"),
                ("q", "", "attn.attention.q_proj.weight"),
                ("k", "", "attn.attention.k_proj.weight"),
                ("v", "", "attn.attention.v_proj.weight"),
                ("o", "", "attn.attention.out_proj.weight"),
                ("gate", "", "mlp.c_fc_0.weight"),
                ("up", "", "mlp.c_fc_1.weight"),
                ("down", "", "mlp.c_proj.weight"),
            ],
            ..Files::BASE
        },
        ..Family::BASE
    },
    Family {
        name: "paddleocr",
        files: Files {
            gguf: &["paddleocr"],
            huggingface: &["paddleocr_vl_text", "paddleocr_vl"],
            ..Files::BASE
        },
        ..Family::BASE
    },
    Family { name: "cogvlm", files: Files { gguf: &["cogvlm"], ..Files::BASE }, ..Family::BASE },
    Family {
        name: "pangu-embedded",
        files: Files { gguf: &["pangu-embedded"], ..Files::BASE },
        ..Family::BASE
    },
    Family {
        name: "cwm",
        files: Files { huggingface: &["cwm"], ..Files::BASE },
        attention: Attention { windows: Windows::ButFirstOf(4), ..Attention::BASE },
        ..Family::BASE
    },
    Family {
        name: "helium",
        files: Files { huggingface: &["helium"], ..Files::BASE },
        rotation: Rotation::PAIRS,
        ..Family::BASE
    },
    // ChatGLM 3 and GLM-4 of 2024.
    Family {
        name: "glm",
        files: Files {
            gguf: &["chatglm"],
            huggingface: &["glm"],
            names: &[("gate_up", "ffn_up.weight", "")],
            ..Files::BASE
        },
        rotation: Rotation::PAIRS,
        ..Family::BASE
    },
    Family {
        name: "qwen",
        files: Files { gguf: &["qwen"], ..Files::BASE },
        attention: Attention { qkv_bias: true, ..Attention::BASE },
        feed_forward: FeedForward { doubled_width: true, ..FeedForward::BASE },
        ..Family::BASE
    },
    Family {
        name: "maincoder",
        files: Files { gguf: &["maincoder"], ..Files::BASE },
        attention: Attention { qk_norm: QkNorm::PerRotatedHead, ..Attention::BASE },
        rotation: Rotation::PAIRS,
        ..Family::BASE
    },
    Family {
        name: "plm",
        files: Files { gguf: &["plm"], ..Files::BASE },
        attention: Attention { latent: true, ..Attention::BASE },
        rotation: Rotation::PAIRS,
        feed_forward: FeedForward { gating: Gating::SquaredRelu, ..FeedForward::BASE },
        ..Family::BASE
    },
    Family {
        name: "youtu",
        files: Files { huggingface: &["youtu"], ..Files::BASE },
        attention: Attention { latent: true, ..Attention::BASE },
        rotation: Rotation::PAIRS,
        ends: Ends { tied: true, ..Ends::BASE },
        ..Family::BASE
    },
    Family {
        name: "minicpm3",
        files: Files { gguf: &["minicpm3"], huggingface: &["minicpm3"], ..Files::BASE },
        attention: Attention { latent: true, ..Attention::BASE },
        ends: Ends { tied: true, gguf_factors: Factors::OfMiniCpm, ..Ends::BASE },
        ..Family::BASE
    },
    Family {
        name: "spark2_5",
        files: Files { gguf: &["spark2_5"], ..Files::BASE },
        attention: Attention {
            output_gate: OutputGate::ByHead(GateFunction::Sigmoid),
            ..Attention::BASE
        },
        rotation: Rotation { of_windows: Some(WindowTheta::SameScaled), ..Rotation::BASE },
        feed_forward: FeedForward { gating: Gating::GeluTanh, ..FeedForward::BASE },
        ..Family::BASE
    },
    Family {
        name: "plamo3",
        files: Files {
            gguf: &["plamo3"],
            names: &[
                ("attention_post_norm", "post_attention_norm", ""),
                ("feed_forward_post_norm", "post_ffw_norm", ""),
                ("gate_up", "ffn_up.weight", ""),
            ],
            ..Files::BASE
        },
        attention: Attention {
            windows: Windows::ButEvery(8),
            qk_norm: QkNorm::PerHead,
            ..Attention::BASE
        },
        rotation: Rotation { of_windows: Some(WindowTheta::Of(10_000.0)), ..Rotation::BASE },
        layers: Layers { norms: NormLayout::Sandwich, ..Layers::BASE },
        ..Family::BASE
    },
];
