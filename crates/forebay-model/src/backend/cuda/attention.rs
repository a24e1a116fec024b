//! The attention block: projections, KV cache writes, attention, output projection.

use forebay_compute::{Growth, RopeLayout, Temperature};
use forebay_cuda::{
    Added, AttentionInputs, AttentionScratch, Columns, DeviceAttention, DevicePtr, HeadGates,
    HeadInput, Norm, Normed, PassRows, RelativeBiases, Rotation, RowTemperature, converts_outputs,
    takes_inputs,
};
use forebay_ops::GateFunction;

use super::backend::CudaBackend;
use super::products::{ExpertEntries, ExpertProduct, Rows};
use super::vectors::optional;
use crate::ModelError;
use crate::arch::{Convolved, Latent, OutputGate, QkNorm};
use crate::backend::Step;
use crate::weights::{AttentionWeights, GroupedWeights, HeadMatrices, LatentWeights};

/// Projections, and those parameters of their remaining steps that differ between the kinds of attention.
pub(super) struct HeadInputs {
    pub(super) q: HeadInput,
    pub(super) k: HeadInput,
    pub(super) v: HeadInput,
    /// Numbers of elements of a key that are normed together ([`AttentionInputs::key_norm_dims`]).
    pub(super) key_norm_dims: [usize; 2],
    /// Index of the first element of a head that is rotated.
    pub(super) rotary_from: usize,
}

impl CudaBackend {
    /// Returns rotation number `index` of the model.
    pub(super) fn rotation(&self, step: &Step<'_>, index: usize) -> Rotation {
        let rope = &step.architecture.ropes[index];
        Rotation {
            angles: self.float(self.at().ropes[index]),
            rotary_dim: rope.rotary_dim,
            rotary_from: rope.from,
            interleaved: rope.layout == RopeLayout::Interleaved,
        }
    }

    /// Returns the rows of the current batch.
    pub(super) fn pass_rows(&self, step: &Step<'_>) -> PassRows {
        let first = self.lanes.current().first_row;
        PassRows {
            kind: step.kind(),
            count: step.count,
            positions: self.exchange.positions().offset(first),
            tables: self.exchange.tables().offset(first),
            tiles: self.exchange.tiles(step.architecture.layers[step.layer].attention),
        }
    }

    pub(super) fn project_layer(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        if let Some(beside) = &step.layer_weights().beside {
            self.project_delta(step, &beside.delta)?;
        }
        self.project_branch(step)?;
        match &step.layer_weights().attention {
            AttentionWeights::Grouped(weights) => self.project_grouped(step, weights),
            AttentionWeights::Latent(weights) => self.project_latent(step, weights),
            AttentionWeights::Delta(weights) => self.project_delta(step, weights),
            AttentionWeights::Shared(weights) => self.project_shared_keys(step, weights),
            AttentionWeights::None => Ok(()),
        }
    }

    fn project_grouped(
        &mut self,
        step: &Step<'_>,
        weights: &GroupedWeights,
    ) -> Result<(), ModelError> {
        let (at, vectors) = (self.at(), self.layer_vectors(step));
        let gated = step.attention().output_gate == OutputGate::InQueries;
        let q = self.product(step, weights.q, if gated { at.q_and_gate } else { at.q });
        let (mut products, mut count) = ([q; 4], 1);
        for (matrix, out) in [(weights.k, at.k), (weights.v, at.v), (weights.gate, at.q_and_gate)] {
            if let Some(matrix) = matrix {
                products[count] = self.product(step, matrix, out);
                count += 1;
            }
        }
        let gpu = &self.gpu;
        self.products().dense(gpu, self.float(at.normed), Rows::of(step), &products[..count])?;
        if let Some((own, [a, b, c], others)) = self.indexer_products(step) {
            let products = &[own, a, b, c][..1 + others];
            self.products().dense(gpu, self.float(at.normed), Rows::of(step), products)?;
        }
        if let Some(of) = &weights.relative {
            let mixes = self.product(step, of.project, at.relative);
            self.products().dense(gpu, self.float(at.normed), Rows::of(step), &[mixes])?;
        }
        self.convolve(step, Convolved::Keys, self.float(at.k))?;
        self.convolve(step, Convolved::Values, self.float(at.v))?;
        if let Some(limit) = step.attention().clamp {
            for product in &products[..count] {
                gpu.clamp(product.out, step.count * product.matrix.rows, limit)?;
            }
        }
        self.take_values(step, weights)?;
        if gated {
            self.take_queries(step)?;
        }
        // A norm of queries would undo it.
        let norms_queries = self.norms_tempered_queries(step);
        if !norms_queries {
            self.temper(step)?;
        }
        let input = |projected: u64, bias: Option<usize>, norm: Option<usize>| HeadInput {
            projected: self.float(projected),
            bias: optional(self.vectors(), bias),
            norm: optional(self.vectors(), norm),
        };
        let mut q = input(at.q, vectors.q_bias, vectors.q_norm);
        let (mut k, mut v) = (HeadInput::none(), HeadInput::none());
        if weights.k.is_some() {
            k = input(at.k, vectors.k_bias, vectors.k_norm);
            v = input(at.v, vectors.v_bias, None);
        }
        let epsilon = step.architecture.norm_epsilon;
        if step.attention().qk_norm == QkNorm::WholeProjection {
            let of_k = weights.k.map_or(0, |k| k.rows);
            for (input, width) in [(&mut q, weights.q.rows), (&mut k, of_k)] {
                if input.projected.is_null() {
                    continue;
                }
                if !input.bias.is_null() {
                    gpu.add_bias_rows(input.projected, input.bias, step.count, width)?;
                }
                let norm = Norm { weight: input.norm, width, epsilon };
                let rows = input.projected;
                gpu.rms_norm(rows, Added::Nothing, &norm, Normed::plain(rows), step.count, None)?;
                *input = HeadInput::plain(input.projected);
            }
        }
        let inputs =
            HeadInputs { q, k, v, key_norm_dims: [step.attention().head_dim, 0], rotary_from: 0 };
        self.take_inputs(step, inputs)?;
        if norms_queries {
            self.temper(step)?;
        }
        self.take_indexer_inputs(step)
    }

    /// Returns true if the layer norms queries before their factor multiplies them.
    fn norms_tempered_queries(&self, step: &Step<'_>) -> bool {
        step.architecture.layers[step.layer].tempered && self.layer_vectors(step).q_norm.is_some()
    }

    /// Makes values of the projections of keys, norms values and scales them, as far as the model does.
    fn take_values(&self, step: &Step<'_>, weights: &GroupedWeights) -> Result<(), ModelError> {
        if weights.k.is_none() {
            return Ok(());
        }
        let (at, attention) = (self.at(), step.attention());
        let heads = step.count * attention.kv_heads;
        let (keys, values) = (self.float(at.k), self.float(at.v));
        let from = if attention.values.of_keys { keys } else { values };
        match self.layer_vectors(step).v_norm {
            Some(norm) => {
                let norm = Norm {
                    weight: self.vectors().offset(norm),
                    width: attention.value_dim,
                    epsilon: step.architecture.norm_epsilon,
                };
                let out = Normed::plain(values);
                self.gpu.rms_norm(from, Added::Nothing, &norm, out, heads, None)?;
            }
            None if attention.values.of_keys => {
                let bytes = 4 * heads * attention.value_dim;
                self.gpu.copy(keys.cast(), values.cast(), bytes)?;
            }
            None => {}
        }
        if attention.values.scale != 1.0 {
            self.gpu.scale(values, heads * attention.value_dim, attention.values.scale)?;
        }
        Ok(())
    }

    /// Separates the queries from the gates of attention's output, which follow each head's query.
    fn take_queries(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let (at, attention) = (self.at(), step.attention());
        let head_dim = attention.head_dim;
        let from = self.float(at.q_and_gate);
        let queries = Columns { from, stride: 2 * head_dim, cols: head_dim };
        let rows = step.count * attention.heads;
        Ok(self.gpu.join_columns([queries, Columns::none()], self.float(at.q), rows)?)
    }

    /// Returns the number of elements of heads that are mixed, because the cache rounds them.
    fn mixed(&self, step: &Step<'_>) -> usize {
        step.attention().mixed(self.kv_shape(step).element)
    }

    /// Multiplies queries by the factor of their positions, in layers that have one. Rotations and products commute with it. What
    /// heads take of biases by distance has the same factor, and is divided by that of scores, which multiplies it later.
    fn temper(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let attention = step.attention();
        let mixes = attention.relative.map_or(0, |of| attention.heads * of.rank);
        if mixes > 0 {
            let to = self.float(self.at().relative);
            self.gpu.scale(to, step.count * mixes, 1.0 / attention.scale)?;
        }
        let is_tempered = step.architecture.layers[step.layer].tempered;
        let Some(temperature) = step.architecture.temperature.filter(|_| is_tempered) else {
            return Ok(());
        };
        let Temperature { rate, step: length, first, growth } = temperature;
        let of = RowTemperature { rate, step: length, first, by_ratio: growth == Growth::Ratio };
        let (at, positions) = (self.at(), self.pass_rows(step).positions);
        for (rows, width) in [(at.q, attention.heads * attention.head_dim), (at.relative, mixes)] {
            if width > 0 {
                self.gpu.temper_rows(self.float(rows), positions, of, step.count, width)?;
            }
        }
        Ok(())
    }

    /// Multiplies sums of values by functions of their gates.
    fn gate_output(&self, step: &Step<'_>, values: DevicePtr<f32>) -> Result<(), ModelError> {
        let (at, attention) = (self.at(), step.attention());
        let heads = attention.heads;
        let (gates, dim) = (self.float(at.q_and_gate), attention.output_width() / heads);
        let (first, stride) = match attention.output_gate {
            OutputGate::None => return Ok(()),
            OutputGate::InQueries => (attention.head_dim, 2 * attention.head_dim),
            OutputGate::ByElement(GateFunction::Sigmoid) => (0, dim),
            OutputGate::ByElement(function) | OutputGate::ByHead(function) => {
                let gates = (gates, function == GateFunction::Softplus);
                let parts = attention.gate_rows();
                let of = [parts, heads * dim / parts];
                return Ok(self.gpu.gate_whole_heads(values, gates, of, step.count)?);
            }
        };
        let gates = HeadGates { gates, heads, dim, first, stride };
        Ok(self.gpu.gate_heads(values, &gates, step.count)?)
    }

    /// Finishes the projections: bias, norm, rotation and KV cache writes. If the attention kernel can do this,
    /// leaves it to that kernel.
    pub(super) fn take_inputs(
        &mut self,
        step: &Step<'_>,
        inputs: HeadInputs,
    ) -> Result<(), ModelError> {
        let HeadInputs { q, k, v, key_norm_dims, rotary_from } = inputs;
        let rope = step.architecture.layers[step.layer].rope;
        let rotation = rope.map(|index| Rotation { rotary_from, ..self.rotation(step, index) });
        let inputs = AttentionInputs {
            q,
            k,
            key_norm_dims,
            v,
            heads: step.attention().heads,
            norm_epsilon: step.architecture.norm_epsilon,
            norms_last: step.attention().qk_norm == QkNorm::PerRotatedHead,
            mixed: self.mixed(step),
            rotation,
        };
        // A row sees the keys of the rows before it in its own sequence only if they are in the cache before attention
        // begins.
        let alone = step.runs.iter().all(|run| run.count == 1);
        // Attention by itself does not leave out keys and values.
        let writes = !inputs.k.projected.is_null();
        let is_last = !self.norms_tempered_queries(step);
        if alone && writes && is_last && takes_inputs(self.kv_shape(step), step.kind()) {
            self.lanes.current_mut().inputs = Some(inputs);
        } else {
            self.gpu.attention_inputs(&inputs, &self.kv_layer(step), &self.pass_rows(step))?;
        }
        Ok(())
    }

    /// Computes queries in latent space `[tokens, heads, rank + rotary]`. The keys are the latent vectors together
    /// with the parts that rotate.
    fn project_latent(
        &mut self,
        step: &Step<'_>,
        weights: &LatentWeights,
    ) -> Result<(), ModelError> {
        self.sort_heads(step)?;
        let (at, vectors, count) = (self.at(), self.layer_vectors(step), step.count);
        let attention = step.attention();
        let Latent { rank, plain, rotary, key_norm, .. } = self.latent(step);
        let (gpu, epsilon) = (&self.gpu, step.architecture.norm_epsilon);
        let kv_a = self.product(step, weights.kv_a, at.latent.kv_a);
        let indexer = self.indexer_products(step);
        let normed = self.float(at.normed);
        if let Some(gate) = weights.gate {
            let gate = self.product(step, gate, at.q_and_gate);
            self.products().dense(gpu, normed, Rows::of(step), &[gate])?;
        }
        match &weights.q_a {
            None => {
                let q = self.product(step, weights.q, at.latent.q);
                self.products().dense(gpu, normed, Rows::of(step), &[q, kv_a])?;
            }
            Some((matrix, _)) => {
                let q_a = self.product(step, *matrix, at.latent.q_a);
                match indexer {
                    None => self.products().dense(gpu, normed, Rows::of(step), &[q_a, kv_a])?,
                    Some((_, [a, b, c], others)) => {
                        let products = &[q_a, kv_a, a, b][..2 + others.min(2)];
                        self.products().dense(gpu, normed, Rows::of(step), products)?;
                        if others > 2 {
                            self.products().dense(gpu, normed, Rows::of(step), &[c])?;
                        }
                    }
                }
                let weight = vectors.q_a_norm.expect("queries that pass through have a norm");
                let norm =
                    Norm { weight: self.vectors().offset(weight), width: matrix.rows, epsilon };
                let also = self.products().converted_too(q_a.out, Rows::of(step), matrix.rows);
                let out = Normed { rows: q_a.out, also };
                gpu.rms_norm(q_a.out, Added::Nothing, &norm, out, count, None)?;
                let q = self.product(step, weights.q, at.latent.q);
                match indexer {
                    None => self.products().dense(gpu, q_a.out, Rows::of(step), &[q])?,
                    Some((own, ..)) => {
                        self.products().dense(gpu, q_a.out, Rows::of(step), &[q, own])?;
                    }
                }
            }
        }

        // The elements that do not rotate are multiplied by the matrices that would make keys of latent vectors. The
        // products use the memory of attention's output, which is not needed yet.
        let rows = count * attention.heads;
        let (q, parts) = (self.float(at.latent.q), self.float(at.latent.heads));
        let stride = plain + rotary;
        let of_q = Columns { from: q, stride, cols: plain };
        gpu.join_columns([of_q, Columns::none()], parts, rows)?;
        self.products().changed(parts);
        let products = self.float(at.attended);
        self.multiply_heads(step, &weights.k_b, 0, parts, products)?;
        let turned = Columns { from: products, stride: rank, cols: rank };
        let rotates = Columns { from: q.offset(plain), stride, cols: rotary };
        let queries = self.float(at.q);
        gpu.join_columns([turned, rotates], queries, rows)?;
        self.temper(step)?;

        let norm = vectors.kv_a_norm.expect("latent vectors have a norm");
        let k = HeadInput {
            projected: kv_a.out,
            bias: DevicePtr::null(),
            norm: self.vectors().offset(norm),
        };
        let (q, v) = (HeadInput::plain(queries), HeadInput::none());
        let key_norm_dims = [rank, if key_norm { rotary } else { 0 }];
        let inputs = HeadInputs { q, k, v, key_norm_dims, rotary_from: rank };
        self.take_inputs(step, inputs)?;
        self.take_indexer_inputs(step)
    }

    fn latent(&self, step: &Step<'_>) -> Latent {
        step.attention().latent.expect("the weights are of latent attention")
    }

    /// Makes the row order by head available for batches of many tokens.
    pub(super) fn sort_heads(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let is_known = step.count == 1 || self.sorted_heads == step.count;
        if is_known || self.products().takes_matvec(step.kind()) {
            return Ok(());
        }
        let count = step.count;
        for tables in &self.at().latent.tables {
            let heads = tables.count;
            let of = |head: usize| (0..count).map(move |token| (token * heads + head) as u32);
            let rows: Vec<u32> = (0..heads).flat_map(of).collect();
            let starts: Vec<u32> = (0..=heads).map(|head| (head * count) as u32).collect();
            self.gpu.upload(&rows, self.arena.activation(tables.rows))?;
            self.gpu.upload(&starts, self.arena.activation(tables.starts))?;
        }
        self.sorted_heads = count;
        Ok(())
    }

    /// Multiplies every head's rows of `x` by one of the layer's two stacks.
    fn multiply_heads(
        &self,
        step: &Step<'_>,
        weights: &HeadMatrices,
        stack: usize,
        x: DevicePtr<f32>,
        out: DevicePtr<f32>,
    ) -> Result<(), ModelError> {
        let at = &self.at().latent;
        let tables = at.tables_of(weights.heads);
        // The CUDA graph of a single token must not depend on what earlier batches have uploaded.
        let [starts, rows] = match step.count {
            1 => [at.single, at.single],
            _ => [tables.starts, tables.rows],
        };
        let entries = ExpertEntries {
            slots: self.arena.head_table(step.layer, stack),
            experts: weights.heads,
            rows: Rows::of(step),
            used: weights.heads,
            ids: self.arena.activation(tables.ids),
            order: DevicePtr::null(),
            starts: self.arena.activation(starts),
            pair_tokens: DevicePtr::null(),
        };
        let product = ExpertProduct { matrix: weights.matrix, offset: 0, out };
        self.products().heads(&self.gpu, x, &entries, self.arena.activation(rows), product)
    }

    pub(super) fn attend_layer(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        if let AttentionWeights::Delta(weights) = &step.layer_weights().attention {
            return self.step_states(step, weights);
        }
        if step.attention().shared.is_some() {
            return self.attend_shared_keys(step);
        }
        let inputs = self.lanes.current_mut().inputs.take();
        let (attention, at) = (step.attention(), self.at());
        let splits = self.splits[step.architecture.layers[step.layer].attention];
        let (shape, out) = (self.kv_shape(step), self.float(at.attended));
        let rows = self.pass_rows(step);
        self.products().changed(out);
        // Latent attention continues with rows of heads, which are converted in another order than rows of tokens. A gate
        // changes the output, and so does what undoes the mixing.
        let mixed = self.mixed(step);
        let is_gated = attention.output_gate != OutputGate::None;
        let output_norm = self.layer_vectors(step).attention_output_norm;
        let changes = attention.latent.is_some() || is_gated || output_norm.is_some() || mixed > 1;
        let converts = converts_outputs(shape, &rows) && !changes;
        let width = attention.heads * shape.dim_v;
        let also = match converts {
            true => self.products().converted_too(out, Rows::of(step), width),
            false => None,
        };
        let what = DeviceAttention {
            q: self.float(at.q),
            out,
            inputs,
            chosen: self.chosen_keys(step),
            also,
            rows,
            heads: attention.heads,
            scale: attention.scale,
            window: step.architecture.layers[step.layer].window,
            chunked: step.architecture.layers[step.layer].chunked,
            softcap: attention.softcap,
            sinks: optional(self.vectors(), self.layer_vectors(step).sinks),
            relative: attention.relative.map(|of| RelativeBiases {
                mixes: self.float(at.relative),
                profiles: optional(self.vectors(), self.layer_vectors(step).profiles),
                rank: of.rank,
                extent: of.extent,
            }),
        };
        let scratch = AttentionScratch {
            parts: self.float(at.attention_parts),
            tickets: self.arena.activation(at.attention_tickets),
            size: at.attention_size,
        };
        let layer = self.kv_layer_to_read(step)?;
        self.choose_keys(step, &layer)?;
        self.gpu.attention(&what, &layer, splits, &scratch)?;
        if mixed > 1 {
            self.gpu.mix_sums(out, step.count * width, mixed, shape.element)?;
        }
        if let Some((weight, length)) = output_norm {
            let epsilon = step.architecture.norm_epsilon;
            let norm = Norm { weight: self.vectors().offset(weight), width: length, epsilon };
            let (plain, parts) = (Normed::plain(out), step.count * width / length);
            self.gpu.rms_norm(out, Added::Nothing, &norm, plain, parts, None)?;
        }
        // The output of latent attention becomes a sum of values later.
        if attention.latent.is_none() {
            self.gate_output(step, out)?;
        }
        match &step.layer_weights().beside {
            Some(beside) => self.step_states(step, &beside.delta),
            None => Ok(()),
        }
    }

    pub(super) fn project_layer_output(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let at = self.at();
        let o = step.layer_weights().o.expect("the layer has attention or is recurrent");
        let product = self.product(step, o, self.mixer_out(step));
        let mut attended = self.float(at.attended);
        let by_head = match &step.layer_weights().attention {
            AttentionWeights::Latent(weights) => Some((&weights.v_b, 1)),
            AttentionWeights::Shared(weights) => Some((&weights.o_a, 0)),
            _ => None,
        };
        if let Some((matrices, stack)) = by_head {
            let values = self.float(at.latent.heads);
            self.multiply_heads(step, matrices, stack, attended, values)?;
            if step.attention().latent.is_some() {
                self.gate_output(step, values)?;
            }
            self.products().changed(values);
            attended = values;
        }
        self.products().dense(&self.gpu, attended, Rows::of(step), &[product])?;
        if let Some(bias) = self.layer_vectors(step).o_bias {
            let bias = self.vectors().offset(bias);
            self.gpu.add_bias_rows(product.out, bias, step.count, step.architecture.hidden)?;
        }
        self.convolve(step, Convolved::Attention, product.out)?;
        match &step.layer_weights().beside {
            Some(beside) => self.add_beside(step, beside),
            None => Ok(()),
        }
    }
}
