//! Pool of the blocks of one layer group: references, cached blocks and the index by hash.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use forebay_kv::BlockHash;

use super::content::{Content, Row};

/// Number of a block in the pool of a layer group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct BlockId(u32);

impl BlockId {
    /// The null block, which is never given out. In a table, it means that the entry is absent.
    pub const NULL: BlockId = BlockId(0);

    /// Returns the position of the block in its pool, in blocks.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Hasher for keys that already are hashes.
#[derive(Default)]
struct KeyIsHash(u64);

impl Hasher for KeyIsHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, key: &[u8]) {
        let (first, _) = key.split_first_chunk().expect("hashes have 16 bytes");
        self.0 = u64::from_le_bytes(*first);
    }

    // The length of the array, which is always the same.
    fn write_usize(&mut self, _: usize) {}
}

/// A block that was cached and is free now. Its memory still has the content.
#[derive(Debug, Clone, Copy)]
pub(super) struct Evicted {
    pub block: BlockId,
    pub content: Content,
    pub ends_turn: bool,
    /// Number of sequences that found the block here.
    pub uses: u64,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    references: u32,
    /// Rows of a full block that the index knows.
    content: Option<Content>,
    /// True if a later turn of the conversation may begin where this block ends.
    ends_turn: bool,
    /// Number of sequences that found the content here.
    uses: u64,
    /// True if the content, or that of a block before it, came from host memory, which is likely to have it still. Equal blocks
    /// agree, and no block without this is behind one with it: so prefixes are evicted from their ends.
    is_copied: bool,
    /// [`Pool::releases`] when the block was cached.
    cached_at: u64,
    /// Neighbours in a ring. A cached block is in one of the two rings of cached blocks: that of copied ones, which starts and ends
    /// at [`Pool::copied_end`], or that of others, which does so at the null block. A full block with references is in the ring of
    /// blocks with the same content. Any other block is alone.
    previous: BlockId,
    next: BlockId,
}

/// Number of times that all blocks of a pool can be replaced before a cached block without a copy is evicted although there are
/// copied ones. Evicting it costs a copy and room in host memory, about ten times as much as the return of a copied one.
const PATIENCE: u64 = 8;

/// Blocks of one layer group.
///
/// Invariant: if a block with some content has references, no block with the same content is cached. So a cached block has
/// no equals, and one pair of links is enough for both rings.
#[derive(Debug)]
pub(super) struct Pool {
    blocks: Vec<Block>,
    /// Blocks without content and references. The last one is given out first.
    free: Vec<BlockId>,
    /// The same for blocks outside the device's own memory, which are given out when no others are free.
    free_outside: Vec<BlockId>,
    /// The first block outside the device's own memory.
    outside: BlockId,
    cached: usize,
    /// Entry behind the last block, which is the end of the ring of copied blocks.
    copied_end: BlockId,
    /// Number of blocks that were cached so far.
    releases: u64,
    /// One of the blocks with a content. It is never iterated over, because the order is not deterministic.
    index: HashMap<BlockHash, BlockId, BuildHasherDefault<KeyIsHash>>,
    evictions: u64,
}

impl Pool {
    /// Creates a pool of `blocks` blocks, of which the first is the null block. Those from `on_device` on are outside the device's
    /// own memory.
    pub fn new(blocks: usize, on_device: usize) -> Pool {
        assert!((1..=blocks).contains(&on_device), "a pool needs a null block");
        let count = u32::try_from(blocks).expect("block numbers have 32 bits");
        let outside = u32::try_from(on_device).expect("block numbers have 32 bits");
        let block = |index| {
            let own = BlockId(index);
            Block {
                references: 0,
                content: None,
                ends_turn: false,
                uses: 0,
                is_copied: false,
                cached_at: 0,
                previous: own,
                next: own,
            }
        };
        Pool {
            blocks: (0..=count).map(block).collect(),
            free: (1..outside).rev().map(BlockId).collect(),
            free_outside: (outside..count).rev().map(BlockId).collect(),
            outside: BlockId(outside),
            cached: 0,
            copied_end: BlockId(count),
            releases: 0,
            // A map that is at most half full removes the traces of removed keys in place.
            index: HashMap::with_capacity_and_hasher(2 * blocks, BuildHasherDefault::default()),
            evictions: 0,
        }
    }

    /// Returns the number of blocks without the null block.
    pub fn total(&self) -> usize {
        self.copied_end.index() - 1
    }

    pub fn free(&self) -> usize {
        self.free.len() + self.free_outside.len()
    }

    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Returns the number of blocks that can be given out: free and cached ones.
    pub fn available(&self) -> usize {
        self.free() + self.cached
    }

    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    pub fn references(&self, block: BlockId) -> u32 {
        self.blocks[block.index()].references
    }

    pub fn hash(&self, block: BlockId) -> Option<BlockHash> {
        self.blocks[block.index()].content.map(|content| content.hash)
    }

    /// Returns true if a sequence that holds the block may write into it.
    pub fn is_writable(&self, block: BlockId) -> bool {
        let Block { references, content, .. } = &self.blocks[block.index()];
        *references == 1 && content.is_none()
    }

    /// Returns true if other referenced blocks have the same content.
    pub fn has_equals(&self, block: BlockId) -> bool {
        let Block { references, next, .. } = self.blocks[block.index()];
        references > 0 && next != block
    }

    pub fn contains(&self, hash: BlockHash) -> bool {
        self.index.contains_key(&hash)
    }

    /// Returns a full block with these rows and this hash.
    pub fn find(&self, hash: BlockHash, rows: &[Row]) -> Option<BlockId> {
        let found = *self.index.get(&hash)?;
        self.blocks[found.index()]
            .content
            .is_some_and(|content| content.holds(rows))
            .then_some(found)
    }

    /// Adds a reference to a full block.
    pub fn acquire(&mut self, block: BlockId) {
        if self.blocks[block.index()].references == 0 {
            self.unlink(block);
            self.cached -= 1;
        }
        self.blocks[block.index()].references += 1;
    }

    /// Counts a sequence that found the block.
    pub fn note_use(&mut self, block: BlockId) {
        self.blocks[block.index()].uses += 1;
    }

    /// Adds a reference to a block that has one already.
    pub fn share(&mut self, block: BlockId) {
        debug_assert!(self.references(block) > 0);
        self.blocks[block.index()].references += 1;
    }

    /// Drops a reference. After the last one, the block is cached if nothing else holds its content, otherwise free.
    pub fn release(&mut self, block: BlockId) {
        debug_assert_ne!(block, BlockId::NULL);
        let has_equals = self.has_equals(block);
        let Block { references, content, .. } = &mut self.blocks[block.index()];
        *references -= 1;
        if *references > 0 {
            return;
        }
        if content.is_some() && !has_equals {
            self.releases += 1;
            let of = &mut self.blocks[block.index()];
            of.cached_at = self.releases;
            let end = if of.is_copied { self.copied_end } else { BlockId::NULL };
            self.link_before(block, end);
            self.cached += 1;
        } else {
            self.withdraw(block);
            self.put_back(block);
        }
    }

    /// Notes that a block is free.
    fn put_back(&mut self, block: BlockId) {
        let free = if block < self.outside { &mut self.free } else { &mut self.free_outside };
        free.push(block);
    }

    /// Returns true if the content of a block, or that of a block before it, came from host memory.
    pub fn is_copied(&self, block: BlockId) -> bool {
        self.blocks[block.index()].is_copied
    }

    /// Makes a written block full: its content can be found from now on. `is_copied` tells that it came from host memory, or that
    /// the block before it did.
    pub fn publish(&mut self, block: BlockId, content: Content, mut is_copied: bool) {
        debug_assert!(self.is_writable(block));
        if let Some(&equal) = self.index.get(&content.hash) {
            if self.blocks[equal.index()].content != Some(content) {
                // A collision of hashes. The block stays private.
                return;
            }
            is_copied &= self.is_copied(equal);
            if self.references(equal) == 0 {
                let evicted = self.forget(content.hash);
                self.blocks[block.index()].ends_turn = evicted.is_some_and(|of| of.ends_turn);
            } else {
                self.link_before(block, equal);
            }
        }
        self.set_copied(block, is_copied);
        self.blocks[block.index()].content = Some(content);
        self.index.entry(content.hash).or_insert(block);
    }

    /// Sets whether a block and its equals count as copied.
    fn set_copied(&mut self, block: BlockId, is_copied: bool) {
        let mut at = block;
        loop {
            self.blocks[at.index()].is_copied = is_copied;
            at = self.blocks[at.index()].next;
            if at == block {
                return;
            }
        }
    }

    /// Takes a free block and gives it one reference.
    pub fn take_free(&mut self) -> Option<BlockId> {
        let block = self.free.pop().or_else(|| self.free_outside.pop())?;
        self.blocks[block.index()].references = 1;
        Some(block)
    }

    /// Makes the least recently used cached block free, of the copied ones if there are any, and returns what is lost. Others go
    /// first only after a long time.
    pub fn evict(&mut self) -> Option<Evicted> {
        let [copied, other] = [self.copied_end, BlockId::NULL].map(|end| {
            let oldest = self.blocks[end.index()].next;
            self.hash(oldest).map(|hash| (hash, self.blocks[oldest.index()].cached_at))
        });
        let waits = |since: u64| {
            let is_young = self.releases - since <= PATIENCE * self.total() as u64;
            copied.is_some_and(|(_, copied)| is_young || copied < since)
        };
        let (hash, _) = other.filter(|(_, since)| !waits(*since)).or(copied)?;
        let evicted = self.forget(hash);
        self.evictions += 1;
        evicted
    }

    /// Returns a block with its content as it would be evicted.
    pub fn as_evicted(&self, block: BlockId) -> Option<Evicted> {
        let Block { content, ends_turn, uses, .. } = self.blocks[block.index()];
        content.map(|content| Evicted { block, content, ends_turn, uses })
    }

    /// Notes that a later turn may begin where a block with this hash ends.
    pub fn note_end_of_turn(&mut self, hash: BlockHash) {
        if let Some(&block) = self.index.get(&hash) {
            self.blocks[block.index()].ends_turn = true;
        }
    }

    /// Removes the content of a block with references from the index.
    pub fn withdraw(&mut self, block: BlockId) {
        let next = self.blocks[block.index()].next;
        self.unlink(block);
        let of = &mut self.blocks[block.index()];
        (of.ends_turn, of.uses, of.is_copied) = (false, 0, false);
        let Some(content) = self.blocks[block.index()].content.take() else { return };
        if self.index.get(&content.hash) == Some(&block) {
            if next == block {
                self.index.remove(&content.hash);
            } else {
                self.index.insert(content.hash, next);
            }
        }
    }

    /// Removes all blocks with a hash from the index. A cached block becomes free, and is returned.
    pub fn forget(&mut self, hash: BlockHash) -> Option<Evicted> {
        let mut evicted = None;
        while let Some(&block) = self.index.get(&hash) {
            if self.references(block) == 0 {
                evicted = self.as_evicted(block);
                self.unlink(block);
                self.cached -= 1;
                self.put_back(block);
            }
            self.withdraw(block);
        }
        evicted
    }

    /// Returns the blocks with content, one for each content.
    pub fn full(&self) -> impl Iterator<Item = Evicted> {
        let blocks = (1..self.copied_end.0).map(BlockId);
        let full = blocks.filter_map(|block| self.as_evicted(block));
        full.filter(|full| self.index.get(&full.content.hash) == Some(&full.block))
    }

    fn unlink(&mut self, block: BlockId) {
        let Block { previous, next, .. } = self.blocks[block.index()];
        self.blocks[previous.index()].next = next;
        self.blocks[next.index()].previous = previous;
        let own = &mut self.blocks[block.index()];
        (own.previous, own.next) = (block, block);
    }

    /// Puts a block that is alone before another one in its ring.
    fn link_before(&mut self, block: BlockId, next: BlockId) {
        let previous = std::mem::replace(&mut self.blocks[next.index()].previous, block);
        self.blocks[previous.index()].next = block;
        let own = &mut self.blocks[block.index()];
        (own.previous, own.next) = (previous, next);
    }

    #[cfg(test)]
    pub fn free_list(&self) -> impl Iterator<Item = BlockId> + use<'_> {
        self.free.iter().chain(&self.free_outside).copied()
    }

    /// Returns the cached blocks: copied ones first, each least recently used first.
    #[cfg(test)]
    pub fn cached_list(&self) -> Vec<BlockId> {
        let next = |block: &BlockId| Some(self.blocks[block.index()].next);
        let of_ring = |end: BlockId| {
            std::iter::successors(next(&end), next).take_while(move |block| *block != end)
        };
        of_ring(self.copied_end).chain(of_ring(BlockId::NULL)).collect()
    }

    #[cfg(test)]
    pub fn content(&self, block: BlockId) -> Option<&Content> {
        self.blocks[block.index()].content.as_ref()
    }

    #[cfg(test)]
    pub fn block_ids(&self) -> impl Iterator<Item = BlockId> + use<> {
        (1..self.copied_end.0).map(BlockId)
    }
}
