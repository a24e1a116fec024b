//! The block manager: room for new positions, and their commit.

use forebay_kv::{BlockHash, BlockKey, Link};
use forebay_ops::{KV_BLOCK, RowKind};

use super::content::Row;
use super::groups::{GroupConfig, Groups};
use super::pool::BlockId;
use super::sequence::{Sequence, SequenceId, Sequences};
use super::statistics::{GroupStatistics, KvStatistics};

/// Decides which blocks hold which positions of which sequences. The [module](super) explains how.
///
/// All decisions depend only on the calls made, never on time, addresses or random numbers.
#[derive(Debug)]
pub struct BlockManager {
    pub(super) groups: Groups,
    pub(super) sequences: Sequences,
    pub(super) statistics: KvStatistics,
    batch: usize,
    /// One number for each group, for searches.
    pub(super) marks: Vec<usize>,
}

/// An entry of a sequence's table that has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableEntry {
    pub sequence: SequenceId,
    /// Index of the layer group.
    pub group: usize,
    /// Index in the table: the entry is for positions from `16 * index` on.
    pub index: usize,
    /// The block, or [`BlockId::NULL`] if the entry is now absent.
    pub block: BlockId,
}

/// A block whose 16 positions must be copied to another one of the same group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// Index of the layer group.
    pub group: usize,
    pub from: BlockId,
    pub to: BlockId,
}

/// A block whose content leaves its pool. The memory of the block still has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostBlock {
    /// Index of the layer group.
    pub group: usize,
    pub block: BlockId,
    pub hash: BlockHash,
    pub link: Link,
    /// Number of sequences that found the block in its pool.
    pub uses: u64,
    /// Length of the block.
    pub bytes: usize,
}

impl LostBlock {
    /// Returns the key of the block in slower tiers.
    pub fn key(&self) -> BlockKey {
        BlockKey { hash: self.hash, group: self.group as u32 }
    }
}

/// Work for a backend before its next pass. Calls append to the lists, so one value serves all sequences of a pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Changes {
    /// Blocks that a slower tier may copy. Before anything else is done: afterwards they hold other content.
    pub lost: Vec<LostBlock>,
    /// Changed entries of tables, in order. A later entry replaces an earlier one.
    pub entries: Vec<TableEntry>,
    /// Copies, to be made in this order: a block that was copied from may be the target of a later copy.
    pub copies: Vec<BlockCopy>,
}

impl Changes {
    /// Empties the lists and keeps their memory.
    pub fn clear(&mut self) {
        self.lost.clear();
        self.entries.clear();
        self.copies.clear();
    }
}

/// A layer group has too few blocks that are free or cached. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("layer group {group} needs {needed} KV blocks and has {available}")]
pub struct OutOfBlocks {
    /// Index of the layer group.
    pub group: usize,
    pub needed: usize,
    pub available: usize,
}

impl BlockManager {
    /// Creates a manager without sequences.
    ///
    /// `batch` is the largest number of rows of one sequence in a pass.
    ///
    /// # Panics
    /// Panics if a window is 0, or a pool has no null block or more than 2^32 - 1 blocks.
    pub fn new(groups: &[GroupConfig], batch: usize) -> BlockManager {
        BlockManager {
            groups: Groups::new(groups),
            sequences: Sequences::new(groups.len()),
            statistics: KvStatistics::default(),
            batch,
            marks: Vec::with_capacity(groups.len()),
        }
    }

    /// Makes room for all positions below `upto`, and makes the blocks writable that will hold positions from the
    /// sequence's length on.
    ///
    /// Call this before every pass, also if earlier calls have reserved enough: a fork in between shares the last block.
    ///
    /// # Errors
    /// Returns an error if a group has too few blocks. Then nothing has changed, in any group.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn reserve(
        &mut self,
        id: SequenceId,
        upto: usize,
        changes: &mut Changes,
    ) -> Result<(), OutOfBlocks> {
        let sequence = self.sequences.get_mut(id);
        if upto <= sequence.len() {
            return Ok(());
        }
        let end = upto.div_ceil(KV_BLOCK);
        for (index, group) in self.groups.iter().enumerate() {
            let shared = partial_block(sequence, index)
                .is_some_and(|block| group.pool.references(block) > 1);
            let missing = end.saturating_sub(sequence.tables[index].len());
            let (needed, available) = (missing + usize::from(shared), group.pool.available());
            if needed > available {
                return Err(OutOfBlocks { group: index, needed, available });
            }
        }
        for group in 0..self.groups.len() {
            // New blocks come first. A copy that is not necessary is made only if another block is left for it.
            let sequence = self.sequences.get_mut(id);
            for index in sequence.tables[group].len()..end {
                let block = self.groups.take(group, &mut changes.lost);
                sequence.tables[group].push(block);
                changes.entries.push(TableEntry { sequence: id, group, index, block });
            }
            if let Some(block) = partial_block(sequence, group) {
                self.make_writable(id, group, block, changes);
            }
        }
        Ok(())
    }

    /// Gives the sequence a last block of its own, if it has none.
    fn make_writable(
        &mut self,
        id: SequenceId,
        group: usize,
        block: BlockId,
        changes: &mut Changes,
    ) {
        let pool = &self.groups[group].pool;
        if pool.is_writable(block) {
            return;
        }
        let alone = pool.references(block) == 1;
        if alone && (pool.has_equals(block) || pool.available() == 0) {
            // Without available blocks, no cached block depends on this one.
            self.groups.withdraw(group, block, &mut changes.lost);
            return;
        }
        let to = self.groups.take(group, &mut changes.lost);
        self.groups.pool(group).release(block);
        let sequence = self.sequences.get_mut(id);
        let index = sequence.len() / KV_BLOCK;
        sequence.tables[group][index] = to;
        changes.copies.push(BlockCopy { group, from: block, to });
        changes.entries.push(TableEntry { sequence: id, group, index, block: to });
    }

    /// Appends rows that a pass has computed, all of one kind.
    ///
    /// Blocks that are now full can be found by later prompts. Blocks that no later token sees lose the sequence's
    /// reference; their entries become absent.
    ///
    /// # Panics
    /// Panics if the sequence is released, or if the rows were not reserved after the last fork.
    pub fn commit(&mut self, id: SequenceId, tokens: &[u32], kind: RowKind, changes: &mut Changes) {
        let sequence = self.sequences.get_mut(id);
        if tokens.is_empty() {
            return;
        }
        let (from, to) = (sequence.len(), sequence.len() + tokens.len());
        for (index, group) in self.groups.iter().enumerate() {
            for block in from / KV_BLOCK..to.div_ceil(KV_BLOCK) {
                let writable = group.pool.is_writable(sequence.entry(index, block));
                assert!(writable, "{id:?}: block {block} of group {index} was not reserved");
            }
        }
        sequence.rows.extend(tokens.iter().map(|&token| Row { token, kind }));
        for index in from / KV_BLOCK..to / KV_BLOCK {
            let content = sequence.content(index);
            sequence.hashes.push(content.hash);
            for group in 0..self.groups.len() {
                let pool = self.groups.pool(group);
                let previous = index.checked_sub(1).map(|before| sequence.entry(group, before));
                let is_copied = previous.is_some_and(|block| pool.is_copied(block));
                pool.publish(sequence.entry(group, index), content, is_copied);
            }
        }
        for group in 0..self.groups.len() {
            let unseen = self.groups[group].first_seen(from)..self.groups[group].first_seen(to);
            for index in unseen {
                let block = std::mem::take(&mut sequence.tables[group][index]);
                self.groups.pool(group).release(block);
                let block = BlockId::NULL;
                changes.entries.push(TableEntry { sequence: id, group, index, block });
            }
        }
    }

    /// Returns the number of committed positions of a sequence.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn len(&self, id: SequenceId) -> usize {
        self.sequences.get(id).len()
    }

    /// Returns the table of a sequence in a layer group. It ends after the last reserved block.
    ///
    /// # Panics
    /// Panics if the sequence is released or the group does not exist.
    pub fn table(&self, id: SequenceId, group: usize) -> &[BlockId] {
        &self.sequences.get(id).tables[group]
    }

    /// Returns the number of layer groups.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Returns the number of blocks that can be given out in each layer group: free and cached ones.
    pub fn free_blocks(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|group| group.pool.available())
    }

    /// Returns the largest number of blocks that a sequence holds at a time in each layer group, from its first token to
    /// its last, without any prefix hit.
    ///
    /// A group with a window needs a bounded number: the window and one batch.
    pub fn blocks_needed(
        &self,
        prompt_tokens: usize,
        generated_tokens: usize,
    ) -> impl Iterator<Item = usize> {
        let batch = self.batch.min(prompt_tokens);
        let len = prompt_tokens.saturating_add(generated_tokens);
        self.groups.iter().map(move |group| group.blocks_needed(len, batch))
    }

    /// Returns the number of blocks that a sequence holds in each layer group, shared ones included.
    ///
    /// A scheduler can admit a sequence, compare [`BlockManager::blocks_needed`] less this with
    /// [`BlockManager::free_blocks`], and release the sequence again if it does not fit.
    ///
    /// # Panics
    /// Panics if the sequence is released.
    pub fn blocks_held(&self, id: SequenceId) -> impl Iterator<Item = usize> {
        let sequence = self.sequences.get(id);
        let held = |(group, table): (_, &Vec<_>)| {
            let seen = table.len().saturating_sub(self.groups[group].first_seen(sequence.len()));
            seen - sequence.absent[group]
        };
        sequence.tables.iter().enumerate().map(held)
    }

    /// Returns the hash of a full block, or `None` for others.
    ///
    /// # Panics
    /// Panics if the group or the block does not exist.
    pub fn block_hash(&self, group: usize, block: BlockId) -> Option<BlockHash> {
        self.groups[group].pool.hash(block)
    }

    /// Returns the size of one block of a layer group in bytes.
    ///
    /// # Panics
    /// Panics if the group does not exist.
    pub fn block_bytes(&self, group: usize) -> usize {
        self.groups[group].block_bytes
    }

    /// Returns the blocks of each layer group.
    pub fn group_statistics(&self) -> impl Iterator<Item = GroupStatistics> {
        self.groups.iter().map(|group| {
            let pool = &group.pool;
            GroupStatistics {
                total: pool.total(),
                free: pool.free(),
                cached: pool.cached(),
                referenced: pool.total() - pool.available(),
                evictions_total: pool.evictions(),
            }
        })
    }

    /// Returns what was counted over all groups.
    pub fn statistics(&self) -> KvStatistics {
        self.statistics
    }
}

/// Returns the last block of a sequence if some, but not all of its positions are committed.
fn partial_block(sequence: &Sequence, group: usize) -> Option<BlockId> {
    let partial = !sequence.len().is_multiple_of(KV_BLOCK);
    partial.then(|| sequence.entry(group, sequence.len() / KV_BLOCK))
}
