//! Sequences: their rows, hashes and tables.

use forebay_kv::{BlockHash, Link};
use forebay_ops::KV_BLOCK;

use super::content::{Content, Row};
use super::pool::BlockId;

/// A sequence of a [`BlockManager`](super::BlockManager).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId {
    slot: u32,
    /// Number of sequences that had this slot before. It unmasks ids of released sequences.
    generation: u32,
}

impl SequenceId {
    /// Stands for a sequence that has not begun.
    pub const NONE: SequenceId = SequenceId { slot: u32::MAX, generation: 0 };

    /// Returns a small number that no other living sequence has. Released numbers are used again.
    ///
    /// Backends can use it as the row of the sequence in an array of tables.
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

/// State of one sequence.
///
/// Invariant of a running sequence: in every group, the table's entries below `first_seen(len)` are absent, and all others
/// are present.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    generation: u32,
    exists: bool,
    /// The hash "before" the first block.
    pub root: BlockHash,
    /// One for each committed position.
    pub rows: Vec<Row>,
    /// One for each block whose 16 rows are committed.
    pub hashes: Vec<BlockHash>,
    /// For each layer group, the number of blocks that are absent although the next token sees them. Not 0 only while a
    /// sequence begins.
    pub absent: Vec<usize>,
    /// One table for each layer group.
    pub tables: Vec<Vec<BlockId>>,
}

impl Sequence {
    /// Returns the number of committed positions.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns the rows of a full block.
    pub fn block_rows(&self, index: usize) -> &[Row] {
        &self.rows[index * KV_BLOCK..(index + 1) * KV_BLOCK]
    }

    /// Returns the block of a table's entry, which is null if absent.
    pub fn entry(&self, group: usize, index: usize) -> BlockId {
        self.tables[group].get(index).copied().unwrap_or(BlockId::NULL)
    }

    /// Returns the content of a block whose 16 rows are known.
    pub fn content(&self, index: usize) -> Content {
        let previous = if index == 0 { self.root } else { self.hashes[index - 1] };
        Content::new(Link { previous, index: index as u32 }, self.block_rows(index))
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.hashes.clear();
        self.tables.iter_mut().for_each(Vec::clear);
        self.absent.fill(0);
    }
}

/// All sequences. Slots of released sequences keep their memory for new ones.
#[derive(Debug)]
pub(super) struct Sequences {
    slots: Vec<Sequence>,
    vacant: Vec<u32>,
    groups: usize,
}

impl Sequences {
    pub fn new(groups: usize) -> Sequences {
        Sequences { slots: Vec::new(), vacant: Vec::new(), groups }
    }

    /// Starts an empty sequence.
    pub fn start(&mut self, root: BlockHash) -> SequenceId {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            let tables = vec![Vec::new(); self.groups];
            let absent = vec![0; self.groups];
            self.slots.push(Sequence { tables, absent, ..Sequence::default() });
            self.slots.len() as u32 - 1
        });
        let sequence = &mut self.slots[slot as usize];
        sequence.exists = true;
        sequence.root = root;
        SequenceId { slot, generation: sequence.generation }
    }

    /// Ends a sequence, whose blocks are already released.
    pub fn end(&mut self, id: SequenceId) {
        let sequence = self.get_mut(id);
        sequence.clear();
        sequence.exists = false;
        sequence.generation = sequence.generation.wrapping_add(1);
        self.vacant.push(id.slot);
    }

    /// Returns two different sequences that exist.
    pub fn pair(&mut self, from: SequenceId, to: SequenceId) -> (&Sequence, &mut Sequence) {
        let found = self.slots.get_disjoint_mut([from.slot(), to.slot()]);
        let [from, to] = found.expect("two different sequences");
        (from, to)
    }

    /// Returns a sequence to change it.
    ///
    /// # Panics
    /// Panics if it is released.
    pub fn get_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.check(id);
        &mut self.slots[id.slot()]
    }

    /// Returns a sequence.
    ///
    /// # Panics
    /// Panics if it is released.
    pub fn get(&self, id: SequenceId) -> &Sequence {
        self.check(id);
        &self.slots[id.slot()]
    }

    fn check(&self, id: SequenceId) {
        let Sequence { generation, exists, .. } = &self.slots[id.slot()];
        assert!(*exists && *generation == id.generation, "{id:?} is released");
    }
}
