//! Values that many shapes share.

use super::super::shapes::{
    Experts, FeedForward, LlamaRopeScaling, Norms, Pattern, QkNorm, RopeScaling, Scores, Shape,
};

/// Defaults that most models with experts share.
pub(super) const EXPERTS: Experts = Experts {
    width: 0,
    experts: 0,
    used: 0,
    dense_width: 0,
    names_width: true,
    dense_layers: 0,
    shared: 0,
    shared_width: None,
    shared_gate: false,
    beside_dense: false,
    scores: Scores::Unsaid,
    groups: None,
    weights_scale: None,
    weights_norm: None,
    correction_bias: false,
    biases: false,
};

pub(super) const LLAMA: Shape = Shape {
    name: "",
    architecture: "llama",
    quantisation: "Q4_K_M",
    hidden: 4096,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    rotary_dim: 128,
    latent_attention: None,
    shared_keys: None,
    indexer: None,
    full_attention: None,
    recurrent: None,
    pattern: Pattern::Alike,
    output_gate: false,
    feed_forward: FeedForward::Dense { width: 14336 },
    gated: true,
    vocabulary: 128_256,
    context: 131_072,
    window: None,
    rope_base: 500_000.0,
    rope_base_windowed: None,
    rope_scaling: RopeScaling::Llama(LlamaRopeScaling {
        factor: 8.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_context: 8192.0,
    }),
    norm_epsilon: 1e-5,
    norms: Norms::Plain,
    qk_norm: QkNorm::None,
    qkv_bias: false,
    output_bias: false,
    sinks: false,
    tied: false,
    scaled_embedding: false,
    layer_scale: false,
    logit_cap: None,
    pre_tokenizer: "llama-bpe",
    adds_bos: true,
};

pub(super) const QWEN: Shape = Shape {
    name: "",
    architecture: "qwen3",
    context: 40_960,
    vocabulary: 151_936,
    rope_base: 1_000_000.0,
    rope_scaling: RopeScaling::None,
    norm_epsilon: 1e-6,
    qk_norm: QkNorm::PerHead,
    pre_tokenizer: "qwen2",
    adds_bos: false,
    ..LLAMA
};
