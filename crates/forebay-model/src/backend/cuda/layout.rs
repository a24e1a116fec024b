//! Layout of device memory, computed before any memory is reserved.

use forebay_cuda::{
    AddressTables, AttentionScratchSize, DECODE_ROWS, ExpertFetch, FETCHED_PAIRS_MAX, LANES,
    RoundedActivations, TOP_K_MAX, TopK,
};

use forebay_stream::{Block, MemoryPlan};

use super::exchange_layout::ExchangeLayout;
use super::expert_inputs::{has_own_input, router_rows};
use super::indexer_layout::IndexerLayout;
use super::kv_size::KvSize;
use super::latent_layout::{LatentLayout, LatentWidths};
use super::ngram_layout::NGramLayout;
use super::prediction_layout::PredictionLayout;
use super::selections::selection_words;
use super::shared_keys_layout::{self, SharedKeyLayout};
use super::stream_layout::StreamLayout;
use crate::ModelError;
use crate::arch::PRODUCTS_MAX;
use crate::arch::{
    Architecture, Attention, Latent, MTP_ROWS_MAX, NormLayout, OutputGate, Recurrent,
};
use crate::sharing::{ALIGNMENT, SubLayerPlan};
use crate::weights::{FeedForwardWeights, PartMatrix, Weights, distinct};

/// Maximum number of tokens that go through the layers together, if all weights are in VRAM.
pub const BATCH_TOKENS: usize = 512;

/// Numbers of tokens that go through the layers together if experts are copied to the GPU for every pass of a prompt,
/// the best first. Longer passes copy them less often.
pub const LONG_BATCHES: [usize; 2] = [2048, 1024];

/// Address tables of the experts of each layer: one of the layer, and two of each lane.
pub const EXPERT_TABLES: usize = 1 + 2 * LANES;

/// Assigns offsets in memory that is reserved later.
#[derive(Debug, Clone, Default)]
pub struct LayoutBuilder {
    end: u64,
}

impl LayoutBuilder {
    /// Returns the offset of the next `bytes` bytes.
    pub fn take(&mut self, bytes: u64) -> u64 {
        let at = self.end.next_multiple_of(ALIGNMENT);
        self.end = at + bytes;
        at
    }

    /// Assigns at least `bytes` bytes in all.
    pub fn reach(&mut self, bytes: u64) {
        self.end = self.end.max(bytes);
    }

    /// Returns the number of bytes assigned so far, with a margin at the end.
    pub fn bytes(&self) -> u64 {
        self.end.next_multiple_of(ALIGNMENT) + ALIGNMENT
    }
}

/// Layout of one layer's experts.
#[derive(Debug, Clone, Copy)]
pub struct ExpertLayout {
    /// Offset of the first expert, if all experts are in VRAM. The others follow it.
    pub first: u64,
    pub slot_bytes: u64,
    /// Offsets of the parts in a slot: gate, up and down. Experts without a gate have two parts, up and down.
    pub parts: [u64; 3],
    pub part_bytes: [u64; 3],
    pub count: usize,
}

/// Offsets of all matrices.
#[derive(Debug, Default)]
pub struct WeightLayout {
    /// Offset by layer and part of the layer's dense block; `None` if the part passes through the ring.
    pub layers: Vec<Vec<Option<u64>>>,
    /// Offset of the ring for streamed sub-layers.
    pub ring: u64,
    /// Offset of the output projection, whose chunks follow one another without gaps.
    pub head: u64,
    /// Offset of the predicting layer's own output projection, if it has one.
    pub mtp_head: Option<u64>,
    pub embedding: EmbeddingLocation,
    pub dense: LayoutBuilder,
    pub experts_of: Vec<Option<ExpertLayout>>,
    pub experts: LayoutBuilder,
}

/// Location of the rows of the embedding table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EmbeddingLocation {
    /// The table is the output projection.
    #[default]
    Head,
    /// The whole table is in VRAM, at this offset.
    Table(u64),
    /// The table stays on the disk. The rows of a batch's tokens are in pinned memory, where kernels read them.
    Rows,
}

impl WeightLayout {
    /// Lays out the sub-layers that `sub_layers` places in VRAM, its ring, and the output projection. The embedding
    /// table gets an offset too, unless it is the output projection or `stays_on_disk`.
    ///
    /// # Errors
    /// Returns an error if a row of an expert's matrix does not consist of whole blocks.
    pub fn new(
        architecture: &Architecture,
        weights: &Weights,
        sub_layers: &SubLayerPlan,
        stays_on_disk: bool,
    ) -> Result<WeightLayout, ModelError> {
        let mut layout = WeightLayout::default();
        // Kernels may read before the first matrix.
        layout.dense.take(ALIGNMENT);
        layout.experts.take(ALIGNMENT);
        for (index, layer) in weights.layers.iter().enumerate() {
            let part_bytes = weights.blocks.dense[index].part_bytes();
            let parts = part_bytes.into_iter().enumerate().map(|(part, bytes)| {
                sub_layers.is_in_vram(index, part).then(|| layout.dense.take(bytes))
            });
            layout.layers.push(parts.collect());
            let experts = match layer.feed_forward {
                FeedForwardWeights::None | FeedForwardWeights::Dense { .. } => None,
                FeedForwardWeights::Experts { gate, up, down, .. } => {
                    let count = weights.blocks.experts[index].len();
                    Some(ExpertLayout::new(count, [gate, up, down])?)
                }
            };
            layout.experts_of.push(experts);
        }
        layout.ring = layout.dense.take(sub_layers.ring_bytes);
        let heads = &weights.blocks.dense[weights.layers.len()..];
        let (head, own) = heads.split_at(weights.head.len());
        let bytes = |head: &[Block]| head.iter().flat_map(Block::part_bytes).sum();
        layout.head = layout.dense.take(bytes(head));
        layout.mtp_head = (!own.is_empty()).then(|| layout.dense.take(bytes(own)));
        if !architecture.tied_embeddings {
            layout.embedding = match stays_on_disk {
                true => EmbeddingLocation::Rows,
                false => {
                    EmbeddingLocation::Table(layout.dense.take(weights.embedding.extent.length))
                }
            };
        }
        Ok(layout)
    }

    /// Assigns an offset to every expert, layer by layer.
    pub fn place_experts(&mut self) {
        for of in self.experts_of.iter_mut().flatten() {
            of.first = self.experts.take(of.slot_bytes * of.count as u64);
        }
    }

    /// Assigns offsets to slots for some of the experts. Returns the offset of each pool.
    pub fn place_pools(&mut self, plan: &MemoryPlan) -> Vec<u64> {
        plan.pools.iter().map(|pool| self.experts.take(pool.bytes())).collect()
    }
}

impl ExpertLayout {
    fn new(count: usize, parts: [PartMatrix; 3]) -> Result<ExpertLayout, ModelError> {
        let mut slot = LayoutBuilder::default();
        let (mut at, mut part_bytes) = ([0; 3], [0; 3]);
        for matrix in distinct(&parts) {
            part_bytes[matrix.part] = matrix_bytes(matrix)?;
            at[matrix.part] = slot.take(part_bytes[matrix.part]);
        }
        Ok(ExpertLayout { first: 0, slot_bytes: slot.bytes(), parts: at, part_bytes, count })
    }
}

fn matrix_bytes(matrix: &PartMatrix) -> Result<u64, ModelError> {
    let row = matrix.ty.row_bytes(matrix.cols as u64).ok_or_else(|| ModelError::BadValue {
        key: format!("columns of a {} matrix", matrix.ty),
        value: matrix.cols.to_string(),
        expected: "they must be whole blocks".into(),
    })?;
    Ok(row * matrix.rows as u64)
}

/// Numbers of values that buffers hold for each row of a pass.
struct Widths {
    hidden: usize,
    /// All streams of the residual stream.
    stream: usize,
    q: usize,
    k: usize,
    v: usize,
    attended: usize,
    /// Inner activations of a feed-forward.
    inner: usize,
    /// Widest input of a product.
    widest: usize,
    /// Experts of a layer, and those that a row uses.
    experts: usize,
    used: usize,
    shared: usize,
    /// Queries with the gates of attention's output, or the gates alone; 0 if there are none.
    q_and_gate: usize,
    relative: usize,
    convolved: usize,
    /// Products of recurrent layers.
    delta_products: usize,
    /// Channels of the convolution.
    delta_mixed: usize,
    /// Outputs of recurrences beside attention; 0 without such layers.
    delta_beside: usize,
    latent: LatentWidths,
    /// Output of attention of parallel blocks; 0 if there are none.
    beside: usize,
    /// Copy of the usual embeddings, embeddings for one layer, and for all layers; 0 if there are none for layers.
    embedded: usize,
    layer_width: usize,
    layer_widths: usize,
}

impl Widths {
    fn of(architecture: &Architecture) -> Widths {
        let hidden = architecture.hidden;
        let most = |of: fn(&Attention) -> usize| architecture.most_of_attentions(of);
        let (q, attended) = (most(|of| of.heads * of.head_dim), most(|of| of.heads * of.value_dim));
        let used = architecture.experts_per_token();
        let expert_width = architecture.expert_layers().map(|e| e.width).max().unwrap_or(0);
        let inner = architecture.dense_width().max(used * expert_width);
        let shared = architecture.shared_width();
        let delta = |of: fn(&Recurrent) -> usize| architecture.recurrent.as_ref().map_or(0, of);
        let values = delta(Recurrent::value_width);
        let attended = attended.max(values);
        let layer_width = architecture.layer_embeddings.map_or(0, |of| of.width);
        let branch = architecture.predicted_widths()[1];
        let stream = architecture.stream_width();
        let ngrams = architecture.ngrams.as_ref().map_or(0, |of| of.width);
        let output = most(Attention::output_width);
        let joined = architecture.mtp.map_or(0, |_| 2 * hidden * architecture.predicted_from());
        let widest =
            [q, attended, output, inner, shared, layer_width, stream, ngrams, joined, branch];
        let latent = |of: fn(Latent, usize) -> usize| architecture.most_of_latents(of);
        Widths {
            hidden,
            stream,
            q,
            k: most(|of| of.kv_heads * of.head_dim),
            v: most(|of| of.kv_heads * of.value_dim),
            attended,
            inner,
            widest: widest.into_iter().fold(hidden, usize::max),
            experts: architecture.expert_layers().map(|e| e.count).max().unwrap_or(0),
            used,
            shared,
            q_and_gate: most(|of| match of.output_gate {
                OutputGate::InQueries => of.query_rows(),
                _ => of.gate_rows(),
            }),
            relative: most(|of| of.relative.map_or(0, |biases| of.heads * biases.rank)),
            convolved: architecture.convolved_width(),
            delta_products: delta(Recurrent::projected_width),
            delta_mixed: delta(Recurrent::channels),
            delta_beside: if architecture.has_beside() { values } else { 0 },
            latent: LatentWidths {
                q_a: latent(|of, _| of.query_rank.unwrap_or(0))
                    .max(architecture.most_of_shared(|shared| shared.query_rank)),
                q: latent(|of, heads| heads * (of.plain + of.rotary)),
                kv_a: latent(|of, _| of.rank + of.rotary),
                heads: latent(|of, heads| heads * of.plain.max(of.value)).max(
                    architecture.most_of_shared(|shared| shared.output_groups * shared.output_rank),
                ),
            },
            embedded: architecture.layer_embeddings.map_or(0, |_| hidden),
            beside: if architecture.norms == NormLayout::Parallel { hidden } else { 0 },
            layer_width,
            layer_widths: layer_width * architecture.layers.len(),
        }
    }
}

/// Scratch memory of the second lane, which two lanes cannot share. Nothing if passes have one lane.
#[derive(Debug, Clone, Copy)]
struct LaneScratch {
    router_tickets: u64,
    starts: u64,
    codes: u64,
    code_scales: u64,
    attention_parts: u64,
    attention_tickets: u64,
}

/// Offsets of activations and of the other buffers of a forward pass, all in one piece of memory.
#[derive(Debug, Clone)]
pub struct ActivationLayout {
    pub layout: LayoutBuilder,
    pub batch: usize,
    /// Maximum number of generated tokens that go through the layers together.
    pub decode_rows: usize,
    pub exchange: u64,
    pub exchange_layout: ExchangeLayout,
    /// Residual stream, normed stream and block output, `[batch, hidden]` each.
    pub x: u64,
    /// Number of elements of a row of the residual stream.
    pub stream_width: usize,
    /// Copy of the residual stream of a pass that is paused; nothing if there is one sequence only.
    pub paused: u64,
    pub normed: u64,
    /// Inputs of experts `[batch, hidden]`, if they are scaled or have a norm or a length of their own. Rows of such a length are
    /// not longer than the usual ones.
    pub expert_input: u64,
    /// Inputs of routers `[batch, hidden]`, if they have a norm of their own. Copies of the residual stream before layers `[layers,
    /// decode rows, hidden]`, or `[batch, hidden]` in prompts, if routers take that.
    pub router_input: u64,
    pub block_out: u64,
    /// Output of attention `[batch, hidden]` until the feed-forward beside it has ended, in parallel blocks.
    pub beside: u64,
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub attended: u64,
    /// Outputs of gate and up: `[batch, width]`, or `[pairs, width]` for experts.
    pub gate: u64,
    pub up: u64,
    pub scores: u64,
    /// Scratch memory of the selection of the largest logits.
    pub top_k_scratch: u64,
    /// What is wanted of the rows of logits, of [`selection_words`] words.
    pub selections: u64,
    pub router_tickets: u64,
    pub expert_ids: u64,
    pub expert_weights: u64,
    pub starts: u64,
    pub pair_tokens: u64,
    pub pairs: u64,
    pub row_of_pair: u64,
    /// 0, 1, 2 ... for the pairs of few tokens.
    pub identity: u64,
    pub identity_count: usize,
    /// Output rows of experts `[pairs, hidden]`.
    pub outputs: u64,
    pub codes: u64,
    pub code_scales: u64,
    pub high: u64,
    pub low: u64,
    pub narrow_scales: u64,
    pub attention_parts: u64,
    pub attention_tickets: u64,
    pub attention_size: AttentionScratchSize,
    /// Angles of every rotation.
    pub ropes: Vec<u64>,
    /// Queries and gates of attention's output `[batch, heads, 2, head_dim]`, if there are gates.
    pub q_and_gate: u64,
    pub delta: DeltaLayout,
    /// What heads take of biases by distance `[batch, heads, rank]`, if there are such.
    pub relative: u64,
    /// Inputs of short convolutions `[batch, channels]`, if there are such.
    pub convolved: u64,
    /// Buffers of latent attention.
    pub latent: LatentLayout,
    pub embeddings: EmbeddingLayout,
    /// Activations of residual streams beside each other.
    pub streams: StreamLayout,
    pub ngrams: NGramLayout,
    pub prediction: PredictionLayout,
    /// Activations of indexers.
    pub indexer: IndexerLayout,
    pub shared_keys: SharedKeyLayout,
    /// Output `[batch, hidden]` of the shared expert, which processes every token.
    pub shared: u64,
    /// Inner activations of the shared expert.
    pub shared_gate: u64,
    pub shared_up: u64,
    /// Total number of entries of the address tables. The first is for experts, with [`EXPERT_TABLES`] of each layer.
    /// The second is for the matrices of heads.
    pub table_entries: [usize; 2],
    /// Maximum number of decode rows whose experts one kernel fetches.
    pub fetch_rows: usize,
    /// For rows whose experts a kernel fetches: the words that the host sends before their work is queued.
    pub fetch: u64,
    /// Tickets of the blocks of the fetch kernel.
    pub fetch_tickets: u64,
    /// Words in which one block of the fetch kernel passes the host's answer to the others.
    pub fetch_desk: u64,
    /// Number of the run that gave up waiting for the host.
    pub fetch_given_up: u64,
    /// Copy of the residual stream `[fetch_rows, hidden]` at the time when the run gave up.
    pub fetch_kept: u64,
    pub vectors: u64,
    lane: LaneScratch,
}

/// Returns the scratch memory of attention, which all shapes of it share.
fn attention_scratch(
    multiprocessors: u32,
    architecture: &Architecture,
    cache: &KvSize,
    [decode_rows, batch]: [usize; 2],
) -> AttentionScratchSize {
    let of_shape = |of: &Attention| {
        let shape = cache.shape(of);
        AttentionScratchSize::of(multiprocessors, &shape, of.heads, decode_rows, batch)
            .max(shared_keys_layout::scratch(of, decode_rows))
    };
    let sizes = architecture.attentions.iter().map(of_shape);
    sizes.fold(AttentionScratchSize::default(), AttentionScratchSize::max)
}

impl ActivationLayout {
    /// Returns the bytes of all buffers and of the address tables, which have memory of their own.
    pub fn bytes(&self) -> u64 {
        let tables = self.table_entries.map(|entries| AddressTables::bytes(entries) as u64);
        self.layout.bytes()
            + tables.iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum::<u64>()
    }

    pub fn new(
        multiprocessors: u32,
        architecture: &Architecture,
        cache: &KvSize,
        batch_tokens: usize,
        vector_floats: usize,
    ) -> ActivationLayout {
        let mut layout = LayoutBuilder::default();
        let batch = batch_tokens.min(cache.context * cache.sequences);
        let few = batch.min(DECODE_ROWS);
        // One row of each sequence, and those of a proposal's check.
        let checked = architecture.mtp.map_or(1, |_| MTP_ROWS_MAX);
        let decode_rows = few.min(cache.sequences.max(checked));
        let own_inputs = architecture.expert_layers().any(has_own_input);
        // Groups of heads have matrices of their own, too.
        let groups = architecture.attentions.iter().filter_map(|of| Some(of.shared?.output_groups));
        let mut head_counts = architecture.latent_head_counts();
        head_counts.extend(groups);
        let heads_of_latent = head_counts.last().copied().unwrap_or(0);
        let width = Widths::of(architecture);
        let (used, experts) = (width.used, width.experts);
        let attention_size =
            attention_scratch(multiprocessors, architecture, cache, [decode_rows, batch]);
        let exchange_layout = ExchangeLayout::new(architecture, cache, batch, decode_rows);
        let top_k = TopK { rows: decode_rows, vocabulary: architecture.vocabulary, k: TOP_K_MAX };
        let mut words = |count: usize| layout.take(4 * count as u64);
        let expert_layers = architecture.expert_layers().map(|of| EXPERT_TABLES * of.count).sum();
        let fetch_rows = decode_rows.min(FETCHED_PAIRS_MAX / used.max(1));
        let fetch_pairs = fetch_rows * used;
        let table_entries = [expert_layers, 2 * heads_of_latent * architecture.layers.len()];
        let (codes, code_scales) = RoundedActivations::bytes(few, width.widest);
        let (codes, code_scales) = (codes.div_ceil(4), code_scales.div_ceil(4));
        let narrow = (batch * width.widest).div_ceil(2);
        let has_lanes = experts > 0 && decode_rows > 1;
        let mut of_lane = |count: usize| words(if has_lanes { count } else { 0 });
        let lane = LaneScratch {
            router_tickets: of_lane(few),
            starts: of_lane(experts + 1),
            codes: of_lane(codes),
            code_scales: of_lane(code_scales),
            attention_parts: of_lane(attention_size.floats),
            attention_tickets: of_lane(attention_size.tickets),
        };
        let reads_rows = width.layer_width > 0 || architecture.ngrams.is_some();
        let ids_count = if reads_rows { batch } else { 0 };
        ActivationLayout {
            batch,
            decode_rows,
            exchange: words(exchange_layout.words),
            exchange_layout,
            x: words(batch * width.stream),
            stream_width: width.stream,
            paused: words(if cache.sequences > 1 { batch * width.stream } else { 0 }),
            normed: words(batch * width.hidden),
            expert_input: words(if own_inputs { batch * width.hidden } else { 0 }),
            router_input: words(router_rows(architecture, batch, decode_rows) * width.hidden),
            block_out: words(batch * width.hidden),
            beside: words(batch * width.beside),
            q: words(batch * width.q),
            k: words(batch * width.k),
            v: words(batch * width.v),
            attended: words(batch * width.attended),
            gate: words(batch * width.inner),
            up: words(batch * width.inner),
            scores: words(batch * experts),
            top_k_scratch: words(2 * top_k.scratch_words()),
            selections: words(selection_words(decode_rows, architecture.vocabulary)),
            router_tickets: words(few),
            expert_ids: words(batch * used),
            expert_weights: words(batch * used),
            starts: words(experts + 1),
            pair_tokens: words(batch * used),
            pairs: words(batch * used),
            row_of_pair: words(batch * used),
            identity: words(few * used),
            identity_count: few * used,
            outputs: words(batch * used * width.hidden),
            codes: words(codes),
            code_scales: words(code_scales),
            high: words(narrow),
            low: words(narrow),
            narrow_scales: words(batch * used.max(heads_of_latent).max(1)),
            attention_parts: words(attention_size.floats),
            attention_tickets: words(attention_size.tickets),
            attention_size,
            ropes: architecture
                .ropes
                .iter()
                .map(|rope| words(cache.context * rope.rotary_dim))
                .collect(),
            q_and_gate: words(batch * width.q_and_gate),
            delta: DeltaLayout {
                products: words(DeltaLayout::product_words(batch, width.delta_products)),
                batch,
                first_row: 0,
                mixed: words(batch * width.delta_mixed),
                beside: words(batch * width.delta_beside),
            },
            relative: words(batch * width.relative),
            convolved: words(batch * width.convolved),
            latent: LatentLayout::new(&head_counts, &width.latent, batch, &mut words),
            embeddings: EmbeddingLayout {
                usual: words(batch * width.embedded),
                all: words(batch * width.layer_widths),
                projected: words(batch * width.layer_width),
                gate: words(batch * width.layer_width),
                ids: words(ids_count),
                ids_count,
            },
            streams: StreamLayout::new(architecture, batch, &mut words),
            ngrams: NGramLayout::new(architecture, batch, &mut words),
            prediction: PredictionLayout::new(architecture, batch, &mut words),
            indexer: IndexerLayout::new(architecture.indexer(), cache.context, batch, &mut words),
            shared_keys: SharedKeyLayout::new(architecture, cache.context, batch, &mut words),
            shared: words(if width.shared > 0 { batch * width.hidden } else { 0 }),
            shared_gate: words(batch * width.shared),
            shared_up: words(batch * width.shared),
            table_entries,
            fetch_rows,
            fetch: words(2 + architecture.layers.len() * fetch_pairs),
            fetch_tickets: words(2),
            fetch_desk: words(ExpertFetch::desk_words(fetch_pairs)),
            fetch_given_up: words(1),
            fetch_kept: words(fetch_rows * width.stream),
            vectors: words(vector_floats),
            lane,
            layout,
        }
    }

    /// Returns the most rows that a lane may have.
    pub fn lane_rows(&self) -> usize {
        // A multiple keeps halves of buffers aligned.
        self.batch / LANES / 4 * 4
    }

    /// Returns the layout for the decode rows of the second lane. They use the second half of buffers that have room for a
    /// whole batch, and scratch memory of their own. `x` and `normed` must be set to those of the lane's first row.
    pub fn second_lane(&self, architecture: &Architecture) -> ActivationLayout {
        let width = Widths::of(architecture);
        let first = self.lane_rows();
        let behind = |at: u64, width: usize| at + 4 * (first * width) as u64;
        let halves = |at: u64| at + 2 * (first * width.widest) as u64;
        ActivationLayout {
            expert_input: behind(self.expert_input, width.hidden),
            block_out: behind(self.block_out, width.hidden),
            beside: behind(self.beside, width.beside),
            q: behind(self.q, width.q),
            k: behind(self.k, width.k),
            v: behind(self.v, width.v),
            attended: behind(self.attended, width.attended),
            gate: behind(self.gate, width.inner),
            up: behind(self.up, width.inner),
            scores: behind(self.scores, width.experts),
            expert_ids: behind(self.expert_ids, width.used),
            expert_weights: behind(self.expert_weights, width.used),
            pair_tokens: behind(self.pair_tokens, width.used),
            pairs: behind(self.pairs, width.used),
            row_of_pair: behind(self.row_of_pair, width.used),
            outputs: behind(self.outputs, width.used * width.hidden),
            high: halves(self.high),
            low: halves(self.low),
            shared: behind(self.shared, width.hidden),
            shared_gate: behind(self.shared_gate, width.shared),
            shared_up: behind(self.shared_up, width.shared),
            q_and_gate: behind(self.q_and_gate, width.q_and_gate),
            relative: behind(self.relative, width.relative),
            convolved: behind(self.convolved, width.convolved),
            delta: DeltaLayout {
                first_row: first,
                mixed: behind(self.delta.mixed, width.delta_mixed),
                beside: behind(self.delta.beside, width.delta_beside),
                ..self.delta
            },
            latent: self.latent.second_lane(&width.latent, first),
            router_input: behind(self.router_input, width.hidden),
            streams: self.streams.second_lane(architecture, first),
            indexer: self.indexer.second_lane(architecture.indexer(), first),
            shared_keys: self.shared_keys.second_lane(first),
            router_tickets: self.lane.router_tickets,
            starts: self.lane.starts,
            codes: self.lane.codes,
            code_scales: self.lane.code_scales,
            attention_parts: self.lane.attention_parts,
            attention_tickets: self.lane.attention_tickets,
            ..self.clone()
        }
    }
}

/// Offsets of activations that only recurrent layers need: products with their projections, and the output of the convolution.
#[derive(Debug, Clone, Copy)]
pub struct DeltaLayout {
    /// The products of a layer, one after another. Each has room for a whole batch.
    products: u64,
    batch: usize,
    /// First row of the lane.
    first_row: usize,
    pub mixed: u64,
    /// Outputs `[batch, values]` of recurrences beside attention, if there are such layers.
    pub beside: u64,
}

impl DeltaLayout {
    /// Returns the words of products with `width` columns in all. Each product begins at a multiple of the alignment.
    fn product_words(batch: usize, width: usize) -> usize {
        match width {
            0 => 0,
            _ => batch * width + PRODUCTS_MAX * ALIGNMENT as usize / 4,
        }
    }

    /// Returns the offsets of the products with matrices of these numbers of rows.
    pub fn products(&self, widths: impl Iterator<Item = usize>) -> [u64; PRODUCTS_MAX] {
        let (mut offsets, mut at) = ([0; PRODUCTS_MAX], self.products);
        for (offset, width) in offsets.iter_mut().zip(widths) {
            *offset = at + 4 * (self.first_row * width) as u64;
            at = (at + 4 * (self.batch * width) as u64).next_multiple_of(ALIGNMENT);
        }
        offsets
    }
}

/// Offsets of activations that only models with embeddings for layers need.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddingLayout {
    /// The rows' usual embeddings `[batch, hidden]`.
    pub usual: u64,
    /// Embeddings for all layers `[batch, layers, width]`.
    pub all: u64,
    /// Projections of the usual embeddings, and gates, for one layer `[batch, width]`.
    pub projected: u64,
    pub gate: u64,
    /// 0, 1, 2 ...: numbers of the rows that are read from the file, and how many these are; none if the model reads no rows.
    pub ids: u64,
    pub ids_count: usize,
}
