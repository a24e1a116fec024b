//! Shapes with latent attention.

use super::super::shapes::{
    Experts, FeedForward, Indexer, LatentAttention, Pools, RopeScaling, Scores, Shape, SharedKeys,
};
use super::base::{EXPERTS, LLAMA};

pub(super) const DEEPSEEK_V3_EXPERTS: Experts = Experts {
    width: 2048,
    experts: 256,
    used: 8,
    dense_width: 18432,
    dense_layers: 3,
    shared: 1,
    scores: Scores::Sigmoid,
    groups: Some((8, 4)),
    weights_scale: Some(2.5),
    weights_norm: Some(true),
    correction_bias: true,
    ..EXPERTS
};

/// The multi-token prediction layer is left out, as converters do.
pub const DEEPSEEK_V3: Shape = Shape {
    name: "deepseek-v3",
    has_mtp: true,
    architecture: "deepseek2",
    hidden: 7168,
    layers: 61,
    heads: 128,
    // The cache and the metadata see one key/value head of latent and rotated elements.
    kv_heads: 1,
    head_dim: 576,
    rotary_dim: 64,
    latent_attention: Some(LatentAttention {
        query_rank: 1536,
        latent: 512,
        unrotated: 128,
        rotated: 64,
        value: 128,
        one_tensor: false,
    }),
    feed_forward: FeedForward::Experts(DEEPSEEK_V3_EXPERTS),
    vocabulary: 129_280,
    context: 163_840,
    rope_base: 10_000.0,
    rope_scaling: RopeScaling::Yarn {
        factor: 40.0,
        original_context: 4096,
        log_multiplier: Some(0.1),
    },
    norm_epsilon: 1e-6,
    pre_tokenizer: "deepseek-v3",
    ..LLAMA
};

pub const DEEPSEEK_V2_LITE: Shape = Shape {
    name: "deepseek-v2-lite",
    has_mtp: false,
    hidden: 2048,
    layers: 27,
    heads: 16,
    latent_attention: Some(LatentAttention {
        query_rank: 0,
        latent: 512,
        unrotated: 128,
        rotated: 64,
        value: 128,
        one_tensor: false,
    }),
    feed_forward: FeedForward::Experts(Experts {
        width: 1408,
        experts: 64,
        used: 6,
        dense_width: 10944,
        dense_layers: 1,
        shared: 2,
        scores: Scores::Softmax,
        groups: Some((1, 1)),
        weights_scale: Some(1.0),
        ..EXPERTS
    }),
    vocabulary: 102_400,
    rope_scaling: RopeScaling::Yarn {
        factor: 40.0,
        original_context: 4096,
        log_multiplier: Some(0.0707),
    },
    pre_tokenizer: "deepseek-llm",
    ..DEEPSEEK_V3
};

/// The multi-token prediction layer is left out, because generating does not need it.
pub const DEEPSEEK_V32: Shape = Shape {
    name: "deepseek-v3.2",
    architecture: "deepseek32",
    indexer: Some(Indexer { heads: 64, head_dim: 128, chosen: 2048, pools: Pools::Keys }),
    ..DEEPSEEK_V3
};

const DEEPSEEK_V4_KEYS: SharedKeys = SharedKeys {
    query_rank: 1024,
    output_groups: 8,
    output_rank: 1024,
    plain_layers: 2,
    ratios: [4, 128],
    rope_base: 160_000.0,
    streams: 4,
    hashed_layers: 3,
    limit: 10.0,
};

pub(super) const DEEPSEEK_V4_EXPERTS: Experts = Experts {
    width: 2048,
    experts: 256,
    used: 6,
    shared: 1,
    scores: Scores::RootOfSoftplus,
    weights_scale: Some(1.5),
    weights_norm: Some(true),
    correction_bias: true,
    ..EXPERTS
};

/// The multi-token prediction layer is left out, because generating does not need it.
pub const DEEPSEEK_V4_FLASH: Shape = Shape {
    name: "deepseek-v4-flash",
    has_mtp: false,
    architecture: "deepseek4",
    quantisation: "MXFP4_MOE",
    hidden: 4096,
    layers: 43,
    heads: 64,
    kv_heads: 1,
    head_dim: 512,
    rotary_dim: 64,
    latent_attention: None,
    shared_keys: Some(DEEPSEEK_V4_KEYS),
    indexer: Some(Indexer { heads: 64, head_dim: 128, chosen: 512, pools: Pools::Keys }),
    feed_forward: FeedForward::Experts(DEEPSEEK_V4_EXPERTS),
    context: 1_048_576,
    window: Some(128),
    rope_scaling: RopeScaling::Yarn {
        factor: 16.0,
        original_context: 65_536,
        log_multiplier: None,
    },
    sinks: true,
    ..DEEPSEEK_V3
};

pub const DEEPSEEK_V4_TINY: Shape = Shape {
    name: "deepseek-v4-tiny",
    hidden: 256,
    layers: 5,
    heads: 4,
    head_dim: 128,
    rotary_dim: 32,
    shared_keys: Some(SharedKeys {
        query_rank: 256,
        output_groups: 2,
        output_rank: 128,
        plain_layers: 1,
        hashed_layers: 1,
        ..DEEPSEEK_V4_KEYS
    }),
    indexer: Some(Indexer { heads: 4, head_dim: 64, chosen: 16, pools: Pools::Keys }),
    feed_forward: FeedForward::Experts(Experts {
        width: 256,
        experts: 16,
        used: 3,
        ..DEEPSEEK_V4_EXPERTS
    }),
    vocabulary: 1024,
    ..DEEPSEEK_V4_FLASH
};

/// The multi-token prediction layer is left out, because generating does not need it.
pub const GLM_47_FLASH: Shape = Shape {
    name: "glm-4.7-flash",
    hidden: 2048,
    layers: 47,
    heads: 20,
    latent_attention: Some(LatentAttention {
        query_rank: 768,
        latent: 512,
        unrotated: 192,
        rotated: 64,
        value: 256,
        one_tensor: false,
    }),
    feed_forward: FeedForward::Experts(Experts {
        width: 1536,
        experts: 64,
        used: 4,
        dense_width: 10240,
        dense_layers: 1,
        groups: Some((1, 1)),
        weights_scale: Some(1.8),
        ..DEEPSEEK_V3_EXPERTS
    }),
    vocabulary: 154_880,
    context: 202_752,
    rope_base: 1_000_000.0,
    rope_scaling: RopeScaling::None,
    norm_epsilon: 1e-5,
    pre_tokenizer: "glm4",
    adds_bos: false,
    ..DEEPSEEK_V3
};

pub const DEEPSEEK_V3_TINY: Shape = Shape {
    name: "deepseek-v3-tiny",
    hidden: 256,
    layers: 4,
    heads: 4,
    head_dim: 288,
    rotary_dim: 32,
    latent_attention: Some(LatentAttention {
        query_rank: 256,
        latent: 256,
        unrotated: 64,
        rotated: 32,
        value: 64,
        one_tensor: false,
    }),
    feed_forward: FeedForward::Experts(Experts {
        width: 256,
        experts: 16,
        used: 4,
        dense_width: 768,
        dense_layers: 1,
        groups: Some((4, 2)),
        ..DEEPSEEK_V3_EXPERTS
    }),
    vocabulary: 1024,
    ..DEEPSEEK_V3
};

pub const DEEPSEEK_V32_TINY: Shape = Shape {
    name: "deepseek-v3.2-tiny",
    architecture: "deepseek32",
    indexer: Some(Indexer { heads: 8, head_dim: 64, chosen: 64, pools: Pools::Keys }),
    ..DEEPSEEK_V3_TINY
};
