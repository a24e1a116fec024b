//! Reading experts before anybody asks for them. Off unless called: it reorders bandwidth, it does not make any.

use forebay_store::Priority;

use super::{Place, READS_MAX, Residency};
use crate::blocks::{BlockId, ExpertIndex, LayerIndex};
use crate::error::StreamError;
use crate::slots::{Purpose, SlotIndex};

impl Residency {
    /// Reads experts that `layer` will probably use, most probable first, into slots that are free now. It never evicts, and a
    /// miss that needs the slot takes it back.
    ///
    /// # Errors
    /// [`StreamError::NoSuchBlock`]; errors of the engine.
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
            let pool = self.experts.pool_of_layer[layer.0 as usize] as usize;
            let Some(slot) = self.experts.pools[pool].take_free(&self.slots) else { return Ok(()) };
            let block = BlockId::Expert(layer, expert);
            self.start_read(block, slot, Purpose::Ahead, Priority::Prefetch);
            self.experts.prefetched.push(slot);
            self.totals.prefetch.issued += 1;
        }
        Ok(())
    }

    /// A slot of the pool that prefetching holds, given back: at once when its block has arrived, else with the completion of
    /// the read, which is cancelled.
    pub(super) fn reclaim_prefetched(&mut self, pool: usize) -> Option<SlotIndex> {
        // The newest prediction is dropped first: it is the least probable, or for the most distant layer.
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

    /// A miss finds its expert prefetched.
    pub(super) fn use_prefetched(&mut self, slot: SlotIndex) {
        if let Some(position) = self.experts.prefetched.iter().position(|&other| other == slot) {
            self.experts.prefetched.swap_remove(position);
            self.totals.prefetch.used += 1;
        }
    }

    /// Drops the predictions for `layer`, whose time has passed.
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
