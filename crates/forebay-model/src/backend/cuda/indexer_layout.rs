//! Layout of the activations that only indexers need.

use forebay_compute::PoolScores;
use forebay_cuda::Indexer;
use forebay_ops::Pools;

use crate::arch;

/// Floats of the scores of rows whose keys are chosen together. A row whose context is longer has room for its own.
const SCORES: usize = 4 << 20;

/// Returns the floats of the scores of rows whose keys are chosen together, `of_row` for each of at most `batch` rows.
pub(super) fn scores_room(of_row: usize, batch: usize) -> usize {
    if of_row == 0 { 0 } else { of_row * (SCORES / of_row).clamp(1, batch.max(1)) }
}

/// Offsets of activations that only indexers need.
#[derive(Debug, Clone, Copy)]
pub struct IndexerLayout {
    /// Queries `[batch, heads, head_dim]`.
    pub q: u64,
    /// Keys `[batch, head_dim]`.
    pub k: u64,
    /// Gates of keys `[batch, head_dim]`, if they have some.
    pub gates: u64,
    /// Weights of the heads `[batch, heads]`, if they have some.
    pub weights: u64,
    /// Scores of some rows, and the number of floats. The second lane has as much room behind it.
    pub scores: u64,
    pub room: usize,
    /// The chosen pools `[batch, lists, most]`, and the pools among which rows choose.
    pub lists: u64,
    pub pools: Pools,
}

impl Default for IndexerLayout {
    fn default() -> IndexerLayout {
        let pools = Pools::positions(0);
        IndexerLayout { q: 0, k: 0, gates: 0, weights: 0, scores: 0, room: 0, lists: 0, pools }
    }
}

/// Returns the pools among which rows of an indexer choose. No list is longer than one that has all pools of the context.
fn pools(of: &arch::Indexer, context: usize) -> Pools {
    let all = of.pools();
    let most = all.most.min(all.candidates(context.saturating_sub(1)).max(1));
    let before_own = all.before_own.min(most);
    Pools { length: all.length, most, own_seen: all.own_seen, before_own }
}

/// Returns an indexer as kernels see it.
pub(super) fn indexer_shape(of: &arch::Indexer, pools: Pools) -> Indexer {
    Indexer {
        heads: of.heads,
        dim: of.head_dim,
        gated: of.key_width() > of.head_dim,
        by_head: of.scores() == PoolScores::Largest,
        pools,
    }
}

impl IndexerLayout {
    pub fn new(
        of: Option<&arch::Indexer>,
        context: usize,
        batch: usize,
        words: &mut impl FnMut(usize) -> u64,
    ) -> IndexerLayout {
        let Some(of) = of else { return IndexerLayout::default() };
        let pools = pools(of, context);
        let of_row = of.lists() * indexer_shape(of, pools).scores(context);
        let room = scores_room(of_row, batch);
        IndexerLayout {
            q: words(batch * of.heads * of.head_dim),
            k: words(batch * of.head_dim),
            gates: words(batch * (of.key_width() - of.head_dim)),
            weights: words(if of.has_weights() { batch * of.heads } else { 0 }),
            scores: words(2 * room),
            room,
            lists: words(batch * of.lists() * pools.most),
            pools,
        }
    }

    /// Returns the layout of the second lane, whose first row has number `first`.
    pub fn second_lane(&self, of: Option<&arch::Indexer>, first: usize) -> IndexerLayout {
        let Some(of) = of else { return *self };
        let behind = |at: u64, width: usize| at + 4 * (first * width) as u64;
        IndexerLayout {
            q: behind(self.q, of.heads * of.head_dim),
            k: behind(self.k, of.head_dim),
            gates: behind(self.gates, of.key_width() - of.head_dim),
            weights: behind(self.weights, if of.has_weights() { of.heads } else { 0 }),
            scores: self.scores + 4 * self.room as u64,
            lists: behind(self.lists, of.lists() * self.pools.most),
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::IndexerRule;

    #[test]
    fn one_head_that_chooses_blocks_scores_like_several() {
        for heads in [1, 4] {
            let rule = IndexerRule::Blocks { length: 8, before: 0 };
            let of = arch::Indexer { heads, head_dim: 32, top_k: 3, rope: None, rule, own: true };
            assert!(indexer_shape(&of, pools(&of, 64)).by_head);
        }
    }
}
