//! Layout of the activations that only attention with shared keys needs, and the shapes of its caches.

use forebay_cuda::{AttentionScratchSize, KvLayerShape, entries_scratch};

use super::indexer_layout::scores_room;
use super::kv_size::KvSize;
use crate::arch::{Architecture, Attention};

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
        let [own, indexer] = architecture.entry_values();
        let widths = [own, own, indexer, indexer];
        let indexer_widths = [
            architecture.most_of_entry_indexers(|of| of.heads * of.head_dim),
            architecture.most_of_entry_indexers(|of| of.heads),
        ];
        // Entries of the longest sequence, as far as they are chosen.
        let entries = architecture.most_of_entries(|entries, _| match entries.indexer {
            Some(_) => (context / entries.ratio).max(1),
            None => 0,
        });
        let room = scores_room(entries, batch);
        let most = architecture.most_of_entry_indexers(|of| of.top_k).min(entries);
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
            values_in_keys,
            span,
            ..KvLayerShape::new(self.element, 1, (dim, dim), self.context)
        };
        let dims = [Some(attention.head_dim), of.indexer.map(|indexer| indexer.head_dim)];
        Some(EntryShapes {
            projections: dims.map(|dim| dim.map(|dim| shape(of.parts() * dim, false, 1))),
            entries: shape(attention.head_dim, true, of.ratio),
            keys: dims[1].map(|dim| shape(dim, true, of.ratio)),
        })
    }
}
