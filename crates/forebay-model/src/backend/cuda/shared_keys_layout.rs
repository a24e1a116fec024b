//! Layout of the activations that only attention with shared keys needs, and the shapes of its caches.

use forebay_cuda::{AttentionScratchSize, KvLayerShape, entries_scratch};

use super::kv_size::KvSize;
use crate::arch::{Architecture, Attention, EntryIndexer, EntryShape, SharedKeys};

/// Floats of the scores of rows whose entries are chosen together. A row whose context is longer has room for its own.
const SCORES: usize = 4 << 20;

/// Offsets of activations that only attention with shared keys needs.
#[derive(Debug, Clone, Copy, Default)]
pub struct SharedKeyLayout {
    /// Values and gates of entries and of the indexer's keys, `[batch, width]` each.
    pub projected: [u64; 4],
    widths: [usize; 4],
    /// Queries of the indexer `[batch, heads, head_dim]`, and weights of its heads `[batch, heads]`.
    pub indexer_q: u64,
    pub weights: u64,
    indexer_widths: [usize; 2],
    /// Scores of some rows, and the number of floats. The second lane has as much room behind it.
    pub scores: u64,
    pub room: usize,
    /// Chosen entries `[batch, most]`, and the length of a row's list.
    pub lists: u64,
    pub most: usize,
}

/// Returns the most of something that entries have, given their shape and length.
fn of_entries(architecture: &Architecture, of: impl Fn(&EntryShape, usize) -> usize) -> usize {
    let entries = |a: &Attention| a.shared.and_then(|shared| shared.entries);
    architecture.most_of_attentions(|a| entries(a).map_or(0, |entries| of(&entries, a.head_dim)))
}

fn of_indexers(architecture: &Architecture, of: impl Fn(&EntryIndexer) -> usize) -> usize {
    of_entries(architecture, |entries, _| entries.indexer.as_ref().map_or(0, &of))
}

/// Returns the most of something that attention with shared keys has; 0 if no layer has such attention.
pub fn of_shared(architecture: &Architecture, of: impl Fn(&SharedKeys) -> usize) -> usize {
    architecture.most_of_attentions(|a| a.shared.as_ref().map_or(0, &of))
}

/// Returns the scratch memory of attention with shared keys for so many generated tokens.
pub fn scratch(of: &Attention, rows: usize) -> AttentionScratchSize {
    match of.shared {
        Some(_) => entries_scratch(of.heads, of.head_dim, rows),
        None => AttentionScratchSize::default(),
    }
}

impl SharedKeyLayout {
    pub fn new(
        architecture: &Architecture,
        context: usize,
        batch: usize,
        words: &mut impl FnMut(usize) -> u64,
    ) -> SharedKeyLayout {
        let own = of_entries(architecture, |entries, dim| entries.parts() * dim);
        let indexer = of_entries(architecture, |entries, _| {
            entries.indexer.map_or(0, |of| entries.parts() * of.head_dim)
        });
        let widths = [own, own, indexer, indexer];
        let indexer_widths = [
            of_indexers(architecture, |of| of.heads * of.head_dim),
            of_indexers(architecture, |of| of.heads),
        ];
        // Entries of the longest sequence, as far as they are chosen.
        let entries = of_entries(architecture, |entries, _| match entries.indexer {
            Some(_) => (context / entries.ratio).max(1),
            None => 0,
        });
        let room = match entries {
            0 => 0,
            entries => entries * (SCORES / entries).clamp(1, batch.max(1)),
        };
        let most = of_indexers(architecture, |of| of.top_k).min(entries);
        SharedKeyLayout {
            projected: widths.map(|width| words(batch * width)),
            widths,
            indexer_q: words(batch * indexer_widths[0]),
            weights: words(batch * indexer_widths[1]),
            indexer_widths,
            scores: words(2 * room),
            room,
            lists: words(batch * most),
            most,
        }
    }

    /// Returns the layout of the second lane, whose first row has number `first`.
    pub fn second_lane(&self, first: usize) -> SharedKeyLayout {
        let behind = |at: u64, width: usize| at + 4 * (first * width) as u64;
        let mut projected = self.projected;
        projected.iter_mut().zip(self.widths).for_each(|(at, width)| *at = behind(*at, width));
        SharedKeyLayout {
            projected,
            indexer_q: behind(self.indexer_q, self.indexer_widths[0]),
            weights: behind(self.weights, self.indexer_widths[1]),
            scores: self.scores + 4 * self.room as u64,
            lists: behind(self.lists, self.most),
            ..*self
        }
    }
}

/// Shapes of the caches of a layer with compressed entries.
pub struct EntryShapes {
    /// Values and gates of positions, from which entries and the indexer's keys are computed.
    pub projections: [Option<KvLayerShape>; 2],
    pub entries: KvLayerShape,
    /// Keys of the indexer.
    pub keys: Option<KvLayerShape>,
}

impl KvSize {
    /// Returns the shapes of the caches of compressed entries, if attention has such.
    pub fn entry_shapes(&self, attention: &Attention) -> Option<EntryShapes> {
        let of = attention.shared.and_then(|shared| shared.entries)?;
        let shape = |dim: usize, values_in_keys: bool, span: usize| KvLayerShape {
            element: self.element,
            kv_heads: 1,
            dim_k: dim,
            dim_v: dim,
            values_in_keys,
            chosen: false,
            context: self.context,
            span,
        };
        let dims = [Some(attention.head_dim), of.indexer.map(|indexer| indexer.head_dim)];
        Some(EntryShapes {
            projections: dims.map(|dim| dim.map(|dim| shape(of.parts() * dim, false, 1))),
            entries: shape(attention.head_dim, true, of.ratio),
            keys: dims[1].map(|dim| shape(dim, true, of.ratio)),
        })
    }
}
