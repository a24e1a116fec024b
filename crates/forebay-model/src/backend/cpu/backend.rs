//! The CPU backend and its sequence of steps.

use std::ops::Range;

use forebay_compute::{ComputeError, Cpu, KvCache, RopeTable};
use forebay_ops::{KV_BLOCK, KvType};
use forebay_store::FileSet;
use forebay_stream::{Lease, Residency};

use super::cache_layers::cache_layers;
use super::embedding_rows::read_rows;
use super::expert_inputs::score_experts;
use super::latent_norm::norm_latent;
use super::moe::MoeStep;
use super::products::{
    add_bias, both_kinds, matmul_beside_reads, matrix, multiply, norm_in_place, norm_or_copy,
};
use super::scratch::{Scratch, batch_tokens};
use super::streams::{BlockInput, StreamRows};
use crate::ModelError;
use crate::arch::{Architecture, KvCapacity, LatentNorm, Layer, STATES_PER_SEQUENCE};
use crate::backend::{
    Backend, Batch, Begun, BlockContent, ComputeInfo, End, KvGroup, NextBlock, Restoring, Step,
    record_routing, record_rows,
};
use crate::weights::{AttentionWeights, DenseBiases, FeedForwardWeights, PartMatrix, Weights};

/// The CPU with its KV cache, and the residency from which it leases blocks.
pub struct CpuBackend {
    pub(super) cpu: Cpu,
    pub(super) files: FileSet,
    pub(super) residency: Residency,
    /// Lease of the current layer's dense block.
    pub(super) lease: Option<Lease>,
    pub(super) cache: KvCache,
    /// States of sequences, `[parts, states, floats]` ([`Architecture::state_parts`]). The system supplies the memory when it is
    /// first written.
    pub(super) states: Vec<f32>,
    /// Number of floats of each part of a state.
    state_parts: Vec<usize>,
    /// KV blocks of every sequence, `[tables][groups]`.
    pub(super) tables: Vec<Vec<Vec<u32>>>,
    windows: Vec<Option<usize>>,
    context: usize,
    /// Tables of [`Architecture::ropes`].
    pub(super) ropes: Vec<RopeTable>,
    pub(super) scratch: Scratch,
    /// Position of every row of the pass.
    pub(super) positions: Vec<u32>,
    /// Token of every row of the pass.
    pub(super) tokens: Vec<u32>,
    /// Most rows that go through the layers together.
    pub(super) batch: usize,
    /// True if the next layer's experts are prefetched by its router's prediction.
    pub(super) prefetch: bool,
    /// Residual stream `[rows, hidden]` as the previous layer passed it to its feed-forward. Filled in passes whose
    /// early scores are recorded; empty in others.
    pub(super) early: Vec<f32>,
}

/// Size of a key/value cache.
#[derive(Debug, Clone, Copy)]
pub struct CacheSize {
    pub kind: KvType,
    pub capacity: KvCapacity,
}

/// Returns the bytes that keys, values and states of recurrent layers take in host memory.
pub fn cache_bytes(architecture: &Architecture, size: CacheSize) -> u64 {
    let batch = batch_tokens(architecture, size.capacity.context);
    let blocks = architecture.kv_blocks(batch, size.capacity);
    let bytes = KvCache::bytes_of(&cache_layers(architecture), &blocks, size.kind);
    let states = architecture.states_bytes(size.capacity.sequences);
    bytes.unwrap_or(u64::MAX).saturating_add(states)
}

/// Reserves the states of so many sequences.
fn reserve_states(architecture: &Architecture, sequences: usize) -> Result<Vec<f32>, ModelError> {
    let bytes = architecture.states_bytes(sequences);
    let floats = usize::try_from(bytes / 4).ok();
    let mut states: Vec<f32> = Vec::new();
    let reserved = floats.filter(|floats| states.try_reserve_exact(*floats).is_ok());
    let floats = reserved.ok_or(ComputeError::CacheTooLarge { bytes: Some(bytes) })?;
    // Zeroed memory costs nothing until it is used.
    drop(states);
    Ok(vec![0.0; floats])
}

impl CpuBackend {
    /// Reserves activations and a KV cache. `residency` must hold all blocks. With `prefetch`, the next layer's experts are
    /// read ahead while a single token is computed, as its router predicts. This never changes a result, and has no effect
    /// if everything is resident.
    ///
    /// # Errors
    /// Returns an error if the architecture's numbers allow no rotary tables, or no cache or states for this context.
    pub fn new(
        architecture: &Architecture,
        weights: &Weights,
        cpu: Cpu,
        files: FileSet,
        residency: Residency,
        size: CacheSize,
        prefetch: bool,
    ) -> Result<CpuBackend, ModelError> {
        let CacheSize { kind, capacity } = size;
        let KvCapacity { context, sequences, .. } = capacity;
        let batch = batch_tokens(architecture, context);
        let blocks = architecture.kv_blocks(batch, capacity);
        let cache = KvCache::new(&cache_layers(architecture), &blocks, kind)?;
        let states = reserve_states(architecture, sequences)?;
        let ropes = architecture.rope_tables(weights.rope_factors.as_ref(), context)?;
        let scratch = Scratch::reserve(architecture, weights, &files, context, batch);
        let prefetch = prefetch && !residency.plan().fully_resident;
        let windows: Vec<_> = architecture.kv_groups().iter().map(|of| of.window).collect();
        let table = vec![0; context.div_ceil(KV_BLOCK)];
        Ok(CpuBackend {
            cpu,
            files,
            residency,
            lease: None,
            cache,
            states,
            state_parts: architecture.state_parts().collect(),
            tables: vec![vec![table; windows.len()]; sequences],
            windows,
            context,
            ropes,
            scratch,
            positions: Vec::with_capacity(batch),
            tokens: Vec::with_capacity(batch),
            batch,
            prefetch,
            early: Vec::new(),
        })
    }

    /// Notes tokens and positions of the rows of a pass.
    pub(super) fn note_rows(&mut self, step: &Step<'_>, batch: &Batch<'_>) {
        self.lease = None;
        self.tokens.clear();
        self.tokens.extend_from_slice(batch.tokens);
        self.positions.clear();
        for run in step.runs {
            self.positions.extend((run.position..run.position + run.count).map(|at| at as u32));
        }
    }

    /// Returns where the states of a part are.
    pub(super) fn states_of(&self, part: usize) -> Range<usize> {
        let states = STATES_PER_SEQUENCE * self.tables.len();
        let first = states * self.state_parts[..part].iter().sum::<usize>();
        first..first + states * self.state_parts[part]
    }

    /// Returns the parts of a state.
    fn parts_of_state(&mut self, place: usize) -> impl Iterator<Item = &mut [f32]> {
        let states = STATES_PER_SEQUENCE * self.tables.len();
        let mut rest = &mut self.states[..];
        self.state_parts.iter().map(move |floats| {
            let (part, others) = std::mem::take(&mut rest).split_at_mut(states * floats);
            rest = others;
            &mut part[place * floats..][..*floats]
        })
    }

    /// Adds the last block's output to the residual stream. Returns an error for a NaN, because it would spread to
    /// every later token and look like a model that writes nonsense.
    pub(super) fn add(&mut self, step: &Step<'_>, block: NextBlock) -> Result<(), ModelError> {
        let hidden = step.architecture.hidden;
        let (layer, _) = step.added(block);
        let (post_norm, scale) = step.added_norm(block);
        let gate = step.added_gate(block);
        let out = &mut self.scratch.block_out[..step.count * hidden];
        if let Some(scale) = gate.and_then(|gate| gate.scale.as_deref()) {
            self.cpu.multiply_columns(out, scale);
        }
        norm_in_place(&self.cpu, out, post_norm, step.architecture.post_norm_epsilon);
        let width = step.architecture.stream_width();
        let x = &mut self.scratch.x[..step.count * width];
        if let Some(factor) = step.architecture.normed_residual {
            // The input of the block whose output is added.
            x.copy_from_slice(&self.scratch.normed[..step.count * hidden]);
            self.cpu.scale_in_place(x, factor);
        }
        if let Some(gate) = gate {
            self.cpu.multiply_columns(x, &gate.keep);
        }
        match step.architecture.active_stream() {
            Some(_) => self.scratch.predicted.add(&self.cpu, step, block, x, out),
            None => {
                let banked = step.banked_stream(block);
                self.scratch.streams.add(&self.cpu, step.architecture, banked, x, out);
            }
        }
        if scale != 1.0 {
            self.cpu.scale_in_place(x, scale);
        }
        // A sum of magnitudes is finite only if all values are, and it vectorises. The sum itself overflows only for
        // values that no later norm could use either.
        let finite = |row: &[f32]| row.iter().map(|value| value.abs()).sum::<f32>().is_finite();
        match x.chunks_exact(width).position(|row| !finite(row)) {
            None => Ok(()),
            Some(row) => Err(ModelError::NumericFailure { layer, token: step.position_of(row) }),
        }
    }

    /// Computes a gated feed-forward of the layer's dense block, from the normed stream into `block_out`.
    fn gated(
        &mut self,
        step: &Step<'_>,
        parts: [PartMatrix; 3],
        biases: Option<&DenseBiases>,
    ) -> Result<(), ModelError> {
        let [gate, up, down] = parts;
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (hidden, width, count) = (step.architecture.hidden, gate.rows, step.count);
        let normed = &scratch.normed[..count * hidden];
        scratch.dense_input.prepare(cpu, normed, count, hidden, &[gate.ty, up.ty]);
        let gate_out = &mut scratch.gate[..count * width];
        let up_out = &mut scratch.up[..count * width];
        let (x, rows) = (&scratch.dense_input, scratch.rows.of(step));
        let [a, b] = both_kinds(matrix(residency, lease, &gate), x, rows, gate_out);
        let [c, d] = both_kinds(matrix(residency, lease, &up), x, rows, up_out);
        let gating = step.layer_weights().gatings.others;
        let jobs = if gating.has_gate() { 4 } else { 2 };
        matmul_beside_reads(cpu, residency, &mut [a, b, c, d][..jobs])?;
        let inner = &mut scratch.gate[..count * width];
        let up_out = &mut scratch.up[..count * width];
        let none = DenseBiases::default();
        let biases = biases.unwrap_or(&none);
        if let Some(cut) = step.cut() {
            cpu.cut_rows(inner, width, cut);
        }
        match gating.has_gate() {
            true => {
                add_bias(cpu, inner, biases.gate.as_deref());
                add_bias(cpu, up_out, biases.up.as_deref());
                cpu.gate_in_place(gating, inner, up_out);
            }
            false => {
                add_bias(cpu, inner, biases.up.as_deref());
                cpu.activate_in_place(gating, inner);
            }
        }
        scratch.inner.prepare(cpu, inner, count, width, &[down.ty]);
        let out = &mut scratch.block_out[..count * hidden];
        multiply(cpu, residency, lease, &down, &scratch.inner, scratch.rows.of(step), out)?;
        add_bias(cpu, out, biases.down.as_deref());
        Ok(())
    }
}

/// Returns the number of dense blocks up to the last one of the head that the model's own pass uses.
fn all_used(step: &Step<'_>) -> usize {
    step.weights.layers.len() + step.weights.head.len()
}

impl Backend for CpuBackend {
    fn info(&self) -> ComputeInfo {
        ComputeInfo {
            threads: self.cpu.pool().threads(),
            isa: self.cpu.isa().to_string(),
            description: self.cpu.describe(),
            arithmetic: self.cpu.describe_arithmetic(),
            vram: None,
        }
    }

    fn batch_tokens(&self) -> usize {
        self.batch
    }

    fn was_cut_short(&self) -> bool {
        self.cpu.pool().was_cut_short()
    }

    fn decode_rows(&self) -> usize {
        self.batch
    }

    fn mixes_rows(&self) -> bool {
        true
    }

    fn tables(&self) -> usize {
        self.tables.len()
    }

    fn context(&self) -> usize {
        self.context
    }

    fn cache_bytes(&self) -> u64 {
        self.cache.bytes() + 4 * self.states.len() as u64
    }

    fn kv_groups(&self) -> Vec<KvGroup> {
        let group = |(group, window): (usize, &Option<usize>)| KvGroup {
            window: *window,
            blocks: self.cache.blocks(group),
            on_device: self.cache.blocks(group),
            block_bytes: self.cache.block_bytes(group),
        };
        self.windows.iter().enumerate().map(group).collect()
    }

    fn set_block(
        &mut self,
        table: usize,
        group: usize,
        index: usize,
        block: u32,
    ) -> Result<(), ModelError> {
        self.tables[table][group][index] = block;
        Ok(())
    }

    fn copy_block(&mut self, group: usize, from: u32, to: u32) -> Result<(), ModelError> {
        self.cache.copy_block(group, from, to);
        Ok(())
    }

    fn save_block(&mut self, group: usize, block: u32, bytes: &mut [u8]) -> Result<(), ModelError> {
        self.cache.save_block(group, block, bytes);
        Ok(())
    }

    fn restore_blocks<'a>(
        &mut self,
        blocks: &mut dyn Iterator<Item = BlockContent<'a>>,
    ) -> Result<Restoring, ModelError> {
        for of in blocks {
            self.cache.restore_block(of.group, of.block, of.bytes());
        }
        Ok(Restoring::default())
    }

    fn state_bytes(&self) -> usize {
        4 * self.state_parts.iter().sum::<usize>()
    }

    fn save_state(&mut self, place: usize, bytes: &mut [u8]) -> Result<(), ModelError> {
        assert_eq!(bytes.len(), self.state_bytes(), "save_state: {place}");
        let floats = self.parts_of_state(place).flatten();
        for (float, bytes) in floats.zip(bytes.as_chunks_mut().0) {
            *bytes = float.to_ne_bytes();
        }
        Ok(())
    }

    fn restore_state(&mut self, place: usize, bytes: &[u8]) -> Result<(), ModelError> {
        assert_eq!(bytes.len(), self.state_bytes(), "restore_state: {place}");
        let floats = self.parts_of_state(place).flatten();
        for (float, bytes) in floats.zip(bytes.as_chunks().0) {
            *float = f32::from_ne_bytes(*bytes);
        }
        Ok(())
    }

    fn residency(&self) -> Option<&Residency> {
        Some(&self.residency)
    }

    fn residency_mut(&mut self) -> Option<&mut Residency> {
        Some(&mut self.residency)
    }

    /// Reads the tokens' rows of the embedding table into the residual stream.
    fn begin(&mut self, step: &Step<'_>, batch: &Batch<'_>) -> Result<Begun, ModelError> {
        self.note_rows(step, batch);
        let Scratch { x, embedding_row, predicted, rows, .. } = &mut self.scratch;
        let (scale, hidden) = (step.architecture.embedding_scale, step.architecture.hidden);
        let width = step.architecture.stream_width();
        let to = x.chunks_exact_mut(width).map(|row| &mut row[..hidden]);
        read_rows(&self.files, &step.weights.embedding, batch.tokens, scale, embedding_row, to)?;
        let norm = step.weights.embedding_norm.as_deref();
        let embedded = &mut x[..step.count * width];
        norm_in_place(&self.cpu, embedded, norm, step.architecture.norm_epsilon);
        if let Some(shape) = step.architecture.stream_shape() {
            let (x, matrices) = (&mut x[..step.count * width], &step.weights.streams_begin);
            match step.architecture.active_stream() {
                Some(_) => predicted.begin(&self.cpu, matrices, x, shape, rows.of(step)),
                None => self.cpu.spread_streams(x, shape),
            }
        }
        self.begin_layer_embeddings(step, batch.tokens)?;
        self.begin_ngrams(step, batch);
        if self.reads_ahead(step) {
            self.prefetch_experts_of(step)?;
        }
        let early = if batch.scores { step.count * width } else { 0 };
        self.early.resize(early, 0.0);
        // A batch without logits skips the head, so its chunks must not be read ahead.
        let main = step.architecture.main_layers();
        let cycle = if batch.end == End::Nothing { main } else { all_used(step) };
        self.residency.set_dense_cycle(cycle);
        if main < step.weights.layers.len() {
            // The predicting layer runs after the head.
            self.residency.postpone_dense(main);
        }
        Ok(Begun::Layers)
    }

    fn enter_layer(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        // Free the last block's slot before another block is requested.
        self.lease = None;
        self.lease = Some(self.residency.dense(step.layer as u32)?);
        // Only the next norm adds the feed-forward's output, so this is still the stream without it.
        let stream = &self.scratch.x[..self.early.len()];
        self.early.copy_from_slice(stream);
        Ok(())
    }

    fn norm(&mut self, step: &Step<'_>, block: NextBlock, add: bool) -> Result<(), ModelError> {
        // The feed-forward of a parallel block takes the stream without the output of attention.
        let adds_later = step.takes_layer_input(block);
        if add && !adds_later {
            self.add(step, block)?;
        }
        let layer = step.layer_weights();
        let (streams, norm) = match block {
            NextBlock::Attention => (&layer.attention_streams, &layer.attention_norm),
            NextBlock::FeedForward => (&layer.feed_forward_streams, &layer.feed_forward_norm),
            NextBlock::NGrams | NextBlock::Embeddings => return Ok(()),
            NextBlock::Head => unreachable!("the head norms the rows that it takes"),
        };
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (streams, norm) = (streams.as_ref(), norm.as_deref());
        if step.architecture.active_stream().is_some() {
            let x = &mut scratch.x[..step.count * step.architecture.stream_width()];
            let input = scratch.predicted.input(cpu, step, block, x);
            let normed = &mut scratch.normed[..step.count * step.architecture.hidden];
            let (form, epsilon) = (step.architecture.norm_form, step.architecture.stream_epsilon());
            norm_or_copy(cpu, form, input, norm, epsilon, normed);
            return Ok(());
        }
        let input = BlockInput { streams, norm, block: (residency, lease) };
        let of = StreamRows {
            architecture: step.architecture,
            rows: scratch.rows.of(step),
            have_output: true,
            filled: step.filled_streams(step.layer, block == NextBlock::FeedForward),
        };
        let x = &scratch.x[..step.count * step.architecture.stream_width()];
        let normed = &mut scratch.normed[..step.count * step.architecture.hidden];
        input.write(cpu, &mut scratch.streams, x, &of, normed);
        if block == NextBlock::Attention {
            scratch.keep_input(step);
        }
        match add && adds_later {
            true => self.add(step, block),
            false => Ok(()),
        }
    }

    fn project(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.project_layer(step)
    }

    fn attend(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        match &step.layer_weights().attention {
            AttentionWeights::Grouped(_)
            | AttentionWeights::Latent(_)
            | AttentionWeights::Shared(_) => self.attend_layer(step),
            AttentionWeights::Delta(_) | AttentionWeights::None => {}
        }
        match step.layer_weights().delta() {
            Some(weights) => self.step_states(step, weights),
            None => Ok(()),
        }
    }

    fn project_output(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.project_layer_output(step)
    }

    fn dense_feed_forward(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let FeedForwardWeights::Dense { gate, up, down } = step.layer_weights().feed_forward else {
            unreachable!("the caller looked at the weights");
        };
        self.gated(step, [gate, up, down], Some(&step.layer_weights().biases))?;
        self.finish_feed_forward(step);
        Ok(())
    }

    fn gives_early_scores(&self) -> bool {
        true
    }

    /// Computes the scores here and not one layer earlier, when a prediction would need them, because this layer's
    /// router is in memory now.
    fn early_scores(&mut self, step: &Step<'_>, scores: &mut [f32]) -> Result<(), ModelError> {
        let FeedForwardWeights::Experts { router, vectors, .. } =
            &step.layer_weights().feed_forward
        else {
            unreachable!("the caller looked at the weights");
        };
        let CpuBackend { cpu, residency, lease, scratch, early, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (experts, count, hidden) = (step.experts().count, step.count, step.architecture.hidden);
        // `block_out` has already been added, and `inner` is free until the experts are computed.
        let normed = &mut scratch.block_out[..count * hidden];
        let input = BlockInput {
            streams: step.layer_weights().feed_forward_streams.as_ref(),
            norm: step.layer_weights().router_norm(),
            block: (residency, lease),
        };
        let of = StreamRows {
            architecture: step.architecture,
            rows: scratch.rows.of(step),
            have_output: false,
            // The stream is the one before the layer.
            filled: step.filled_streams(step.layer, false),
        };
        let early = &early[..count * step.architecture.stream_width()];
        input.write(cpu, &mut scratch.streams, early, &of, normed);
        scratch.inner.prepare(cpu, normed, count, hidden, &[router.ty]);
        let out = &mut scratch.moe.scores[..count * experts];
        let w = matrix(residency, lease, router);
        cpu.matmul(&mut both_kinds(w, &scratch.inner, scratch.rows.of(step), out));
        add_bias(cpu, out, vectors.router_bias.as_deref());
        if let Some(value) = out.iter().position(|score| !score.is_finite()) {
            let (layer, token) = (step.layer, step.position_of(value / experts));
            return Err(ModelError::NumericFailure { layer, token });
        }
        let described = &step.architecture.layers;
        let counts = |layers: &[Layer]| layers.iter().map(Layer::experts).sum::<usize>();
        let (first, all) = (counts(&described[..step.layer]), counts(described));
        for (from, to) in out.chunks_exact(experts).zip(scores.chunks_exact_mut(all)) {
            to[first..first + experts].copy_from_slice(from);
        }
        Ok(())
    }

    fn route(&mut self, step: &Step<'_>, routing: Option<&mut [i32]>) -> Result<(), ModelError> {
        let FeedForwardWeights::Experts { router, gate, up, shared, latent, vectors, .. } =
            &step.layer_weights().feed_forward
        else {
            unreachable!("the caller looked at the weights");
        };
        let (experts, count, hidden) = (step.experts(), step.count, step.architecture.hidden);
        let lease = self.lease.as_ref().expect("the layer was entered");
        let w = matrix(&self.residency, lease, router);
        let types = match latent {
            Some([down, _]) => [down.ty; 2],
            None => [gate.ty, up.ty],
        };
        score_experts(&self.cpu, step, &mut self.scratch, vectors, w, types);
        let moe = &mut self.scratch.moe;
        if shared.is_none() && latent.is_none() {
            // The dense block is no longer needed. Its slot may take the next layer while experts are computed.
            self.lease = None;
        }
        let rule = vectors.rule(experts);
        let by_token = vectors.experts_of(&self.tokens);
        moe.route(&self.cpu, count, experts, &rule, by_token, step.chosen)?;
        if let Some(routing) = routing {
            let layers = step.architecture.main_layers();
            record_routing(moe.chosen(count, experts), routing, step.layer, layers, count);
        }
        moe.begin(step.layer, &mut self.residency)?;
        if let Some([down, _]) = latent {
            self.enter_expert_space(step, down, [gate.ty, up.ty]);
        }
        if let Some(shared) = shared {
            // Runs while the missing experts are being read.
            self.gated(step, *shared, None)?;
            if latent.is_none() {
                self.lease = None;
            }
            if let Some(weight) = &vectors.shared_scale {
                let Scratch { block_out, normed, .. } = &mut self.scratch;
                let (out, x) = (&mut block_out[..count * hidden], &normed[..count * hidden]);
                self.cpu.gate_rows(out, x, weight);
            }
        }
        if experts.scaled_input {
            // The router and the shared experts took the input as it was.
            let Scratch { input, normed, moe, .. } = &mut self.scratch;
            let normed = &mut normed[..count * hidden];
            moe.scale_inputs(&self.cpu, experts, normed, count);
            input.prepare(&self.cpu, normed, count, hidden, &[gate.ty, up.ty]);
        }
        if self.reads_ahead(step) {
            self.prefetch_next(step)?;
        }
        Ok(())
    }

    fn gives_routing_weights(&self) -> bool {
        true
    }

    fn routing_weights(&self, step: &Step<'_>, weights: &mut [f32]) {
        let chosen = self.scratch.moe.chosen_weights(step.count, step.experts());
        let layers = step.architecture.main_layers();
        record_rows(chosen, |weight| weight, weights, step.layer, layers, step.count);
    }

    fn experts(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let FeedForwardWeights::Experts { gate, up, down, shared, latent, vectors, .. } =
            &step.layer_weights().feed_forward
        else {
            unreachable!("the caller looked at the weights");
        };
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let (count, hidden) = (step.count, step.architecture.hidden);
        let moe_step = MoeStep {
            experts: step.experts(),
            gate: *gate,
            up: *up,
            down: *down,
            biases: vectors.biases.as_ref(),
            output_norm: vectors.output_norm.as_ref(),
            output_epsilon: step.architecture.post_norm_epsilon,
            gating: step.layer_weights().gatings.experts,
            outer: step.experts().outer_width(hidden),
            count,
            decode: step.decode,
        };
        // The output of the shared experts, if any, is already in `block_out`.
        let (block_out, normed) = (&mut scratch.block_out, &mut scratch.normed);
        let (out, beside) = match shared {
            None => (&mut block_out[..count * hidden], None),
            Some(_) => (&mut normed[..count * hidden], Some(&mut block_out[..count * hidden])),
        };
        scratch.moe.compute(&moe_step, cpu, residency, &scratch.input)?;
        match latent {
            None => scratch.moe.combine(&moe_step, cpu, out),
            Some([_, up]) => {
                let sums = &mut scratch.latent_experts[..count * up.cols];
                scratch.moe.combine(&moe_step, cpu, sums);
                norm_latent(cpu, step, LatentNorm::After, sums);
                scratch.inner.prepare(cpu, sums, count, up.cols, &[up.ty]);
                let lease = lease.as_ref().expect("the block holds the projection");
                let rows = scratch.rows.of(step);
                multiply(cpu, residency, lease, up, &scratch.inner, rows, out)?;
            }
        }
        *lease = None;
        if let Some(norms) = &vectors.norms {
            cpu.rms_norm_in_place(out, &norms.output, step.architecture.norm_epsilon);
        }
        if let Some(beside) = beside {
            if let Some(norms) = &vectors.norms {
                cpu.rms_norm_in_place(beside, &norms.shared, step.architecture.norm_epsilon);
            }
            cpu.add_assign(beside, out);
        }
        self.finish_feed_forward(step);
        Ok(())
    }

    fn add_ngrams(&mut self, step: &Step<'_>, add: bool) -> Result<(), ModelError> {
        self.add_ngrams_of_layer(step, add)
    }

    fn layer_embeddings(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.add_layer_embeddings(step)
    }

    fn predicts(&self) -> bool {
        true
    }

    fn begin_prediction(
        &mut self,
        step: &Step<'_>,
        batch: &Batch<'_>,
        hidden: &[f32],
    ) -> Result<(), ModelError> {
        self.join(step, batch, hidden)
    }

    fn head(&mut self, step: &Step<'_>, logits: &mut Vec<f32>) -> Result<(), ModelError> {
        self.append_logits(step, logits)
    }

    fn final_rows(
        &mut self,
        step: &Step<'_>,
        rows: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        self.append_final_rows(step, rows, out);
        Ok(())
    }

    fn end(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.lease = None;
        self.add(step, NextBlock::Head)
    }
}
