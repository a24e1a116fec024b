//! Attention whose heads share keys that are values, with compressed entries ([`crate::arch::SharedKeys`] says where its data is).

use forebay_compute::{
    Attention, AttentionRun, ChosenKeys, Compression, Entries, EntryScratch, KeyChoice, KvLayer,
    KvShape, MatmulJob, PoolScores, Pools,
};

use super::attention::HeadJobs;
use super::backend::CpuBackend;
use super::products::{both_kinds, matmul_beside_reads, matrix, recycle};
use crate::ModelError;
use crate::arch::{Architecture, EntryIndexer, EntryShape, SharedKeys};
use crate::backend::{Run, Step};
use crate::weights::{CompressorWeights, SharedKeyWeights};

/// Kinds of layers of the cache that follow those with keys, as many of each as there are layers.
#[derive(Clone, Copy)]
enum Kind {
    /// Projections of positions from which entries are computed, and the entries.
    Projections,
    Entries,
    /// The same for the keys of indexers.
    IndexerProjections,
    IndexerKeys,
}

const KINDS: [Kind; 4] =
    [Kind::Projections, Kind::Entries, Kind::IndexerProjections, Kind::IndexerKeys];

/// Returns the layer of the cache for one kind of data of the layer. No such model has indexers of keys, which would follow the
/// layers first.
fn layer_of(step: &Step<'_>, kind: Kind) -> usize {
    let layers = step.architecture.layers.len();
    layers * (1 + kind as usize) + step.layer
}

/// Returns the layers of the cache behind the first ones. `group` returns the number of a group.
pub(super) fn entry_layers(
    architecture: &Architecture,
    group: impl Fn(crate::arch::KvGroup) -> usize,
) -> Vec<KvLayer> {
    let of = |kind: Kind, layer: usize| {
        let keys = architecture.kv_group(layer).zip(architecture.entry_group(layer));
        let entries = architecture.entries_of(layer).zip(keys);
        let dim = entries.map_or(0, |(of, _)| match kind {
            Kind::Projections | Kind::Entries => architecture.attention_of(layer).head_dim,
            _ => of.indexer.map_or(0, |indexer| indexer.head_dim),
        });
        let (group, ratio, parts) = match entries.filter(|_| dim > 0) {
            Some((of, (keys, entries))) => match kind {
                Kind::Projections | Kind::IndexerProjections => (group(keys), 1, of.parts()),
                Kind::Entries | Kind::IndexerKeys => (group(entries), of.ratio, 0),
            },
            None => {
                let (kv_heads, dim) = (0, 1);
                let none =
                    KvShape { kv_heads, head_dim_k: dim, head_dim_v: dim, values_in_keys: true };
                return KvLayer::new(none, 0);
            }
        };
        let width = dim * parts.max(1);
        let shape = KvShape {
            kv_heads: 1,
            head_dim_k: width,
            head_dim_v: width,
            values_in_keys: parts == 0,
        };
        KvLayer { shape, group, span: ratio }
    };
    let layers = 0..architecture.layers.len();
    KINDS
        .into_iter()
        .flat_map(|kind| layers.clone().map(move |layer| (kind, layer)))
        .map(|(kind, layer)| of(kind, layer))
        .collect()
}

/// Activations of attention with shared keys, for one batch.
#[derive(Default)]
pub struct SharedKeyScratch {
    /// Output of the first query matrix `[tokens, query rank]`.
    q_a: Vec<f32>,
    /// Values and gates of entries and of the indexer's keys, `[tokens, parts * dim]` each.
    projected: [Vec<f32>; 4],
    /// Queries of the indexer `[tokens, heads, head_dim]`, and weights of its heads `[tokens, heads]`.
    indexer_q: Vec<f32>,
    weights: Vec<f32>,
    /// Chosen entries `[tokens, top_k]`.
    chosen: Vec<u32>,
    /// Products of the groups of heads `[groups, tokens, rank]`, and the same by token.
    by_group: Vec<f32>,
    grouped: Vec<f32>,
    /// Rows of each group `[groups, batch]`: `token * groups + group`.
    rows: Vec<u32>,
    batch: usize,
    entries: EntryScratch,
    /// Always empty between calls; kept for their memory.
    jobs: Vec<MatmulJob<'static>>,
    runs: Vec<AttentionRun<'static>>,
    tables: Vec<&'static [u32]>,
}

/// Numbers of elements of the activations for one token, each the most of any layer.
struct Widths {
    query_rank: usize,
    projected: [usize; 2],
    indexer_q: usize,
    weights: usize,
    chosen: usize,
    output: usize,
    groups: usize,
}

impl Widths {
    /// Returns the widths; `None` if no layer has shared keys.
    fn of(architecture: &Architecture) -> Option<Widths> {
        let of_shared = |of: &dyn Fn(&SharedKeys, usize) -> usize| {
            let all = architecture.attentions.iter();
            all.filter_map(|a| a.shared.as_ref().map(|shared| of(shared, a.head_dim))).max()
        };
        let of_entries = |of: &dyn Fn(&EntryShape, usize) -> usize| {
            of_shared(&|shared, dim| shared.entries.as_ref().map_or(0, |entries| of(entries, dim)))
                .unwrap_or(0)
        };
        let of_indexer = |of: &dyn Fn(&EntryIndexer, usize) -> usize| {
            of_entries(&|entries, _| {
                entries.indexer.as_ref().map_or(0, |own| of(own, entries.parts()))
            })
        };
        Some(Widths {
            query_rank: of_shared(&|shared, _| shared.query_rank)?,
            projected: [
                of_entries(&|entries, dim| entries.parts() * dim),
                of_indexer(&|own, parts| parts * own.head_dim),
            ],
            indexer_q: of_indexer(&|own, _| own.heads * own.head_dim),
            weights: of_indexer(&|own, _| own.heads),
            chosen: of_indexer(&|own, _| own.top_k),
            output: of_shared(&|shared, _| shared.output_groups * shared.output_rank)?,
            groups: of_shared(&|shared, _| shared.output_groups)?,
        })
    }
}

impl SharedKeyScratch {
    pub fn reserve(architecture: &Architecture, batch: usize) -> SharedKeyScratch {
        let Some(widths) = Widths::of(architecture) else { return SharedKeyScratch::default() };
        let floats = |width: usize| vec![0.0; batch * width];
        let [own, indexer] = widths.projected;
        // All layers have the same number of groups.
        let groups = widths.groups;
        let rows =
            (0..groups).flat_map(|group| (0..batch).map(move |token| token * groups + group));
        SharedKeyScratch {
            q_a: floats(widths.query_rank),
            projected: [own, own, indexer, indexer].map(floats),
            indexer_q: floats(widths.indexer_q),
            weights: floats(widths.weights),
            chosen: vec![0; batch * widths.chosen],
            by_group: floats(widths.output),
            grouped: floats(widths.output),
            rows: rows.map(|row| row as u32).collect(),
            batch,
            entries: EntryScratch::reserve(batch, own.max(indexer)),
            jobs: Vec::with_capacity(2 * groups.max(7)),
            runs: Vec::new(),
            tables: Vec::new(),
        }
    }

    /// Returns the number of floats for one token of a batch.
    pub fn floats_per_token(architecture: &Architecture) -> usize {
        Widths::of(architecture).map_or(0, |of| {
            let [own, indexer] = of.projected;
            // Every token may end an entry.
            2 * (own + indexer)
                + own.max(indexer)
                + of.query_rank
                + of.indexer_q
                + of.weights
                + of.chosen
                + 2 * of.output
                + of.groups
        })
    }
}

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
        types[6] = weights.q_a.ty;
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
            ChosenKeys { lists: chosen, lists_of_row: 1, pools }
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

impl SharedKeyScratch {
    /// Returns the rows `[tokens, width]` of the first output projection.
    pub(super) fn grouped(&self, count: usize, width: usize) -> &[f32] {
        &self.grouped[..count * width]
    }
}
