//! The shape of a model. A shape is data; only the list of shapes knows models by name.

/// The block that follows attention in every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForward {
    Dense { width: u32 },
    Experts(Experts),
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Width of each expert.
    pub width: u32,
    pub experts: u32,
    /// Number of experts that a token uses.
    pub used: u32,
    /// Width of the dense layers. If there are none, the metadata has this width but no tensor does.
    pub dense_width: u32,
    /// True if the metadata has a key for the experts' width besides the dense width.
    pub names_width: bool,
    /// Number of layers at the beginning that have no experts.
    pub dense_layers: u32,
    /// Number of experts that every token uses. They are joined to one expert that is this many times as wide.
    pub shared: u32,
    /// Width of the shared experts together, if the metadata has it beside their number; `None` if it is `shared` times
    /// `width`.
    pub shared_width: Option<u32>,
    /// True if the metadata has the shared expert's width instead of its number, and its output has a gate.
    pub shared_gate: bool,
    /// True if every layer has a dense feed-forward beside the experts. The router's input and the experts' outputs then
    /// have scales, and one tensor holds the gate and up matrices (Gemma 4).
    pub beside_dense: bool,
    pub scores: Scores,
    /// Number of expert groups, and number of groups that a token uses.
    pub groups: Option<(u32, u32)>,
    /// Factor of the chosen experts' weights, if the metadata has one.
    pub weights_scale: Option<f32>,
    /// True if the chosen experts' weights are normalised; `None` if the metadata does not say.
    pub weights_norm: Option<bool>,
    /// True if scores get a bias that affects only the choice of experts.
    pub correction_bias: bool,
    /// True if the router and every matrix of every expert have a bias.
    pub biases: bool,
    /// Length of the vector that the experts read and write, if it is shorter than the router's: a matrix makes it, and another
    /// brings the normed sum back (Kimi K3).
    pub latent: Option<u32>,
}

/// Function that turns a router's outputs into scores, if the metadata names it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scores {
    Unsaid,
    Softmax,
    Sigmoid,
    /// The root of `ln(1 + e^x)`.
    RootOfSoftplus,
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

/// Norms of a layer, by their tensor names in files.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norms {
    /// `attn_norm` and `ffn_norm`.
    Plain,
    /// `attn_norm` and `post_attention_norm`, the norm before the feed-forward.
    SecondAfterAttention,
    /// `attn_norm` and `ffn_norm`, and one norm after each of the two blocks.
    Sandwich,
    /// The norms of `Sandwich`, and more around the dense feed-forward and the experts that work beside each other.
    SandwichOfBoth,
    /// `attn_norm` alone, because a layer has one block.
    One,
    /// None, because blocks read gated residual streams.
    None,
}

/// Rope scaling of Llama 3: divides frequencies by `factor` for wavelengths beyond `original_context`, and leaves short
/// wavelengths unchanged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlamaRopeScaling {
    pub factor: f32,
    pub low_frequency_factor: f32,
    pub high_frequency_factor: f32,
    pub original_context: f32,
}

/// Change of the rotation angles for contexts longer than those of the first training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// Divisors of the frequencies, stored as a tensor.
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
    /// The angles of a whole head for the first `rotated` elements; the others stand still because a tensor divides their
    /// frequencies by a huge number.
    Proportional {
        rotated: u32,
    },
}

/// Attention whose keys and values are products of a short latent vector (DeepSeek-V2 report, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentAttention {
    /// Length of the vector that queries are made from; 0 if they are made directly.
    pub query_rank: u32,
    /// Length of the latent vector that keys and values are made from.
    pub latent: u32,
    /// Number of elements of a head's key that do not rotate.
    pub unrotated: u32,
    /// Number of elements of a head's key that rotate; all heads share them.
    pub rotated: u32,
    /// Number of elements of a head's value.
    pub value: u32,
    /// True if one tensor holds the matrices that make keys and values, as in files until 2025.
    pub one_tensor: bool,
}

/// Sparse attention: an indexer chooses the positions that each query sees (DeepSeek-V3.2 report, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Indexer {
    pub heads: u32,
    pub head_dim: u32,
    /// Number of positions that are chosen.
    pub chosen: u32,
    pub pools: Pools,
}

/// What an indexer chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pools {
    /// Positions, or the entries of [`SharedKeys`].
    Keys,
    /// Pools of so many positions, whose keys are averaged by gates (GLM-5-Next).
    Gated(u32),
    /// Pools of so many positions, whose keys have a mean (Qwen4-Exp).
    Mean(u32),
}

/// Residual streams beside each other, in models without [`SharedKeys`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Streams {
    /// So many streams, mixed by hyper-connections. Their mean is what the output projection reads.
    Mixed(u32),
    /// So many streams, with gates of a low rank. Blocks have no norm.
    Gated { count: u32, rank: u32 },
    /// One stream, and a bank of what it was every so many layers. Each block reads a mean of them, weighted by scores
    /// (attention residuals).
    Bank(u32),
}

/// Embeddings of the last two and more tokens, which a layer adds to the residual streams.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NGrams {
    /// The layer, counted from 0.
    pub layer: u32,
    /// Largest number of tokens of an n-gram. There are hashes for two tokens and for each number up to this one.
    pub size: u32,
    /// Hashes of each number of tokens. Each has a table of its own.
    pub hashes: u32,
    /// Least number of rows of a table. Each has a prime number of rows.
    pub rows: u32,
    /// Number of elements that the rows of a token have together.
    pub width: u32,
    pub convolution: u32,
}

impl NGrams {
    /// Returns the number of rows of each table in a model with this share of its layers. A shorter model has smaller
    /// tables, so that its file gets as much smaller as its layers do.
    pub fn table_rows(&self, (layers, of): (u32, u32)) -> Vec<u64> {
        let least = u64::from(self.rows) * u64::from(layers) / u64::from(of);
        let is_prime = |number: &u64| {
            let divides = |by: u64| number.is_multiple_of(by);
            *number > 1 && (2..).take_while(|by| by * by <= *number).all(|by| !divides(by))
        };
        let tables = (self.size - 1) * self.hashes;
        (least..).filter(is_prime).take(tables as usize).collect()
    }

    /// Returns the number of elements of a row of a table.
    pub fn row(&self) -> u32 {
        self.width / ((self.size - 1) * self.hashes)
    }
}

/// Attention of layers with a window, where its number of heads differs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Windowed {
    /// Layers whose number is a multiple of this, counted from 0, have no window.
    pub period: u32,
    pub heads: u32,
}

/// Attention with one key for all heads, which is the value, too. Layers see a window, and most see compressed entries of what is
/// before it (DeepSeek-V4 report, section 2.3). Such models have several residual streams, and layers that choose experts by the
/// token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedKeys {
    /// Length of the vector that queries are made from.
    pub query_rank: u32,
    /// Number of groups of heads whose outputs are projected together, and length of a group's projection.
    pub output_groups: u32,
    pub output_rank: u32,
    /// Number of layers at the beginning that see the window only.
    pub plain_layers: u32,
    /// Number of positions of an entry in the other layers, in turn. Entries of few positions overlap and are chosen.
    pub ratios: [u32; 2],
    /// Rope base of the layers with entries.
    pub rope_base: f32,
    /// Number of residual streams.
    pub streams: u32,
    /// Number of layers at the beginning whose experts a table gives for every token.
    pub hashed_layers: u32,
    /// Limit of the gate and up products of experts.
    pub limit: f32,
}

impl SharedKeys {
    /// Returns the number of positions of an entry in layer `layer`; 0 if the layer has none.
    pub fn ratio(&self, layer: u32) -> u32 {
        match layer.checked_sub(self.plain_layers) {
            None => 0,
            Some(layer) => self.ratios[layer as usize % 2],
        }
    }

    /// Returns true if entries of so many positions overlap and are chosen.
    pub fn overlaps(&self, ratio: u32) -> bool {
        ratio == self.ratios[0]
    }
}

/// Attention of the layers without a window, where it differs. It takes its values from the key projection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FullAttention {
    /// Every layer with a number that is a multiple of this, counted from 1, has no window.
    pub period: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
}

/// The block that recurrent layers have instead of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Recurrent {
    Delta(GatedDelta),
    ChannelDelta(ChannelDelta),
    Mamba(Mamba),
}

/// Gated delta networks (Yang et al. 2025).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDelta {
    pub convolution: u32,
    pub key_heads: u32,
    pub value_heads: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    /// True if one tensor makes both vectors that control how the state changes.
    pub one_tensor: bool,
}

/// Delta networks that forget each channel at its own speed (Kimi Linear report, section 3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChannelDelta {
    pub convolution: u32,
    pub heads: u32,
    pub head_dim: u32,
    /// Least logarithm of a decay, if the metadata has one.
    pub bound: Option<f32>,
    /// True if one matrix makes the gate of the output; false if it is a product of two.
    pub full_gate: bool,
}

/// Selective state spaces (Mamba2; Dao and Gu 2024).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mamba {
    pub convolution: u32,
    pub heads: u32,
    pub head_dim: u32,
    /// Number of groups of heads that share their input and output vectors.
    pub groups: u32,
    /// Length of a state's row.
    pub state: u32,
}

/// Blocks of each layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// Every layer has attention and a feed-forward.
    Alike,
    /// Every layer has a feed-forward. Layers have attention if their number, counted from 1, is a multiple of this or
    /// that of the last layer; the others are recurrent.
    AttentionEvery(u32),
    /// The same, but the last layer is no exception.
    AttentionOnlyEvery(u32),
    /// A layer has one block, which a letter names: `M` recurrent, `*` attention, `E` feed-forward.
    OneBlock(&'static str),
}

/// Shape of one model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub name: &'static str,
    /// `general.architecture`, which is also the prefix of the model's own keys.
    pub architecture: &'static str,
    /// Quantisation of published files.
    pub quantisation: &'static str,
    pub hidden: u32,
    pub layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Number of elements of a head that rotate.
    pub rotary_dim: u32,
    pub latent_attention: Option<LatentAttention>,
    pub shared_keys: Option<SharedKeys>,
    /// Chooses the positions or entries that attention sees.
    pub indexer: Option<Indexer>,
    pub full_attention: Option<FullAttention>,
    pub windowed: Option<Windowed>,
    /// True if each head of attention has a gate, made by a matrix of its own.
    pub head_gates: bool,
    /// True if each element of latent attention's output has a gate, made by a matrix of its own.
    pub element_gates: bool,
    pub streams: Option<Streams>,
    pub ngrams: Option<NGrams>,
    /// Limit of the gate and up products of all feed-forwards with experts, if they have one.
    pub experts_limit: Option<f32>,
    /// Limits of the gate and up products of all feed-forwards by `tanh`, if they have them (SiTU).
    pub soft_limits: Option<(f32, f32)>,
    /// Block of the layers that `pattern` makes recurrent.
    pub recurrent: Option<Recurrent>,
    pub pattern: Pattern,
    /// True if attention's output has a gate, which the query matrix makes.
    pub output_gate: bool,
    pub feed_forward: FeedForward,
    /// True if feed-forwards multiply by a gate; false if they square instead.
    pub gated: bool,
    pub vocabulary: u32,
    pub context: u32,
    /// Number of positions that sliding-window layers see. The architecture determines which layers these are.
    pub window: Option<u32>,
    pub rope_base: f32,
    /// Rope base of sliding-window layers, if it differs.
    pub rope_base_windowed: Option<f32>,
    pub rope_scaling: RopeScaling,
    pub norm_epsilon: f32,
    pub norms: Norms,
    pub qk_norm: QkNorm,
    pub qkv_bias: bool,
    pub output_bias: bool,
    /// True if each head has an attention sink: a score that belongs to no position.
    pub sinks: bool,
    /// True if the output projection is the embedding matrix.
    pub tied: bool,
    /// True if embeddings are multiplied by the square root of their length.
    pub scaled_embedding: bool,
    /// True if a number of each layer multiplies what leaves the layer.
    pub layer_scale: bool,
    /// Limit of the logits, if they have one.
    pub logit_cap: Option<f32>,
    /// True if the published model has a layer for multi-token prediction.
    pub has_mtp: bool,
    /// True to write that layer ([`super::SynthOptions::mtp`]).
    pub writes_mtp: bool,
    pub pre_tokenizer: &'static str,
    pub adds_bos: bool,
}

impl Shape {
    /// Returns the experts of layer `layer`; `None` if the layer is dense.
    pub fn experts_of(&self, layer: u32) -> Option<Experts> {
        match self.feed_forward {
            FeedForward::Experts(experts) if layer >= experts.dense_layers => Some(experts),
            _ => None,
        }
    }

    /// Returns the recurrent block of layer `layer`; `None` if the layer has none.
    pub fn recurrent_of(&self, layer: u32) -> Option<Recurrent> {
        match self.pattern {
            Pattern::Alike => None,
            Pattern::AttentionEvery(_) | Pattern::AttentionOnlyEvery(_) => {
                self.recurrent.filter(|_| !self.has_attention(layer))
            }
            Pattern::OneBlock(letters) => self.recurrent.filter(|_| letter(letters, layer) == b'M'),
        }
    }

    /// Returns true if layer `layer` has attention.
    pub fn has_attention(&self, layer: u32) -> bool {
        match self.pattern {
            Pattern::Alike => true,
            Pattern::AttentionEvery(period) => {
                (layer + 1).is_multiple_of(period) || layer + 1 == self.layers
            }
            Pattern::AttentionOnlyEvery(period) => (layer + 1).is_multiple_of(period),
            Pattern::OneBlock(letters) => letter(letters, layer) == b'*',
        }
    }

    /// Returns true if layer `layer` has a feed-forward.
    pub fn has_feed_forward(&self, layer: u32) -> bool {
        match self.pattern {
            Pattern::Alike | Pattern::AttentionEvery(_) | Pattern::AttentionOnlyEvery(_) => true,
            Pattern::OneBlock(letters) => letter(letters, layer) == b'E',
        }
    }

    /// Returns the attention of layer `layer` if the layer has no window while others have one.
    pub fn full_attention_of(&self, layer: u32) -> Option<FullAttention> {
        self.full_attention.filter(|full| (layer + 1).is_multiple_of(full.period))
    }

    /// Returns the number of query heads of layer `layer`.
    pub fn heads_of(&self, layer: u32) -> u32 {
        match self.windowed {
            Some(windowed) if !layer.is_multiple_of(windowed.period) => windowed.heads,
            _ => self.heads,
        }
    }

    /// Returns the number of key and value heads of layer `layer`; 0 if it has no attention.
    pub fn kv_heads_of(&self, layer: u32) -> u32 {
        match self.full_attention_of(layer) {
            _ if !self.has_attention(layer) => 0,
            Some(full) => full.kv_heads,
            None => self.kv_heads,
        }
    }

    /// Returns the least number of layers that a model of this shape can have: it needs one with attention, and that
    /// with embeddings of n-grams.
    pub fn layers_min(&self) -> u32 {
        let first = self.ngrams.map_or(1, |of| of.layer + 1);
        (first..=self.layers).find(|layers| self.has_attention(layers - 1)).unwrap_or(self.layers)
    }

    /// Returns the width of the dense layers. There may be none.
    pub fn dense_width(&self) -> u32 {
        match self.feed_forward {
            FeedForward::Dense { width } => width,
            FeedForward::Experts(experts) => experts.dense_width,
        }
    }
}

/// Returns the letter of layer `layer`.
fn letter(letters: &str, layer: u32) -> u8 {
    letters.as_bytes()[layer as usize]
}

impl LlamaRopeScaling {
    /// Returns the divisor of each frequency of a head. It is 1 for short wavelengths, `factor` for wavelengths beyond
    /// the original context, and a blend between (Llama 3.1, published reference code).
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
            if let Some(Recurrent::Delta(delta)) = shape.recurrent {
                assert_eq!(delta.value_heads % delta.key_heads, 0, "{}", shape.name);
            }
            if let Some(Recurrent::Mamba(mamba)) = shape.recurrent {
                assert_eq!(mamba.heads % mamba.groups, 0, "{}", shape.name);
            }
            if let Pattern::OneBlock(letters) = shape.pattern {
                assert_eq!(letters.len(), shape.layers as usize, "{}", shape.name);
                assert!(letters.bytes().all(|letter| b"M*E".contains(&letter)), "{}", shape.name);
            }
            let recurrent = (0..shape.layers).any(|layer| shape.recurrent_of(layer).is_some());
            assert_eq!(recurrent, shape.recurrent.is_some(), "{}", shape.name);
            assert!(shape.has_attention(shape.layers_min() - 1), "{}", shape.name);
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
