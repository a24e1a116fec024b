//! Truncation, forks and the end of sequences.

use forebay_ops::KV_BLOCK;

use super::manager::{BlockManager, Changes, TableEntry};
use super::pool::{BlockId, Pool};
use super::sequence::{Sequence, SequenceId};

impl BlockManager {
    /// Drops the positions from `len` on, with everything reserved beyond, and returns the number of positions kept.
    ///
    /// Fewer than `len` are kept if a group with a window no longer has what a token at `len` sees. The result is then the
    /// largest multiple of [`KV_BLOCK`] from which computation can resume: all groups still have what a token there
    /// sees, among the sequence's blocks or among other full blocks. In the worst case, it is 0.
    ///
    /// This takes no block from the free ones, but cached blocks that are used again can no longer be evicted.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn truncate(&mut self, id: SequenceId, len: usize, changes: &mut Changes) -> usize {
        let kept = self.last_resumable(id, len);
        let kept_blocks = kept.div_ceil(KV_BLOCK);
        let sequence = self.sequences.get_mut(id);
        for group in 0..self.groups.len() {
            let first = self.groups[group].first_seen(kept);
            let pool = self.groups.pool(group);
            // From the end to the start, so that blocks are evicted before the blocks that they depend on.
            while sequence.tables[group].len() > kept_blocks {
                let Some(block) = sequence.tables[group].pop() else { break };
                if block != BlockId::NULL {
                    pool.release(block);
                    let (index, block) = (sequence.tables[group].len(), BlockId::NULL);
                    changes.entries.push(TableEntry { sequence: id, group, index, block });
                }
            }
            sequence.tables[group].resize(kept_blocks, BlockId::NULL);
            for index in first..kept_blocks {
                if sequence.tables[group][index] == BlockId::NULL {
                    let (hash, rows) = (sequence.hashes[index], sequence.block_rows(index));
                    let block = pool.find(hash, rows).expect("the search has found it");
                    pool.acquire(block);
                    sequence.tables[group][index] = block;
                    changes.entries.push(TableEntry { sequence: id, group, index, block });
                }
            }
        }
        sequence.rows.truncate(kept);
        sequence.hashes.truncate(kept / KV_BLOCK);
        kept
    }

    /// Returns the largest position from which a sequence can resume: `len` or a multiple of the block size.
    fn last_resumable(&mut self, id: SequenceId, len: usize) -> usize {
        let sequence = self.sequences.get(id);
        let mut kept = len.min(sequence.len());
        // For each group, the first of the blocks that are known to be there, up to the last one kept.
        self.marks.clear();
        self.marks.resize(self.groups.len(), kept.div_ceil(KV_BLOCK));
        'search: loop {
            for (group, known) in self.marks.iter_mut().enumerate() {
                for index in (self.groups[group].first_seen(kept)..*known).rev() {
                    if !has_block(&self.groups[group].pool, sequence, group, index) {
                        // All positions after this block see it, or another block that is missing.
                        kept = index * KV_BLOCK;
                        self.marks.iter_mut().for_each(|known| *known = index.min(*known));
                        continue 'search;
                    }
                    *known = index;
                }
            }
            return kept;
        }
    }

    /// Begins a sequence with the same positions as another one, and shares its blocks.
    ///
    /// This takes no block. Whichever of the two writes first into a partially filled last block gets a copy of it. What
    /// the other sequence has reserved beyond its length is not shared.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn fork(&mut self, id: SequenceId, changes: &mut Changes) -> SequenceId {
        let root = self.sequences.get(id).root;
        let child_id = self.sequences.start(root);
        let (parent, child) = self.sequences.pair(id, child_id);
        child.rows.extend_from_slice(&parent.rows);
        child.hashes.extend_from_slice(&parent.hashes);
        let blocks = parent.len().div_ceil(KV_BLOCK);
        for (group, (from, to)) in parent.tables.iter().zip(&mut child.tables).enumerate() {
            to.extend_from_slice(&from[..blocks]);
            for (index, &block) in to.iter().enumerate() {
                if block != BlockId::NULL {
                    self.groups.pool(group).share(block);
                    changes.entries.push(TableEntry { sequence: child_id, group, index, block });
                }
            }
        }
        child_id
    }

    /// Ends a sequence. Its full blocks stay cached until their room is needed.
    ///
    /// Its table is void afterwards. No changes are reported for it.
    ///
    /// # Panics
    /// Panics if the sequence is released already.
    pub fn release(&mut self, id: SequenceId) {
        // From the end to the start, so that blocks are evicted before the blocks that they depend on.
        let sequence = self.sequences.get_mut(id);
        for (group, table) in sequence.tables.iter().enumerate() {
            let present = table.iter().rev().filter(|&&block| block != BlockId::NULL);
            present.for_each(|&block| self.groups.pool(group).release(block));
        }
        self.sequences.end(id);
    }
}

/// Returns true if a sequence has a block, or could have it because the pool has its content.
fn has_block(pool: &Pool, sequence: &Sequence, group: usize, index: usize) -> bool {
    let find = |&hash| pool.find(hash, sequence.block_rows(index));
    sequence.entry(group, index) != BlockId::NULL
        || sequence.hashes.get(index).and_then(find).is_some()
}
