//! The contents of layers: matrices as parts of blocks, and vectors.

use forebay_compute::{DeltaColumns, RouterRule};
use forebay_format::TensorType;

use crate::arch::{ExpertInput, Experts, Gatings};
use crate::ngrams::NGramHashes;
use crate::rows::RowTable;

/// A matrix `[rows, cols]` that is part `part` of its block.
#[derive(Debug, Clone, Copy)]
pub struct PartMatrix {
    pub part: usize,
    pub ty: TensorType,
    pub rows: usize,
    pub cols: usize,
}

/// One layer's matrices (parts of the layer's dense block) and resident vectors.
#[derive(Debug)]
pub struct LayerWeights {
    /// Norm before attention or the recurrence, if the layer has one.
    pub attention_norm: Option<Vec<f32>>,
    /// Norm of the attention's output, if the architecture has such norms.
    pub attention_post_norm: Option<Vec<f32>>,
    /// Norm before the feed-forward, if the layer has one.
    pub feed_forward_norm: Option<Vec<f32>>,
    pub feed_forward_post_norm: Option<Vec<f32>>,
    /// Weights that collapse the residual streams for attention or the recurrence, if there are several.
    pub attention_streams: Option<StreamWeights<PartMatrix>>,
    /// Weights that collapse the residual streams for the feed-forward.
    pub feed_forward_streams: Option<StreamWeights<PartMatrix>>,
    /// Weights of predicted residual streams, if layers compute one of several.
    pub predicted: Option<Box<PredictedWeights>>,
    pub attention: AttentionWeights,
    /// Attention sinks, one for each head.
    pub sinks: Option<Vec<f32>>,
    /// Recurrence beside the attention, if the layer has both.
    pub beside: Option<Box<RecurrenceBeside>>,
    /// Output projection of attention or of a recurrent layer; `None` if the layer has neither.
    pub o: Option<PartMatrix>,
    pub o_bias: Option<Vec<f32>>,
    /// Number of parts of the dense block that belong to n-grams and attention, with all those that collapse residual streams. The
    /// feed-forward matrices, or router and shared experts, follow.
    pub attention_parts: usize,
    pub feed_forward: FeedForwardWeights,
    pub gatings: Gatings,
    /// Biases of a dense feed-forward.
    pub biases: DenseBiases,
    /// What the layer does with the tokens' embeddings for it, if the model has such embeddings.
    pub embeddings: Option<LayerEmbeddingWeights>,
    /// Weights of the embeddings of n-grams that the layer adds to the residual streams before its attention, if it does.
    pub ngrams: Option<Box<NGramWeights>>,
    /// Gates that mix the residual stream with the outputs of the layer's blocks, if the model has such.
    pub attention_gate: Option<ResidualGate>,
    pub feed_forward_gate: Option<ResidualGate>,
    /// Weights `[taps, channels]` of the short convolutions of keys, of values, and of the outputs of attention and feed-forward,
    /// if the model has such.
    pub convolutions: Option<Box<[Vec<f32>; 4]>>,
    /// Factor of the feed-forward's output.
    pub feed_forward_scale: f32,
    /// Factor of the residual stream at the layer's end.
    pub scale: f32,
}

/// Gates of a block, as vectors `[hidden]`. The share of the block's output is the weight of its norm.
#[derive(Debug)]
pub struct ResidualGate {
    /// Factors of the residual stream before the output is added.
    pub keep: Vec<f32>,
    /// Factors of the output before its norm, if there are such.
    pub scale: Option<Vec<f32>>,
}

/// Biases of a layer's scores by the distance of the key.
#[derive(Debug)]
pub struct RelativeWeights {
    /// Projection `[heads * rank, hidden]` to how much of each profile every query head takes.
    pub project: PartMatrix,
    /// Profiles `[rank, extent]`, from the farthest distance to the token itself.
    pub profiles: Vec<f32>,
}

/// Biases of a dense feed-forward, as far as it has such: `[width]` for gate and up, `[hidden]` for down.
#[derive(Debug, Default)]
pub struct DenseBiases {
    pub gate: Option<Vec<f32>>,
    pub up: Option<Vec<f32>>,
    pub down: Option<Vec<f32>>,
}

impl DenseBiases {
    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        self.gate.is_none() && self.up.is_none() && self.down.is_none()
    }
}

/// Matrices and norms of a layer for the embeddings that tokens have for it. The matrices are parts of the dense block, behind
/// all others.
#[derive(Debug)]
pub struct LayerEmbeddingWeights {
    /// Projection `[width, hidden]` of the token's usual embedding. It is added to the embedding for the layer.
    pub project: PartMatrix,
    /// Norm of this projection. Its weight has the factor of the sum.
    pub norm: Vec<f32>,
    /// Projection `[width, hidden]` of the residual stream to the gate.
    pub gate: PartMatrix,
    /// Projection `[hidden, width]` of the gated embedding.
    pub out: PartMatrix,
    /// Norm of what is added to the residual stream.
    pub post_norm: Vec<f32>,
}

/// Weights of the embeddings that a layer adds to the residual streams for the n-grams that end at a token.
#[derive(Debug)]
pub struct NGramWeights {
    pub hashes: NGramHashes,
    /// The embeddings, which stay on the disk.
    pub table: RowTable,
    /// Type of the table's elements.
    pub ty: TensorType,
    /// Projection `[streams * hidden, width]` of an embedding to a key for each stream.
    pub key: PartMatrix,
    /// Projection `[hidden, width]` of an embedding to the value.
    pub value: PartMatrix,
    /// Weights of the norms of keys, of streams, and of what the convolution reads, each `[streams, hidden]`.
    pub key_norm: Vec<f32>,
    pub stream_norm: Vec<f32>,
    pub convolution_norm: Vec<f32>,
    /// Weights of the convolution `[taps, channels]`.
    pub convolution: Vec<f32>,
}

/// Weights that collapse residual streams to the input of a block, or behind the last layer. `M` is a matrix.
#[derive(Debug)]
pub enum StreamWeights<M> {
    Mixed {
        /// Matrix `[coefficients, streams * hidden]`. Behind the last layer, it has one row for each stream, and in independent
        /// hyper-connections two.
        mix: M,
        /// Numbers that are added to the products.
        base: Vec<f32>,
        /// Factors of the products for the input, the output and the matrix, as far as there are such.
        scales: Vec<f32>,
    },
    Gated {
        /// Norm of each stream, one after the other.
        norm: Vec<f32>,
        /// Low-rank projection `[rank, streams * hidden]` and `[streams * hidden, rank]`, which gives the gates.
        down: M,
        up: M,
        /// Matrix `[streams, streams * hidden]` for the factors of the output. There is none behind the last layer.
        inject: Option<M>,
    },
    /// Weights `[hidden]` of the products that choose among the streams of a bank.
    Bank { scores: Vec<f32> },
    /// The mean of the streams.
    Mean,
    /// The mean of the first stream and of products of the others with a matrix `[hidden, hidden]` each, which take its magnitude.
    Projected(Vec<M>),
}

/// Weights of a layer that computes one of several residual streams, and of the low-rank branch beside its attention.
#[derive(Debug)]
pub struct PredictedWeights {
    /// Matrix `[streams, hidden]`, with the weight of the norm of its input and that input's scale.
    pub router: Vec<f32>,
    /// Matrix `[streams * streams, streams]` of the predictions.
    pub prediction: Vec<f32>,
    /// Matrix `[streams, streams]` of the corrections.
    pub correction: Vec<f32>,
    /// Factors `[hidden]` of the active stream where it is the gate of the embeddings for the layer.
    pub output_scale: Option<Vec<f32>>,
    /// Low-rank projection `[rank, hidden]` and `[hidden, rank]` of attention's input.
    pub left: PartMatrix,
    pub right: PartMatrix,
    /// Norm of this projection.
    pub branch_norm: Vec<f32>,
}

impl<M> StreamWeights<M> {
    /// Returns the matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &M> {
        let list = match self {
            StreamWeights::Projected(list) => &list[..],
            _ => &[],
        };
        let all = match self {
            StreamWeights::Mean | StreamWeights::Bank { .. } | StreamWeights::Projected(_) => {
                [None, None, None]
            }
            StreamWeights::Mixed { mix, .. } => [Some(mix), None, None],
            StreamWeights::Gated { down, up, inject, .. } => {
                [Some(down), Some(up), inject.as_ref()]
            }
        };
        all.into_iter().flatten().chain(list)
    }
}

/// A matrix that is always in memory, in f32.
#[derive(Debug)]
pub struct ResidentMatrix {
    pub rows: usize,
    pub cols: usize,
    /// Little-endian numbers `[rows, cols]`.
    pub data: Vec<u8>,
}

/// A recurrence that reads the same normed input as the layer's attention. Its output is added to that of attention.
#[derive(Debug)]
pub struct RecurrenceBeside {
    pub delta: DeltaWeights,
    /// Output projection `[hidden, values]`.
    pub o: PartMatrix,
}

impl LayerWeights {
    /// Returns all matrices of attention and of a recurrence, with their output projections. The matrices of all heads count as one.
    pub fn mixer_matrices(&self) -> Vec<PartMatrix> {
        let beside =
            self.beside.iter().flat_map(|of| of.delta.projections().copied().chain([of.o]));
        self.attention.matrices().into_iter().chain(self.o).chain(beside).collect()
    }

    /// Returns the weights of the layer's recurrence, if it has one.
    pub fn delta(&self) -> Option<&DeltaWeights> {
        match (&self.attention, &self.beside) {
            (AttentionWeights::Delta(of), _) => Some(of),
            (_, Some(of)) => Some(&of.delta),
            _ => None,
        }
    }

    /// Returns what collapses the residual streams for the layer's blocks, if there are several.
    pub fn streams(&self) -> impl Iterator<Item = &StreamWeights<PartMatrix>> {
        self.attention_streams.iter().chain(&self.feed_forward_streams)
    }

    /// Returns the norm before the router, or before the feed-forward if there is no other. Some routers take the stream as it is.
    pub fn router_norm(&self) -> Option<&[f32]> {
        match &self.feed_forward {
            FeedForwardWeights::Experts { vectors, .. } => {
                let own = vectors.norms.as_ref().map(|norms| &norms.router[..]);
                match vectors.input {
                    ExpertInput::OfFeedForward => own.or(self.feed_forward_norm.as_deref()),
                    ExpertInput::RouterOfLayer => None,
                    ExpertInput::OfLayer => vectors.input_norm.as_deref(),
                }
            }
            FeedForwardWeights::None | FeedForwardWeights::Dense { .. } => {
                self.feed_forward_norm.as_deref()
            }
        }
    }
}

/// Experts that a table gives to the tokens of a pass.
#[derive(Debug, Clone, Copy)]
pub struct TokenExperts<'a> {
    /// Experts `[vocabulary, used]`.
    table: &'a [u32],
    /// Tokens of the rows.
    tokens: &'a [u32],
}

impl<'a> TokenExperts<'a> {
    /// Returns the `used` experts of a row.
    pub fn of(&self, row: usize, used: usize) -> &'a [u32] {
        &self.table[self.tokens[row] as usize * used..][..used]
    }
}

impl ExpertVectors {
    /// Returns the experts of rows with these tokens, if a table gives them.
    pub fn experts_of<'a>(&'a self, tokens: &'a [u32]) -> Option<TokenExperts<'a>> {
        self.by_token.as_deref().map(|table| TokenExperts { table, tokens })
    }

    /// Returns the rule of the layer's router.
    pub fn rule<'a>(&'a self, experts: &Experts) -> RouterRule<'a> {
        experts.rule(self.correction_bias.as_deref(), self.scales.as_deref())
    }
}

/// Weights of what a layer does before its feed-forward, up to the output projection.
#[derive(Debug)]
pub enum AttentionWeights {
    Grouped(GroupedWeights),
    Latent(LatentWeights),
    Shared(SharedKeyWeights),
    /// A recurrent layer, which has no keys and values.
    Delta(DeltaWeights),
    /// A layer that is only a feed-forward.
    None,
}

/// A recurrent layer.
#[derive(Debug)]
pub struct DeltaWeights {
    /// Projections of the normed input.
    pub products: Vec<PartMatrix>,
    /// Second matrices of low-rank projections, each with the number of the product that it multiplies. Their products are
    /// numbered after those of `products`.
    pub second: Vec<(PartMatrix, usize)>,
    /// Which product holds what.
    pub parts: DeltaParts,
    /// Which columns of the products are which.
    pub columns: DeltaColumns,
    /// Factors of the columns of the first product, if they are not all 1.
    pub factors: Option<Vec<f32>>,
    /// Projections of what the convolution gives, if the layer's rule has them ([`crate::arch::DeltaRule::Mamba`]).
    pub selective: Option<Box<SelectiveWeights>>,
    /// Weights of the convolution `[convolution, channels]`.
    pub convolution: Vec<f32>,
    /// Bias of the convolution `[channels]`.
    pub convolution_bias: Option<Vec<f32>>,
    /// Rate of decay of each value head, at most 0. Mamba has `[values, key_dim]`.
    pub decay: Vec<f32>,
    /// Numbers that are added to the steps `[value_heads, decay_width]`. Mamba has one for each value.
    pub step: Vec<f32>,
    /// Factor for each value head's values, which are added to its output. Mamba has one for each value.
    pub skip: Option<Vec<f32>>,
    /// Weight of the norm of the outputs.
    pub norm: Vec<f32>,
}

/// Projections of Mamba that multiply what the convolution gives. Their products are numbered after those of
/// [`DeltaWeights::products`].
#[derive(Debug)]
pub struct SelectiveWeights {
    /// Projection `[rank + 2 * key_dim, values]` to compressed steps, keys and queries.
    pub compressed: PartMatrix,
    /// Projection `[values, rank]` of compressed steps.
    pub steps: PartMatrix,
    /// Norms of compressed steps, keys and queries, if they have norms (Jamba).
    pub norms: Option<[Vec<f32>; 3]>,
}

/// Numbers of the products that hold a recurrent layer's inputs. Several may be columns of the same product.
#[derive(Debug, Clone, Copy)]
pub struct DeltaParts {
    pub q: usize,
    pub k: usize,
    pub v: usize,
    /// Gate of the output.
    pub z: usize,
    /// Share of replacement.
    pub b: usize,
    /// Step of decay.
    pub a: usize,
}

impl DeltaWeights {
    /// Returns the matrices of the projections, in the order of their products.
    pub fn projections(&self) -> impl Iterator<Item = &PartMatrix> {
        let selective = self.selective.iter().flat_map(|of| [&of.compressed, &of.steps]);
        self.products.iter().chain(self.second.iter().map(|(matrix, _)| matrix)).chain(selective)
    }
}

/// Grouped-query attention: every key/value head serves a group of query heads.
#[derive(Debug)]
pub struct GroupedWeights {
    pub q: PartMatrix,
    /// `None` if the layer uses the keys and values of another.
    pub k: Option<PartMatrix>,
    /// `None` if there is no `k`, or if values are the projections of keys.
    pub v: Option<PartMatrix>,
    /// Projection to gates of the output, if there is one beside that of queries.
    pub gate: Option<PartMatrix>,
    pub q_bias: Option<Vec<f32>>,
    pub k_bias: Option<Vec<f32>>,
    pub v_bias: Option<Vec<f32>>,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    /// Weight of the norm of every value, if values are normed.
    pub v_norm: Option<Vec<f32>>,
    /// Weight of the norm of every head's sum of values, if they are normed.
    pub output_norm: Option<Vec<f32>>,
    /// Biases by the distance of the key, if there are any.
    pub relative: Option<RelativeWeights>,
    /// The layer's indexer, if it has one.
    pub indexer: Option<IndexerWeights>,
}

/// Multi-head latent attention.
#[derive(Debug)]
pub struct LatentWeights {
    /// First matrix of a low-rank query projection and the norm after it; `None` for a single query matrix.
    pub q_a: Option<(PartMatrix, Vec<f32>)>,
    /// Query projection `[heads * (plain + rotary), ..]`.
    pub q: PartMatrix,
    /// Projection `[rank + rotary, hidden]` to the latent vector and the rotating part that all keys share.
    pub kv_a: PartMatrix,
    pub kv_a_norm: Vec<f32>,
    /// Norm of the rotating part that all keys share, if it is normed.
    pub rotary_norm: Option<Vec<f32>>,
    /// Matrix `[rank, plain]` for each head, which maps a query into latent space.
    pub k_b: HeadMatrices,
    /// Matrix `[value, rank]` for each head, which maps a sum of latent vectors to a sum of values.
    pub v_b: HeadMatrices,
    /// Projection to gates of the output, if there is one.
    pub gate: Option<PartMatrix>,
    /// The layer's indexer, if it has one.
    pub indexer: Option<IndexerWeights>,
}

/// Chooses the keys that a token attends to.
#[derive(Debug)]
pub struct IndexerWeights {
    /// Projection `[heads * head_dim, query rank]` of the compressed queries, or `[heads * head_dim, hidden]`.
    pub q: PartMatrix,
    /// Projection `[head_dim, hidden]` to the key.
    pub k: PartMatrix,
    /// Projection `[heads, hidden]` to the weights of the heads, if they have weights.
    pub weights: Option<PartMatrix>,
    /// Projection `[head_dim, hidden]` to the gates by which keys are averaged, and what is added to the gates of each position of
    /// a pool `[length, head_dim]`.
    pub gate: Option<(PartMatrix, Vec<f32>)>,
    /// Norm of queries, if they have one.
    pub q_norm: Option<Vec<f32>>,
    /// Norm of keys, or of the keys of pools. With a bias it is a layer norm.
    pub k_norm: Vec<f32>,
    pub k_norm_bias: Option<Vec<f32>>,
}

impl IndexerWeights {
    /// Returns all matrices.
    pub fn matrices(&self) -> impl Iterator<Item = PartMatrix> {
        std::iter::once(self.q).chain(self.of_input())
    }

    /// Returns those that multiply the layer's normed input. The matrix of queries does so only where attention has no compressed
    /// queries.
    pub fn of_input(&self) -> impl Iterator<Item = PartMatrix> {
        let gate = self.gate.as_ref().map(|(matrix, _)| *matrix);
        [Some(self.k), self.weights, gate].into_iter().flatten()
    }
}

/// Attention whose heads share keys that are values. The second output projection is [`LayerWeights::o`].
#[derive(Debug)]
pub struct SharedKeyWeights {
    /// First matrix of the query projection and the norm after it.
    pub q_a: PartMatrix,
    pub q_a_norm: Vec<f32>,
    /// Query projection `[heads * head_dim, query rank]`, and the weights of the norm of every query.
    pub q_b: PartMatrix,
    pub q_norm: Vec<f32>,
    /// Projection `[head_dim, hidden]` to the key, and its norm.
    pub key: PartMatrix,
    pub key_norm: Vec<f32>,
    /// First output projection: a matrix `[output rank, heads of a group * head_dim]` for each group of heads.
    pub o_a: HeadMatrices,
    pub entries: Option<EntryWeights>,
}

/// Computes and chooses compressed entries.
#[derive(Debug)]
pub struct EntryWeights {
    pub own: CompressorWeights,
    pub indexer: Option<EntryIndexerWeights>,
}

/// Computes entries of one kind.
#[derive(Debug)]
pub struct CompressorWeights {
    /// Projections `[parts * dim, hidden]` to values and gates.
    pub values: PartMatrix,
    pub gates: PartMatrix,
    /// Numbers that are added to the gates `[ratio, parts * dim]`.
    pub bias: Vec<f32>,
    /// Norm of the entries.
    pub norm: Vec<f32>,
}

/// Chooses the entries that a token attends to.
#[derive(Debug)]
pub struct EntryIndexerWeights {
    /// Projection `[heads * head_dim, query rank]` of the compressed queries.
    pub q: PartMatrix,
    /// Projection `[heads, hidden]` to the weights of the heads.
    pub weights: PartMatrix,
    /// Computes the keys.
    pub keys: CompressorWeights,
}

impl EntryWeights {
    /// Returns what computes the entries, and what computes the indexer's keys.
    pub fn compressors(&self) -> impl Iterator<Item = &CompressorWeights> {
        std::iter::once(&self.own).chain(self.indexer.as_ref().map(|of| &of.keys))
    }

    /// Returns the projections of the layer's input.
    pub fn of_input(&self) -> impl Iterator<Item = &PartMatrix> {
        let weights = self.indexer.as_ref().map(|of| &of.weights);
        self.compressors().flat_map(|of| [&of.values, &of.gates]).chain(weights)
    }
}

/// One matrix for each head, stored consecutively.
#[derive(Debug, Clone, Copy)]
pub struct HeadMatrices {
    /// Matrix of one head.
    pub matrix: PartMatrix,
    /// Bytes of one head's matrix.
    pub bytes: usize,
    pub heads: usize,
}

impl HeadMatrices {
    /// Returns the matrices of all heads as one.
    pub fn all(&self) -> PartMatrix {
        PartMatrix { rows: self.heads * self.matrix.rows, ..self.matrix }
    }
}

impl AttentionWeights {
    /// Returns the stacks of matrices with one for each head, or for each group of heads.
    pub fn head_matrices(&self) -> Vec<&HeadMatrices> {
        match self {
            AttentionWeights::Latent(of) => vec![&of.k_b, &of.v_b],
            AttentionWeights::Shared(of) => vec![&of.o_a],
            AttentionWeights::Grouped(_) | AttentionWeights::Delta(_) | AttentionWeights::None => {
                Vec::new()
            }
        }
    }

    /// Returns the layer's indexer, if it has one.
    pub fn indexer(&self) -> Option<&IndexerWeights> {
        match self {
            AttentionWeights::Grouped(of) => of.indexer.as_ref(),
            AttentionWeights::Latent(of) => of.indexer.as_ref(),
            AttentionWeights::Shared(_) | AttentionWeights::Delta(_) | AttentionWeights::None => {
                None
            }
        }
    }

    /// Returns all matrices except the output projection. The matrices of all heads count as one.
    pub fn matrices(&self) -> Vec<PartMatrix> {
        let indexer = self.indexer().into_iter().flat_map(IndexerWeights::matrices);
        match self {
            AttentionWeights::Grouped(of) => {
                let relative = of.relative.as_ref().map(|of| of.project);
                let own = [Some(of.q), of.k, of.v, of.gate, relative];
                own.into_iter().flatten().chain(indexer).collect()
            }
            AttentionWeights::Delta(of) => of.projections().copied().collect(),
            AttentionWeights::None => Vec::new(),
            AttentionWeights::Shared(of) => {
                let own = [of.q_a, of.q_b, of.key, of.o_a.all()];
                let entries = of.entries.iter().flat_map(EntryWeights::of_input).copied();
                let indexer = of.entries.as_ref().and_then(|of| of.indexer.as_ref());
                own.into_iter().chain(entries).chain(indexer.map(|of| of.q)).collect()
            }
            AttentionWeights::Latent(of) => {
                let q_a = of.q_a.as_ref().map(|(matrix, _)| *matrix);
                let own = q_a.into_iter().chain([of.q, of.kv_a, of.k_b.all(), of.v_b.all()]);
                own.chain(of.gate).chain(indexer).collect()
            }
        }
    }
}

/// Returns the matrices of a feed-forward: gate, up and down. Without a gate, `gate` stands for `up`, which is the same part.
pub fn distinct(matrices: &[PartMatrix; 3]) -> impl Iterator<Item = &PartMatrix> {
    let [gate, up, down] = matrices;
    let up = (up.part != gate.part).then_some(up);
    [Some(gate), up, Some(down)].into_iter().flatten()
}

#[derive(Debug)]
pub enum FeedForwardWeights {
    /// A layer without a feed-forward.
    None,
    /// Matrices in the layer's dense block.
    Dense { gate: PartMatrix, up: PartMatrix, down: PartMatrix },
    /// A mixture of experts. The router and the shared experts are in the dense block; gate, up and down are the parts
    /// of each expert's block.
    Experts {
        router: PartMatrix,
        gate: PartMatrix,
        up: PartMatrix,
        down: PartMatrix,
        /// Gate, up and down of the shared experts.
        shared: Option<[PartMatrix; 3]>,
        /// Projections `[width, hidden]` to the space of the experts and `[hidden, width]` back, if they have one. The latter takes the
        /// sum of the experts' outputs.
        latent: Option<[PartMatrix; 2]>,
        vectors: Box<ExpertVectors>,
    },
}

/// Vectors of routers and experts.
#[derive(Debug, Default)]
pub struct ExpertVectors {
    /// Bias `[experts]` that is added to the logits.
    pub router_bias: Option<Vec<f32>>,
    /// Bias `[experts]` that is added to the scores for the selection only.
    pub correction_bias: Option<Vec<f32>>,
    /// Vector `[hidden]` whose product with the input gives the gate of the shared experts.
    pub shared_scale: Option<Vec<f32>>,
    /// Experts `[vocabulary, used]` of every token, if a table gives them.
    pub by_token: Option<Vec<u32>>,
    /// Biases of gate and up `[experts, width]`, and of down `[experts, hidden]`.
    pub biases: Option<[Vec<f32>; 3]>,
    /// Factor of each expert's weight `[experts]`.
    pub scales: Option<Vec<f32>>,
    /// Norm in the space of the experts, if they have one.
    pub latent_norm: Option<Vec<f32>>,
    /// What router and experts take, and the norm of the layer's input if both take that.
    pub input: ExpertInput,
    pub input_norm: Option<Vec<f32>>,
    /// Factors of the output of every expert, and the weight of the norm after them, if there are such.
    pub output_norm: Option<[Vec<f32>; 2]>,
    /// Norms of their own, if router, experts and shared experts have such.
    pub norms: Option<ExpertNorms>,
}

/// Norms of a layer whose experts are beside a feed-forward for every token. All vectors are `[hidden]`.
#[derive(Debug)]
pub struct ExpertNorms {
    /// Norm of the residual stream for the router.
    pub router: Vec<f32>,
    /// Norm of the residual stream for the experts.
    pub input: Vec<f32>,
    /// Norm of the output of the shared experts.
    pub shared: Vec<f32>,
    /// Norm of the sum of the experts' outputs.
    pub output: Vec<f32>,
}

/// Rows `first_row ..` of the output projection, which form one dense block.
#[derive(Debug, Clone, Copy)]
pub struct HeadChunk {
    pub first_row: usize,
    pub matrix: PartMatrix,
}
