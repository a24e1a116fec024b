//! Preemption: a sequence gives its blocks to others and gets blocks again later.

use super::content::{BlockHash, Content, KV_BLOCK};
use super::manager::{BlockManager, Changes, OutOfBlocks, TableEntry};
use super::pool::BlockId;
use super::sequence::{Sequence, SequenceId};

/// A block whose content is to be saved, or restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedBlock {
    /// Index of the layer group.
    pub group: usize,
    /// Index in the sequence's table.
    pub index: usize,
    /// The block to copy from, or to.
    pub block: BlockId,
    /// Identity of the content, with which it can be kept elsewhere.
    pub hash: BlockHash,
    /// Positions of the block that hold content: 16, or fewer in the last block of a sequence.
    pub rows: usize,
}

impl BlockManager {
    /// Takes all blocks from a sequence, and appends those that hold what its next token sees to `saved`: group by group,
    /// each in order of positions.
    ///
    /// The caller copies them out before the next pass and before it moves anything that a later call reports. A caller
    /// that does not want to copy can use [`BlockManager::resume_cached`] later. The sequence's table is void. No changes
    /// are reported for it.
    ///
    /// # Panics
    /// Panics if the sequence is suspended or released.
    pub fn suspend(&mut self, id: SequenceId, saved: &mut Vec<SavedBlock>) {
        let sequence = self.sequences.running(id);
        for (group, table) in sequence.tables.iter().enumerate() {
            let used = table.iter().take(sequence.len().div_ceil(KV_BLOCK)).enumerate();
            for (index, &block) in used.filter(|&(_, &block)| block != BlockId::NULL) {
                saved.push(saved_block(self.salt, sequence, group, index, block));
            }
        }
        self.drop_blocks(id);
        self.sequences.suspend(id);
    }

    /// Gives a suspended sequence blocks for all positions that its next token sees.
    ///
    /// Appends the blocks to `restored` whose content is no longer in the pools. The caller copies the saved content into
    /// them before the next pass. All other blocks need no copy.
    ///
    /// # Errors
    /// Returns an error if a group has too few blocks. Then nothing has changed, and the sequence stays suspended.
    ///
    /// # Panics
    /// Panics if the sequence is running or released.
    pub fn resume(
        &mut self,
        id: SequenceId,
        restored: &mut Vec<SavedBlock>,
        changes: &mut Changes,
    ) -> Result<(), OutOfBlocks> {
        self.check_room_to_resume(id)?;
        self.sequences.resume(id);
        let sequence = self.sequences.running(id);
        let blocks = sequence.len().div_ceil(KV_BLOCK);
        // First everything that is still there: new blocks could evict it.
        for group in 0..self.groups.len() {
            let first = self.groups[group].first_seen(sequence.len());
            let pool = self.groups.pool(group);
            sequence.tables[group].resize(blocks, BlockId::NULL);
            for index in first..sequence.hashes.len() {
                let (hash, rows) = (sequence.hashes[index], sequence.block_rows(index));
                if let Some(block) = pool.find(hash, rows) {
                    pool.acquire(block);
                    sequence.tables[group][index] = block;
                }
            }
        }
        for group in 0..self.groups.len() {
            for index in self.groups[group].first_seen(sequence.len())..blocks {
                if sequence.tables[group][index] == BlockId::NULL {
                    let block = self.groups.take(group);
                    sequence.tables[group][index] = block;
                    restored.push(saved_block(self.salt, sequence, group, index, block));
                    if index < sequence.hashes.len() {
                        let content = content(self.salt, sequence, index);
                        self.groups.pool(group).publish(block, content);
                    }
                }
                let block = sequence.tables[group][index];
                changes.entries.push(TableEntry { sequence: id, group, index, block });
            }
        }
        Ok(())
    }

    /// Resumes a suspended sequence with what is still in the pools, and returns the number of positions kept.
    ///
    /// The caller computes the others again. This takes no block from the free ones.
    ///
    /// # Panics
    /// Panics if the sequence is running or released.
    pub fn resume_cached(&mut self, id: SequenceId, changes: &mut Changes) -> usize {
        self.sequences.resume(id);
        self.fall_back(id, usize::MAX, changes)
    }

    fn check_room_to_resume(&mut self, id: SequenceId) -> Result<(), OutOfBlocks> {
        let sequence = &*self.sequences.suspended(id);
        for (index, group) in self.groups.iter().enumerate() {
            // Blocks that others reference need no room. Cached blocks are counted as available, as new ones are.
            let needs_room = |&block: &usize| {
                let find = |&hash| group.pool.find(hash, sequence.block_rows(block));
                let found = sequence.hashes.get(block).and_then(find);
                found.is_none_or(|found| group.pool.references(found) == 0)
            };
            let blocks = group.first_seen(sequence.len())..sequence.len().div_ceil(KV_BLOCK);
            let (needed, available) = (blocks.filter(needs_room).count(), group.pool.available());
            if needed > available {
                return Err(OutOfBlocks { group: index, needed, available });
            }
        }
        Ok(())
    }
}

/// Returns the content of a sequence's block, whose last positions may be empty.
fn content(salt: u64, sequence: &Sequence, index: usize) -> Content {
    let end = sequence.len().min((index + 1) * KV_BLOCK);
    Content::new(salt, sequence.hash_before(index), &sequence.rows[index * KV_BLOCK..end])
}

fn saved_block(
    salt: u64,
    sequence: &Sequence,
    group: usize,
    index: usize,
    block: BlockId,
) -> SavedBlock {
    let rows = (sequence.len() - index * KV_BLOCK).min(KV_BLOCK);
    let hash = sequence.hashes.get(index).copied();
    let hash = hash.unwrap_or_else(|| content(salt, sequence, index).hash);
    SavedBlock { group, index, block, hash, rows }
}
