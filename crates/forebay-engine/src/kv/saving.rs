//! Sequences outside the pools: which blocks a copy of a sequence consists of, and how a sequence is made from a copy.
//!
//! Preemption saves a sequence, releases it, and restores it later. A snapshot saves a sequence that goes on.

use std::ops::Range;

use forebay_kv::{BlockHash, BlockKey, Link};
use forebay_model::{BlockContent, HostMemory};
use forebay_ops::KV_BLOCK;

use super::content::{Row, hashes};
use super::manager::{BlockManager, Changes, LostBlock, OutOfBlocks, TableEntry};
use super::pool::BlockId;
use super::sequence::SequenceId;

/// Positions at the end of a prompt that the next turn may not share: templates end a prompt with tokens that announce an
/// answer, and put others in their place later.
const TURN_END: usize = 32;

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

impl SavedBlock {
    /// Returns the block with its content, which is in this range of the memory.
    pub fn with_content<'a>(
        &self,
        (memory, range): (&'a dyn HostMemory, Range<usize>),
    ) -> BlockContent<'a> {
        BlockContent { group: self.group, block: self.block.index() as u32, memory, range }
    }
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
        root: BlockHash,
        rows: &[Row],
        restored: &mut Vec<SavedBlock>,
        changes: &mut Changes,
    ) -> Result<SequenceId, OutOfBlocks> {
        self.check_room(root, rows)?;
        let id = self.sequences.start(root);
        let sequence = self.sequences.get_mut(id);
        sequence.rows.extend_from_slice(rows);
        sequence.hashes.extend(hashes(root, rows));
        // First everything that is still there: new blocks could evict it.
        self.acquire_found(id, changes);
        self.fill_up(id, restored, changes);
        Ok(id)
    }

    /// Gives a new sequence those blocks of its rows that are in the pools.
    pub(super) fn acquire_found(&mut self, id: SequenceId, changes: &mut Changes) {
        let sequence = self.sequences.get_mut(id);
        let (len, blocks) = (sequence.len(), sequence.len().div_ceil(KV_BLOCK));
        for group in 0..self.groups.len() {
            let first = self.groups[group].first_seen(len);
            let pool = self.groups.pool(group);
            sequence.tables[group].resize(blocks, BlockId::NULL);
            sequence.absent[group] = blocks - first.min(blocks);
            for index in first..sequence.hashes.len() {
                let (hash, rows) = (sequence.hashes[index], sequence.block_rows(index));
                if let Some(block) = pool.find(hash, rows) {
                    pool.acquire(block);
                    sequence.absent[group] -= 1;
                    sequence.tables[group][index] = block;
                    changes.entries.push(TableEntry { sequence: id, group, index, block });
                }
            }
        }
    }

    /// Gives a sequence new blocks for all positions that its next token sees and whose blocks are absent. Appends them to
    /// `restored`: the caller copies the content into them before the next pass.
    ///
    /// # Panics
    /// Panics if a group has too few blocks, or if the sequence is released.
    pub fn fill_up(
        &mut self,
        id: SequenceId,
        restored: &mut Vec<SavedBlock>,
        changes: &mut Changes,
    ) {
        let sequence = self.sequences.get_mut(id);
        let (len, blocks) = (sequence.len(), sequence.len().div_ceil(KV_BLOCK));
        for group in 0..self.groups.len() {
            for index in self.groups[group].first_seen(len)..blocks {
                if sequence.tables[group][index] != BlockId::NULL {
                    continue;
                }
                let block = self.groups.take(group, &mut changes.lost);
                sequence.absent[group] -= 1;
                sequence.tables[group][index] = block;
                restored.push(SavedBlock { group, index, block });
                changes.entries.push(TableEntry { sequence: id, group, index, block });
                if index < sequence.hashes.len() {
                    // Blocks of windows are saved only at the ends of turns, and may go first without a copy.
                    let is_copied = self.groups[group].window.is_none();
                    let pool = self.groups.pool(group);
                    pool.publish(block, sequence.content(index), is_copied);
                    // It was kept outside the pool, so it is at the end of a turn.
                    pool.note_end_of_turn(sequence.hashes[index]);
                }
            }
        }
    }

    /// Ends a sequence whose restored blocks did not get their content.
    ///
    /// # Panics
    /// Panics if the sequence is released already.
    pub fn abandon(&mut self, id: SequenceId, restored: &[SavedBlock]) {
        for &SavedBlock { group, block, .. } in restored {
            self.groups.pool(group).withdraw(block);
        }
        self.release(id);
    }

    /// Returns the key of a full block of a sequence in a layer group, and its place in the sequence. `None` if not all of the
    /// block's rows are committed.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn block_key(
        &self,
        id: SequenceId,
        group: usize,
        index: usize,
    ) -> Option<(BlockKey, Link)> {
        let sequence = self.sequences.get(id);
        let hash = *sequence.hashes.get(index)?;
        let previous = index.checked_sub(1).map_or(sequence.root, |before| sequence.hashes[before]);
        let link = Link { previous, index: index as u32 };
        Some((BlockKey { hash, group: group as u32 }, link))
    }

    /// Returns the hash "before" the first block of a sequence.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn root(&self, id: SequenceId) -> BlockHash {
        self.sequences.get(id).root
    }

    /// Counts the use of every block that a new sequence found in the pools. Not part of [`BlockManager::admit`], because a
    /// sequence without room is admitted again and again.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn note_uses(&mut self, id: SequenceId) {
        let sequence = self.sequences.get(id);
        for (group, table) in sequence.tables.iter().enumerate() {
            let found = table.iter().filter(|block| **block != BlockId::NULL);
            found.for_each(|block| self.groups.pool(group).note_use(*block));
        }
    }

    /// Notes that a later request may share the sequence up to about here, because its prompt ends here: a slower tier keeps the
    /// blocks that such a request needs in groups with a window.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn note_end_of_turn(&mut self, id: SequenceId) {
        let sequence = self.sequences.get(id);
        let len = sequence.len();
        for group in 0..self.groups.len() {
            if self.groups[group].window.is_some() {
                let first = self.groups[group].first_seen(len.saturating_sub(TURN_END));
                let pool = self.groups.pool(group);
                let hashes = sequence.hashes.iter().skip(first);
                hashes.for_each(|&hash| pool.note_end_of_turn(hash));
            }
        }
    }

    /// Returns the full blocks in the pools that a slower tier may copy, every block before those behind it.
    pub fn full_blocks(&self) -> Vec<LostBlock> {
        let mut all = Vec::new();
        for (group, of) in self.groups.iter().enumerate() {
            let found = of.pool.full().filter(|full| of.window.is_none() || full.ends_turn);
            all.extend(found.map(|full| of.lost(group, &full)));
        }
        all.sort_by_key(|lost| lost.link.index);
        all
    }

    fn check_room(&self, root: BlockHash, rows: &[Row]) -> Result<(), OutOfBlocks> {
        let hashes: Vec<_> = hashes(root, rows).collect();
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
