//! Shapes of real models from their published configurations, and small shapes with the same features.

mod base;
mod gemma;
mod latent;
mod latest;
mod recurrent;

use super::shapes::{
    Experts, FeedForward, LlamaRopeScaling, Norms, QkNorm, RopeScaling, Scores, Shape,
};
use base::{EXPERTS, LLAMA, QWEN};
use gemma::{GEMMA3_4B, GEMMA3_TINY, GEMMA4_26B, GEMMA4_TINY};
use latent::{
    DEEPSEEK_V2_LITE, DEEPSEEK_V3, DEEPSEEK_V3_TINY, DEEPSEEK_V4_FLASH, DEEPSEEK_V4_TINY,
    DEEPSEEK_V32, DEEPSEEK_V32_TINY, GLM_47_FLASH,
};
use latest::{
    DEEPSEEK_V41_FLASH, FLASH_NEXT_TINY, GLM_53_FLASH, GLM_53_TINY, KIMI_K3, KIMI_K3_TINY,
    LAGUNA_TINY, LAGUNA_XS, QWEN38_FLASH_NEXT,
};
use recurrent::{
    KIMI_LINEAR_48B, KIMI_LINEAR_TINY, NEMOTRON3_NANO, NEMOTRON3_TINY, QWEN3_NEXT_80B, QWEN36_35B,
    QWEN36_TINY,
};

const QWEN3_MOE_30B: Shape = Shape {
    name: "qwen3moe-30b",
    architecture: "qwen3moe",
    hidden: 2048,
    layers: 48,
    kv_heads: 4,
    feed_forward: FeedForward::Experts(Experts {
        width: 768,
        experts: 128,
        used: 8,
        dense_width: 6144,
        ..EXPERTS
    }),
    ..QWEN
};

const LLAMA_1B: Shape = Shape {
    name: "llama-1b",
    hidden: 2048,
    layers: 16,
    head_dim: 64,
    rotary_dim: 64,
    feed_forward: FeedForward::Dense { width: 8192 },
    rope_scaling: RopeScaling::Llama(LlamaRopeScaling {
        factor: 32.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_context: 8192.0,
    }),
    tied: true,
    ..LLAMA
};

const GPT_OSS_EXPERTS: Experts =
    Experts { width: 2880, experts: 32, used: 4, dense_width: 2880, biases: true, ..EXPERTS };

const GPT_OSS_20B: Shape = Shape {
    name: "gpt-oss-20b",
    architecture: "gpt-oss",
    quantisation: "MXFP4_MOE",
    hidden: 2880,
    layers: 24,
    heads: 64,
    kv_heads: 8,
    head_dim: 64,
    rotary_dim: 64,
    feed_forward: FeedForward::Experts(GPT_OSS_EXPERTS),
    vocabulary: 201_088,
    context: 131_072,
    window: Some(128),
    rope_base: 150_000.0,
    rope_scaling: RopeScaling::Yarn { factor: 32.0, original_context: 4096, log_multiplier: None },
    norm_epsilon: 1e-5,
    norms: Norms::SecondAfterAttention,
    qkv_bias: true,
    output_bias: true,
    sinks: true,
    pre_tokenizer: "gpt-4o",
    adds_bos: false,
    ..LLAMA
};

const GLM_EXPERTS: Experts = Experts {
    width: 1408,
    experts: 128,
    used: 8,
    dense_width: 10944,
    dense_layers: 1,
    shared: 1,
    scores: Scores::Sigmoid,
    groups: Some((1, 1)),
    weights_scale: Some(1.0),
    weights_norm: Some(true),
    correction_bias: true,
    ..EXPERTS
};

/// The multi-token prediction layer is left out, because generating does not need it.
const GLM_45_AIR: Shape = Shape {
    name: "glm-4.5-air",
    has_mtp: true,
    architecture: "glm4moe",
    layers: 46,
    heads: 96,
    rotary_dim: 64,
    feed_forward: FeedForward::Experts(GLM_EXPERTS),
    vocabulary: 151_552,
    rope_base: 1_000_000.0,
    rope_scaling: RopeScaling::None,
    norms: Norms::SecondAfterAttention,
    qkv_bias: true,
    pre_tokenizer: "glm4",
    adds_bos: false,
    ..LLAMA
};

const MINIMAX_M2: Shape = Shape {
    name: "minimax-m2",
    architecture: "minimax-m2",
    hidden: 3072,
    layers: 62,
    heads: 48,
    rotary_dim: 64,
    feed_forward: FeedForward::Experts(Experts {
        width: 1536,
        experts: 256,
        used: 8,
        dense_width: 1536,
        scores: Scores::Sigmoid,
        correction_bias: true,
        ..EXPERTS
    }),
    vocabulary: 200_064,
    context: 196_608,
    rope_base: 5_000_000.0,
    rope_scaling: RopeScaling::None,
    norm_epsilon: 1e-6,
    qk_norm: QkNorm::WholeProjection,
    pre_tokenizer: "minimax-m2",
    adds_bos: false,
    ..LLAMA
};

const HUNYUAN_A13B: Shape = Shape {
    name: "hunyuan-a13b",
    architecture: "hunyuan-moe",
    feed_forward: FeedForward::Experts(Experts {
        width: 3072,
        experts: 64,
        used: 8,
        dense_width: 3072,
        shared: 1,
        shared_width: Some(3072),
        ..EXPERTS
    }),
    vocabulary: 128_167,
    context: 262_144,
    // 10,000 times 1,000 to the power of 128 / 126.
    rope_base: 11_158_840.0,
    rope_scaling: RopeScaling::None,
    qk_norm: QkNorm::PerHead,
    tied: true,
    pre_tokenizer: "hunyuan",
    adds_bos: false,
    ..LLAMA
};

/// All shapes, the most used first.
pub static SHAPES: [Shape; 47] = [
    QWEN3_MOE_30B,
    LLAMA_1B,
    Shape { name: "llama-8b", ..LLAMA },
    Shape {
        name: "llama-70b",
        hidden: 8192,
        layers: 80,
        heads: 64,
        feed_forward: FeedForward::Dense { width: 28672 },
        ..LLAMA
    },
    Shape {
        name: "mixtral-8x7b",
        feed_forward: FeedForward::Experts(Experts {
            width: 14336,
            experts: 8,
            used: 2,
            dense_width: 14336,
            names_width: false,
            ..EXPERTS
        }),
        vocabulary: 32_000,
        context: 32_768,
        rope_base: 1_000_000.0,
        rope_scaling: RopeScaling::None,
        ..LLAMA
    },
    Shape {
        name: "qwen3-8b",
        layers: 36,
        feed_forward: FeedForward::Dense { width: 12288 },
        ..QWEN
    },
    Shape {
        name: "qwen2-7b",
        architecture: "qwen2",
        hidden: 3584,
        layers: 28,
        heads: 28,
        kv_heads: 4,
        feed_forward: FeedForward::Dense { width: 18944 },
        vocabulary: 152_064,
        context: 32_768,
        qk_norm: QkNorm::None,
        qkv_bias: true,
        ..QWEN
    },
    Shape {
        name: "olmoe-7b",
        architecture: "olmoe",
        hidden: 2048,
        layers: 16,
        heads: 16,
        kv_heads: 16,
        feed_forward: FeedForward::Experts(Experts {
            width: 1024,
            experts: 64,
            used: 8,
            dense_width: 1024,
            names_width: false,
            ..EXPERTS
        }),
        vocabulary: 50_304,
        context: 4096,
        rope_base: 10_000.0,
        rope_scaling: RopeScaling::None,
        qk_norm: QkNorm::WholeProjection,
        pre_tokenizer: "olmo",
        adds_bos: false,
        ..LLAMA
    },
    GPT_OSS_20B,
    Shape {
        name: "gpt-oss-120b",
        layers: 36,
        feed_forward: FeedForward::Experts(Experts { experts: 128, ..GPT_OSS_EXPERTS }),
        ..GPT_OSS_20B
    },
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GEMMA3_4B,
    GLM_45_AIR,
    Shape {
        name: "qwen3moe-235b",
        hidden: 4096,
        layers: 94,
        heads: 64,
        feed_forward: FeedForward::Experts(Experts {
            width: 1536,
            experts: 128,
            used: 8,
            dense_width: 12288,
            ..EXPERTS
        }),
        ..QWEN3_MOE_30B
    },
    QWEN36_35B,
    QWEN3_NEXT_80B,
    GLM_47_FLASH,
    MINIMAX_M2,
    DEEPSEEK_V32,
    DEEPSEEK_V4_FLASH,
    KIMI_LINEAR_48B,
    NEMOTRON3_NANO,
    GEMMA4_26B,
    HUNYUAN_A13B,
    QWEN38_FLASH_NEXT,
    GLM_53_FLASH,
    DEEPSEEK_V41_FLASH,
    KIMI_K3,
    LAGUNA_XS,
    FLASH_NEXT_TINY,
    GLM_53_TINY,
    LAGUNA_TINY,
    QWEN36_TINY,
    DEEPSEEK_V3_TINY,
    DEEPSEEK_V32_TINY,
    DEEPSEEK_V4_TINY,
    KIMI_LINEAR_TINY,
    KIMI_K3_TINY,
    NEMOTRON3_TINY,
    GEMMA3_TINY,
    GEMMA4_TINY,
    Shape {
        name: "qwen3moe-tiny",
        hidden: 256,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        rotary_dim: 64,
        feed_forward: FeedForward::Experts(Experts {
            width: 256,
            experts: 16,
            used: 4,
            dense_width: 1024,
            ..EXPERTS
        }),
        vocabulary: 1024,
        context: 2048,
        ..QWEN3_MOE_30B
    },
    Shape {
        name: "llama-tiny",
        hidden: 256,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        feed_forward: FeedForward::Dense { width: 768 },
        vocabulary: 1024,
        context: 2048,
        ..LLAMA_1B
    },
    Shape {
        name: "gpt-oss-tiny",
        hidden: 256,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        feed_forward: FeedForward::Experts(Experts {
            width: 256,
            experts: 16,
            dense_width: 256,
            ..GPT_OSS_EXPERTS
        }),
        vocabulary: 1024,
        ..GPT_OSS_20B
    },
    Shape {
        name: "glm-4.5-tiny",
        hidden: 256,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        rotary_dim: 32,
        feed_forward: FeedForward::Experts(Experts {
            width: 256,
            experts: 16,
            used: 4,
            dense_width: 768,
            ..GLM_EXPERTS
        }),
        vocabulary: 1024,
        ..GLM_45_AIR
    },
    Shape {
        name: "hunyuan-tiny",
        hidden: 256,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        rotary_dim: 64,
        feed_forward: FeedForward::Experts(Experts {
            width: 256,
            experts: 16,
            used: 4,
            dense_width: 256,
            shared: 1,
            shared_width: Some(256),
            ..EXPERTS
        }),
        vocabulary: 1024,
        ..HUNYUAN_A13B
    },
];

/// Returns the shape with this name.
pub fn find(name: &str) -> Option<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name == name)
}
