//! The choice of the keys that a token attends to.

use forebay_compute::{
    Activations, AttentionRun, ChosenKeys, Cpu, KeyChoice, KvCache, KvLayer, KvShape, RopeTable,
};
use forebay_stream::{Lease, Residency};

use super::products::{RowsByKind, both_kinds, matmul_beside_reads, matrix};
use crate::ModelError;
use crate::arch::{Architecture, INDEXER_NORM_EPSILON, Indexer};
use crate::backend::Step;
use crate::weights::IndexerWeights;

/// Activations of an indexer, for one batch.
#[derive(Default)]
pub struct IndexerScratch {
    /// Queries `[tokens, heads, head_dim]`.
    pub(super) q: Vec<f32>,
    /// Keys `[tokens, head_dim]`.
    pub(super) k: Vec<f32>,
    /// Weights of the heads `[tokens, heads]`.
    pub(super) weights: Vec<f32>,
    /// Positions of the chosen keys `[tokens, top_k]`. Empty if a context is not longer.
    pub(super) chosen: Vec<u32>,
}

/// Returns the length of the lists of chosen keys. There are none if a token sees all positions of its context.
fn list_length(of: &Indexer, context: usize) -> usize {
    if of.top_k < context { of.top_k } else { 0 }
}

impl IndexerScratch {
    pub fn reserve(of: Option<&Indexer>, context: usize, batch: usize) -> IndexerScratch {
        let Some(of) = of else { return IndexerScratch::default() };
        IndexerScratch {
            q: vec![0.0; batch * of.heads * of.head_dim],
            k: vec![0.0; batch * of.head_dim],
            weights: vec![0.0; batch * of.heads],
            chosen: vec![0; batch * list_length(of, context)],
        }
    }

    /// Returns the number of floats for one token of a batch.
    pub fn floats_per_token(of: Option<&Indexer>, context: usize) -> usize {
        of.map_or(0, |of| of.heads * (of.head_dim + 1) + of.head_dim + list_length(of, context))
    }

    /// Chooses the keys of a layer, if it has an indexer and a token may see fewer keys than there are.
    pub(super) fn choose(
        &mut self,
        cpu: &Cpu,
        cache: &KvCache,
        step: &Step<'_>,
        runs: &[AttentionRun<'_>],
    ) -> Option<ChosenKeys<'_>> {
        let of = step.attention().indexer.as_ref()?;
        if self.chosen.is_empty() {
            return None;
        }
        let chosen = &mut self.chosen[..step.count * of.top_k];
        let q = &self.q[..step.count * of.heads * of.head_dim];
        let weights = &self.weights[..step.count * of.heads];
        let what = KeyChoice { layer: index_layer(step), heads: of.heads, most: of.top_k };
        cpu.choose_keys(q, weights, cache, &what, runs, chosen);
        Some(ChosenKeys { positions: chosen, most: of.top_k })
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
        let own = own.filter(|_| architecture.kv_group(layer).is_some());
        let (kv_heads, dim) = own.map_or((0, 0), |own| (1, own.head_dim));
        let shape = KvShape { kv_heads, head_dim_k: dim, head_dim_v: dim, values_in_keys: true };
        KvLayer::new(shape, of.group)
    };
    layers.iter().enumerate().map(of_layer).collect()
}

/// What an indexer's projections are computed from. The activations are rounded again, because the indexer's matrices may have
/// other types.
pub(super) struct IndexerInputs<'a> {
    /// The layer's normed input `[tokens, hidden]`.
    pub normed: (&'a mut Activations, &'a [f32]),
    /// Compressed queries `[tokens, query rank]`.
    pub queries: (&'a mut Activations, &'a [f32]),
    pub rows: RowsByKind<'a>,
    pub rope: &'a RopeTable,
    pub positions: &'a [u32],
}

/// Computes an indexer's queries, keys and weights of heads. A common factor of the weights changes no choice, so there is none.
pub(super) fn project_indexer(
    (cpu, residency, lease): (&Cpu, &mut Residency, &Lease),
    weights: &IndexerWeights,
    of: &Indexer,
    inputs: IndexerInputs<'_>,
    out: &mut IndexerScratch,
) -> Result<(), ModelError> {
    let IndexerInputs { normed, queries, rows, rope, positions } = inputs;
    let count = positions.len();
    let q = &mut out.q[..count * of.heads * of.head_dim];
    let k = &mut out.k[..count * of.head_dim];
    let of_heads = &mut out.weights[..count * of.heads];
    let (x, values) = normed;
    x.prepare(cpu, values, count, weights.k.cols, &[weights.k.ty, weights.weights.ty]);
    let (from, values) = queries;
    from.prepare(cpu, values, count, weights.q.cols, &[weights.q.ty]);
    let (w_q, w_k) = (matrix(residency, lease, &weights.q), matrix(residency, lease, &weights.k));
    let w_heads = matrix(residency, lease, &weights.weights);
    let [a, b] = both_kinds(w_q, from, rows, q);
    let [c, d] = both_kinds(w_k, x, rows, k);
    let [e, f] = both_kinds(w_heads, x, rows, of_heads);
    matmul_beside_reads(cpu, residency, &mut [a, b, c, d, e, f])?;
    cpu.layer_norm_in_place(k, &weights.k_norm, &weights.k_norm_bias, INDEXER_NORM_EPSILON);
    cpu.rope(q, of.head_dim, positions, rope);
    cpu.rope(k, of.head_dim, positions, rope);
    Ok(())
}
