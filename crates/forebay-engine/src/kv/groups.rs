//! Layer groups with their pools, and what the pools owe each other.

use forebay_kv::BlockHash;
use forebay_ops::KV_BLOCK;

use super::manager::LostBlock;
use super::pool::{BlockId, Evicted, Pool};

/// A layer group: the layers with the same attention window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Number of positions that a token sees: itself and the `window - 1` before it. `None` means all.
    pub window: Option<usize>,
    /// Blocks in the pool, with the null block.
    pub blocks: usize,
    /// Number of those in the device's own memory, which come first and are given out first.
    pub on_device: usize,
    /// Size of one block over all layers of the group, in bytes.
    pub block_bytes: usize,
}

#[derive(Debug)]
pub(super) struct Group {
    pub window: Option<usize>,
    pub block_bytes: usize,
    pub pool: Pool,
}

impl Group {
    /// Returns the index of the first block that a token at position `len` sees, or any later token.
    pub fn first_seen(&self, len: usize) -> usize {
        self.window.map_or(0, |window| (len + 1).saturating_sub(window) / KV_BLOCK)
    }

    /// Returns a block that leaves the pool of this group, which has the index `group`.
    pub fn lost(&self, group: usize, evicted: &Evicted) -> LostBlock {
        let Evicted { block, content, uses, .. } = *evicted;
        let (hash, link, bytes) = (content.hash, content.link, self.block_bytes);
        LostBlock { group, block, hash, link, uses, bytes }
    }

    /// Returns the largest number of blocks that a sequence of up to `len` positions holds at a time, if a pass has up to
    /// `batch` of its rows.
    pub fn blocks_needed(&self, len: usize, batch: usize) -> usize {
        let all = len.div_ceil(KV_BLOCK);
        let Some(window) = self.window else { return all };
        // A run of n positions that starts anywhere touches up to 1 + ceil((n - 1) / 16) blocks.
        let positions = (window - 1).saturating_add(batch.max(1));
        all.min(1 + (positions - 1).div_ceil(KV_BLOCK))
    }
}

/// All layer groups.
#[derive(Debug)]
pub(super) struct Groups(Vec<Group>);

impl Groups {
    pub fn new(configs: &[GroupConfig]) -> Groups {
        let group = |config: &GroupConfig| {
            assert_ne!(config.window, Some(0), "a window of 0 sees nothing");
            let GroupConfig { window, blocks, on_device, block_bytes } = *config;
            Group { window, block_bytes, pool: Pool::new(blocks, on_device) }
        };
        Groups(configs.iter().map(group).collect())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> std::slice::Iter<'_, Group> {
        self.0.iter()
    }

    pub fn pool(&mut self, group: usize) -> &mut Pool {
        &mut self.0[group].pool
    }

    /// Takes a block of a group, if necessary a cached one, and gives it one reference. Appends what is evicted for it to
    /// `lost`.
    ///
    /// # Panics
    /// Panics if the group has no free and no cached block.
    pub fn take(&mut self, group: usize, lost: &mut Vec<LostBlock>) -> BlockId {
        let pool = &mut self.0[group].pool;
        if pool.free() == 0
            && let Some(evicted) = pool.evict()
        {
            self.note_lost(group, &evicted, lost);
            self.forget_elsewhere(group, evicted.content.hash, lost);
        }
        self.0[group].pool.take_free().expect("the caller has counted the available blocks")
    }

    /// Removes the content of a block with references from the index, so that it can be written. Appends it to `lost` if no
    /// other block has it.
    pub fn withdraw(&mut self, group: usize, block: BlockId, lost: &mut Vec<LostBlock>) {
        let pool = &mut self.0[group].pool;
        let Some(withdrawn) = pool.as_evicted(block) else { return };
        let hash = withdrawn.content.hash;
        pool.withdraw(block);
        if !pool.contains(hash) {
            self.note_lost(group, &withdrawn, lost);
            self.forget_elsewhere(group, hash, lost);
        }
    }

    /// Appends a block to `lost` if a later request could use it. In a group with a window, that is a block at the end of a
    /// turn.
    fn note_lost(&self, group: usize, evicted: &Evicted, lost: &mut Vec<LostBlock>) {
        if self.0[group].window.is_none() || evicted.ends_turn {
            lost.push(self.0[group].lost(group, evicted));
        }
    }

    /// Removes a content that a group has lost from the other groups, if it cannot be reached there any more.
    ///
    /// A hit beyond this block needs it in every group without a window. A hit before it does not see it.
    fn forget_elsewhere(&mut self, group: usize, hash: BlockHash, lost: &mut Vec<LostBlock>) {
        if self.0[group].window.is_some() {
            return;
        }
        for other in (0..self.0.len()).filter(|other| *other != group) {
            if let Some(evicted) = self.0[other].pool.forget(hash) {
                self.note_lost(other, &evicted, lost);
            }
        }
    }
}

impl std::ops::Index<usize> for Groups {
    type Output = Group;

    fn index(&self, group: usize) -> &Group {
        &self.0[group]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_bound_the_blocks_that_a_sequence_needs() {
        let group = |window| Group { window, block_bytes: 1, pool: Pool::new(1, 1) };
        assert_eq!(group(None).blocks_needed(33, 8), 3);
        assert_eq!(group(Some(100)).blocks_needed(0, 8), 0);
        for (window, batch) in
            [(1, 1), (1, 16), (1, 17), (2, 1), (16, 1), (17, 1), (18, 1), (128, 512)]
        {
            let group = group(Some(window));
            let held = |len: usize| (len + batch).div_ceil(KV_BLOCK) - group.first_seen(len);
            let most = (0..2000).map(held).max();
            assert_eq!(most, Some(group.blocks_needed(1 << 20, batch)), "{window} {batch}");
        }
    }

    #[test]
    fn a_window_includes_the_token_itself() {
        let first =
            |window, len| Group { window, block_bytes: 1, pool: Pool::new(1, 1) }.first_seen(len);
        assert_eq!(first(None, 1000), 0);
        assert_eq!((first(Some(1), 31), first(Some(1), 32)), (1, 2));
        assert_eq!((first(Some(17), 31), first(Some(17), 32)), (0, 1));
    }
}
