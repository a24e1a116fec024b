//! The shapes of real models, as their published configurations give them. A shape is data; nothing else in this
//! module knows a model by name.

/// What follows attention in every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForward {
    Dense {
        width: u32,
    },
    /// `experts` of `width` each, `used` of them per token. `dense_width` is the width that the metadata also
    /// names and no tensor has.
    Experts {
        width: u32,
        experts: u32,
        used: u32,
        dense_width: u32,
    },
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QkNorm {
    None,
    /// One weight per element of a head.
    PerHead,
    /// One weight per element of the whole projection.
    WholeProjection,
}

/// Rope scaling of Llama 3: `factor` for wavelengths beyond `original_context`, nothing for short ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlamaRopeScaling {
    pub factor: f32,
    pub low_frequency_factor: f32,
    pub high_frequency_factor: f32,
    pub original_context: f32,
}

/// One model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub name: &'static str,
    /// `general.architecture`, which is also the prefix of the model's own keys.
    pub architecture: &'static str,
    pub hidden: u32,
    pub layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub feed_forward: FeedForward,
    pub vocabulary: u32,
    pub context: u32,
    pub rope_base: f32,
    pub rope_scaling: Option<LlamaRopeScaling>,
    pub norm_epsilon: f32,
    pub qk_norm: QkNorm,
    pub qkv_bias: bool,
    /// The output projection is the embedding.
    pub tied: bool,
    pub pre_tokenizer: &'static str,
    pub adds_bos: bool,
}

const LLAMA: Shape = Shape {
    name: "",
    architecture: "llama",
    hidden: 4096,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    feed_forward: FeedForward::Dense { width: 14336 },
    vocabulary: 128_256,
    context: 131_072,
    rope_base: 500_000.0,
    rope_scaling: Some(LlamaRopeScaling {
        factor: 8.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_context: 8192.0,
    }),
    norm_epsilon: 1e-5,
    qk_norm: QkNorm::None,
    qkv_bias: false,
    tied: false,
    pre_tokenizer: "llama-bpe",
    adds_bos: true,
};

const QWEN: Shape = Shape {
    name: "",
    architecture: "qwen3",
    context: 40_960,
    vocabulary: 151_936,
    rope_base: 1_000_000.0,
    rope_scaling: None,
    norm_epsilon: 1e-6,
    qk_norm: QkNorm::PerHead,
    pre_tokenizer: "qwen2",
    adds_bos: false,
    ..LLAMA
};

const QWEN3_MOE_30B: Shape = Shape {
    name: "qwen3moe-30b",
    architecture: "qwen3moe",
    hidden: 2048,
    layers: 48,
    kv_heads: 4,
    feed_forward: FeedForward::Experts { width: 768, experts: 128, used: 8, dense_width: 6144 },
    ..QWEN
};

const LLAMA_1B: Shape = Shape {
    name: "llama-1b",
    hidden: 2048,
    layers: 16,
    head_dim: 64,
    feed_forward: FeedForward::Dense { width: 8192 },
    rope_scaling: Some(LlamaRopeScaling {
        factor: 32.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_context: 8192.0,
    }),
    tied: true,
    ..LLAMA
};

/// Every shape, the ones named most often first.
pub const SHAPES: [Shape; 10] = [
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
        feed_forward: FeedForward::Experts {
            width: 14336,
            experts: 8,
            used: 2,
            dense_width: 14336,
        },
        vocabulary: 32_000,
        context: 32_768,
        rope_base: 1_000_000.0,
        rope_scaling: None,
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
        feed_forward: FeedForward::Experts { width: 1024, experts: 64, used: 8, dense_width: 1024 },
        vocabulary: 50_304,
        context: 4096,
        rope_base: 10_000.0,
        rope_scaling: None,
        qk_norm: QkNorm::WholeProjection,
        pre_tokenizer: "olmo",
        adds_bos: false,
        ..LLAMA
    },
    Shape {
        name: "qwen3moe-tiny",
        hidden: 256,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        feed_forward: FeedForward::Experts { width: 256, experts: 16, used: 4, dense_width: 1024 },
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
];

/// The shape of that name.
pub fn find(name: &str) -> Option<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name == name)
}

impl LlamaRopeScaling {
    /// What each frequency of a head is divided by: 1 for short wavelengths, `factor` for those beyond the original
    /// context, a blend between (Llama 3.1, published reference code).
    pub fn divisors(&self, head_dim: u32, base: f32) -> Vec<f32> {
        let longest = self.original_context / self.low_frequency_factor;
        let shortest = self.original_context / self.high_frequency_factor;
        (0..head_dim / 2)
            .map(|pair| {
                let frequency = base.powf(-((2 * pair) as f32) / head_dim as f32);
                let wavelength = 2.0 * std::f32::consts::PI / frequency;
                if wavelength < shortest {
                    1.0
                } else if wavelength > longest {
                    self.factor
                } else {
                    let smooth = (self.original_context / wavelength - self.low_frequency_factor)
                        / (self.high_frequency_factor - self.low_frequency_factor);
                    1.0 / ((1.0 - smooth) / self.factor + smooth)
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_heads_are_whole() {
        for (index, shape) in SHAPES.iter().enumerate() {
            assert_eq!(shape.heads % shape.kv_heads, 0, "{}", shape.name);
            assert!(SHAPES[..index].iter().all(|other| other.name != shape.name));
            assert_eq!(find(shape.name), Some(shape));
        }
        assert!(find("gpt-5").is_none());
    }

    #[test]
    fn long_waves_are_stretched() {
        let scaling = SHAPES[1].rope_scaling.unwrap();
        let divisors = scaling.divisors(64, 500_000.0);
        assert_eq!(divisors.len(), 32);
        assert_eq!((divisors[0], divisors[31]), (1.0, 32.0));
        assert!(divisors.windows(2).all(|pair| pair[0] <= pair[1]));
    }
}
