//! Shapes of models of late 2026.

use super::super::shapes::{
    ChannelDelta, Experts, FeedForward, GatedDelta, Indexer, LatentAttention, NGrams, Norms,
    Pattern, Pools, QkNorm, Recurrent, RopeScaling, Scores, Shape, Streams, Windowed,
};
use super::base::{EXPERTS, LLAMA};
use super::latent::{
    DEEPSEEK_V3, DEEPSEEK_V3_EXPERTS, DEEPSEEK_V3_TINY, DEEPSEEK_V4_EXPERTS, DEEPSEEK_V4_FLASH,
};
use super::recurrent::{
    KIMI_DELTA, KIMI_DELTA_TINY, KIMI_LINEAR_48B, QWEN36_35B, QWEN36_DELTA, QWEN36_EXPERTS,
};

const FLASH_NEXT_NGRAMS: NGrams =
    NGrams { layer: 1, size: 3, hashes: 8, rows: 20_000_000, width: 2560, convolution: 4 };

/// The vision tower and the multi-token prediction layer are left out, as converters do.
pub const QWEN38_FLASH_NEXT: Shape = Shape {
    name: "qwen3.8-flash-next",
    has_mtp: false,
    architecture: "qwen4exp",
    hidden: 2560,
    layers: 48,
    heads: 24,
    indexer: Some(Indexer { heads: 4, head_dim: 128, chosen: 2048, pools: Pools::Mean(4) }),
    streams: Some(Streams::Gated { count: 4, rank: 320 }),
    ngrams: Some(FLASH_NEXT_NGRAMS),
    recurrent: Some(Recurrent::Delta(GatedDelta { value_heads: 48, ..QWEN36_DELTA })),
    feed_forward: FeedForward::Experts(Experts {
        width: 640,
        experts: 512,
        used: 10,
        dense_width: 640,
        ..QWEN36_EXPERTS
    }),
    norms: Norms::None,
    ..QWEN36_35B
};

pub const FLASH_NEXT_TINY: Shape = Shape {
    name: "qwen3.8-flash-next-tiny",
    hidden: 256,
    layers: 4,
    heads: 4,
    head_dim: 64,
    rotary_dim: 16,
    indexer: Some(Indexer { heads: 2, head_dim: 64, chosen: 16, pools: Pools::Mean(4) }),
    streams: Some(Streams::Gated { count: 4, rank: 32 }),
    ngrams: Some(NGrams { hashes: 4, rows: 200, width: 256, ..FLASH_NEXT_NGRAMS }),
    recurrent: Some(Recurrent::Delta(GatedDelta {
        key_heads: 2,
        value_heads: 6,
        key_dim: 64,
        value_dim: 64,
        ..QWEN36_DELTA
    })),
    feed_forward: FeedForward::Experts(Experts {
        width: 256,
        experts: 16,
        used: 4,
        dense_width: 256,
        ..QWEN36_EXPERTS
    }),
    vocabulary: 1024,
    ..QWEN38_FLASH_NEXT
};

const GLM_53_EXPERTS: Experts = Experts {
    experts: 288,
    dense_width: 12288,
    groups: Some((1, 1)),
    scores: Scores::Unsaid,
    ..DEEPSEEK_V3_EXPERTS
};

/// The vision tower and the multi-token prediction layer are left out, as converters do.
pub const GLM_53_FLASH: Shape = Shape {
    name: "glm-5.3-flash",
    has_mtp: false,
    architecture: "glm5-next",
    hidden: 4096,
    layers: 45,
    heads: 64,
    head_dim: 512,
    rotary_dim: 0,
    latent_attention: Some(LatentAttention {
        query_rank: 1536,
        latent: 512,
        unrotated: 256,
        rotated: 0,
        value: 256,
        one_tensor: false,
    }),
    indexer: Some(Indexer { heads: 32, head_dim: 128, chosen: 2048, pools: Pools::Gated(16) }),
    streams: Some(Streams::Mixed(4)),
    experts_limit: Some(10.0),
    recurrent: Some(Recurrent::ChannelDelta(ChannelDelta {
        heads: 64,
        bound: Some(-5.0),
        ..KIMI_DELTA
    })),
    pattern: Pattern::AttentionOnlyEvery(4),
    feed_forward: FeedForward::Experts(GLM_53_EXPERTS),
    vocabulary: 154_880,
    context: 1_048_576,
    rope_scaling: RopeScaling::None,
    norm_epsilon: 1e-5,
    pre_tokenizer: "glm4",
    adds_bos: false,
    ..DEEPSEEK_V3
};

pub const GLM_53_TINY: Shape = Shape {
    name: "glm-5.3-tiny",
    hidden: 256,
    layers: 5,
    heads: 4,
    head_dim: 256,
    latent_attention: Some(LatentAttention {
        query_rank: 256,
        latent: 256,
        unrotated: 64,
        rotated: 0,
        value: 64,
        one_tensor: false,
    }),
    indexer: Some(Indexer { heads: 4, head_dim: 64, chosen: 16, pools: Pools::Gated(4) }),
    recurrent: Some(Recurrent::ChannelDelta(ChannelDelta { bound: Some(-5.0), ..KIMI_DELTA_TINY })),
    pattern: Pattern::AttentionOnlyEvery(2),
    feed_forward: FeedForward::Experts(Experts {
        width: 256,
        experts: 16,
        used: 4,
        dense_width: 768,
        dense_layers: 1,
        ..GLM_53_EXPERTS
    }),
    vocabulary: 1024,
    ..GLM_53_FLASH
};

/// Only the numbers of experts are known, and that there are tables of n-grams. The rest is that of V4-Flash.
pub const DEEPSEEK_V41_FLASH: Shape = Shape {
    name: "deepseek-v4.1-flash",
    feed_forward: FeedForward::Experts(Experts { experts: 384, ..DEEPSEEK_V4_EXPERTS }),
    ..DEEPSEEK_V4_FLASH
};

const KIMI_K3_EXPERTS: Experts = Experts {
    width: 3072,
    experts: 896,
    used: 16,
    dense_width: 33_792,
    dense_layers: 1,
    shared: 2,
    scores: Scores::Sigmoid,
    groups: Some((1, 1)),
    weights_norm: Some(true),
    correction_bias: true,
    latent: Some(3584),
    ..EXPERTS
};

/// The vision tower is left out, as converters do.
pub const KIMI_K3: Shape = Shape {
    name: "kimi-k3",
    architecture: "kimi-k3",
    quantisation: "MXFP4_MOE",
    hidden: 7168,
    layers: 93,
    heads: 96,
    latent_attention: DEEPSEEK_V3.latent_attention,
    element_gates: true,
    streams: Some(Streams::Bank(12)),
    soft_limits: Some((4.0, 25.0)),
    recurrent: Some(Recurrent::ChannelDelta(ChannelDelta {
        heads: 96,
        bound: Some(-5.0),
        full_gate: true,
        ..KIMI_DELTA
    })),
    feed_forward: FeedForward::Experts(KIMI_K3_EXPERTS),
    ..KIMI_LINEAR_48B
};

pub const KIMI_K3_TINY: Shape = Shape {
    name: "kimi-k3-tiny",
    hidden: 256,
    layers: 5,
    heads: 4,
    head_dim: 288,
    rotary_dim: 32,
    latent_attention: DEEPSEEK_V3_TINY.latent_attention,
    streams: Some(Streams::Bank(2)),
    recurrent: Some(Recurrent::ChannelDelta(ChannelDelta {
        bound: Some(-5.0),
        full_gate: true,
        ..KIMI_DELTA_TINY
    })),
    pattern: Pattern::AttentionEvery(2),
    feed_forward: FeedForward::Experts(Experts {
        width: 256,
        experts: 16,
        used: 4,
        dense_width: 768,
        latent: Some(128),
        ..KIMI_K3_EXPERTS
    }),
    vocabulary: 1024,
    ..KIMI_K3
};

const LAGUNA_EXPERTS: Experts = Experts {
    width: 512,
    experts: 256,
    used: 8,
    dense_width: 8192,
    dense_layers: 1,
    shared: 1,
    shared_width: Some(512),
    scores: Scores::Sigmoid,
    weights_scale: Some(2.5),
    weights_norm: Some(true),
    correction_bias: true,
    ..EXPERTS
};

pub const LAGUNA_XS: Shape = Shape {
    name: "laguna-xs-2.1",
    architecture: "laguna",
    hidden: 2048,
    layers: 40,
    heads: 48,
    rotary_dim: 64,
    windowed: Some(Windowed { period: 4, heads: 64 }),
    head_gates: true,
    feed_forward: FeedForward::Experts(LAGUNA_EXPERTS),
    vocabulary: 100_352,
    context: 262_144,
    window: Some(512),
    rope_base_windowed: Some(10_000.0),
    rope_scaling: RopeScaling::Yarn { factor: 32.0, original_context: 8192, log_multiplier: None },
    norm_epsilon: 1e-6,
    qk_norm: QkNorm::PerHead,
    pre_tokenizer: "qwen2",
    ..LLAMA
};

pub const LAGUNA_TINY: Shape = Shape {
    name: "laguna-tiny",
    hidden: 256,
    layers: 5,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    rotary_dim: 32,
    windowed: Some(Windowed { period: 4, heads: 6 }),
    feed_forward: FeedForward::Experts(Experts {
        width: 256,
        experts: 16,
        used: 4,
        dense_width: 512,
        shared_width: Some(256),
        ..LAGUNA_EXPERTS
    }),
    vocabulary: 1024,
    window: Some(16),
    ..LAGUNA_XS
};
