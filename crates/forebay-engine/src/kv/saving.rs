//! Sequences outside the pools: which blocks a copy of a sequence consists of, and how a sequence is made from a copy.
//!
//! Preemption saves a sequence, releases it, and restores it later. A snapshot saves a sequence that goes on.

use super::content::{Content, KV_BLOCK, Row, hashes};
use super::manager::{BlockManager, Changes, OutOfBlocks, TableEntry};
use super::pool::BlockId;
use super::sequence::SequenceId;

/// A block whose content is to be saved, or restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedBlock {
    /// Index of the layer group.
    pub group: usize,
    /// Index in the sequence's table.
    pub index: usize,
    /// The block to copy from, or to.
    pub block: BlockId,
}

impl BlockManager {
    /// Returns the committed rows of a sequence.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn rows(&self, id: SequenceId) -> &[Row] {
        &self.sequences.get(id).rows
    }

    /// Returns the blocks that hold what the next token of a sequence sees: group by group, each in order of positions.
    ///
    /// The caller copies them before it moves anything that a later call reports.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn blocks_to_save(&self, id: SequenceId) -> impl Iterator<Item = SavedBlock> {
        let sequence = self.sequences.get(id);
        let used = sequence.len().div_ceil(KV_BLOCK);
        sequence.tables.iter().enumerate().flat_map(move |(group, table)| {
            let blocks = table.iter().take(used).enumerate();
            let present = blocks.filter(|(_, block)| **block != BlockId::NULL);
            present.map(move |(index, &block)| SavedBlock { group, index, block })
        })
    }

    /// Returns the layer group, the index in the table and the bytes of every block that the next token of a sequence of `len`
    /// positions sees: group by group, each in order of positions.
    pub fn blocks_seen(&self, len: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        self.groups.iter().enumerate().flat_map(move |(index, group)| {
            let blocks = group.first_seen(len)..len.div_ceil(KV_BLOCK);
            blocks.map(move |block| (index, block, group.block_bytes))
        })
    }

    /// Begins a sequence with saved rows and blocks for all positions that its next token sees.
    ///
    /// Appends the blocks to `restored` whose content is not in the pools. The caller copies the saved content into them
    /// before the next pass. All other blocks need no copy.
    ///
    /// # Errors
    /// Returns an error if a group has too few blocks. Then nothing has changed.
    pub fn restore(
        &mut self,
        rows: &[Row],
        restored: &mut Vec<SavedBlock>,
        changes: &mut Changes,
    ) -> Result<SequenceId, OutOfBlocks> {
        self.check_room(rows)?;
        let id = self.sequences.start();
        let sequence = self.sequences.get_mut(id);
        sequence.rows.extend_from_slice(rows);
        sequence.hashes.extend(hashes(self.salt, rows));
        let (len, blocks) = (rows.len(), rows.len().div_ceil(KV_BLOCK));
        // First everything that is still there: new blocks could evict it.
        for group in 0..self.groups.len() {
            let first = self.groups[group].first_seen(len);
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
            for index in self.groups[group].first_seen(len)..blocks {
                if sequence.tables[group][index] == BlockId::NULL {
                    let block = self.groups.take(group);
                    sequence.tables[group][index] = block;
                    restored.push(SavedBlock { group, index, block });
                    if index < sequence.hashes.len() {
                        let rows = sequence.block_rows(index);
                        let content = Content::new(self.salt, sequence.hash_before(index), rows);
                        self.groups.pool(group).publish(block, content);
                    }
                }
                let block = sequence.tables[group][index];
                changes.entries.push(TableEntry { sequence: id, group, index, block });
            }
        }
        Ok(id)
    }

    fn check_room(&self, rows: &[Row]) -> Result<(), OutOfBlocks> {
        let hashes: Vec<_> = hashes(self.salt, rows).collect();
        for (index, group) in self.groups.iter().enumerate() {
            // Blocks that others reference need no room. Cached blocks are counted as available, as new ones are.
            let needs_room = |&block: &usize| {
                let rows = || &rows[block * KV_BLOCK..(block + 1) * KV_BLOCK];
                let found = hashes.get(block).and_then(|&hash| group.pool.find(hash, rows()));
                found.is_none_or(|found| group.pool.references(found) == 0)
            };
            let blocks = group.first_seen(rows.len())..rows.len().div_ceil(KV_BLOCK);
            let (needed, available) = (blocks.filter(needs_room).count(), group.pool.available());
            if needed > available {
                return Err(OutOfBlocks { group: index, needed, available });
            }
        }
        Ok(())
    }
}
