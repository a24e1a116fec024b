//! Experts that another tier keeps, too: what it has need not be here, and what it gives up may come back.
//!
//! With room for all experts here, nothing changes hands. Else an expert is in one of the two memories, and both
//! together hold as many as they have slots. All uses of an expert, in either memory, decide whether it stays here.

use std::ops::Range;

use forebay_store::SlotBuffer;

use super::{Place, Residency};
use crate::blocks::{BlockId, ExpertIndex, LayerIndex};
use crate::slots::SlotIndex;

/// A slot of an expert on its way back from another tier, for [`Residency::has_returned`]: without that, its memory is lost.
#[must_use]
pub struct Returning {
    layer: LayerIndex,
    expert: ExpertIndex,
    slot: SlotIndex,
    buffer: SlotBuffer,
    parts: [Range<usize>; 3],
}

impl Returning {
    /// Where the bytes of gate, up and down belong in the slot.
    pub fn parts(&self) -> [Range<usize>; 3] {
        self.parts.clone()
    }
}

impl AsMut<[u8]> for Returning {
    /// The whole slot.
    fn as_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut_slice()
    }
}

impl Residency {
    /// Records uses of experts that nobody has to look for here.
    ///
    /// # Panics
    /// If there is no such expert.
    pub fn note_uses(&mut self, layer: LayerIndex, experts: &[ExpertIndex]) {
        experts.iter().for_each(|&expert| self.cache.note_use(layer, expert));
    }

    /// An expert of the open batch, or of the last one, is in another tier from now on: it need not stay here once its
    /// leases have ended.
    ///
    /// # Panics
    /// If there is no such expert.
    pub fn hand_over(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        if self.keeps_all_of(layer) {
            return;
        }
        self.cache.give_away(layer, expert);
        self.let_go(layer, expert);
    }

    /// Another tier does not keep an expert any more: a slot for its bytes, if it is worth more than what is here. `None` also
    /// where it is here, or nothing is free.
    ///
    /// # Panics
    /// If there is no such expert, or it has not three parts.
    pub fn take_back(&mut self, layer: LayerIndex, expert: ExpertIndex) -> Option<Returning> {
        let block = BlockId::Expert(layer, expert);
        if self.keeps_all_of(layer) || *self.place(block) != Place::Absent {
            return None;
        }
        let mut evicted = std::mem::take(&mut self.batch.evicted);
        self.cache.admit(layer, expert, &mut evicted);
        evicted.drain(..).for_each(|(of, expert)| self.let_go(of, expert));
        self.batch.evicted = evicted;
        if !self.cache.is_resident(layer, expert) {
            return None;
        }
        let Some(slot) = self.take_slot(layer) else {
            self.cache.forget(layer, expert);
            return None;
        };
        self.vacate(slot);
        let into = &mut self.slots[slot as usize];
        let buffer = into.take_buffer();
        let held = &self.layout(block).held;
        let parts = [0, 1, 2].map(|part| held[part].clone());
        Some(Returning { layer, expert, slot, buffer, parts })
    }

    /// The bytes of all parts are there.
    pub fn has_returned(&mut self, returning: Returning) {
        let Returning { layer, expert, slot, buffer, .. } = returning;
        let block = BlockId::Expert(layer, expert);
        self.slots[slot as usize].put_buffer(Some(buffer));
        // It may have been wanted, or others been worth more, meanwhile.
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
        let pool = self.experts.pool_of_layer[layer.0 as usize] as usize;
        self.plan.pools[pool].transient_slots == 0
    }
}
