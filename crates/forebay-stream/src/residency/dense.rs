//! Dense blocks: pinned ones, and the ring that the others go round in, read ahead in the order of execution.

use forebay_store::{BlockLayout, Priority};

use super::{Place, READS_MAX, Residency};
use crate::blocks::BlockId;
use crate::error::StreamError;
use crate::slots::{Lease, Purpose, SlotIndex};

/// State of the dense blocks.
pub(super) struct DenseBlocks {
    pub layouts: Vec<BlockLayout>,
    pub places: Vec<Place>,
    /// The slot of a pinned block.
    pub ram_slots: Vec<Option<SlotIndex>>,
    ring: Vec<SlotIndex>,
    /// The block that was asked for last.
    current: u32,
    /// Execution begins anew after this many blocks.
    cycle: u32,
}

impl DenseBlocks {
    pub fn new(
        layouts: Vec<BlockLayout>,
        ram_slots: Vec<Option<SlotIndex>>,
        ring: Vec<SlotIndex>,
    ) -> DenseBlocks {
        let blocks = layouts.len() as u32;
        let places = vec![Place::Absent; layouts.len()];
        DenseBlocks { layouts, places, ram_slots, ring, current: 0, cycle: blocks }
    }

    /// The block of the ring that is wanted next after `index`.
    fn next_streamed(&self, index: u32) -> Option<u32> {
        let after = (index + 1..self.cycle).chain(0..(index + 1).min(self.cycle));
        after.into_iter().find(|&next| self.ram_slots[next as usize].is_none())
    }

    /// Whether a block is one of the next few of the ring, for which slots are meant.
    fn is_ahead(&self, block: Option<BlockId>) -> bool {
        let Some(BlockId::Dense(block)) = block else { return false };
        let mut next = self.current;
        (0..self.ring.len()).any(|_| match self.next_streamed(next) {
            Some(index) => {
                next = index;
                index == block
            }
            None => false,
        })
    }
}

impl Residency {
    /// Leases a dense block, waiting for it where needed, and reads the next ones ahead.
    ///
    /// # Errors
    /// [`StreamError::Read`] when it cannot be read, [`StreamError::LeasesHoldAllSlots`] when the caller still leases
    /// as many blocks of the ring as it has slots.
    pub fn dense(&mut self, index: u32) -> Result<Lease, StreamError> {
        let block = BlockId::Dense(index);
        if index as usize >= self.dense.places.len() {
            return Err(StreamError::NoSuchBlock { block });
        }
        self.poll()?;
        self.dense.current = index;
        loop {
            match self.dense.places[index as usize] {
                Place::Present(slot) => {
                    let lease = self.slots[slot as usize].lease(slot, block);
                    self.read_dense_ahead();
                    return Ok(lease);
                }
                Place::Reading(slot) => self.demand_read(slot),
                Place::Absent => match self.slot_for_dense(index)? {
                    Some(slot) => {
                        self.start_read(block, slot, Purpose::Demand, Priority::Demand);
                    }
                    None => {
                        self.wait()?;
                        continue;
                    }
                },
            }
            self.read_dense_ahead();
            let _span = tracing::trace_span!("layer_wait", block = index).entered();
            self.wait()?;
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
        }
    }

    /// As [`Residency::dense`], but never waits: `None` while the block is on its way, or leases hold all slots that it might
    /// be read into.
    ///
    /// # Errors
    /// Errors of the engine. A failed read is tried again, and told when somebody waits for it.
    pub fn dense_if_here(&mut self, index: u32) -> Result<Option<Lease>, StreamError> {
        let block = BlockId::Dense(index);
        if index as usize >= self.dense.places.len() {
            return Err(StreamError::NoSuchBlock { block });
        }
        self.poll()?;
        self.dense.current = index;
        if self.dense.places[index as usize] == Place::Absent {
            let ram_slot = self.dense.ram_slots[index as usize];
            if let Some(slot) = ram_slot.or_else(|| self.idle_ring_slot()) {
                self.start_read(block, slot, Purpose::Ahead, Priority::ReadAhead);
            }
        }
        let lease = self.dense_if_present(index);
        self.read_dense_ahead();
        Ok(lease)
    }

    /// A lease of a dense block if it is in memory; never waits and starts nothing.
    pub fn dense_if_present(&self, index: u32) -> Option<Lease> {
        match self.dense.places.get(index as usize)? {
            Place::Present(slot) => {
                Some(self.slots[*slot as usize].lease(*slot, BlockId::Dense(index)))
            }
            Place::Reading(_) | Place::Absent => None,
        }
    }

    /// Says that execution begins anew after the first `blocks` dense blocks, until told otherwise: all but the last
    /// batch of a prompt leave out the head, which then need not be read ahead.
    pub fn set_dense_cycle(&mut self, blocks: usize) {
        self.dense.cycle = blocks.clamp(1, self.dense.places.len().max(1)) as u32;
    }

    /// Starts the reads of the next blocks of the ring, as far as slots are idle.
    pub(super) fn read_dense_ahead(&mut self) {
        let mut index = self.dense.current;
        for _ in 0..self.dense.ring.len() {
            let Some(next) = self.dense.next_streamed(index) else { return };
            index = next;
            if self.dense.places[next as usize] != Place::Absent {
                continue;
            }
            if next == self.dense.current || self.engine.in_flight() >= READS_MAX {
                return;
            }
            let Some(slot) = self.idle_ring_slot() else { return };
            self.start_read(BlockId::Dense(next), slot, Purpose::Ahead, Priority::ReadAhead);
        }
    }

    /// A slot of the ring whose block is not one of the next.
    fn idle_ring_slot(&self) -> Option<SlotIndex> {
        self.dense.ring.iter().copied().find(|&slot| {
            let slot = &self.slots[slot as usize];
            slot.is_idle() && !self.dense.is_ahead(slot.block)
        })
    }

    /// The slot for a block that is needed now; `None`: after a wait.
    fn slot_for_dense(&mut self, index: u32) -> Result<Option<SlotIndex>, StreamError> {
        let ram_slot = self.dense.ram_slots[index as usize];
        if ram_slot.is_some() {
            return Ok(ram_slot);
        }
        if let Some(slot) = self.idle_ring_slot() {
            return Ok(Some(slot));
        }
        let ring = self.dense.ring.iter().copied();
        let idle = ring.clone().find(|&slot| self.slots[slot as usize].is_idle());
        if idle.is_some() {
            return Ok(idle);
        }
        // Read-ahead for a future that did not come.
        match ring.clone().find(|&slot| self.slots[slot as usize].read.is_some()) {
            Some(slot) => {
                self.abandon_read(slot);
                Ok(None)
            }
            None => Err(StreamError::LeasesHoldAllSlots { block: BlockId::Dense(index) }),
        }
    }
}
