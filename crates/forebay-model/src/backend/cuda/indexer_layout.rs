//! Layout of the activations that only indexers need.

use crate::arch;

/// Floats of the scores of rows whose keys are chosen together. A row whose context is longer has room for its own.
const SCORES: usize = 4 << 20;

/// Offsets of activations that only indexers need.
#[derive(Debug, Clone, Copy, Default)]
pub struct IndexerLayout {
    /// Queries `[batch, heads, head_dim]`.
    pub q: u64,
    /// Keys `[batch, head_dim]`.
    pub k: u64,
    /// Weights of the heads `[batch, heads]`.
    pub weights: u64,
    /// Scores of some rows, and the number of floats. The second lane has as much room behind it.
    pub scores: u64,
    pub room: usize,
    /// Positions of the chosen keys `[batch, most]`, and the length of a row's list.
    pub lists: u64,
    pub most: usize,
}

impl IndexerLayout {
    pub fn new(
        of: Option<&arch::Indexer>,
        context: usize,
        batch: usize,
        words: &mut impl FnMut(usize) -> u64,
    ) -> IndexerLayout {
        let Some(of) = of else { return IndexerLayout::default() };
        let room = context * (SCORES / context).clamp(1, batch.max(1));
        IndexerLayout {
            q: words(batch * of.heads * of.head_dim),
            k: words(batch * of.head_dim),
            weights: words(batch * of.heads),
            scores: words(2 * room),
            room,
            lists: words(batch * of.top_k.min(context)),
            most: of.top_k.min(context),
        }
    }

    /// Returns the layout of the second lane, whose first row has number `first`.
    pub fn second_lane(&self, of: Option<&arch::Indexer>, first: usize) -> IndexerLayout {
        let Some(of) = of else { return *self };
        let behind = |at: u64, width: usize| at + 4 * (first * width) as u64;
        IndexerLayout {
            q: behind(self.q, of.heads * of.head_dim),
            k: behind(self.k, of.head_dim),
            weights: behind(self.weights, of.heads),
            scores: self.scores + 4 * self.room as u64,
            lists: behind(self.lists, self.most),
            ..*self
        }
    }
}
