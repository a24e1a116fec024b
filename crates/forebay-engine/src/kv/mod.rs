//! Block manager of the paged KV cache: which block of a pool holds which positions of which sequence.
//!
//! This is pure logic. It touches no device and does no I/O. Backends see block numbers only.
//!
//! # Terms
//!
//! | term | meaning |
//! | --- | --- |
//! | layer group | the layers with the same attention window; each group has its own pool |
//! | KV block | room for keys and values of [`KV_BLOCK`] positions in all layers of one group |
//! | pool | the blocks of a group, fixed in number; block 0 is the null block and is never given out |
//! | table | the blocks of a sequence in a group: entry `i` holds positions `16 i` to `16 i + 15`, and 0 means absent |
//! | row | one position of a sequence: a token, and whether it was read as prompt or generated |
//! | hash | the identity of a full block: a hash of its 16 rows and of all rows before them |
//! | root | stands for the hash before a sequence's first block: what keys and values depend on beside rows |
//!
//! # A block's life
//!
//! | state | references | indexed by hash | leaves this state when |
//! | --- | --- | --- | --- |
//! | free | 0 | no | a sequence reserves it |
//! | written | 1 or more | no | its 16 rows are committed, or its last reference goes |
//! | full | 1 or more | yes | its last reference goes |
//! | cached | 0 | yes | a sequence finds it by its hash, or it is evicted |
//!
//! - **Full blocks are immutable.** A sequence that truncates into a full block and goes on writes into a copy. The same
//!   holds for a block with several references, which a fork leaves behind. A full block that only this sequence references
//!   is written in place, and loses its hash, in two cases: another block has the same content, or the pool has no block
//!   for a copy.
//! - **Equal blocks.** Two sequences that read the same prompt at the same time fill equal blocks. Both keep theirs,
//!   because replacing a table entry could change a pass that is already under way. The index links equal blocks with
//!   each other. Only one of them is kept when no sequence references them any more.
//! - **Eviction** takes the least recently used cached block. References are dropped from the end of a sequence to its
//!   start, so a block is always evicted before the blocks that it depends on. A block that leaves a group without a
//!   window also leaves all other groups: no prefix hit could reach it there.
//!
//! # What a token sees
//!
//! A token at position `p` in a group with window `w` sees `p` and the `w - 1` positions before it. A sequence of length
//! `n` therefore keeps blocks from position `n + 1 - w` on. Earlier blocks lose its reference after each commit and stay
//! cached. Without a window, a sequence keeps all blocks.
//!
//! # Order of work
//!
//! For each pass: [`BlockManager::reserve`] for every sequence, apply the [`Changes`], run the pass,
//! [`BlockManager::commit`] for every sequence. [`Changes::lost`] come before everything else. [`Changes::copies`], blocks to
//! save ([`BlockManager::blocks_to_save`]) and blocks to restore ([`BlockManager::restore`]) must be moved in the order of the
//! calls that reported them, and before the next pass. A block may appear in several of them.

mod admission;
mod branching;
mod content;
mod groups;
mod manager;
mod pool;
mod saving;
mod sequence;
mod statistics;
#[cfg(test)]
mod tests;

pub use admission::Admission;
pub use content::Row;
pub use groups::GroupConfig;
pub use manager::{BlockCopy, BlockManager, Changes, LostBlock, OutOfBlocks, TableEntry};
pub use pool::BlockId;
pub use saving::SavedBlock;
pub use sequence::SequenceId;
pub use statistics::{GroupStatistics, KvStatistics};
