//! Shapes of the Gemma models.

use super::super::shapes::{
    Experts, FeedForward, FullAttention, Norms, QkNorm, RopeScaling, Shape,
};
use super::base::{EXPERTS, LLAMA};

pub const GEMMA3_4B: Shape = Shape {
    name: "gemma3-4b",
    architecture: "gemma3",
    hidden: 2560,
    layers: 34,
    heads: 8,
    kv_heads: 4,
    head_dim: 256,
    rotary_dim: 256,
    feed_forward: FeedForward::Dense { width: 10240 },
    vocabulary: 262_144,
    context: 131_072,
    window: Some(1024),
    rope_base: 1_000_000.0,
    rope_base_windowed: Some(10_000.0),
    rope_scaling: RopeScaling::Linear { factor: 8.0 },
    norm_epsilon: 1e-6,
    norms: Norms::Sandwich,
    qk_norm: QkNorm::PerHead,
    tied: true,
    scaled_embedding: true,
    ..LLAMA
};

const GEMMA4_EXPERTS: Experts =
    Experts { width: 704, experts: 128, used: 8, dense_width: 2112, beside_dense: true, ..EXPERTS };

/// The vision tower is left out, as converters do.
pub const GEMMA4_26B: Shape = Shape {
    name: "gemma4-26b-a4b",
    architecture: "gemma4",
    hidden: 2816,
    layers: 30,
    heads: 16,
    kv_heads: 8,
    full_attention: Some(FullAttention { period: 6, kv_heads: 2, head_dim: 512 }),
    feed_forward: FeedForward::Experts(GEMMA4_EXPERTS),
    context: 262_144,
    rope_scaling: RopeScaling::Proportional { rotated: 128 },
    norms: Norms::SandwichOfBoth,
    layer_scale: true,
    logit_cap: Some(30.0),
    ..GEMMA3_4B
};

pub const GEMMA3_TINY: Shape = Shape {
    name: "gemma3-tiny",
    hidden: 256,
    layers: 7,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    rotary_dim: 64,
    feed_forward: FeedForward::Dense { width: 768 },
    vocabulary: 1024,
    window: Some(64),
    ..GEMMA3_4B
};

pub const GEMMA4_TINY: Shape = Shape {
    name: "gemma4-tiny",
    hidden: 256,
    layers: 7,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    rotary_dim: 64,
    full_attention: Some(FullAttention { period: 2, kv_heads: 1, head_dim: 128 }),
    feed_forward: FeedForward::Experts(Experts {
        width: 256,
        experts: 16,
        used: 4,
        dense_width: 768,
        ..GEMMA4_EXPERTS
    }),
    vocabulary: 1024,
    window: Some(64),
    rope_scaling: RopeScaling::Proportional { rotated: 32 },
    ..GEMMA4_26B
};
