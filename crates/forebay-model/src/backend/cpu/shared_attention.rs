//! Attention whose heads share keys that are values.

use forebay_compute::{Attention, AttentionRun, Compression, Entries, KeyChoice, PoolScores};
use forebay_ops::{ChosenKeys, Pools};

use super::attention::HeadJobs;
use super::backend::CpuBackend;
use super::products::{both_kinds, matmul_beside_reads, matrix, recycle};
use super::shared_keys::{Kind, layer_of};
use crate::ModelError;
use crate::backend::{Run, Step};
use crate::weights::{CompressorWeights, SharedKeyWeights};

impl CpuBackend {
    /// Computes queries and keys, and what entries and their choice are computed from.
    pub(super) fn project_shared_keys(
        &mut self,
        step: &Step<'_>,
        weights: &SharedKeyWeights,
    ) -> Result<(), ModelError> {
        let CpuBackend { cpu, residency, lease, ropes, scratch, positions, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (count, hidden) = (step.count, step.architecture.hidden);
        let attention = step.attention();
        let (dim, epsilon) = (attention.head_dim, step.architecture.norm_epsilon);
        let rope = &ropes[step.architecture.layers[step.layer].rope.expect("checked")];
        let at = &mut scratch.shared_keys;
        let q_a = &mut at.q_a[..count * weights.q_a.rows];
        let k = &mut scratch.k[..count * dim];
        let entries = weights.entries.as_ref();
        let indexer = entries.and_then(|of| of.indexer.as_ref());
        // The widest set of types is that of a layer with an indexer.
        let mut types = [weights.q_a.ty; 7];
        let own = entries.into_iter().flat_map(|of| of.of_input()).map(|matrix| matrix.ty);
        types
            .iter_mut()
            .zip(std::iter::once(weights.key.ty).chain(own))
            .for_each(|(to, ty)| *to = ty);
        let normed = &scratch.normed[..count * hidden];
        scratch.input.prepare(cpu, normed, count, hidden, &types);
        let (x, rows) = (&scratch.input, scratch.rows.of(step));
        let mut jobs = recycle(std::mem::take(&mut at.jobs));
        jobs.extend(both_kinds(matrix(residency, lease, &weights.q_a), x, rows, q_a));
        jobs.extend(both_kinds(matrix(residency, lease, &weights.key), x, rows, k));
        let [values, gates, index_values, index_gates] = &mut at.projected;
        let outputs = [values, gates, index_values, index_gates];
        let outputs = outputs.into_iter().chain(std::iter::once(&mut at.weights));
        for (matrix_of, out) in entries.into_iter().flat_map(|of| of.of_input()).zip(outputs) {
            let out = &mut out[..count * matrix_of.rows];
            jobs.extend(both_kinds(matrix(residency, lease, matrix_of), x, rows, out));
        }
        matmul_beside_reads(cpu, residency, &mut jobs)?;
        at.jobs = recycle(jobs);

        cpu.rms_norm_in_place(q_a, &weights.q_a_norm, epsilon);
        let ty = indexer.map_or(weights.q_b.ty, |of| of.q.ty);
        scratch.inner.prepare(cpu, q_a, count, weights.q_a.rows, &[weights.q_b.ty, ty]);
        let (x, rows) = (&scratch.inner, scratch.rows.of(step));
        let q = &mut scratch.q[..count * weights.q_b.rows];
        let indexer_q = &mut at.indexer_q[..count * indexer.map_or(0, |of| of.q.rows)];
        let [a, b] = both_kinds(matrix(residency, lease, &weights.q_b), x, rows, q);
        match indexer {
            None => matmul_beside_reads(cpu, residency, &mut [a, b])?,
            Some(of) => {
                let [c, d] = both_kinds(matrix(residency, lease, &of.q), x, rows, indexer_q);
                matmul_beside_reads(cpu, residency, &mut [a, b, c, d])?;
            }
        }
        cpu.rms_norm_in_place(q, &weights.q_norm, epsilon);
        cpu.rms_norm_in_place(k, &weights.key_norm, epsilon);
        cpu.rope(q, dim, positions, rope);
        cpu.rope(k, dim, positions, rope);
        let of = attention.shared.and_then(|of| of.entries).and_then(|of| of.indexer);
        if let Some(of) = of {
            cpu.rope(indexer_q, of.head_dim, positions, &ropes[of.rope]);
        }
        Ok(())
    }

    /// Writes the rows' projections to the cache, then the entries that end with them.
    pub(super) fn write_entries(&mut self, step: &Step<'_>, weights: &SharedKeyWeights) {
        let Some(of) = &weights.entries else { return };
        let shape =
            step.attention().shared.and_then(|of| of.entries).expect("the shape of entries");
        let CpuBackend { cpu, cache, tables, ropes, scratch, .. } = self;
        let at = &mut scratch.shared_keys;
        let rope = step.architecture.layers[step.layer].rope.expect("checked");
        let kinds = [
            (Kind::Projections, Kind::Entries, rope),
            (Kind::IndexerProjections, Kind::IndexerKeys, shape.indexer.map_or(rope, |of| of.rope)),
        ];
        let [values, gates, index_values, index_gates] = &at.projected;
        let projected = [[values, gates], [index_values, index_gates]];
        for ((of, kinds), [values, gates]) in of.compressors().zip(kinds).zip(projected) {
            let (projections, entries) = (layer_of(step, kinds.0), layer_of(step, kinds.1));
            let groups = [projections, entries].map(|layer| cache.group(layer));
            let CompressorWeights { values: matrix, bias, norm, .. } = of;
            let mut runs = recycle(std::mem::take(&mut at.runs));
            let mut entry_tables = recycle(std::mem::take(&mut at.tables));
            let mut first = 0;
            for run in step.runs {
                let [table, of_entries] = groups.map(|group| &tables[run.table][group][..]);
                let rows = first * matrix.rows..(first + run.count) * matrix.rows;
                let (k, v) = (&values[rows.clone()], &gates[rows]);
                cache.write(cpu, projections, table, run.position, k, v);
                runs.push(AttentionRun {
                    kind: run.kind,
                    first_position: run.position,
                    tokens: run.count,
                    table,
                });
                entry_tables.push(of_entries);
                first += run.count;
            }
            let what = Compression {
                projections,
                entries,
                overlap: shape.overlap,
                bias,
                norm,
                epsilon: step.architecture.norm_epsilon,
                rope: &ropes[kinds.2],
            };
            cpu.compress(cache, &what, &runs, &entry_tables, &mut at.entries);
            at.runs = recycle(runs);
            at.tables = recycle(entry_tables);
        }
    }

    /// Computes attention over the window and, if the layer has them, over entries. Rotates the output back.
    pub(super) fn attend_shared_keys(&mut self, step: &Step<'_>) {
        let CpuBackend { cpu, cache, tables, ropes, scratch, positions, .. } = self;
        let attention = step.attention();
        let shared = attention.shared.expect("the layer has shared keys");
        let layer = &step.architecture.layers[step.layer];
        let (heads, dim) = (attention.heads, attention.head_dim);
        let what = Attention {
            window: layer.window,
            sinks: step.layer_weights().sinks.as_deref(),
            ..Attention::causal(step.layer, heads, attention.scale)
        };
        let at = &mut scratch.shared_keys;
        let group = cache.group(step.layer);
        let run = |run: &Run, group: usize| AttentionRun {
            kind: run.kind,
            first_position: run.position,
            tokens: run.count,
            table: &tables[run.table][group],
        };
        let mut runs = recycle(std::mem::take(&mut at.runs));
        let q = &scratch.q[..step.count * heads * dim];
        let attended = &mut scratch.attended[..step.count * heads * dim];
        let Some(entries) = shared.entries else {
            runs.extend(step.runs.iter().map(|of| run(of, group)));
            cpu.attention(q, cache, &what, &runs, attended);
            at.runs = recycle(runs);
            let rope = &ropes[layer.rope.expect("checked")];
            return cpu.rope_back(attended, dim, positions, rope);
        };
        let chosen = entries.indexer.map(|of| {
            let keys = layer_of(step, Kind::IndexerKeys);
            let group = cache.group(keys);
            runs.extend(step.runs.iter().map(|of| run(of, group)));
            let q = &at.indexer_q[..step.count * of.heads * of.head_dim];
            let weights = &at.weights[..step.count * of.heads];
            let chosen = &mut at.chosen[..step.count * of.top_k];
            let pools = Pools::positions(of.top_k);
            let (heads, dim, scores) = (of.heads, of.head_dim, PoolScores::Weighted);
            let what = KeyChoice { layer: keys, heads, dim, pools, scores };
            cpu.choose_keys(q, Some(weights), cache, &what, &runs, chosen);
            ChosenKeys { lists: &chosen[..], lists_of_row: 1, pools }
        });
        runs.clear();
        runs.extend(step.runs.iter().map(|of| run(of, group)));
        let entry_layer = layer_of(step, Kind::Entries);
        let entry_group = cache.group(entry_layer);
        let mut entry_tables = recycle(std::mem::take(&mut at.tables));
        entry_tables.extend(step.runs.iter().map(|run| &tables[run.table][entry_group][..]));
        let entries = Entries { layer: entry_layer, tables: &entry_tables, chosen };
        cpu.attention_with_entries(q, cache, &what, &entries, &runs, attended);
        at.runs = recycle(runs);
        at.tables = recycle(entry_tables);
        cpu.rope_back(attended, dim, positions, &ropes[layer.rope.expect("checked")]);
    }

    /// Computes the first output projection, within groups of heads. Its output is [`SharedKeyScratch::grouped`].
    pub(super) fn project_output_groups(
        &mut self,
        step: &Step<'_>,
        weights: &SharedKeyWeights,
    ) -> Result<(), ModelError> {
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (count, o_a) = (step.count, &weights.o_a);
        let (groups, rows, cols) = (o_a.heads, o_a.matrix.rows, o_a.matrix.cols);
        let attended = &scratch.attended[..count * groups * cols];
        scratch.inner.prepare(cpu, attended, count * groups, cols, &[o_a.matrix.ty]);
        let at = &mut scratch.shared_keys;
        let by_group = &mut at.by_group[..count * groups * rows];
        let jobs = HeadJobs { weights: o_a, decode: step.decode, count, batch: at.batch };
        let inner = &scratch.inner;
        let mut jobs = jobs.fill(&mut at.jobs, residency, lease, inner, &at.rows, by_group);
        matmul_beside_reads(cpu, residency, &mut jobs)?;
        at.jobs = recycle(jobs);
        let grouped = &mut at.grouped[..count * groups * rows];
        for (index, row) in grouped.chunks_exact_mut(rows).enumerate() {
            let (token, group) = (index / groups, index % groups);
            row.copy_from_slice(&by_group[(group * count + token) * rows..][..rows]);
        }
        Ok(())
    }
}
