//! The attention block: projections, append to the KV cache, attention, output projection.

use forebay_compute::{Attention, AttentionRun, Cpu, MatmulJob, Matrix, RelativeBias};
use forebay_format::TensorType;
use forebay_ops::GateFunction;
use forebay_stream::{Lease, Residency};

use super::backend::CpuBackend;
use super::indexer::{IndexerInputs, project_indexer};
use super::latent::rows_of_heads;
use super::products::{
    RowsByKind, add_bias, both_kinds, matmul_beside_reads, matrix, multiply, norm_in_place, recycle,
};
use crate::ModelError;
use crate::arch::{Convolved, Latent, OutputGate, QkNorm};
use crate::backend::Step;
use crate::weights::{
    AttentionWeights, GroupedWeights, HeadMatrices, IndexerWeights, LatentWeights, PartMatrix,
    RecurrenceBeside,
};

/// Multiplies queries by the factor of their positions, in layers that have one.
fn temper(cpu: &Cpu, step: &Step<'_>, positions: &[u32], q: &mut [f32], factors: &mut Vec<f32>) {
    let is_tempered = step.architecture.layers[step.layer].tempered;
    if let Some(temperature) = step.architecture.temperature.filter(|_| is_tempered) {
        factors.clear();
        factors.extend(positions.iter().map(|position| temperature.factor(*position)));
        cpu.multiply_rows(q, factors);
    }
}

/// Multiplies sums of values by functions of their gates.
fn gate_output(cpu: &Cpu, step: &Step<'_>, values: &mut [f32], gates: &mut [f32]) {
    let attention = step.attention();
    match attention.output_gate {
        OutputGate::None => {}
        OutputGate::InQueries | OutputGate::ByElement(GateFunction::Sigmoid) => {
            cpu.multiply_by_sigmoid(values, &gates[..values.len()]);
        }
        OutputGate::ByElement(function) | OutputGate::ByHead(function) => {
            let gates = &mut gates[..step.count * attention.gate_rows()];
            gates.iter_mut().for_each(|gate| *gate = function.of(*gate));
            cpu.multiply_rows(values, gates);
        }
    }
}

impl CpuBackend {
    pub(super) fn project_layer(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        if let Some(beside) = &step.layer_weights().beside {
            self.project_delta(step, &beside.delta)?;
        }
        if let Some(weights) = &step.layer_weights().predicted {
            self.project_branch(step, weights)?;
        }
        match &step.layer_weights().attention {
            AttentionWeights::Grouped(weights) => self.project_grouped(step, weights)?,
            AttentionWeights::Latent(weights) => self.project_latent(step, weights)?,
            AttentionWeights::Shared(weights) => self.project_shared_keys(step, weights)?,
            AttentionWeights::Delta(weights) => return self.project_delta(step, weights),
            AttentionWeights::None => return Ok(()),
        }
        let CpuBackend { cpu, cache, tables, scratch, ropes, .. } = self;
        let attention = step.attention();
        let mixed = attention.mixed(cache.kind());
        cpu.mix(&mut scratch.q[..step.count * attention.heads * attention.head_dim], mixed);
        if step.architecture.keys_of(step.layer) != step.layer {
            return Ok(());
        }
        let k_row = attention.kv_heads * attention.head_dim;
        let v_row = match attention.values_in_keys() {
            false => attention.kv_heads * attention.value_dim,
            true => 0,
        };
        cpu.mix(&mut scratch.k[..step.count * k_row], mixed);
        cpu.mix(&mut scratch.v[..step.count * v_row], mixed);
        let group = cache.group(step.layer);
        let mut first = 0;
        for run in step.runs {
            let k = &scratch.k[first * k_row..][..run.count * k_row];
            let v = &scratch.v[first * v_row..][..run.count * v_row];
            let table = &tables[run.table][group];
            cache.write(cpu, step.layer, table, run.position, k, v);
            scratch.indexer.write((cpu, cache, ropes), step, (table, run, first));
            first += run.count;
        }
        if let AttentionWeights::Shared(weights) = &step.layer_weights().attention {
            self.write_entries(step, weights);
        }
        Ok(())
    }

    fn project_grouped(
        &mut self,
        step: &Step<'_>,
        weights: &GroupedWeights,
    ) -> Result<(), ModelError> {
        let states_of = self.convolution_states(step);
        let CpuBackend { cpu, residency, lease, states, ropes, scratch, positions, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (count, hidden) = (step.count, step.architecture.hidden);
        let head_dim = step.attention().head_dim;
        let normed = &scratch.normed[..count * hidden];
        // A projection that also gives a gate has its rows in another buffer until they are separated.
        let gated = step.attention().output_gate == OutputGate::InQueries;
        let q_rows = count * weights.q.rows;
        let q = if gated { &mut scratch.q_and_gate } else { &mut scratch.q };
        let q = &mut q[..q_rows];
        let attention = step.attention();
        let (k_rows, v_rows) = match weights.k {
            Some(k) => (k.rows, attention.kv_heads * attention.value_dim),
            None => (0, 0),
        };
        let k = &mut scratch.k[..count * k_rows];
        let v = &mut scratch.v[..count * v_rows];
        let ty = |of: Option<PartMatrix>| of.map_or(weights.q.ty, |of| of.ty);
        let of_biases = weights.relative.as_ref().map(|of| of.project);
        let own = [weights.q, of_biases.unwrap_or(weights.q)].map(|of| of.ty);
        let own = [own[0], ty(weights.k), ty(weights.v), ty(weights.gate), own[1]];
        let of_indexer = weights.indexer.iter().flat_map(IndexerWeights::matrices);
        let types = types_of_input(&own, of_indexer);
        scratch.input.prepare(cpu, normed, count, hidden, &types);
        let (x, rows) = (&scratch.input, scratch.rows.of(step));
        let [a, b] = both_kinds(matrix(residency, lease, &weights.q), x, rows, q);
        match (&weights.k, &weights.v) {
            (Some(of_k), Some(of_v)) => {
                let [c, d] = both_kinds(matrix(residency, lease, of_k), x, rows, k);
                let [e, f] = both_kinds(matrix(residency, lease, of_v), x, rows, v);
                matmul_beside_reads(cpu, residency, &mut [a, b, c, d, e, f])?;
            }
            (Some(of_k), None) => {
                let [c, d] = both_kinds(matrix(residency, lease, of_k), x, rows, k);
                matmul_beside_reads(cpu, residency, &mut [a, b, c, d])?;
                v.copy_from_slice(k);
            }
            (None, _) => matmul_beside_reads(cpu, residency, &mut [a, b])?,
        }
        if let Some(gate) = &weights.gate {
            let out = &mut scratch.output_gate[..count * gate.rows];
            multiply(cpu, residency, lease, gate, x, rows, out)?;
        }
        let mixes = of_biases.map_or(0, |of| count * of.rows);
        if let Some(project) = &of_biases {
            let out = &mut scratch.relative[..mixes];
            multiply(cpu, residency, lease, project, x, rows, out)?;
        }
        if let (Some(indexer), Some(of)) = (&weights.indexer, attention.indexer.as_ref()) {
            let inputs = IndexerInputs {
                normed: &scratch.input,
                queries: &scratch.input,
                rows: scratch.rows.of(step),
                rope: of.rope.map(|rope| &ropes[rope]),
                positions,
                epsilon: step.architecture.norm_epsilon,
            };
            let out = &mut scratch.indexer;
            project_indexer((cpu, residency, lease), indexer, of, inputs, out)?;
        }
        let states = &mut states[states_of];
        scratch.convolutions.add(cpu, step, states, Convolved::Keys, k);
        scratch.convolutions.add(cpu, step, states, Convolved::Values, v);
        add_bias(cpu, q, weights.q_bias.as_deref());
        add_bias(cpu, k, weights.k_bias.as_deref());
        add_bias(cpu, v, weights.v_bias.as_deref());
        if let Some(limit) = attention.clamp {
            [&mut *q, &mut *k, &mut *v].into_iter().for_each(|of| cpu.clamp_in_place(of, limit));
        }
        if gated {
            let (own, gate) =
                (&mut scratch.q[..q_rows / 2], &mut scratch.output_gate[..q_rows / 2]);
            split_rows(&scratch.q_and_gate[..q_rows], [own, gate], [head_dim, head_dim]);
        }
        let q = &mut scratch.q[..count * step.attention().heads * head_dim];
        let epsilon = step.architecture.norm_epsilon;
        let norm_heads = |q: &mut [f32], k: &mut [f32]| {
            norm_in_place(cpu, q, weights.q_norm.as_deref(), epsilon);
            norm_in_place(cpu, k, weights.k_norm.as_deref(), epsilon);
        };
        let norms_last = attention.qk_norm == QkNorm::PerRotatedHead;
        if !norms_last {
            norm_heads(q, k);
        }
        norm_in_place(cpu, v, weights.v_norm.as_deref(), epsilon);
        if attention.values.scale != 1.0 {
            cpu.scale_in_place(v, attention.values.scale);
        }
        if let Some(rope) = step.architecture.layers[step.layer].rope {
            cpu.rope(q, head_dim, positions, &ropes[rope]);
            if !k.is_empty() {
                cpu.rope(k, head_dim, positions, &ropes[rope]);
            }
        }
        temper(cpu, step, positions, q, &mut scratch.row_factors);
        if mixes > 0 {
            let of_biases = &mut scratch.relative[..mixes];
            temper(cpu, step, positions, of_biases, &mut scratch.row_factors);
        }
        if norms_last {
            norm_heads(q, k);
        }
        Ok(())
    }

    /// Computes queries in latent space `[tokens, heads, rank + rotary]`, and keys that consist of the latent vector
    /// and the rotating part.
    fn project_latent(
        &mut self,
        step: &Step<'_>,
        weights: &LatentWeights,
    ) -> Result<(), ModelError> {
        let CpuBackend { cpu, residency, lease, ropes, scratch, positions, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (count, hidden) = (step.count, step.architecture.hidden);
        let attention = step.attention();
        let (heads, head_dim) = (attention.heads, attention.head_dim);
        let latent = attention.latent.expect("the weights are of latent attention");
        let Latent { rank, plain, rotary, .. } = latent;
        let epsilon = step.architecture.norm_epsilon;
        let at = &mut scratch.latent;
        let q = &mut at.q[..count * weights.q.rows];
        let kv_a = &mut at.kv_a[..count * weights.kv_a.rows];
        let normed = &scratch.normed[..count * hidden];
        let first = weights.q_a.as_ref().map_or(&weights.q, |(q_a, _)| q_a);
        let of_indexer = weights.indexer.iter().flat_map(IndexerWeights::of_input);
        let of_gate = weights.gate.map_or(first.ty, |gate| gate.ty);
        let types = types_of_input(&[first.ty, weights.kv_a.ty, of_gate], of_indexer);
        scratch.input.prepare(cpu, normed, count, hidden, &types);
        let q_a = &mut at.q_a[..count * weights.q_a.as_ref().map_or(0, |(q_a, _)| q_a.rows)];
        let out = if weights.q_a.is_some() { &mut *q_a } else { &mut *q };
        let (w, x) = (matrix(residency, lease, first), &scratch.input);
        let w_kv = matrix(residency, lease, &weights.kv_a);
        let rows = scratch.rows.of(step);
        let [a, b] = both_kinds(w, x, rows, out);
        let [c, d] = both_kinds(w_kv, x, rows, kv_a);
        matmul_beside_reads(cpu, residency, &mut [a, b, c, d])?;
        if let Some(gate) = &weights.gate {
            let out = &mut scratch.output_gate[..count * gate.rows];
            multiply(cpu, residency, lease, gate, x, rows, out)?;
        }
        if let Some((_, norm)) = &weights.q_a {
            cpu.rms_norm_in_place(q_a, norm, epsilon);
            let ty = weights.indexer.as_ref().map_or(weights.q.ty, |of| of.q.ty);
            scratch.inner.prepare(cpu, q_a, count, norm.len(), &[weights.q.ty, ty]);
            multiply(cpu, residency, lease, &weights.q, &scratch.inner, rows, q)?;
        }
        if let (Some(indexer), Some(of)) = (&weights.indexer, step.attention().indexer.as_ref()) {
            let inputs = IndexerInputs {
                normed: &scratch.input,
                queries: &scratch.inner,
                rows: scratch.rows.of(step),
                rope: of.rope.map(|rope| &ropes[rope]),
                positions,
                epsilon,
            };
            let out = &mut scratch.indexer;
            project_indexer((cpu, residency, lease), indexer, of, inputs, out)?;
        }

        let (q_plain, q_rotary) =
            (&mut at.q_plain[..count * heads * plain], &mut at.q_rotary[..count * heads * rotary]);
        split_rows(q, [&mut *q_plain, &mut *q_rotary], [plain, rotary]);
        let latents = &mut scratch.v[..count * rank];
        let k_rotary = &mut at.k_rotary[..count * rotary];
        split_rows(kv_a, [&mut *latents, &mut *k_rotary], [rank, rotary]);
        cpu.rms_norm_in_place(latents, &weights.kv_a_norm, epsilon);
        norm_in_place(cpu, k_rotary, weights.rotary_norm.as_deref(), epsilon);
        if let Some(rope) = step.architecture.layers[step.layer].rope {
            cpu.rope(q_rotary, rotary, positions, &ropes[rope]);
            cpu.rope(k_rotary, rotary, positions, &ropes[rope]);
        }
        let k = &mut scratch.k[..count * head_dim];
        join_rows([latents, k_rotary], [rank, rotary], k);

        // Queries are compared with latent vectors, so the matrix that would turn these into keys is applied to the
        // queries.
        scratch.inner.prepare(cpu, q_plain, count * heads, plain, &[weights.k_b.matrix.ty]);
        let by_head = &mut at.by_head[..count * heads * rank];
        let jobs = HeadJobs { weights: &weights.k_b, decode: step.decode, count, batch: at.batch };
        let (inner, rows) = (&scratch.inner, rows_of_heads(&at.rows, heads));
        let mut jobs = jobs.fill(&mut at.jobs, residency, lease, inner, rows, by_head);
        matmul_beside_reads(cpu, residency, &mut jobs)?;
        at.jobs = recycle(jobs);
        let q = &mut scratch.q[..count * heads * head_dim];
        for (index, row) in q.chunks_exact_mut(head_dim).enumerate() {
            let (token, head) = (index / heads, index % heads);
            row[..rank].copy_from_slice(&by_head[(head * count + token) * rank..][..rank]);
            row[rank..].copy_from_slice(&q_rotary[index * rotary..][..rotary]);
        }
        temper(cpu, step, positions, q, &mut scratch.row_factors);
        Ok(())
    }

    pub(super) fn attend_layer(&mut self, step: &Step<'_>) {
        if step.attention().shared.is_some() {
            return self.attend_shared_keys(step);
        }
        let attention = step.attention();
        let (tokens, heads) = (step.count, attention.heads);
        let layer = &step.architecture.layers[step.layer];
        let (window, chunked) = (layer.window, layer.chunked);
        let what = Attention {
            window,
            chunked,
            softcap: attention.softcap,
            sinks: step.layer_weights().sinks.as_deref(),
            ..Attention::causal(step.architecture.keys_of(step.layer), heads, attention.scale)
        };
        let CpuBackend { cpu, cache, tables, scratch, .. } = self;
        let group = cache.group(what.layer);
        let mut runs = recycle(std::mem::take(&mut scratch.runs));
        runs.extend(step.runs.iter().map(|run| AttentionRun {
            kind: run.kind,
            first_position: run.position,
            tokens: run.count,
            table: &tables[run.table][group],
        }));
        let chosen = scratch.indexer.choose(cpu, cache, step, &runs);
        let relative = match &step.layer_weights().attention {
            AttentionWeights::Grouped(GroupedWeights { relative: Some(of), .. }) => {
                let (mixes, rank) = (&scratch.relative[..], of.project.rows / heads);
                Some(RelativeBias { mixes, profiles: &of.profiles, rank })
            }
            _ => None,
        };
        let what = Attention { chosen, relative, ..what };
        let q = &scratch.q[..tokens * heads * attention.head_dim];
        let attended = &mut scratch.attended[..tokens * heads * attention.value_dim];
        cpu.attention(q, cache, &what, &runs, attended);
        cpu.mix(attended, attention.mixed(cache.kind()));
        scratch.runs = recycle(runs);
        if let AttentionWeights::Grouped(of) = &step.layer_weights().attention {
            let epsilon = step.architecture.norm_epsilon;
            norm_in_place(cpu, attended, of.output_norm.as_deref(), epsilon);
        }
        // The output of latent attention becomes a sum of values later.
        if attention.latent.is_none() {
            gate_output(cpu, step, attended, &mut scratch.output_gate);
        }
    }

    pub(super) fn project_layer_output(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        if let AttentionWeights::Shared(of) = &step.layer_weights().attention {
            self.project_output_groups(step, of)?;
        }
        let states_of = self.convolution_states(step);
        let CpuBackend { cpu, residency, lease, states, scratch, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (weights, count) = (step.layer_weights(), step.count);
        let o = weights.o.as_ref().expect("the layer has attention or is recurrent");
        let attention = step.attention();
        let width = match &weights.attention {
            AttentionWeights::Delta(_) | AttentionWeights::Shared(_) => o.cols,
            _ => attention.heads * attention.value_dim,
        };
        let mut attended = match &weights.attention {
            AttentionWeights::Shared(_) => scratch.shared_keys.grouped(count, width),
            _ => &scratch.attended[..count * width],
        };
        if let AttentionWeights::Latent(of) = &weights.attention {
            // Map sums of latent vectors to sums of values.
            let (heads, rank, rows) = (attention.heads, attention.value_dim, of.v_b.matrix.rows);
            let at = &mut scratch.latent;
            scratch.inner.prepare(cpu, attended, count * heads, rank, &[of.v_b.matrix.ty]);
            let by_head = &mut at.by_head[..count * heads * rows];
            let jobs = HeadJobs { weights: &of.v_b, decode: step.decode, count, batch: at.batch };
            let (inner, of_heads) = (&scratch.inner, rows_of_heads(&at.rows, heads));
            let mut jobs = jobs.fill(&mut at.jobs, residency, lease, inner, of_heads, by_head);
            matmul_beside_reads(cpu, residency, &mut jobs)?;
            at.jobs = recycle(jobs);
            let values = &mut at.values[..count * heads * rows];
            for (index, row) in values.chunks_exact_mut(rows).enumerate() {
                let (token, head) = (index / heads, index % heads);
                row.copy_from_slice(&by_head[(head * count + token) * rows..][..rows]);
            }
            gate_output(cpu, step, values, &mut scratch.output_gate);
            attended = values;
        }
        scratch.input.prepare(cpu, attended, count, o.cols, &[o.ty]);
        let out = &mut scratch.block_out[..count * step.architecture.hidden];
        multiply(cpu, residency, lease, o, &scratch.input, scratch.rows.of(step), out)?;
        add_bias(cpu, out, weights.o_bias.as_deref());
        let states = &mut states[states_of];
        scratch.convolutions.add(cpu, step, states, Convolved::Attention, out);
        match &weights.beside {
            Some(beside) => self.add_beside(step, beside),
            None => Ok(()),
        }
    }

    /// Adds the output of a recurrence beside attention to that of attention.
    fn add_beside(&mut self, step: &Step<'_>, beside: &RecurrenceBeside) -> Result<(), ModelError> {
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (o, count, hidden) = (&beside.o, step.count, step.architecture.hidden);
        scratch.input.prepare(cpu, scratch.delta.beside(count, o.cols), count, o.cols, &[o.ty]);
        // The normed input is not needed any more.
        let own = &mut scratch.normed[..count * hidden];
        multiply(cpu, residency, lease, o, &scratch.input, scratch.rows.of(step), own)?;
        let factor = step.architecture.recurrent.map_or(1.0, |of| of.factors.output);
        cpu.add_scaled(&mut scratch.block_out[..count * hidden], factor, own);
        Ok(())
    }
}

/// Products of every head's rows with the head's matrix.
pub(super) struct HeadJobs<'a> {
    pub(super) weights: &'a HeadMatrices,
    /// Number of decode rows, which are the first, and of all rows.
    pub(super) decode: usize,
    pub(super) count: usize,
    /// Number of rows per head in `rows`.
    pub(super) batch: usize,
}

impl HeadJobs<'_> {
    /// Returns one job for each head and kind of rows. `x` is `[count * heads, cols]`, and `out` is
    /// `[heads, count, rows]`. The jobs use the allocation of `memory`.
    pub(super) fn fill<'a>(
        &self,
        memory: &mut Vec<MatmulJob<'static>>,
        residency: &Residency,
        lease: &'a Lease,
        x: &'a forebay_compute::Activations,
        rows: &'a [u32],
        mut out: &'a mut [f32],
    ) -> Vec<MatmulJob<'a>> {
        let HeadMatrices { matrix, bytes, heads } = *self.weights;
        let data = residency.bytes(lease, matrix.part);
        let mut jobs = recycle(std::mem::take(memory));
        for head in 0..heads {
            let (own, rest) = out.split_at_mut(self.count * matrix.rows);
            out = rest;
            let data = &data[head * bytes..][..bytes];
            let w = Matrix { ty: matrix.ty, rows: matrix.rows, cols: matrix.cols, data };
            let (decode, prompt) = rows[head * self.batch..][..self.count].split_at(self.decode);
            jobs.extend(both_kinds(w, x, RowsByKind { decode, prompt }, own));
        }
        jobs
    }
}

/// Splits every row into two parts, of which the second may have no elements.
fn split_rows(rows: &[f32], parts: [&mut [f32]; 2], [first, second]: [usize; 2]) {
    let [a, b] = parts;
    if second == 0 {
        a.copy_from_slice(rows);
        return;
    }
    let parts = a.chunks_exact_mut(first).zip(b.chunks_exact_mut(second));
    for (row, (a, b)) in rows.chunks_exact(first + second).zip(parts) {
        a.copy_from_slice(&row[..first]);
        b.copy_from_slice(&row[first..]);
    }
}

fn join_rows([a, b]: [&[f32]; 2], [first, second]: [usize; 2], rows: &mut [f32]) {
    if second == 0 {
        rows.copy_from_slice(a);
        return;
    }
    let parts = a.chunks_exact(first).zip(b.chunks_exact(second));
    for (row, (a, b)) in rows.chunks_exact_mut(first + second).zip(parts) {
        row[..first].copy_from_slice(a);
        row[first..].copy_from_slice(b);
    }
}

/// Returns the types of the matrices that multiply a layer's normed input: `own`, and those of an indexer.
fn types_of_input(
    own: &[TensorType],
    of_indexer: impl Iterator<Item = PartMatrix>,
) -> [TensorType; 9] {
    let mut types = [own[0]; 9];
    let all = own.iter().copied().chain(of_indexer.map(|of| of.ty));
    types.iter_mut().zip(all).for_each(|(to, ty)| *to = ty);
    types
}
