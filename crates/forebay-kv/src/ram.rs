//! Index of a tier in host memory: which blocks it holds, in which slots, and which block is evicted next.
//!
//! This is pure logic. The caller owns the memory and copies the bytes.
//!
//! # Eviction
//!
//! The policy is greedy-dual: a block's rank is a clock plus its value, and the block of the lowest rank is evicted, which
//! sets the clock to that rank. So blocks age without being visited. The value is the work of computing the block again,
//! times the number of its uses. All blocks of a group have one size, so their size does not matter.
//!
//! In a group without a window, a hit needs all blocks from the first on. So only blocks with no block behind them are
//! evicted there, and with them their parts in the other groups. In a group with a window, any block may go.
//!
//! A leased block is not evicted.
//!
//! The uses of an evicted block are remembered for a while. A block that comes back was wanted while it was away, which counts as
//! a use, too. Otherwise a prefix that comes again and again, but never soon enough, would stay as worthless as one that comes
//! once.

use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::block::{BlockHash, BlockKey, Link};

/// Uses beyond this number add nothing to the value of a block. A block that was popular long ago would stay for ever.
const USES_MAX: u64 = 16;

/// Number of blocks before a block whose attention takes as long as everything else in the block's rows. The work of a block
/// is `1 + index / WORK_DOUBLES` in units of the first block's. 512 blocks are 8,192 positions, about right for models of
/// 4,096 numbers per row.
const WORK_DOUBLES: u64 = 512;

/// Evicted blocks that are remembered, as a multiple of those held.
const REMEMBERED: usize = 4;

/// Which blocks a tier in host memory holds.
#[derive(Debug)]
pub struct RamIndex {
    nodes: HashMap<BlockHash, Node>,
    /// Number of blocks directly behind a block, among those in the group without a window.
    followers: HashMap<BlockHash, u32>,
    groups: Vec<Group>,
    evicted: Remembered,
    clock: u64,
    /// Number of changes so far, which orders blocks of equal rank.
    changes: u64,
    statistics: RamStatistics,
}

/// The uses of evicted blocks, the oldest first.
#[derive(Debug, Default)]
struct Remembered {
    uses: HashMap<BlockHash, u64>,
    order: VecDeque<BlockHash>,
}

impl Remembered {
    /// Adds a block, and forgets the oldest ones beyond `most`.
    fn add(&mut self, hash: BlockHash, uses: u64, most: usize) {
        if self.uses.insert(hash, uses).is_none() {
            self.order.push_back(hash);
        }
        while self.uses.len() > most.max(1) {
            let oldest = self.order.pop_front().expect("every block has a place in the order");
            self.uses.remove(&oldest);
        }
        // Blocks that came back left their places.
        if self.order.len() > 2 * self.uses.len() + 16 {
            self.order.retain(|hash| self.uses.contains_key(hash));
        }
    }

    /// Returns the uses of a block that comes back.
    fn take(&mut self, hash: BlockHash) -> Option<u64> {
        self.uses.remove(&hash)
    }
}

#[derive(Debug)]
struct Group {
    is_windowed: bool,
    /// The blocks that may be evicted, the next one first.
    victims: BTreeSet<Victim>,
}

/// Rank, number of the change that gave the rank, and the block.
type Victim = (u64, u64, BlockHash);

/// The parts of a block in all groups.
#[derive(Debug)]
struct Node {
    link: Link,
    /// One for each group.
    slots: Vec<Option<usize>>,
    uses: u64,
    rank: u64,
    changed: u64,
    leases: u32,
}

/// A block that was evicted. Its slot is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evicted {
    pub key: BlockKey,
    pub link: Link,
    pub slot: usize,
    /// Number of sequences that found the block here.
    pub uses: u64,
}

/// What a [`RamIndex`] has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RamStatistics {
    /// Blocks held now, counted once in each group.
    pub blocks: u64,
    pub inserted: u64,
    pub evicted: u64,
}

impl RamIndex {
    /// Creates an index for layer groups, of which some have a window.
    ///
    /// # Panics
    /// Panics if several groups have no window.
    pub fn new(windowed: impl Iterator<Item = bool>) -> RamIndex {
        let group = |is_windowed| Group { is_windowed, victims: BTreeSet::new() };
        let groups: Vec<Group> = windowed.map(group).collect();
        assert!(groups.iter().filter(|group| !group.is_windowed).count() <= 1);
        RamIndex {
            nodes: HashMap::new(),
            followers: HashMap::new(),
            groups,
            evicted: Remembered::default(),
            clock: 0,
            changes: 0,
            statistics: RamStatistics::default(),
        }
    }

    /// Returns the slot of a block.
    pub fn find(&self, key: BlockKey) -> Option<usize> {
        self.nodes.get(&key.hash)?.slots[key.group as usize]
    }

    /// Adds a block that is in `slot`. So many sequences have used it before.
    ///
    /// # Panics
    /// Panics if the index has the block.
    pub fn insert(&mut self, key: BlockKey, link: Link, slot: usize, uses: u64) {
        let group = key.group as usize;
        let groups = self.groups.len();
        self.delist(key.hash);
        let before = self.evicted.take(key.hash).map_or(0, |uses| uses + 1);
        let node = self.nodes.entry(key.hash).or_insert_with(|| Node {
            link,
            slots: vec![None; groups],
            uses: 0,
            rank: 0,
            changed: 0,
            leases: 0,
        });
        assert!(node.slots[group].is_none(), "{key:?} is held already");
        node.slots[group] = Some(slot);
        node.uses = node.uses.max(uses + before);
        self.statistics.blocks += 1;
        self.statistics.inserted += 1;
        if !self.groups[group].is_windowed {
            self.delist(link.previous);
            *self.followers.entry(link.previous).or_default() += 1;
        }
        self.raise(key.hash);
    }

    /// Notes that a sequence uses a block, which raises its rank.
    pub fn note_use(&mut self, hash: BlockHash) {
        if let Some(node) = self.nodes.get_mut(&hash) {
            node.uses += 1;
            self.raise(hash);
        }
    }

    /// Raises a block to the rank that its value gives now.
    pub fn raise(&mut self, hash: BlockHash) {
        self.rerank(hash, |clock, node| {
            let work = WORK_DOUBLES + u64::from(node.link.index);
            clock + (1 + node.uses).min(USES_MAX) * work
        });
    }

    /// Gives a block the lowest rank, because a faster tier has a copy. [`RamIndex::raise`] undoes this.
    pub fn lower(&mut self, hash: BlockHash) {
        self.rerank(hash, |clock, _| clock);
    }

    fn rerank(&mut self, hash: BlockHash, rank: impl FnOnce(u64, &Node) -> u64) {
        self.delist(hash);
        if let Some(node) = self.nodes.get_mut(&hash) {
            self.changes += 1;
            (node.rank, node.changed) = (rank(self.clock, node), self.changes);
        }
        self.list(hash);
    }

    /// Keeps a block until [`RamIndex::end_lease`] is called as often as this.
    ///
    /// # Panics
    /// Panics if the index has no such block.
    pub fn lease(&mut self, hash: BlockHash) {
        self.delist(hash);
        self.nodes.get_mut(&hash).expect("a held block").leases += 1;
    }

    /// Ends a lease.
    ///
    /// # Panics
    /// Panics if the block is not leased.
    pub fn end_lease(&mut self, hash: BlockHash) {
        let node = self.nodes.get_mut(&hash).expect("leased blocks stay");
        node.leases = node.leases.checked_sub(1).expect("a leased block");
        self.list(hash);
    }

    /// Evicts the block of a group whose loss costs least, with its parts in the other groups if the group has no window.
    /// Appends what was evicted to `evicted`. Returns false if no block of the group may be evicted.
    pub fn evict(&mut self, group: usize, evicted: &mut Vec<Evicted>) -> bool {
        let Some(&(rank, _, hash)) = self.groups[group].victims.first() else { return false };
        self.clock = self.clock.max(rank);
        let all = !self.groups[group].is_windowed;
        self.remove(hash, (!all).then_some(group), evicted);
        true
    }

    /// Removes a block that turned out to be damaged or useless, in all groups. A leased block stays.
    pub fn forget(&mut self, hash: BlockHash, forgotten: &mut Vec<Evicted>) {
        if self.nodes.get(&hash).is_some_and(|node| node.leases == 0) {
            self.remove(hash, None, forgotten);
        }
    }

    /// Removes the part of a block in a group with a window, or all its parts.
    fn remove(&mut self, hash: BlockHash, only: Option<usize>, removed: &mut Vec<Evicted>) {
        self.delist(hash);
        let Some(mut node) = self.nodes.remove(&hash) else { return };
        let is_linked = |group: usize, node: &Node| {
            !self.groups[group].is_windowed && node.slots[group].is_some()
        };
        let unlinks = only.is_none() && (0..self.groups.len()).any(|group| is_linked(group, &node));
        for group in 0..self.groups.len() {
            if only.is_none_or(|only| only == group)
                && let Some(slot) = node.slots[group].take()
            {
                let key = BlockKey { hash, group: group as u32 };
                removed.push(Evicted { key, link: node.link, slot, uses: node.uses });
                self.statistics.blocks -= 1;
                self.statistics.evicted += 1;
            }
        }
        let previous = node.link.previous;
        if node.slots.iter().any(Option::is_some) {
            self.nodes.insert(hash, node);
            self.list(hash);
        } else {
            self.evicted.add(hash, node.uses, REMEMBERED * (self.nodes.len() + 1));
        }
        if unlinks && let Some(count) = self.followers.get_mut(&previous) {
            *count -= 1;
            if *count == 0 {
                self.followers.remove(&previous);
                self.list(previous);
            }
        }
    }

    /// Returns the blocks that are not leased, every block before those behind it.
    pub fn in_order(&self) -> Vec<Evicted> {
        let mut all: Vec<Evicted> = Vec::new();
        for (&hash, node) in self.nodes.iter().filter(|(_, node)| node.leases == 0) {
            for (group, slot) in node.slots.iter().enumerate() {
                let key = BlockKey { hash, group: group as u32 };
                let found = |&slot| Evicted { key, link: node.link, slot, uses: node.uses };
                all.extend(slot.as_ref().map(found));
            }
        }
        all.sort_unstable_by_key(|block| (block.link.index, block.key));
        all
    }

    /// Returns what the index has done.
    pub fn statistics(&self) -> RamStatistics {
        self.statistics
    }

    /// Takes a block out of the lists of those that may be evicted.
    fn delist(&mut self, hash: BlockHash) {
        let Some(node) = self.nodes.get(&hash) else { return };
        for group in &mut self.groups {
            group.victims.remove(&(node.rank, node.changed, hash));
        }
    }

    /// Puts a block into the lists of those that may be evicted, if it may.
    fn list(&mut self, hash: BlockHash) {
        let Some(node) = self.nodes.get(&hash).filter(|node| node.leases == 0) else { return };
        let has_followers = self.followers.contains_key(&hash);
        for (group, slot) in self.groups.iter_mut().zip(&node.slots) {
            if slot.is_some() && (group.is_windowed || !has_followers) {
                group.victims.insert((node.rank, node.changed, hash));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hash(number: u64) -> BlockHash {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&number.to_be_bytes());
        BlockHash(bytes)
    }

    fn key(number: u64, group: u32) -> BlockKey {
        BlockKey { hash: hash(number), group }
    }

    /// Adds the blocks `first..first + count` of a chain to group 0. Slots are numbers of blocks.
    fn chain(index: &mut RamIndex, root: u64, first: u64, count: u64) {
        for number in first..first + count {
            let previous = if number == first { root } else { number - 1 };
            let link = Link { previous: hash(previous), index: (number - first) as u32 };
            index.insert(key(number, 0), link, number as usize, 0);
        }
    }

    fn evict(index: &mut RamIndex, group: usize) -> Vec<usize> {
        let mut evicted = Vec::new();
        index.evict(group, &mut evicted);
        evicted.iter().map(|block| block.slot).collect()
    }

    #[test]
    fn the_end_of_the_least_used_chain_goes_first() {
        let mut index = RamIndex::new([false].into_iter());
        chain(&mut index, 0, 10, 3);
        chain(&mut index, 0, 20, 3);
        (10..13).for_each(|number| index.note_use(hash(number)));
        let order: Vec<_> = (0..7).flat_map(|_| evict(&mut index, 0)).collect();
        assert_eq!(order, [22, 21, 20, 12, 11, 10]);
        assert!(index.nodes.is_empty() && index.followers.is_empty());
        let RamStatistics { blocks, inserted, evicted } = index.statistics();
        assert_eq!((blocks, inserted, evicted), (0, 6, 6));
    }

    #[test]
    fn old_uses_do_not_keep_a_block_for_ever() {
        let mut index = RamIndex::new([false].into_iter());
        chain(&mut index, 0, 1, 1);
        (0..100).for_each(|_| index.note_use(hash(1)));
        let mut rounds = 0;
        chain(&mut index, 0, 100, 1);
        while index.find(key(1, 0)).is_some() {
            rounds += 1;
            chain(&mut index, 0, 100 + rounds, 1);
            evict(&mut index, 0);
        }
        assert!((10..40).contains(&rounds), "{rounds}");
    }

    #[test]
    fn a_block_that_comes_back_was_wanted_while_it_was_away() {
        let mut index = RamIndex::new([false].into_iter());
        chain(&mut index, 0, 1, 1);
        chain(&mut index, 0, 2, 1);
        assert_eq!(evict(&mut index, 0), [1]);
        chain(&mut index, 0, 1, 1);
        chain(&mut index, 0, 3, 1);
        // Block 1 is older than block 3, and worth more.
        assert_eq!(evict(&mut index, 0), [2]);
        assert_eq!(evict(&mut index, 0), [3]);
        // What is remembered is bounded by what is held.
        for number in 10..200 {
            chain(&mut index, 0, number, 1);
            evict(&mut index, 0);
        }
        let Remembered { uses, order } = &index.evicted;
        assert!(uses.len() <= 2 * REMEMBERED && order.len() <= 4 * REMEMBERED + 17);
    }

    #[test]
    fn leases_and_copies_elsewhere_change_what_goes() {
        let mut index = RamIndex::new([false].into_iter());
        for number in 1..=3 {
            chain(&mut index, 0, number, 1);
        }
        index.lease(hash(1));
        index.lower(hash(3));
        assert_eq!(evict(&mut index, 0), [3]);
        assert_eq!(evict(&mut index, 0), [2]);
        assert!(evict(&mut index, 0).is_empty());
        index.end_lease(hash(1));
        assert_eq!(evict(&mut index, 0), [1]);
    }

    #[test]
    fn windowed_parts_go_alone_or_with_the_whole_block() {
        let mut index = RamIndex::new([false, true].into_iter());
        chain(&mut index, 0, 1, 2);
        for number in 1..=2 {
            let link = Link { previous: hash(number - 1), index: number as u32 - 1 };
            index.insert(key(number, 1), link, 100 + number as usize, 0);
        }
        assert_eq!(evict(&mut index, 1), [101]);
        assert_eq!(index.find(key(1, 0)), Some(1));
        assert_eq!(evict(&mut index, 0), [2, 102]);
        assert_eq!(evict(&mut index, 0), [1]);
        assert!(index.nodes.is_empty());
    }

    proptest! {
        /// Whatever happens: a block with followers, or leased, is not evicted, and every block can go in the end.
        #[test]
        fn nothing_that_is_needed_goes(
            steps in proptest::collection::vec((0_u8..7, 0_u64..24, 0_u32..2), 1..200)
        ) {
            let mut index = RamIndex::new([false, true].into_iter());
            // Block n follows block n / 2, so that chains branch.
            let link = |number: u64| {
                Link { previous: hash(number / 2), index: 64 - number.leading_zeros() }
            };
            let mut leased: HashMap<u64, u32> = HashMap::new();
            for (what, number, group) in steps {
                let number = number + 1;
                let held = index.nodes.contains_key(&hash(number));
                match what {
                    0 | 1 if index.find(key(number, group)).is_none() => {
                        index.insert(key(number, group), link(number), number as usize, 0);
                    }
                    2 => index.note_use(hash(number)),
                    3 => index.lower(hash(number)),
                    4 if held => {
                        index.lease(hash(number));
                        *leased.entry(number).or_default() += 1;
                    }
                    5 => {
                        if let Some(count) = leased.get_mut(&number).filter(|count| **count > 0) {
                            *count -= 1;
                            index.end_lease(hash(number));
                        }
                    }
                    6 => {
                        let mut evicted = Vec::new();
                        index.evict(group as usize, &mut evicted);
                        for Evicted { key: gone, .. } in evicted {
                            let is_gone = |number: &u64| hash(*number) == gone.hash;
                            let number = (1..25).find(is_gone).unwrap();
                            prop_assert_eq!(leased.get(&number).copied().unwrap_or(0), 0);
                            if gone.group == 0 {
                                for behind in [2 * number, 2 * number + 1] {
                                    prop_assert_eq!(index.find(key(behind, 0)), None);
                                }
                            }
                        }
                    }
                    _ => {}
                }
            }
            for (number, count) in leased {
                (0..count).for_each(|_| index.end_lease(hash(number)));
            }
            let mut evicted = Vec::new();
            while index.evict(0, &mut evicted) || index.evict(1, &mut evicted) {}
            prop_assert!(index.nodes.is_empty() && index.followers.is_empty());
            prop_assert_eq!(index.statistics().blocks, 0);
        }
    }
}
