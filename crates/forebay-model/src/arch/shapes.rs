//! Shapes of parts that newer models have. They know nothing of whole models.

use forebay_compute::PoolScores;
use forebay_ops::{KV_BLOCK, Pools, StreamMixing};
use serde::Serialize;

use super::check::{check, check_size};
use crate::ModelError;

/// Attention whose heads share one key of each position, which is its value too (DeepSeek-V4). Queries are projected in two steps
/// and divided by their root mean square, and keys are normed. The output is rotated back and projected in two steps, the
/// first within groups of heads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SharedKeys {
    /// Width of the low-rank query projection.
    pub query_rank: usize,
    /// Number of groups of heads in the first output projection, and of elements that it gives for each.
    pub output_groups: usize,
    pub output_rank: usize,
    /// Compressed entries, if a token sees such beside its window.
    pub entries: Option<EntryShape>,
}

/// Shape of compressed entries, which are as long as keys.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EntryShape {
    /// Number of positions that an entry stands for.
    pub ratio: usize,
    /// True if an entry also takes the positions of the entry before it.
    pub overlap: bool,
    /// The choice of the entries that a token attends to; `None` means all before it.
    pub indexer: Option<EntryIndexer>,
}

/// Chooses entries as an [`super::Indexer`] chooses keys. Its keys are compressed like the entries.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EntryIndexer {
    pub heads: usize,
    /// Number of elements of a query and of a key.
    pub head_dim: usize,
    /// Number of entries that a token attends to.
    pub top_k: usize,
    /// Index into [`Architecture::ropes`] of the rotation of queries and keys.
    pub rope: usize,
}

impl EntryShape {
    /// Returns the number of positions, counted back from an entry's last one, that it is computed from.
    pub fn looks_back(&self) -> usize {
        self.ratio.saturating_mul(self.parts())
    }

    /// Returns the number of parts of each projection: one for each entry that a position belongs to.
    pub fn parts(&self) -> usize {
        if self.overlap { 2 } else { 1 }
    }

    /// Returns the number of elements of entries of `head_dim` elements with the keys of their indexer.
    pub(super) fn elements(&self, head_dim: usize) -> usize {
        head_dim + self.indexer.map_or(0, |of| of.head_dim)
    }

    /// Returns the number of elements of a position's values and gates.
    pub fn projected(&self, head_dim: usize) -> usize {
        2 * self.parts() * self.elements(head_dim)
    }

    /// Returns the bytes that entries take for each position, with elements of so many bytes. Every block has at least one row.
    pub fn kept_bytes(&self, head_dim: usize, element: usize) -> u64 {
        (element * self.elements(head_dim) / self.ratio.clamp(1, KV_BLOCK)) as u64
    }
}

/// Chooses the keys that a token attends to. The indexer's heads share one key of each position, which is kept in the KV cache.
/// Queries, keys and weights of heads are projections of what attention's are projections of. Of equal scores, the lower
/// position is taken first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Indexer {
    pub heads: usize,
    /// Number of elements of a query and of a key.
    pub head_dim: usize,
    /// Number of keys that a token attends to, or of blocks or pools of keys.
    pub top_k: usize,
    /// Index into [`Architecture::ropes`] of the rotation of queries and keys, if they are rotated.
    pub rope: Option<usize>,
    pub rule: IndexerRule,
    /// False if layers with this attention have no indexer, but take the choice of the last layer before them that has one (Hy4).
    pub own: bool,
}

/// The rule by which an indexer chooses, and the things that it chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum IndexerRule {
    /// Positions. The score of a key is the sum over the heads of a weight times the positive part of the dot product of query
    /// and key. Keys have a layer norm (DeepSeek-V3.2, the lightning indexer).
    Keys,
    /// Blocks of `length` positions, by every head for one key/value head. The score of a block is the largest dot product of
    /// query and key. The block of the token's own position and the `before` blocks before it are always among the chosen
    /// ones. Queries and keys have norms (MiniMax-M3).
    Blocks { length: usize, before: usize },
    /// Pools of `length` positions, scored like keys. The key of a pool is an average of its keys, weighted for every element by
    /// the softmax of gates. Positions behind the last complete pool are always chosen (GLM-5-Next).
    GatedPools { length: usize },
    /// The same, without weights of heads, and with the mean of the keys. It is normed and rotated like the key at the pool's
    /// first position. Queries have a norm (Qwen4-Exp).
    MeanPools { length: usize },
}

impl Indexer {
    /// Returns the pools of positions among which a token chooses.
    pub fn pools(&self) -> Pools {
        match self.rule {
            IndexerRule::Keys => Pools::positions(self.top_k),
            IndexerRule::Blocks { length, before } => Pools {
                length,
                // The block of the token's own position is one of them.
                most: self.top_k.saturating_sub(1),
                own_seen: true,
                before_own: before,
            },
            IndexerRule::GatedPools { length } | IndexerRule::MeanPools { length } => {
                Pools { length, ..Pools::positions(self.top_k) }
            }
        }
    }

    /// Returns how pools are scored.
    pub fn scores(&self) -> PoolScores {
        match self.rule {
            IndexerRule::Blocks { .. } => PoolScores::Largest,
            _ => PoolScores::Weighted,
        }
    }

    /// Returns the number of lists of chosen keys of a token.
    pub fn lists(&self) -> usize {
        if self.scores() == PoolScores::Largest { self.heads } else { 1 }
    }

    /// Returns the number of elements of a key in the KV cache, with its gates.
    pub fn key_width(&self) -> usize {
        match self.rule {
            IndexerRule::GatedPools { .. } => 2 * self.head_dim,
            _ => self.head_dim,
        }
    }

    /// Returns true if the heads have weights.
    pub fn has_weights(&self) -> bool {
        matches!(self.rule, IndexerRule::Keys | IndexerRule::GatedPools { .. })
    }

    /// Returns the number of positions of a pool, if a pool has one key.
    pub fn pooled(&self) -> Option<usize> {
        match self.rule {
            IndexerRule::GatedPools { length } | IndexerRule::MeanPools { length } => Some(length),
            IndexerRule::Keys | IndexerRule::Blocks { .. } => None,
        }
    }
}

/// What the router and the experts of a layer take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub enum ExpertInput {
    /// The normed input of the feed-forward.
    #[default]
    OfFeedForward,
    /// The same, but the router takes the residual stream as it is before the layer (SmallThinker).
    RouterOfLayer,
    /// Both take the residual stream as it is before the layer, behind a norm of their own. Shared experts take the input of the
    /// feed-forward (Arctic).
    OfLayer,
}

/// Experts that compute in a space of their own, between two projections. The router and shared experts take the input as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LatentExperts {
    /// Number of elements of an expert's input and output.
    pub width: usize,
    pub norm: LatentNorm,
}

/// Position of the norm in the latent space of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum LatentNorm {
    /// The experts take normed inputs (Muse Spark).
    Before,
    /// The weighted sum of the experts' outputs is normed (Kimi K3).
    After,
}

/// Biases of scores by the distance of the key (Inkling). Every query head mixes them from profiles, which have a number for each
/// distance. How much of each profile it takes is a projection of the layer's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RelativeBias {
    /// Number of profiles.
    pub rank: usize,
    /// Number of distances that have a bias, from 0 on.
    pub extent: usize,
}

/// Embeddings of the n-grams that end at a token (Qwen4-Exp). Before their attention, some layers add what they make of them to the
/// residual streams ([`NGramShape`]).
///
/// An n-gram has 2 to `size` tokens. Several hashes of it choose rows of a table, whose elements together are the embedding.
#[derive(Debug, Clone, Serialize)]
pub struct NGrams {
    /// Number of tokens of the longest n-grams.
    pub size: usize,
    /// Number of hashes of each n-gram.
    pub hashes: usize,
    /// Number of elements of a token's embedding.
    pub width: usize,
    /// Number of tokens that the convolution sees, [`NGrams::size`] tokens apart.
    pub taps: usize,
    /// The token between texts. It stands for the tokens before it.
    pub separator: u32,
    /// The layers that add embeddings, ascending. Each has a table of its own.
    pub layers: Vec<usize>,
    /// Numbers of the hashes, if the metadata has them. Otherwise every layer has them as tensors.
    #[serde(skip)]
    pub constants: Option<HashConstants>,
}

/// Numbers of the hashes of n-grams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashConstants {
    /// Multipliers of the last token, the one before it, and so on.
    pub multipliers: Vec<i64>,
    /// First row of each hash in the table, and number of its rows.
    pub firsts: Vec<i64>,
    pub counts: Vec<i64>,
}

impl NGrams {
    /// Returns the number of rows of a table that make the embedding of a token.
    pub fn rows_per_token(&self) -> usize {
        (self.size - 1) * self.hashes
    }

    /// Returns the number of elements of a row.
    pub fn row_width(&self) -> usize {
        self.width / self.rows_per_token()
    }

    /// Returns the number of tokens before a row that its n-grams may have.
    pub fn before(&self) -> usize {
        self.size - 1
    }

    pub(super) fn validate(&self, layers: usize) -> Result<(), ModelError> {
        check(
            "tokens of n-grams",
            self.size,
            (2..=8).contains(&self.size),
            "forebay knows 2 to 8",
        )?;
        let hashes = self.hashes;
        check("hashes of n-grams", hashes, (1..=64).contains(&hashes), "forebay knows 1 to 64")?;
        check_size("width of the embeddings of n-grams", self.width)?;
        let rows = self.rows_per_token();
        let fits = self.width.is_multiple_of(rows);
        let expected = format!("it must be a multiple of the {rows} rows of a token");
        check("width of the embeddings of n-grams", self.width, fits, &expected)?;
        let elements = self.row_width();
        let fits = elements <= 1 << 16;
        check("elements of a row of n-grams", elements, fits, "forebay knows up to 65536")?;
        let taps = self.taps;
        let key = "width of the convolution of n-grams";
        check(key, taps, (2..=8).contains(&taps), "forebay knows 2 to 8")?;
        let ascending = self.layers.is_sorted_by(|a, b| a < b);
        let inside = self.layers.last().is_some_and(|last| *last < layers);
        let given = format!("{:?}", self.layers);
        check("layers with n-grams", given, ascending && inside, "each must be a layer, ascending")
    }
}

/// Residual streams beside each other. Every block collapses them to its input, and its output is added to all of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Streams {
    pub count: usize,
    pub rule: StreamRule,
}

/// The rule by which blocks read and write residual streams.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub enum StreamRule {
    /// Manifold-constrained hyper-connections (DeepSeek-V4, GLM-5-Next): products of the streams give a factor of every stream for
    /// the input, one for the output, and a matrix that mixes the streams.
    Mixed {
        /// Number of times that the columns of the matrix are divided by their sums.
        iterations: usize,
        epsilon: f32,
        /// The collapse of the streams behind the last layer.
        end: StreamsEnd,
    },
    /// Gated residuals (Qwen4): every element has a gate for the input, from a low-rank projection, and products give a factor of
    /// every stream for the output. The streams collapse behind the last layer in the same way, and blocks have no other norm.
    Gated {
        /// Width of the low-rank projection.
        rank: usize,
    },
    /// Independent hyper-connections (Hy4): products of the streams give a factor of every stream for the input and one for the
    /// output. The streams are not mixed. Behind the last layer, products give a factor of each.
    Independent {
        /// Factor of the logistic function in the factors of outputs.
        magnitude: f32,
        /// Number that is added to all factors.
        epsilon: f32,
    },
    /// A bank of earlier states (Kimi K3): the first stream is the state, and blocks read a mixture of it and of the states in the
    /// bank, by the softmax of products. In every `period`-th layer, beginning with the first, the state moves to the bank when
    /// the output of attention or the recurrence is added, and the output replaces it.
    Bank { period: usize },
    /// Alternating updates (Gemma 3n): a layer computes one stream. The others are predicted before it and corrected after it, and
    /// the tokens' embeddings for the layer are added to all streams but the first. A low-rank branch (LAuReL) is beside the
    /// attention of every layer.
    Predicted {
        /// Number of the stream that layers compute.
        active: usize,
        /// True if a vector multiplies the active stream where it is the gate of the embeddings for a layer.
        scaled: bool,
        /// Largest magnitude of weights of corrections, if there is one.
        clip: Option<f32>,
        /// Width of the branch's low-rank projection.
        branch_rank: usize,
    },
}

/// The collapse of mixed streams behind the last layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum StreamsEnd {
    /// Products of the streams give a factor of each (DeepSeek-V4).
    Weighted,
    /// Their mean (GLM-5-Next).
    Mean,
}

/// The rule of a family whose models have residual streams beside each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamForm {
    Mixed(StreamsEnd),
    Gated,
    Independent,
    Bank,
    Predicted,
}

impl Streams {
    /// Returns the number of streams that hold something, which are the first, when a block of a layer reads them: its feed-forward
    /// if `after_mixer`. The number of layers stands for what follows the last layer.
    pub(crate) fn filled(&self, layer: usize, after_mixer: bool) -> usize {
        match self.rule {
            StreamRule::Mixed { .. }
            | StreamRule::Gated { .. }
            | StreamRule::Independent { .. }
            | StreamRule::Predicted { .. } => self.count,
            StreamRule::Bank { period } => 1 + (layer + usize::from(after_mixer)).div_ceil(period),
        }
    }

    /// Returns the stream to which the state moves when the output of a layer's attention or recurrence is added, if it moves.
    pub(crate) fn banked(&self, layer: usize) -> Option<usize> {
        match self.rule {
            StreamRule::Mixed { .. }
            | StreamRule::Gated { .. }
            | StreamRule::Independent { .. }
            | StreamRule::Predicted { .. } => None,
            StreamRule::Bank { period } => {
                layer.is_multiple_of(period).then_some(1 + layer / period)
            }
        }
    }

    /// Returns what turns products of streams of hyper-connections into coefficients.
    ///
    /// # Panics
    /// Panics if the streams are gated, a bank or predicted.
    pub(crate) fn mixing<V>(&self, scales: V, base: V, norm_epsilon: f32) -> StreamMixing<V> {
        let (iterations, epsilon, outputs) = match self.rule {
            StreamRule::Mixed { iterations, epsilon, .. } => (iterations, epsilon, (2.0, 0.0)),
            StreamRule::Independent { magnitude, epsilon } => (0, epsilon, (magnitude, epsilon)),
            StreamRule::Gated { .. } | StreamRule::Bank { .. } | StreamRule::Predicted { .. } => {
                unreachable!("other streams have no such weights")
            }
        };
        StreamMixing { scales, base, iterations, epsilon, outputs, norm_epsilon }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_ngrams_that_no_cache_holds_are_refused() {
        let of = |width: usize| {
            NGrams {
                size: 2,
                hashes: 1,
                width,
                taps: 4,
                separator: 0,
                layers: vec![0],
                constants: None,
            }
            .validate(1)
        };
        of(1 << 16).unwrap();
        let error = of((1 << 16) + 8).unwrap_err().to_string();
        assert!(error.contains("elements of a row of n-grams"), "{error}");
    }
}

/// Position of the norms in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum NormLayout {
    /// A norm before attention and before the feed-forward.
    Pre,
    /// A norm before each of them, and one on its output before that is added to the residual stream (Gemma).
    Sandwich,
    /// A norm on the output of each of them, and none before it (OLMo 2).
    Post,
    /// A norm before each of them. Both take the residual stream as it is before the layer, and both outputs are added to it (Cohere).
    /// Files may have one norm for both.
    Parallel,
    /// No norm of its own, because collapsing the streams norms them (Qwen4).
    None,
}

/// What a layer's short convolutions are added to, in the order of their states and weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Convolved {
    Keys,
    Values,
    Attention,
    FeedForward,
}
