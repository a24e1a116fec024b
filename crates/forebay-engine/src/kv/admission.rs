//! Admission of a sequence: the longest prefix of its rows that the pools already hold.

use super::content::{BlockHash, Content, KV_BLOCK, Row};
use super::manager::{BlockManager, Changes, TableEntry};
use super::sequence::SequenceId;

/// A sequence that has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    pub sequence: SequenceId,
    /// Rows at the start that need not be computed: a multiple of [`KV_BLOCK`], less than all.
    pub hit_rows: usize,
}

impl BlockManager {
    /// Begins a sequence with the longest prefix of `rows` that is in the pools.
    ///
    /// A prefix of `p` rows is a hit if all groups have the full blocks that a token at position `p` sees, computed as
    /// rows of the same kinds. The last row is never part of it, because its logits are needed.
    ///
    /// The sequence has `hit_rows` committed positions. The caller computes the rest. This takes no block from the free
    /// ones, but cached blocks that are hit can no longer be evicted.
    pub fn admit(&mut self, rows: &[Row], changes: &mut Changes) -> Admission {
        let id = self.sequences.start();
        let hit_blocks = self.find_prefix(id, rows);
        let sequence = self.sequences.get_mut(id);
        for group in 0..self.groups.len() {
            let first = self.groups[group].first_seen(hit_blocks * KV_BLOCK);
            sequence.tables[group].resize(hit_blocks, Default::default());
            for index in first..hit_blocks {
                let (hash, rows) = (sequence.hashes[index], sequence.block_rows(index));
                let pool = self.groups.pool(group);
                let block = pool.find(hash, rows).expect("the search has found it");
                pool.acquire(block);
                sequence.tables[group][index] = block;
                changes.entries.push(TableEntry { sequence: id, group, index, block });
            }
        }
        let hit_rows = hit_blocks * KV_BLOCK;
        self.statistics.rows_total += rows.len() as u64;
        self.statistics.hit_rows_total += hit_rows as u64;
        Admission { sequence: id, hit_rows }
    }

    /// Fills the rows and hashes of a new sequence with the longest hit, and returns its length in blocks.
    fn find_prefix(&mut self, id: SequenceId, rows: &[Row]) -> usize {
        let sequence = self.sequences.get_mut(id);
        // For each group, the number of consecutive blocks found up to the current one.
        self.marks.clear();
        self.marks.resize(self.groups.len(), 0);
        let (mut hit_blocks, mut hash) = (0, BlockHash::ROOT);
        let shareable = &rows[..rows.len().saturating_sub(1)];
        'blocks: for (index, rows) in shareable.chunks_exact(KV_BLOCK).enumerate() {
            sequence.rows.extend_from_slice(rows);
            hash = Content::new(self.salt, hash, sequence.block_rows(index)).hash;
            sequence.hashes.push(hash);
            let end = index + 1;
            let mut is_hit = true;
            for (group, run) in self.groups.iter().zip(&mut self.marks) {
                let found = group.pool.find(hash, sequence.block_rows(index)).is_some();
                if !found && group.window.is_none() {
                    break 'blocks;
                }
                *run = if found { *run + 1 } else { 0 };
                is_hit &= *run >= end - group.first_seen(end * KV_BLOCK);
            }
            if is_hit {
                hit_blocks = end;
            }
        }
        sequence.rows.truncate(hit_blocks * KV_BLOCK);
        sequence.hashes.truncate(hit_blocks);
        hit_blocks
    }
}
