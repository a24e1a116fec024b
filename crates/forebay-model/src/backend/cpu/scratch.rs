//! Activations of one batch on the CPU, reserved at start.

use super::convolutions::ConvolutionScratch;
use super::delta_scratch::DeltaScratch;
use super::indexer::IndexerScratch;
use super::latent::LatentScratch;
use super::moe::MoeScratch;
use super::ngram_scratch::NGramScratch;
use super::predicted::PredictedScratch;
use super::products::RowNumbers;
use super::shared_keys::SharedKeyScratch;
use super::streams::StreamScratch;
use crate::arch::{Architecture, Attention, ExpertInput, Layer, OutputGate};
use crate::weights::Weights;
use forebay_compute::{Activations, AttentionRun};
use forebay_store::FileSet;

/// Most tokens that go through the layers together.
const BATCH_TOKENS_MAX: usize = 512;

/// Bytes that the activations of a batch may take. They are not part of the user's budget, but of the documented
/// allowance for the process itself.
const ACTIVATION_BYTES_MAX: u64 = 112 << 20;

/// Returns the number of tokens that go through the layers together: as many as the activations' allowance has room
/// for. No result depends on it.
pub fn batch_tokens(architecture: &Architecture, context: usize) -> usize {
    let mut batch = BATCH_TOKENS_MAX;
    while batch > 32 && activation_bytes(architecture, context, batch) > ACTIVATION_BYTES_MAX {
        batch /= 2;
    }
    batch.min(context)
}

/// Returns the bytes of activation buffers for batches of `batch` tokens.
fn activation_bytes(architecture: &Architecture, context: usize, batch: usize) -> u64 {
    Scratch::floats_per_token(architecture, context) as u64 * batch as u64 * 4
        + MoeScratch::bytes(architecture, batch)
}

/// Activations of one batch.
pub struct Scratch {
    /// Residual stream `[tokens, hidden]`, or streams `[tokens, streams, hidden]`.
    pub x: Vec<f32>,
    pub streams: StreamScratch,
    pub predicted: PredictedScratch,
    /// Normed input of a block `[tokens, hidden]`.
    pub normed: Vec<f32>,
    /// Residual stream as it is before the layer `[tokens, hidden]`; empty if no experts take it.
    pub layer_input: Vec<f32>,
    /// Output of a block `[tokens, hidden]`.
    pub block_out: Vec<f32>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub attended: Vec<f32>,
    /// Queries and gates of attention's output `[tokens, heads, 2, head_dim]`, and the gates alone. Empty for models without
    /// such gates.
    pub q_and_gate: Vec<f32>,
    pub output_gate: Vec<f32>,
    /// How much of each profile of biases the query heads take `[tokens, heads, rank]`; empty without such biases.
    pub relative: Vec<f32>,
    pub convolutions: ConvolutionScratch,
    /// Inputs and summed outputs of experts in their space `[tokens, width]`; empty if they have none.
    pub latent_experts: Vec<f32>,
    pub latent: LatentScratch,
    pub indexer: IndexerScratch,
    pub shared_keys: SharedKeyScratch,
    pub delta: DeltaScratch,
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    pub input: Activations,
    /// Input of the feed-forward in the dense block. It is separate because `input` may still be needed by the experts.
    pub dense_input: Activations,
    pub inner: Activations,
    /// Normed embeddings and states of the rows `[tokens, streams, 2 * hidden]` for a predicting layer; empty without one.
    pub joined: Vec<f32>,
    pub embedding_row: Vec<u8>,
    pub chunk_logits: Vec<f32>,
    pub moe: MoeScratch,
    pub rows: RowNumbers,
    /// Factors of the rows of a pass.
    pub row_factors: Vec<f32>,
    /// The rows' usual embeddings `[tokens, hidden]` and those for all layers `[tokens, layers, width]`, if the model has such.
    pub embedded: Vec<f32>,
    pub layer_rows: Vec<f32>,
    pub ngrams: NGramScratch,
    /// Always empty between calls; kept for its memory.
    pub runs: Vec<AttentionRun<'static>>,
}

impl Scratch {
    pub fn reserve(
        architecture: &Architecture,
        weights: &Weights,
        files: &FileSet,
        context: usize,
        batch: usize,
    ) -> Scratch {
        let floats = |width: usize| vec![0.0; batch * width];
        let most = |of: fn(&Attention) -> usize| floats(architecture.most_of_attentions(of));
        let width = inner_width(architecture);
        let layer_widths = layer_widths(architecture);
        Scratch {
            x: floats(architecture.stream_width()),
            streams: StreamScratch::reserve(architecture, batch),
            predicted: PredictedScratch::reserve(architecture, batch),
            normed: floats(architecture.hidden),
            layer_input: floats(layer_input_width(architecture)),
            block_out: floats(architecture.hidden),
            q: most(|of| of.heads * of.head_dim),
            k: most(|of| of.kv_heads * of.head_dim),
            v: most(|of| of.kv_heads * of.value_dim),
            attended: floats(attended_width(architecture)),
            q_and_gate: most(|of| match of.output_gate {
                OutputGate::InQueries => of.query_rows(),
                _ => 0,
            }),
            output_gate: floats(gate_width(architecture)),
            relative: floats(relative_width(architecture)),
            convolutions: ConvolutionScratch::reserve(architecture, batch),
            latent_experts: floats(latent_width(architecture)),
            delta: DeltaScratch::reserve(architecture, weights, batch),
            latent: LatentScratch::reserve(architecture, batch),
            indexer: IndexerScratch::reserve(architecture.indexer(), context, batch),
            shared_keys: SharedKeyScratch::reserve(architecture, batch),
            gate: floats(width),
            up: floats(width),
            input: Activations::new(),
            dense_input: Activations::new(),
            inner: Activations::new(),
            joined: floats(joined_width(architecture)),
            embedding_row: Vec::with_capacity(longest_row(weights)),
            chunk_logits: Vec::new(),
            moe: MoeScratch::reserve(architecture, batch),
            rows: RowNumbers((0..(batch * architecture.predicted_from()) as u32).collect()),
            row_factors: Vec::with_capacity(batch),
            embedded: floats(if layer_widths > 0 { architecture.hidden } else { 0 }),
            layer_rows: floats(layer_widths),
            ngrams: NGramScratch::reserve(architecture, weights, files, batch),
            runs: Vec::new(),
        }
    }

    /// Returns the number of floats for one token of a batch, including its quantised copies.
    fn floats_per_token(architecture: &Architecture, context: usize) -> usize {
        let most = |of: fn(&Attention) -> usize| architecture.most_of_attentions(of);
        let (q_width, kv_width) =
            (most(|of| of.heads * of.head_dim), most(|of| of.kv_heads * of.head_dim));
        let width = inner_width(architecture);
        let layer_widths = layer_widths(architecture);
        let of_layers = if layer_widths > 0 { architecture.hidden + layer_widths } else { 0 };
        let latent = LatentScratch::floats_per_token(architecture)
            + IndexerScratch::floats_per_token(architecture.indexer(), context)
            + SharedKeyScratch::floats_per_token(architecture);
        let attended = attended_width(architecture) - most(|of| of.heads * of.value_dim);
        let recurrent = DeltaScratch::floats_per_token(architecture)
            + NGramScratch::floats_per_token(architecture)
            + attended;
        let gate = 3 * gate_width(architecture)
            + relative_width(architecture)
            + architecture.convolved_width()
            + latent_width(architecture)
            + layer_input_width(architecture);
        let streams = architecture.stream_width()
            + StreamScratch::floats_per_token(architecture)
            + PredictedScratch::floats_per_token(architecture);
        1 + streams + joined_width(architecture) + 2 * architecture.hidden + 2 * q_width + 2 * kv_width + 2 * width + latent + recurrent + gate + of_layers
            // Quantised activations take one byte per value in each of two forms, and scales.
            + (architecture.hidden.max(q_width) + width) * 5 / 8
    }
}

/// Returns the width of the widest feed-forward or embedding for a layer.
fn inner_width(architecture: &Architecture) -> usize {
    let of_layer = architecture.layer_embeddings.map_or(0, |of| of.width);
    architecture.dense_width().max(architecture.shared_width()).max(of_layer)
}

/// Returns the width of a kept row of the residual stream; 0 if no experts take the input of their layer.
fn layer_input_width(architecture: &Architecture) -> usize {
    let takes = |layer: &Layer| layer.expert_input() != ExpertInput::OfFeedForward;
    if architecture.layers.iter().any(takes) { architecture.hidden } else { 0 }
}

/// Returns the width of the space of experts; 0 if they have none.
fn latent_width(architecture: &Architecture) -> usize {
    let widths = architecture.expert_layers().filter_map(|experts| experts.latent);
    widths.map(|latent| latent.width).max().unwrap_or(0)
}

/// Returns the number of elements of a token's mixes of profiles; 0 if scores have no biases by distance.
fn relative_width(architecture: &Architecture) -> usize {
    architecture.most_of_attentions(|of| of.relative.map_or(0, |relative| of.heads * relative.rank))
}

/// Returns the number of elements of a token's embeddings for all layers; 0 if there are none.
fn layer_widths(architecture: &Architecture) -> usize {
    architecture.layer_embeddings.map_or(0, |of| of.width * architecture.layers.len())
}

/// Returns the number of elements of a token's rows that a predicting layer joins; 0 if there is no such layer.
fn joined_width(architecture: &Architecture) -> usize {
    architecture.mtp.map_or(0, |_| 2 * architecture.hidden * architecture.predicted_from())
}

/// Returns the bytes of the longest row of an embedding table.
fn longest_row(weights: &Weights) -> usize {
    let of_layers = weights.layer_embeddings.map_or(0, |of| of.row_bytes);
    weights.embedding.row_bytes.max(of_layers)
}

/// Returns the number of elements of a token's input of the output projection: that of attention, or of a recurrent layer.
fn attended_width(architecture: &Architecture) -> usize {
    let recurrent = architecture.recurrent.map_or(0, |of| of.value_width());
    recurrent.max(architecture.most_of_attentions(|of| of.heads * of.value_dim))
}

/// Returns the number of elements of a token's gate of attention's output; 0 if there is none.
fn gate_width(architecture: &Architecture) -> usize {
    architecture.most_of_attentions(|of| match of.output_gate {
        OutputGate::InQueries => of.heads * of.head_dim,
        _ => of.gate_rows(),
    })
}
