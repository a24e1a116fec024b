//! The choice of the keys that a token attends to.

use forebay_compute::{
    Activations, AttentionRun, Cpu, KeyChoice, KeyPool, KvCache, KvLayer, KvShape, RopeTable,
};
use forebay_ops::ChosenKeys;
use forebay_stream::{Lease, Residency};

use super::products::{RowsByKind, both_kinds, matmul_beside_reads, matrix, norm_in_place};
use crate::ModelError;
use crate::arch::{Architecture, INDEXER_NORM_EPSILON, Indexer};
use crate::backend::{Run, Step};
use crate::weights::IndexerWeights;

/// Activations of an indexer, for one batch.
#[derive(Default)]
pub struct IndexerScratch {
    /// Queries `[tokens, heads, head_dim]`.
    pub(super) q: Vec<f32>,
    /// Keys `[tokens, head_dim]`.
    k: Vec<f32>,
    /// Gates of keys `[tokens, head_dim]`, if keys are averaged by gates.
    gates: Vec<f32>,
    /// Rows of the cache `[tokens, key width]`: keys and gates.
    rows: Vec<f32>,
    /// Keys of the pools that a run completes, and the first positions of these.
    pooled: Vec<f32>,
    first: Vec<u32>,
    /// Weights of the heads `[tokens, heads]`, if they have some.
    weights: Vec<f32>,
    /// The chosen pools `[tokens, lists, most]`. Empty if a token sees all positions of its context.
    chosen: Vec<u32>,
}

/// Returns the length of a token's lists of chosen pools. There are none if a token sees all positions of its context.
fn list_length(of: &Indexer, context: usize) -> usize {
    let pools = of.pools();
    if pools.sees_all(context.saturating_sub(1)) { 0 } else { of.lists() * pools.most }
}

impl IndexerScratch {
    pub fn reserve(of: Option<&Indexer>, context: usize, batch: usize) -> IndexerScratch {
        let Some(of) = of else { return IndexerScratch::default() };
        let floats = |width: usize| vec![0.0; batch * width];
        let gate_width = of.key_width() - of.head_dim;
        // A run completes at most one pool more than it is long.
        let pools = of.pooled().map_or(0, |length| batch / length + 1);
        IndexerScratch {
            q: floats(of.heads * of.head_dim),
            k: floats(of.head_dim),
            gates: floats(gate_width),
            rows: floats(if gate_width > 0 { of.key_width() } else { 0 }),
            pooled: vec![0.0; pools * of.head_dim],
            first: Vec::with_capacity(pools),
            weights: floats(if of.has_weights() { of.heads } else { 0 }),
            chosen: vec![0; batch * list_length(of, context)],
        }
    }

    /// Returns the number of floats for one token of a batch.
    pub fn floats_per_token(of: Option<&Indexer>, context: usize) -> usize {
        let gated = |of: &Indexer| 2 * (of.key_width() - of.head_dim) + of.head_dim;
        of.map_or(0, |of| {
            of.heads * (of.head_dim + 1) + 2 * of.head_dim + gated(of) + list_length(of, context)
        })
    }

    /// Chooses the keys of a layer, if it has an indexer and a token may see fewer keys than there are.
    pub(super) fn choose(
        &mut self,
        cpu: &Cpu,
        cache: &KvCache,
        step: &Step<'_>,
        runs: &[AttentionRun<'_>],
    ) -> Option<ChosenKeys<&[u32]>> {
        let of = step.attention().indexer.as_ref()?;
        if self.chosen.is_empty() {
            return None;
        }
        let (pools, lists) = (of.pools(), of.lists());
        let chosen = &mut self.chosen[..step.count * lists * pools.most];
        if !of.own {
            // The lists are those of the last layer that chose, for the same rows.
            return Some(ChosenKeys { lists: chosen, lists_of_row: lists, pools });
        }
        let q = &self.q[..step.count * of.heads * of.head_dim];
        let weights = of.has_weights().then(|| &self.weights[..step.count * of.heads]);
        let what = KeyChoice {
            layer: index_layer(step),
            heads: of.heads,
            dim: of.head_dim,
            pools,
            scores: of.scores(),
        };
        cpu.choose_keys(q, weights, cache, &what, runs, chosen);
        Some(ChosenKeys { lists: chosen, lists_of_row: lists, pools })
    }

    /// Writes the keys of a run, whose first row has number `first`, to the cache. If pools have one key, it replaces the key of
    /// the pool's last position as soon as that is there. It is made of what is in the cache, so it does not depend on where
    /// prompts are cut.
    pub(super) fn write(
        &mut self,
        (cpu, cache, ropes): (&Cpu, &mut KvCache, &[RopeTable]),
        step: &Step<'_>,
        (table, run, first): (&[u32], &Run, usize),
    ) {
        let Some(of) = step.attention().indexer.as_ref().filter(|of| of.own) else { return };
        let (layer, dim, width) = (index_layer(step), of.head_dim, of.key_width());
        let own = first * dim..(first + run.count) * dim;
        if width == dim {
            cache.write(cpu, layer, table, run.position, &self.k[own], &[]);
        } else {
            let rows = &mut self.rows[..run.count * width];
            let parts = self.k[own.clone()].chunks_exact(dim);
            let parts = parts.zip(self.gates[own].chunks_exact(dim));
            for (row, (key, gate)) in rows.chunks_exact_mut(width).zip(parts) {
                row[..dim].copy_from_slice(key);
                row[dim..].copy_from_slice(gate);
            }
            cache.write(cpu, layer, table, run.position, rows, &[]);
        }
        let Some(length) = of.pooled() else { return };
        let pools = run.position / length..(run.position + run.count) / length;
        let weights = step.layer_weights().attention.indexer().expect("the layer has an indexer");
        let gate_bias = weights.gate.as_ref().map(|(_, bias)| &bias[..]);
        let what = KeyPool { layer, length, dim, gate_bias };
        let pooled = &mut self.pooled[..pools.len() * dim];
        cpu.pool_keys(cache, &what, table, pools.clone(), pooled);
        if gate_bias.is_none() {
            cpu.rms_norm_in_place(pooled, &weights.k_norm, step.architecture.norm_epsilon);
            if let Some(rope) = of.rope {
                self.first.clear();
                self.first.extend(pools.clone().map(|pool| (pool * length) as u32));
                cpu.rope(pooled, dim, &self.first, &ropes[rope]);
            }
        }
        let row = &mut self.rows;
        for (pool, key) in pools.zip(pooled.chunks_exact(dim)) {
            let last = (pool + 1) * length - 1;
            if width == dim {
                cache.write(cpu, layer, table, last, key, &[]);
                continue;
            }
            row[..dim].copy_from_slice(key);
            row[dim..width].fill(0.0);
            cache.write(cpu, layer, table, last, &row[..width], &[]);
        }
    }
}

/// Returns the layer of the cache with the keys of the layer's indexer.
pub(super) fn index_layer(step: &Step<'_>) -> usize {
    step.architecture.layers.len() + step.layer
}

/// Returns the layers of the cache for the indexers' keys, which are in the groups of `layers`.
pub(super) fn index_layers(architecture: &Architecture, layers: &[KvLayer]) -> Vec<KvLayer> {
    let of_layer = |(layer, of): (usize, &KvLayer)| {
        let own = architecture.attention_of(layer).indexer.as_ref();
        let own = own.filter(|of| of.own && architecture.kv_group(layer).is_some());
        let (kv_heads, dim) = own.map_or((0, 0), |own| (1, own.key_width()));
        let shape = KvShape { kv_heads, head_dim_k: dim, head_dim_v: dim, values_in_keys: true };
        KvLayer::new(shape, of.group)
    };
    layers.iter().enumerate().map(of_layer).collect()
}

/// Inputs of an indexer's projections, prepared for the types of its matrices.
pub(super) struct IndexerInputs<'a> {
    /// The layer's normed input `[tokens, hidden]`.
    pub normed: &'a Activations,
    /// Compressed queries `[tokens, query rank]` if attention has such, otherwise the normed input.
    pub queries: &'a Activations,
    pub rows: RowsByKind<'a>,
    pub rope: Option<&'a RopeTable>,
    pub positions: &'a [u32],
    /// Epsilon of norms other than layer norms.
    pub epsilon: f32,
}

/// Computes an indexer's queries, keys, and weights of heads. A common factor of the weights changes no choice, so there is none.
pub(super) fn project_indexer(
    (cpu, residency, lease): (&Cpu, &mut Residency, &Lease),
    weights: &IndexerWeights,
    of: &Indexer,
    inputs: IndexerInputs<'_>,
    out: &mut IndexerScratch,
) -> Result<(), ModelError> {
    let IndexerInputs { normed, queries, rows, rope, positions, epsilon } = inputs;
    let count = positions.len();
    let IndexerScratch { q, k, gates, weights: of_heads, .. } = out;
    let q = &mut q[..count * of.heads * of.head_dim];
    let k = &mut k[..count * of.head_dim];
    let (w_q, w_k) = (matrix(residency, lease, &weights.q), matrix(residency, lease, &weights.k));
    let [a, b] = both_kinds(w_q, queries, rows, q);
    let [c, d] = both_kinds(w_k, normed, rows, k);
    let of_heads = weights.weights.as_ref().map(|of_weights| {
        let out = &mut of_heads[..count * of.heads];
        both_kinds(matrix(residency, lease, of_weights), normed, rows, out)
    });
    let gates = weights.gate.as_ref().map(|(gate, _)| {
        both_kinds(matrix(residency, lease, gate), normed, rows, &mut gates[..count * of.head_dim])
    });
    match (of_heads, gates) {
        (None, None) => matmul_beside_reads(cpu, residency, &mut [a, b, c, d])?,
        (Some([e, f]), None) => {
            matmul_beside_reads(cpu, residency, &mut [a, b, c, d, e, f])?;
        }
        (Some([e, f]), Some([g, h])) => {
            matmul_beside_reads(cpu, residency, &mut [a, b, c, d, e, f, g, h])?;
        }
        (None, Some(_)) => unreachable!("gates come with weights of heads"),
    }
    norm_in_place(cpu, q, weights.q_norm.as_deref(), epsilon);
    match &weights.k_norm_bias {
        Some(bias) => cpu.layer_norm_in_place(k, &weights.k_norm, bias, INDEXER_NORM_EPSILON),
        // Keys that are averaged are normed and rotated afterwards.
        None if of.pooled().is_none() => cpu.rms_norm_in_place(k, &weights.k_norm, epsilon),
        None => {}
    }
    if let Some(rope) = rope {
        cpu.rope(q, of.head_dim, positions, rope);
        if of.pooled().is_none() {
            cpu.rope(k, of.head_dim, positions, rope);
        }
    }
    Ok(())
}
