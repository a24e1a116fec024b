//! Shapes in which most layers are recurrent.

use super::super::shapes::{
    ChannelDelta, Experts, FeedForward, GatedDelta, LatentAttention, Mamba, Norms, Pattern,
    Recurrent, RopeScaling, Scores, Shape,
};
use super::base::{EXPERTS, LLAMA, QWEN};
use super::latent::DEEPSEEK_V3;

pub(super) const QWEN36_DELTA: GatedDelta = GatedDelta {
    convolution: 4,
    key_heads: 16,
    value_heads: 32,
    key_dim: 128,
    value_dim: 128,
    one_tensor: false,
};

pub(super) const QWEN36_EXPERTS: Experts = Experts {
    width: 512,
    experts: 256,
    used: 8,
    dense_width: 512,
    shared: 1,
    shared_gate: true,
    ..EXPERTS
};

/// The vision tower and the multi-token prediction layer are left out, as converters do.
pub const QWEN36_35B: Shape = Shape {
    name: "qwen3.6-35b-a3b",
    has_mtp: true,
    architecture: "qwen35moe",
    hidden: 2048,
    layers: 40,
    heads: 16,
    kv_heads: 2,
    head_dim: 256,
    rotary_dim: 64,
    recurrent: Some(Recurrent::Delta(QWEN36_DELTA)),
    pattern: Pattern::AttentionEvery(4),
    output_gate: true,
    feed_forward: FeedForward::Experts(QWEN36_EXPERTS),
    vocabulary: 248_320,
    context: 262_144,
    rope_base: 10_000_000.0,
    norms: Norms::SecondAfterAttention,
    pre_tokenizer: "qwen35",
    ..QWEN
};

pub const QWEN3_NEXT_80B: Shape = Shape {
    name: "qwen3-next-80b",
    architecture: "qwen3next",
    layers: 48,
    recurrent: Some(Recurrent::Delta(GatedDelta { one_tensor: true, ..QWEN36_DELTA })),
    feed_forward: FeedForward::Experts(Experts {
        experts: 512,
        used: 10,
        dense_width: 5120,
        ..QWEN36_EXPERTS
    }),
    vocabulary: 151_936,
    pre_tokenizer: "qwen2",
    ..QWEN36_35B
};

pub const QWEN36_TINY: Shape = Shape {
    name: "qwen3.6-tiny",
    hidden: 256,
    layers: 4,
    heads: 4,
    head_dim: 64,
    rotary_dim: 16,
    recurrent: Some(Recurrent::Delta(GatedDelta {
        key_heads: 2,
        value_heads: 4,
        key_dim: 64,
        value_dim: 64,
        ..QWEN36_DELTA
    })),
    pattern: Pattern::AttentionEvery(2),
    feed_forward: FeedForward::Experts(Experts {
        width: 256,
        experts: 16,
        used: 4,
        dense_width: 256,
        ..QWEN36_EXPERTS
    }),
    vocabulary: 1024,
    ..QWEN36_35B
};

const KIMI_LINEAR_EXPERTS: Experts = Experts {
    width: 1024,
    experts: 256,
    used: 8,
    dense_width: 9216,
    dense_layers: 1,
    shared: 1,
    scores: Scores::Sigmoid,
    groups: Some((1, 1)),
    weights_scale: Some(2.446),
    correction_bias: true,
    ..EXPERTS
};

pub const KIMI_DELTA: ChannelDelta =
    ChannelDelta { convolution: 4, heads: 32, head_dim: 128, bound: None, full_gate: false };

pub const KIMI_DELTA_TINY: ChannelDelta = ChannelDelta { heads: 4, head_dim: 64, ..KIMI_DELTA };

pub const KIMI_LINEAR_48B: Shape = Shape {
    name: "kimi-linear-48b",
    has_mtp: false,
    architecture: "kimi-linear",
    hidden: 2304,
    layers: 27,
    heads: 32,
    latent_attention: Some(LatentAttention {
        query_rank: 0,
        latent: 512,
        unrotated: 128,
        rotated: 64,
        value: 128,
        one_tensor: false,
    }),
    recurrent: Some(Recurrent::ChannelDelta(KIMI_DELTA)),
    pattern: Pattern::AttentionEvery(4),
    feed_forward: FeedForward::Experts(KIMI_LINEAR_EXPERTS),
    vocabulary: 163_840,
    context: 1_048_576,
    rope_scaling: RopeScaling::None,
    norm_epsilon: 1e-5,
    pre_tokenizer: "kimi-k2",
    ..DEEPSEEK_V3
};

pub const KIMI_LINEAR_TINY: Shape = Shape {
    name: "kimi-linear-tiny",
    hidden: 256,
    layers: 5,
    heads: 4,
    head_dim: 288,
    rotary_dim: 32,
    latent_attention: Some(LatentAttention {
        query_rank: 0,
        latent: 256,
        unrotated: 64,
        rotated: 32,
        value: 64,
        one_tensor: false,
    }),
    recurrent: Some(Recurrent::ChannelDelta(KIMI_DELTA_TINY)),
    pattern: Pattern::AttentionEvery(2),
    feed_forward: FeedForward::Experts(Experts {
        width: 256,
        experts: 16,
        used: 4,
        dense_width: 768,
        ..KIMI_LINEAR_EXPERTS
    }),
    vocabulary: 1024,
    ..KIMI_LINEAR_48B
};

const NEMOTRON3_EXPERTS: Experts = Experts {
    width: 1856,
    experts: 128,
    used: 6,
    dense_width: 1856,
    shared: 1,
    shared_width: Some(3712),
    groups: Some((1, 1)),
    weights_scale: Some(2.5),
    weights_norm: Some(true),
    correction_bias: true,
    ..EXPERTS
};

pub const NEMOTRON3_NANO: Shape = Shape {
    name: "nemotron-3-nano",
    architecture: "nemotron_h_moe",
    hidden: 2688,
    layers: 52,
    heads: 32,
    kv_heads: 2,
    rotary_dim: 84,
    recurrent: Some(Recurrent::Mamba(Mamba {
        convolution: 4,
        heads: 64,
        head_dim: 64,
        groups: 8,
        state: 128,
    })),
    pattern: Pattern::OneBlock("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
    feed_forward: FeedForward::Experts(NEMOTRON3_EXPERTS),
    gated: false,
    vocabulary: 131_072,
    context: 1_048_576,
    rope_base: 10_000.0,
    rope_scaling: RopeScaling::None,
    norms: Norms::One,
    pre_tokenizer: "pixtral",
    ..LLAMA
};

pub const NEMOTRON3_TINY: Shape = Shape {
    name: "nemotron-3-tiny",
    hidden: 256,
    layers: 7,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    rotary_dim: 64,
    recurrent: Some(Recurrent::Mamba(Mamba {
        convolution: 4,
        heads: 8,
        head_dim: 32,
        groups: 2,
        state: 64,
    })),
    pattern: Pattern::OneBlock("M*EMEME"),
    feed_forward: FeedForward::Experts(Experts {
        width: 256,
        experts: 16,
        used: 4,
        dense_width: 256,
        shared_width: Some(512),
        ..NEMOTRON3_EXPERTS
    }),
    vocabulary: 1024,
    ..NEMOTRON3_NANO
};
