//! What a model is, as data: read from a catalog's metadata, obeyed by the decoder.

mod families;
mod gguf;
mod huggingface;

use forebay_compute::{RopeConfig, RopeLayout, RopeScaling, RopeTable};
use forebay_format::{Catalog, Source};
use serde::Serialize;

use crate::ModelError;
use crate::weights::Weights;
pub use families::{Family, known_families};

/// A description that one decoder can run.
#[derive(Debug, Clone, Serialize)]
pub struct Architecture {
    /// The family's name in the field, for example `qwen3moe`.
    pub family: &'static str,
    /// Name given by the model's author, where the file says one.
    pub name: Option<String>,
    pub hidden: usize,
    pub vocabulary: usize,
    /// Positions the model was trained for.
    pub context_trained: usize,
    pub norm_epsilon: f32,
    pub attention: Attention,
    pub rope: Rope,
    /// One entry per layer.
    pub layers: Vec<Layer>,
    /// The output projection is the embedding table.
    pub tied_embeddings: bool,
    /// How this file names its tensors.
    pub naming: Naming,
}

/// Shape of the attention, the same in all layers.
#[derive(Debug, Clone, Serialize)]
pub struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub bias: AttentionBias,
    pub qk_norm: QkNorm,
}

/// Which projections carry a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum AttentionBias {
    None,
    /// q, k and v, not the output projection (qwen2).
    Qkv,
    /// All four projections (llama with `attention_bias`).
    All,
}

/// Root-mean-square norm of queries and keys before the rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum QkNorm {
    None,
    /// One weight vector of `head_dim`, applied to every head (qwen3).
    PerHead,
    /// One weight vector over the whole projection (olmoe).
    WholeProjection,
}

/// Rotary position embedding.
#[derive(Debug, Clone, Serialize)]
pub struct Rope {
    pub theta: f64,
    /// Leading dimensions of each head that rotate.
    pub rotary_dim: usize,
    #[serde(skip)]
    pub layout: RopeLayout,
    #[serde(skip)]
    pub scaling: RopeScaling,
}

/// One decoder layer.
#[derive(Debug, Clone, Serialize)]
pub struct Layer {
    /// Positions a token attends to, itself included; all when absent.
    pub window: Option<usize>,
    pub feed_forward: FeedForward,
}

impl Layer {
    /// Experts of the layer; 0 in a dense one.
    pub fn experts(&self) -> usize {
        match &self.feed_forward {
            FeedForward::Dense { .. } => 0,
            FeedForward::Experts(experts) => experts.count,
        }
    }
}

#[derive(Debug, Clone, Serialize)]
pub enum FeedForward {
    /// Gated SiLU feed-forward of this width.
    Dense {
        width: usize,
    },
    Experts(Experts),
}

impl FeedForward {
    pub fn has_experts(&self) -> bool {
        matches!(self, FeedForward::Experts(_))
    }
}

/// A mixture of experts.
#[derive(Debug, Clone, Serialize)]
pub struct Experts {
    pub count: usize,
    pub used: usize,
    pub width: usize,
    /// Weights of the chosen experts are divided by their sum.
    pub renormalise: bool,
    pub scale: f32,
}

/// How tensors are named in the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Naming {
    Gguf,
    HuggingFace(HfExpertNames),
}

/// Names of the expert tensors in a Hugging Face folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum HfExpertNames {
    /// `mlp.experts.N.{gate,up,down}_proj`, router `mlp.gate`.
    Mlp,
    /// `block_sparse_moe.experts.N.{w1,w3,w2}`, router `block_sparse_moe.gate`.
    BlockSparse,
}

impl Architecture {
    /// Reads the description from a catalog's metadata.
    ///
    /// # Errors
    /// An unknown architecture is refused with the list of known ones; so are missing keys and
    /// values that no model can have.
    pub fn from_catalog(catalog: &Catalog) -> Result<Self, ModelError> {
        let architecture = match &catalog.source {
            Source::Gguf(metadata) => gguf::describe(catalog, metadata)?,
            Source::HuggingFace(metadata) => huggingface::describe(catalog, metadata)?,
        };
        architecture.validate()?;
        Ok(architecture)
    }

    /// Experts a token uses in a layer, the largest over the layers; 0 for a dense model.
    pub fn experts_per_token(&self) -> usize {
        self.expert_layers().map(|experts| experts.used).max().unwrap_or(0)
    }

    /// The expert layers' descriptions, in order.
    pub fn expert_layers(&self) -> impl Iterator<Item = &Experts> {
        self.layers.iter().filter_map(|layer| match &layer.feed_forward {
            FeedForward::Experts(experts) => Some(experts),
            FeedForward::Dense { .. } => None,
        })
    }

    /// Width of the widest dense feed-forward; 0 where every layer has experts.
    pub(crate) fn dense_width(&self) -> usize {
        let widths = self.layers.iter().map(|layer| match layer.feed_forward {
            FeedForward::Dense { width } => width,
            FeedForward::Experts(_) => 0,
        });
        widths.max().unwrap_or(0)
    }

    /// The rotary position embedding for `context` positions.
    ///
    /// # Errors
    /// Numbers that cannot be tabulated.
    pub(crate) fn rope_table(
        &self,
        weights: &Weights,
        context: usize,
    ) -> Result<RopeTable, ModelError> {
        let rope = &self.rope;
        Ok(RopeTable::new(&RopeConfig {
            rotary_dim: rope.rotary_dim,
            rotary_from: 0,
            theta: rope.theta,
            layout: rope.layout,
            scaling: rope.scaling,
            frequency_factors: weights.rope_factors.as_deref(),
            context,
        })?)
    }

    fn validate(&self) -> Result<(), ModelError> {
        // Far above any model; keeps products of hostile values inside usize.
        const LIMIT: usize = 1 << 24;
        let attention = &self.attention;
        let sized = [
            ("hidden size", self.hidden),
            ("vocabulary size", self.vocabulary),
            ("layer count", self.layers.len()),
            ("attention heads", attention.heads),
            ("key/value heads", attention.kv_heads),
            ("head dimension", attention.head_dim),
            ("rotary dimension", self.rope.rotary_dim),
            ("trained context", self.context_trained),
        ];
        for (key, value) in sized {
            check(key, value, value > 0 && value < LIMIT, "it must be from 1 to 16 million")?;
        }
        check(
            "attention heads",
            attention.heads,
            attention.heads.is_multiple_of(attention.kv_heads),
            "it must be a multiple of the key/value heads",
        )?;
        check(
            "rotary dimension",
            self.rope.rotary_dim,
            self.rope.rotary_dim.is_multiple_of(2) && self.rope.rotary_dim <= attention.head_dim,
            "it must be even and at most the head dimension",
        )?;
        check(
            "norm epsilon",
            self.norm_epsilon,
            self.norm_epsilon > 0.0 && self.norm_epsilon < 1.0,
            "it must be between 0 and 1",
        )?;
        check(
            "rope base",
            self.rope.theta,
            self.rope.theta.is_finite() && self.rope.theta > 0.0,
            "it must be positive",
        )?;
        for layer in &self.layers {
            layer.validate()?;
        }
        Ok(())
    }
}

impl Layer {
    fn validate(&self) -> Result<(), ModelError> {
        const LIMIT: usize = 1 << 24;
        if let Some(window) = self.window {
            check("sliding window", window, window > 0, "it must be positive")?;
        }
        match &self.feed_forward {
            FeedForward::Dense { width } => check(
                "feed-forward width",
                *width,
                *width > 0 && *width < LIMIT,
                "it must be positive",
            ),
            FeedForward::Experts(experts) => {
                let fits = experts.count > 0 && experts.count <= 65_536;
                check("expert count", experts.count, fits, "it must be from 1 to 65536")?;
                let fits = experts.used > 0 && experts.used <= experts.count.min(256);
                check(
                    "experts per token",
                    experts.used,
                    fits,
                    "it must be from 1 to the expert count (at most 256)",
                )?;
                check(
                    "expert width",
                    experts.width,
                    experts.width > 0 && experts.width < LIMIT,
                    "it must be positive",
                )
            }
        }
    }
}

fn check<T: ToString>(key: &str, value: T, holds: bool, expected: &str) -> Result<(), ModelError> {
    if holds {
        return Ok(());
    }
    Err(ModelError::BadValue {
        key: key.into(),
        value: value.to_string(),
        expected: expected.into(),
    })
}
