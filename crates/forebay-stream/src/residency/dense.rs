//! Dense blocks: pinned blocks, and the ring through which the other blocks are streamed in execution order.

use std::ops::Range;

use forebay_store::{BlockLayout, Priority};

use super::{Place, READS_MAX, Residency};
use crate::blocks::BlockId;
use crate::error::StreamError;
use crate::slots::{Lease, Purpose, SlotIndex};

/// State of the dense blocks.
pub(super) struct DenseBlocks {
    pub layouts: Vec<BlockLayout>,
    pub places: Vec<Place>,
    /// Slot of each block; `None` for a block that is not pinned.
    pub ram_slots: Vec<Option<SlotIndex>>,
    ring: Vec<SlotIndex>,
    /// The block that the caller requested last.
    current: u32,
    /// Number of blocks after which execution starts again at block 0.
    cycle: u32,
    /// A block that is not used in its place, but after the last one of the cycle.
    postponed: Option<u32>,
}

impl DenseBlocks {
    pub fn new(
        layouts: Vec<BlockLayout>,
        ram_slots: Vec<Option<SlotIndex>>,
        ring: Vec<SlotIndex>,
    ) -> DenseBlocks {
        let blocks = layouts.len() as u32;
        let places = vec![Place::Absent; layouts.len()];
        DenseBlocks { layouts, places, ram_slots, ring, current: 0, cycle: blocks, postponed: None }
    }

    /// Returns the first block after `index`, in execution order, that is streamed through the ring.
    fn next_streamed(&self, index: u32) -> Option<u32> {
        let is_postponed = |block: u32| Some(block) == self.postponed;
        let last = if is_postponed(index) { index + 1 } else { self.cycle };
        let in_place = |blocks: Range<u32>| blocks.filter(move |block| !is_postponed(*block));
        let mut after = in_place(index + 1..last)
            .chain(self.postponed.filter(|block| *block != index))
            .chain(in_place(0..(index + 1).min(self.cycle)));
        after.find(|&next| self.ram_slots[next as usize].is_none())
    }

    /// Returns true if the block is one of the next streamed blocks, as many as the ring has slots.
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
    /// Leases a dense block and reads the next ones ahead. Waits for the block if it is not in memory yet.
    ///
    /// # Errors
    /// Returns [`StreamError::Read`] if the block cannot be read.
    /// Returns [`StreamError::LeasesHoldAllSlots`] if the caller still holds leases on every slot of the ring.
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

    /// Leases a dense block like [`Residency::dense`], but never waits. Returns `None` while the block is being read,
    /// or while leases hold all slots that could take it.
    ///
    /// # Errors
    /// Returns an error if the read engine fails. A failed read is retried; only a call that waits for the block
    /// reports it.
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

    /// Returns a lease of a dense block if it is in memory. Never waits and starts no read.
    pub fn dense_if_present(&self, index: u32) -> Option<Lease> {
        match self.dense.places.get(index as usize)? {
            Place::Present(slot) => {
                Some(self.slots[*slot as usize].lease(*slot, BlockId::Dense(index)))
            }
            Place::Reading(_) | Place::Absent => None,
        }
    }

    /// Sets the number of dense blocks after which execution starts again, until the next call. All but the last batch
    /// of a prompt skip the head, so its chunks need not be read ahead.
    pub fn set_dense_cycle(&mut self, blocks: usize) {
        self.dense.cycle = blocks.clamp(1, self.dense.places.len().max(1)) as u32;
        self.dense.postponed = None;
    }

    /// Says that a block comes after the last one of the cycle and not in its place, until the next call of
    /// [`Residency::set_dense_cycle`].
    pub fn postpone_dense(&mut self, block: usize) {
        self.dense.postponed = Some(block as u32).filter(|_| block < self.dense.places.len());
    }

    /// Starts the reads of the next streamed blocks, one for each idle slot of the ring.
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

    /// Returns an idle slot of the ring whose block is not one of the next streamed blocks.
    fn idle_ring_slot(&self) -> Option<SlotIndex> {
        self.dense.ring.iter().copied().find(|&slot| {
            let slot = &self.slots[slot as usize];
            slot.is_idle() && !self.dense.is_ahead(slot.block)
        })
    }

    /// Returns the slot for a block that is needed now. Returns `None` if the caller must wait for a read and try
    /// again.
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
        // A wrong prediction: the block in this slot was read ahead, but another block was requested.
        match ring.clone().find(|&slot| self.slots[slot as usize].read.is_some()) {
            Some(slot) => {
                self.abandon_read(slot);
                Ok(None)
            }
            None => Err(StreamError::LeasesHoldAllSlots { block: BlockId::Dense(index) }),
        }
    }
}
