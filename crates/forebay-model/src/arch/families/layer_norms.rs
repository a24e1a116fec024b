//! Models with layer norms. Many of them compute attention and feed-forward side by side.

use super::super::family::{
    Attention, Ends, Factors, Family, FeedForward, Files, Layers, OwnNames, Rotation, Windows,
};
use super::super::unrotated::Unrotated;

/// Common properties of Cohere's models. One norm is for attention and feed-forward.
const COHERE: Family = Family {
    files: Files { names: ONE_NORM, ..Files::BASE },
    rotation: Rotation::PAIRS,
    layers: Layers::PARALLEL,
    ends: Ends { tied: true, gguf_factors: Factors::OfLogits, ..Ends::BASE },
    ..Family::BASE
};

/// Those of which some layers have a window, and rotate.
const COHERE_2: Family = Family {
    attention: Attention { windows: Windows::ButEvery(4), window: Some(4096), ..Attention::BASE },
    rotation: Rotation { unrotated: Some(Unrotated::WithoutWindow), ..Rotation::PAIRS },
    ..COHERE
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "command-r",
        files: Files { gguf: &["command-r"], huggingface: &["cohere"], ..COHERE.files },
        ..COHERE
    },
    Family {
        name: "cohere2",
        files: Files { gguf: &["cohere2"], huggingface: &["cohere2"], ..COHERE.files },
        ..COHERE_2
    },
    Family {
        name: "cohere2moe",
        files: Files { gguf: &["cohere2moe"], huggingface: &["cohere2_moe"], ..COHERE.files },
        feed_forward: FeedForward {
            experts: true,
            chosen_by_logits: true,
            averaged: true,
            ..FeedForward::BASE
        },
        ..COHERE_2
    },
];

/// Names of the norm before both blocks.
const ONE_NORM: OwnNames = &[("feed_forward_norm", "attn_norm.weight", "input_layernorm.weight")];
