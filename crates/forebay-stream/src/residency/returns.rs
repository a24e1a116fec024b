//! Exchange of experts with another tier, usually VRAM. RAM need not hold what that tier holds, and may take back what
//! it evicts.
//!
//! If RAM holds all experts of a pool, nothing is exchanged. Otherwise the two memories form an exclusive cache: together they
//! hold as many experts as they have slots. Slots in RAM that nothing needs keep copies of what the other tier holds, so that it
//! need not be copied back. Uses in either memory count when RAM decides which experts to keep.

use std::ops::Range;

use forebay_store::SlotBuffer;

use super::{Place, Residency, expert_parts};
use crate::blocks::{BlockId, ExpertIndex, LayerIndex};
use crate::slots::SlotIndex;

/// An expert that is being copied back from another tier, and its slot. Pass it to [`Residency::has_returned`], or the
/// slot's memory is lost.
#[must_use]
pub struct Returning {
    layer: LayerIndex,
    expert: ExpertIndex,
    slot: SlotIndex,
    buffer: SlotBuffer,
    parts: [Range<usize>; 3],
}

impl Returning {
    /// Returns the ranges of the slot into which gate, up and down must be copied. Experts without a gate have two parts, and the
    /// last range is empty.
    pub fn parts(&self) -> [Range<usize>; 3] {
        self.parts.clone()
    }
}

impl AsMut<[u8]> for Returning {
    /// Returns the whole slot.
    fn as_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut_slice()
    }
}

impl Residency {
    /// Records uses of experts that another tier served, without looking them up here.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn note_uses(&mut self, layer: LayerIndex, experts: &[ExpertIndex]) {
        experts.iter().for_each(|&expert| self.cache.note_use(layer, expert));
    }

    /// Records that another tier now holds an expert of the open or last batch. Its slot in RAM is used for something else when
    /// no other is free and its leases have ended.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn hand_over(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        if self.keeps_all_of(layer) {
            return;
        }
        self.take_over(layer, expert);
        self.cache.give_away(layer, expert);
        let entry = self.cache.entry(layer, expert);
        self.experts.handed_over[entry] = true;
        self.let_go(layer, expert);
    }

    /// Returns true if RAM has a copy of an expert that another tier holds.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn has_copy(&self, layer: LayerIndex, expert: ExpertIndex) -> bool {
        let entry = self.cache.entry(layer, expert);
        self.experts.handed_over[entry] && matches!(self.experts.places[entry], Place::Present(_))
    }

    /// Returns a slot for an expert that another tier is about to evict, if the expert is worth more than those in RAM.
    /// Returns `None` if it is not, if RAM has it, or if no slot is free. A copy in RAM is then kept if the expert is worth it.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn take_back(&mut self, layer: LayerIndex, expert: ExpertIndex) -> Option<Returning> {
        let block = BlockId::Expert(layer, expert);
        if self.keeps_all_of(layer) {
            return None;
        }
        let has_copy = self.take_over(layer, expert);
        if *self.place(block) != Place::Absent && !has_copy {
            return None;
        }
        let mut evicted = std::mem::take(&mut self.batch.evicted);
        self.cache.admit(layer, expert, &mut evicted);
        evicted.drain(..).for_each(|(of, expert)| self.let_go(of, expert));
        self.batch.evicted = evicted;
        if !self.cache.is_resident(layer, expert) || has_copy {
            return None;
        }
        let Some(slot) = self.take_slot(layer) else {
            self.cache.forget(layer, expert);
            return None;
        };
        self.vacate(slot);
        let into = &mut self.slots[slot as usize];
        let buffer = into.take_buffer();
        let parts = expert_parts(&self.layout(block).held);
        Some(Returning { layer, expert, slot, buffer, parts })
    }

    /// Makes the expert resident after the caller has copied all its parts into the slot.
    pub fn has_returned(&mut self, returning: Returning) {
        let Returning { layer, expert, slot, buffer, .. } = returning;
        let block = BlockId::Expert(layer, expert);
        self.slots[slot as usize].put_buffer(Some(buffer));
        // Meanwhile a batch may have read the expert, or the cache may have evicted it again.
        if *self.place(block) != Place::Absent || !self.cache.is_resident(layer, expert) {
            self.free_slot(layer, slot);
            return;
        }
        let into = &mut self.slots[slot as usize];
        into.block = Some(block);
        self.occupied_bytes += into.bytes;
        self.occupied_bytes_max = self.occupied_bytes_max.max(self.occupied_bytes);
        *self.place(block) = Place::Present(slot);
    }

    fn keeps_all_of(&self, layer: LayerIndex) -> bool {
        let pool = self.experts.pool_of(layer);
        self.plan.pools[pool].transient_slots == 0
    }
}
