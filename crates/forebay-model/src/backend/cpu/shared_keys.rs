//! Attention whose heads share keys that are values, with compressed entries ([`crate::arch::SharedKeys`] says where its data is).

use forebay_compute::{AttentionRun, EntryScratch, KvLayer, KvShape, MatmulJob};

use crate::arch::Architecture;
use crate::backend::Step;

/// A kind of layers of the cache that follow those with keys. There are as many of each kind as the model has layers.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// Projections of positions, from which entries are computed.
    Projections,
    Entries,
    /// Projections of positions, from which the keys of indexers are computed.
    IndexerProjections,
    IndexerKeys,
}

const KINDS: [Kind; 4] =
    [Kind::Projections, Kind::Entries, Kind::IndexerProjections, Kind::IndexerKeys];

/// Returns the layer of the cache for one kind of data of the layer. No such model has indexers of keys, which would follow the
/// layers first.
pub(super) fn layer_of(step: &Step<'_>, kind: Kind) -> usize {
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
    pub(super) q_a: Vec<f32>,
    /// Values and gates of entries and of the indexer's keys, `[tokens, parts * dim]` each.
    pub(super) projected: [Vec<f32>; 4],
    /// Queries of the indexer `[tokens, heads, head_dim]`, and weights of its heads `[tokens, heads]`.
    pub(super) indexer_q: Vec<f32>,
    pub(super) weights: Vec<f32>,
    /// Chosen entries `[tokens, top_k]`.
    pub(super) chosen: Vec<u32>,
    /// Products of the groups of heads `[groups, tokens, rank]`, and the same by token.
    pub(super) by_group: Vec<f32>,
    pub(super) grouped: Vec<f32>,
    /// Rows of each group `[groups, batch]`: `token * groups + group`.
    pub(super) rows: Vec<u32>,
    pub(super) batch: usize,
    pub(super) entries: EntryScratch,
    /// Always empty between calls; kept for their memory.
    pub(super) jobs: Vec<MatmulJob<'static>>,
    pub(super) runs: Vec<AttentionRun<'static>>,
    pub(super) tables: Vec<&'static [u32]>,
}

/// Numbers of elements of the activations for one token, each the most of any layer.
struct Widths {
    query_rank: usize,
    projected: [usize; 2],
    indexer_q: usize,
    weights: usize,
    chosen: usize,
    output: usize,
    /// All layers have the same number of groups; 0 if no layer has shared keys.
    groups: usize,
}

impl Widths {
    fn of(architecture: &Architecture) -> Widths {
        Widths {
            query_rank: architecture.most_of_shared(|of| of.query_rank),
            projected: architecture.entry_values(),
            indexer_q: architecture.most_of_entry_indexers(|of| of.heads * of.head_dim),
            weights: architecture.most_of_entry_indexers(|of| of.heads),
            chosen: architecture.most_of_entry_indexers(|of| of.top_k),
            output: architecture.most_of_shared(|of| of.output_groups * of.output_rank),
            groups: architecture.most_of_shared(|of| of.output_groups),
        }
    }
}

impl SharedKeyScratch {
    pub fn reserve(architecture: &Architecture, batch: usize) -> SharedKeyScratch {
        let widths = Widths::of(architecture);
        let groups = widths.groups;
        if groups == 0 {
            return SharedKeyScratch::default();
        }
        let floats = |width: usize| vec![0.0; batch * width];
        let [own, indexer] = widths.projected;
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
        let of = Widths::of(architecture);
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
    }

    /// Returns the rows `[tokens, width]` of the first output projection.
    pub(super) fn grouped(&self, count: usize, width: usize) -> &[f32] {
        &self.grouped[..count * width]
    }
}
