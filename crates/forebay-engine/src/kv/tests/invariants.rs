//! Checks of the invariants that hold after every call.

use std::collections::HashMap;

use forebay_ops::KV_BLOCK;

use super::super::BlockId;
use super::model::World;

impl World {
    pub fn check(&self) {
        self.check_references();
        self.check_sequences();
        self.check_full_blocks();
        self.check_order_of_eviction();
    }

    fn check_references(&self) {
        for (group, state) in self.manager.groups.iter().enumerate() {
            let mut references: HashMap<BlockId, u32> = HashMap::new();
            for sequence in &self.sequences {
                for &block in self.manager.table(sequence.id, group) {
                    *references.entry(block).or_default() += 1;
                }
            }
            let (pool, cached) = (&state.pool, state.pool.cached_list());
            let statistics = self.manager.group_statistics().nth(group).unwrap();
            assert_eq!(cached.len(), pool.cached());
            let parts = (statistics.free, statistics.cached, statistics.referenced);
            assert_eq!(parts.0 + parts.1 + parts.2, statistics.total);
            let mut found = (0, 0, 0);
            for block in pool.block_ids() {
                let count = references.get(&block).copied().unwrap_or(0);
                assert_eq!(pool.references(block), count);
                let is_free = pool.free_list().any(|free| free == block);
                let is_cached = cached.contains(&block);
                assert_eq!(u8::from(is_free) + u8::from(is_cached) + u8::from(count > 0), 1);
                assert!(!is_free || pool.hash(block).is_none());
                assert!(!is_cached || pool.hash(block).is_some());
                found.0 += usize::from(is_free);
                found.1 += usize::from(is_cached);
                found.2 += usize::from(count > 0);
            }
            assert_eq!(found, parts);
        }
    }

    /// Tables are what the changes say, and visible positions have the right content.
    fn check_sequences(&self) {
        for sequence in &self.sequences {
            assert_eq!(self.manager.len(sequence.id), sequence.histories.len());
            let held: Vec<usize> = self.manager.blocks_held(sequence.id).collect();
            for (group, held) in held.into_iter().enumerate() {
                let table = self.manager.table(sequence.id, group);
                let present = table.iter().filter(|&&block| block != BlockId::NULL);
                assert_eq!(present.count(), held);
                for index in 0..table.len().max(sequence.tables[group].len()) {
                    let entry = table.get(index).copied().unwrap_or_default();
                    assert_eq!(entry, sequence.entry(group, index));
                }
                for index in self.needed(group, sequence.histories.len()) {
                    let content = self.pools[group][sequence.entry(group, index).index()];
                    let expected = sequence.histories[index * KV_BLOCK..].iter();
                    assert!(expected.zip(&content).all(|(expected, found)| expected == found));
                }
            }
        }
    }

    /// A full block holds one history, which its hash identifies, and which is found by it.
    fn check_full_blocks(&self) {
        let (mut hashes, mut histories) = (HashMap::new(), HashMap::new());
        for (group, contents) in self.pools.iter().enumerate() {
            let pool = &self.manager.groups[group].pool;
            for block in pool.block_ids() {
                let Some(content) = pool.content(block) else { continue };
                let held = contents[block.index()];
                assert!(held.windows(2).all(|pair| self.histories.previous(pair[1]) == pair[0]));
                let rows = held.map(|history| self.histories.row(history));
                assert!((0..KV_BLOCK).all(|index| content.row(index) == rows[index]));
                let last = held[KV_BLOCK - 1];
                assert_eq!(*hashes.entry(content.hash).or_insert(last), last);
                assert_eq!(*histories.entry(last).or_insert(content.hash), content.hash);
                let found = pool.find(content.hash, &rows).expect("the index knows it");
                assert_eq!(contents[found.index()], held);
                assert!(found == block || pool.references(block) > 0, "equal blocks are cached");
            }
        }
    }

    /// Without a window, no block outlives the one before it. With a window, no block outlives its counterparts.
    fn check_order_of_eviction(&self) {
        let full = self.full_blocks();
        let whole: Vec<usize> =
            (0..self.groups.len()).filter(|&group| self.groups[group].window.is_none()).collect();
        for (group, contents) in self.pools.iter().enumerate() {
            let pool = &self.manager.groups[group].pool;
            let first_row = |block: BlockId| contents[block.index()][0];
            let last_row = |block: BlockId| contents[block.index()][KV_BLOCK - 1];
            for block in pool.block_ids().filter(|&block| pool.hash(block).is_some()) {
                assert!(whole.iter().all(|&other| full.contains(&(other, last_row(block)))));
                let before = self.histories.previous(first_row(block));
                if whole.contains(&group) && before != 0 {
                    assert!(full.contains(&(group, before)));
                }
            }
            if whole.contains(&group) {
                let cached = pool.cached_list();
                for (age, &block) in cached.iter().enumerate() {
                    let before = self.histories.previous(first_row(block));
                    assert!(cached[..age].iter().all(|&older| last_row(older) != before));
                }
            }
        }
    }
}
