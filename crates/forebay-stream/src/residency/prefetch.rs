//! Prefetching of predicted experts. It runs only when called, because it reorders disk reads and adds no bandwidth.

use forebay_store::Priority;

use super::{Place, READS_MAX, Residency};
use crate::blocks::{BlockId, ExpertIndex, LayerIndex};
use crate::error::StreamError;
use crate::slots::{Purpose, SlotIndex};

impl Residency {
    /// Reads experts that `layer` will probably use into free slots, most probable first. Never evicts an expert, and
    /// gives up the slot if a miss needs it.
    ///
    /// # Errors
    /// Returns [`StreamError::NoSuchBlock`] or an error of the read engine.
    pub fn prefetch_experts(
        &mut self,
        layer: LayerIndex,
        predictions: &[ExpertIndex],
    ) -> Result<(), StreamError> {
        self.check_experts(layer, predictions)?;
        self.poll()?;
        for &expert in predictions {
            let entry = self.cache.entry(layer, expert);
            if self.experts.places[entry] != Place::Absent {
                continue;
            }
            if self.engine.in_flight() >= READS_MAX {
                return Ok(());
            }
            let pool = self.experts.pool_of(layer);
            let Some(slot) = self.experts.pools[pool].take_free(&self.slots) else { return Ok(()) };
            let block = BlockId::Expert(layer, expert);
            self.start_read(block, slot, Purpose::Ahead, Priority::Prefetch);
            self.experts.prefetched.push(slot);
            self.totals.prefetch.issued += 1;
        }
        Ok(())
    }

    /// Takes a slot of the pool from a prefetched expert. If its read is still in flight, this cancels the read and
    /// returns `None`; the completion then frees the slot.
    pub(super) fn reclaim_prefetched(&mut self, pool: usize) -> Option<SlotIndex> {
        // The newest prediction is dropped first: it is the least probable one, or for the most distant layer.
        let held = |slot: &SlotIndex| self.experts.pools[pool].owns(*slot);
        let position = self.experts.prefetched.iter().rposition(held)?;
        let slot = self.experts.prefetched.swap_remove(position);
        self.totals.prefetch.wasted += 1;
        if self.slots[slot as usize].read.is_some() {
            self.abandon_read(slot);
            return None;
        }
        self.vacate(slot);
        Some(slot)
    }

    /// Counts a prefetched expert as used, and no longer treats its slot as prefetched.
    pub(super) fn use_prefetched(&mut self, slot: SlotIndex) {
        if let Some(position) = self.experts.prefetched.iter().position(|&other| other == slot) {
            self.experts.prefetched.swap_remove(position);
            self.totals.prefetch.used += 1;
        }
    }

    /// Drops unused predictions for `layer` after its batch has ended.
    pub(super) fn drop_prefetches(&mut self, layer: LayerIndex) {
        let mut index = 0;
        while index < self.experts.prefetched.len() {
            let slot = self.experts.prefetched[index];
            let block = self.slots[slot as usize].block;
            if !matches!(block, Some(BlockId::Expert(of, _)) if of == layer) {
                index += 1;
                continue;
            }
            self.experts.prefetched.swap_remove(index);
            self.totals.prefetch.wasted += 1;
            if self.slots[slot as usize].read.is_some() {
                self.abandon_read(slot);
            } else {
                self.vacate(slot);
                self.free_slot(layer, slot);
            }
        }
    }
}
