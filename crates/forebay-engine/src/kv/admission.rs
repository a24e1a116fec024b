//! Admission of a sequence: the longest prefix of its rows that the pools or slower tiers hold.

use forebay_kv::{BlockHash, BlockKey};
use forebay_ops::KV_BLOCK;

use super::content::{Content, Row};
use super::manager::{BlockManager, Changes};
use super::sequence::SequenceId;

/// A sequence that has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    pub sequence: SequenceId,
    /// Rows at the start that need not be computed: a multiple of [`KV_BLOCK`], less than all.
    pub hit_rows: usize,
}

/// Which blocks of a prefix are where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey<T> {
    /// For each layer group and each block from the first on, where it is. `None` means nowhere.
    pub places: Vec<Vec<Option<T>>>,
    /// Hashes of these blocks.
    pub hashes: Vec<BlockHash>,
    /// The prefixes that are hits, in blocks, in ascending order: all groups have the blocks that a token behind them sees.
    pub hits: Vec<usize>,
}

impl BlockManager {
    /// Looks up the blocks of a prefix of `rows`, as far as a hit is possible. `place` says where a block is that is not in
    /// the pools, and `pool` stands for those that are.
    ///
    /// A prefix of `p` rows is a hit if all groups have the full blocks that a token at position `p` sees, computed as rows of
    /// the same kinds. The last row is never part of it, because its logits are needed.
    pub fn survey<T: Copy>(
        &self,
        root: BlockHash,
        rows: &[Row],
        pool: T,
        mut place: impl FnMut(BlockKey) -> Option<T>,
    ) -> Survey<T> {
        let mut survey = Survey {
            places: vec![Vec::new(); self.groups.len()],
            hashes: Vec::new(),
            hits: Vec::new(),
        };
        // For each group, the number of consecutive blocks found up to the current one.
        let mut found_in_row = vec![0; self.groups.len()];
        let mut hash = root;
        let shareable = &rows[..rows.len().saturating_sub(1)];
        'blocks: for (index, rows) in shareable.chunks_exact(KV_BLOCK).enumerate() {
            let link = forebay_kv::Link { previous: hash, index: index as u32 };
            hash = Content::new(link, rows).hash;
            let end = index + 1;
            let mut is_hit = true;
            for (group, of) in self.groups.iter().enumerate() {
                let key = BlockKey { hash, group: group as u32 };
                let found = match of.pool.find(hash, rows) {
                    Some(_) => Some(pool),
                    None => place(key),
                };
                if found.is_none() && of.window.is_none() {
                    break 'blocks;
                }
                survey.places[group].push(found);
                found_in_row[group] = if found.is_some() { found_in_row[group] + 1 } else { 0 };
                is_hit &= found_in_row[group] >= end - of.first_seen(end * KV_BLOCK);
            }
            survey.hashes.push(hash);
            if is_hit {
                survey.hits.push(end);
            }
        }
        survey
    }

    /// For each layer group, returns the first block that a token behind the first `blocks` blocks of a sequence sees.
    pub fn first_seen_behind(&self, blocks: usize) -> impl Iterator<Item = usize> {
        self.groups.iter().map(move |of| of.first_seen(blocks * KV_BLOCK).min(blocks))
    }

    /// Returns the blocks that a token behind the first `blocks` blocks of a sequence sees: the layer group and the index of
    /// each.
    pub fn seen_behind(&self, blocks: usize) -> impl Iterator<Item = (usize, usize)> {
        self.groups.iter().enumerate().flat_map(move |(group, of)| {
            (of.first_seen(blocks * KV_BLOCK)..blocks).map(move |index| (group, index))
        })
    }

    /// Begins a sequence with the longest prefix of `rows` that is in the pools, or for which `below` is true.
    ///
    /// The sequence has `hit_rows` committed positions. The caller computes the rest. This takes no block from the free
    /// ones, but cached blocks that are hit can no longer be evicted. Blocks that are not in the pools are absent until
    /// [`BlockManager::fill_up`].
    pub fn admit(
        &mut self,
        root: BlockHash,
        rows: &[Row],
        below: impl Fn(BlockKey) -> bool,
        changes: &mut Changes,
    ) -> Admission {
        self.admit_where(root, rows, below, |_| true, changes)
    }

    /// Does the same as [`BlockManager::admit`] with the longest prefix that ends with a block for whose hash `can_end` is true.
    pub fn admit_where(
        &mut self,
        root: BlockHash,
        rows: &[Row],
        below: impl Fn(BlockKey) -> bool,
        can_end: impl Fn(BlockHash) -> bool,
        changes: &mut Changes,
    ) -> Admission {
        let survey = self.survey(root, rows, (), |key| below(key).then_some(()));
        let mut hits = survey.hits.iter().rev().copied();
        let hit_blocks = hits.find(|blocks| can_end(survey.hashes[blocks - 1])).unwrap_or(0);
        let hit_rows = hit_blocks * KV_BLOCK;
        let id = self.sequences.start(root);
        let sequence = self.sequences.get_mut(id);
        sequence.rows.extend_from_slice(&rows[..hit_rows]);
        sequence.hashes.extend_from_slice(&survey.hashes[..hit_blocks]);
        self.acquire_found(id, changes);
        self.statistics.rows_total += rows.len() as u64;
        self.statistics.hit_rows_total += hit_rows as u64;
        Admission { sequence: id, hit_rows }
    }
}
