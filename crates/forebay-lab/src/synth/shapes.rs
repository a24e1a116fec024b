//! What the shape of a model is. A shape is data; nothing but their list knows a model by name.

/// What follows attention in every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForward {
    Dense { width: u32 },
    Experts(Experts),
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Of each expert.
    pub width: u32,
    pub experts: u32,
    /// Per token.
    pub used: u32,
    /// Width of the dense layers; where there are none, the metadata names it and no tensor has it.
    pub dense_width: u32,
    /// The metadata names the experts' width apart from the dense one.
    pub names_width: bool,
    /// Layers at the beginning that have no experts.
    pub dense_layers: u32,
    /// Experts that every token uses, joined to one that is so many times as wide.
    pub shared: u32,
    pub scores: Scores,
    /// Groups that experts come in, and how many of them a token uses.
    pub groups: Option<(u32, u32)>,
    /// What the metadata says about the weights of the chosen: a factor, and whether they are normalised.
    pub weights_scale: Option<f32>,
    pub weights_norm: Option<bool>,
    /// A bias of the scores for the choice alone.
    pub correction_bias: bool,
    /// The router and every matrix of every expert have a bias.
    pub biases: bool,
}

/// How a router's outputs become scores, as far as the metadata says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scores {
    Unsaid,
    Softmax,
    Sigmoid,
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

/// Which norms a layer has, by the names that files give them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norms {
    /// `attn_norm` and `ffn_norm`.
    Plain,
    /// The second is called `post_attention_norm`.
    SecondAfterAttention,
    /// Both, and one behind each block.
    Sandwich,
}

/// Rope scaling of Llama 3: `factor` for wavelengths beyond `original_context`, nothing for short ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlamaRopeScaling {
    pub factor: f32,
    pub low_frequency_factor: f32,
    pub high_frequency_factor: f32,
    pub original_context: f32,
}

/// How angles are changed for contexts longer than those of the first training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// As a tensor of divisors.
    Llama(LlamaRopeScaling),
    Linear {
        factor: f32,
    },
    /// `log_multiplier` is a tenth of DeepSeek's `mscale_all_dim`.
    Yarn {
        factor: f32,
        original_context: u32,
        log_multiplier: Option<f32>,
    },
}

/// Attention whose keys and values are products of a short latent vector (DeepSeek-V2 report, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentAttention {
    /// Queries are made by way of so many numbers; 0: directly.
    pub query_rank: u32,
    /// Numbers that keys and values are made of.
    pub latent: u32,
    /// Of a head's keys: elements that do not rotate, and those that do, which all heads share.
    pub unrotated: u32,
    pub rotated: u32,
    /// Of a head's values.
    pub value: u32,
    /// What makes keys and values lies in one tensor, as in files until 2025.
    pub one_tensor: bool,
}

/// One model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub name: &'static str,
    /// `general.architecture`, which is also the prefix of the model's own keys.
    pub architecture: &'static str,
    /// That of published files.
    pub quantisation: &'static str,
    pub hidden: u32,
    pub layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Elements of a head that rotate.
    pub rotary_dim: u32,
    pub latent_attention: Option<LatentAttention>,
    pub feed_forward: FeedForward,
    pub vocabulary: u32,
    pub context: u32,
    /// Positions that some of the layers see; which ones, the architecture says.
    pub window: Option<u32>,
    pub rope_base: f32,
    /// Of layers with a window, where it is another.
    pub rope_base_windowed: Option<f32>,
    pub rope_scaling: RopeScaling,
    pub norm_epsilon: f32,
    pub norms: Norms,
    pub qk_norm: QkNorm,
    pub qkv_bias: bool,
    pub output_bias: bool,
    /// A score for each head that no position has.
    pub sinks: bool,
    /// The output projection is the embedding.
    pub tied: bool,
    pub pre_tokenizer: &'static str,
    pub adds_bos: bool,
}

impl Shape {
    /// How the model's layer `layer` has a mixture of experts, if it has one.
    pub fn experts_of(&self, layer: u32) -> Option<Experts> {
        match self.feed_forward {
            FeedForward::Experts(experts) if layer >= experts.dense_layers => Some(experts),
            _ => None,
        }
    }

    /// Width of the dense layers, of which there may be none.
    pub fn dense_width(&self) -> u32 {
        match self.feed_forward {
            FeedForward::Dense { width } => width,
            FeedForward::Experts(experts) => experts.dense_width,
        }
    }
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
    use super::super::known::{SHAPES, find};
    use super::*;

    #[test]
    fn names_are_unique_and_heads_are_whole() {
        for (index, shape) in SHAPES.iter().enumerate() {
            assert_eq!(shape.heads % shape.kv_heads, 0, "{}", shape.name);
            assert!(SHAPES[..index].iter().all(|other| other.name != shape.name));
            assert_eq!(find(shape.name), Some(shape));
            if let Some(latent) = shape.latent_attention {
                assert_eq!((shape.kv_heads, shape.head_dim), (1, latent.latent + latent.rotated));
                assert_eq!(shape.rotary_dim, latent.rotated);
            }
        }
        assert!(find("gpt-5").is_none());
    }

    #[test]
    fn long_wavelengths_are_stretched() {
        let RopeScaling::Llama(scaling) = SHAPES[1].rope_scaling else { panic!("not a llama") };
        let divisors = scaling.divisors(64, 500_000.0);
        assert_eq!(divisors.len(), 32);
        assert_eq!((divisors[0], divisors[31]), (1.0, 32.0));
        assert!(divisors.windows(2).all(|pair| pair[0] <= pair[1]));
    }
}
