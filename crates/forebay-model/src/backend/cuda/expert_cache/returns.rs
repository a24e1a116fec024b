//! Exclusive caching of experts in VRAM and RAM, when neither holds all of them: together, both memories hold as many experts as
//! they have slots.
//!
//! RAM usually still has what VRAM evicts. Otherwise the expert is copied back while promoted experts arrive. This uses the other
//! direction of the bus, which is idle otherwise.

use forebay_cuda::{CudaError, DevicePtr, ExpertReturn, Gpu};
use forebay_stream::{ExpertIndex, GoneExpert, TierBatch};

use super::super::memory::Device;
use super::ExpertCache;

/// Returns the addresses and sizes in bytes of an evicted expert's gate, up and down. An expert without a gate has two parts, and
/// the last size is 0. Returns `None` if the expert is in no slot.
fn parts(on: Device<'_>, pool: usize, gone: &GoneExpert) -> Option<[(DevicePtr<u8>, u64); 3]> {
    let from = on.plan.slot(on.arena, pool, gone.slot?);
    let layout = on.plan.weights.experts_of[gone.layer.0 as usize].expect("the layer has experts");
    Some([0, 1, 2].map(|part| (from.offset(layout.parts[part] as usize), layout.part_bytes[part])))
}

impl ExpertCache {
    /// Tells RAM which experts the batch promotes to VRAM. Unless RAM holds all experts, other experts may get their RAM slots.
    pub(super) fn hand_over(&mut self) {
        let ExpertCache { tier, host, batch, layer, .. } = self;
        let stays = |expert: &&ExpertIndex| tier.stays(*layer, **expert);
        batch.misses.iter().filter(stays).for_each(|&expert| host.hand_over(*layer, expert));
    }

    /// Starts copying experts that the batch evicts back to host memory, as far as they are worth a RAM slot and RAM has no copy.
    /// Copies that start later may overwrite their VRAM slots.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub(super) fn begin_returns(&mut self, on: Device<'_>) -> Result<(), CudaError> {
        let ExpertCache { tier, host, batch, copies, returning, .. } = self;
        let TierBatch { gone, .. } = &*batch;
        for gone in gone {
            let Some(parts) = parts(on, tier.pool(gone.layer), gone) else { continue };
            let Some(to) = host.take_back(gone.layer, gone.expert) else { continue };
            let ranges = to.parts();
            let from = parts.map(|(from, _)| from);
            let copied = from.into_iter().zip(ranges).filter(|(_, range)| !range.is_empty());
            returning.push_back(copies.download(to, copied)?);
            self.experts_returned += 1;
            self.bytes_returned += parts.iter().map(|(_, bytes)| bytes).sum::<u64>();
        }
        tier.free_left();
        Ok(())
    }

    /// Lists the same copies as [`ExpertCache::begin_returns`] for a kernel to make, up to one for each expert that a row
    /// chooses. [`ExpertCache::let_go`] frees their VRAM slots; those of other evicted experts become free at once.
    pub(super) fn queue_returns(&mut self, on: Device<'_>) {
        let ExpertCache { tier, host, batch, service, .. } = self;
        let service = service.as_mut().expect("it serves");
        service.returns.clear();
        service.returned_slots.clear();
        for gone in &batch.gone {
            let is_full = service.returns.len() == service.used;
            if is_full && !host.has_copy(gone.layer, gone.expert) {
                continue;
            }
            let pool = tier.pool(gone.layer);
            let Some(parts) = parts(on, pool, gone) else { continue };
            let Some(to) = host.take_back(gone.layer, gone.expert) else { continue };
            let ranges = to.parts();
            service.returned_slots.extend(gone.slot.map(|slot| (pool, slot)));
            service.returns.push(ExpertReturn { from: parts.map(|(from, _)| from), to, ranges });
            self.experts_returned += 1;
            self.bytes_returned += parts.iter().map(|(_, bytes)| bytes).sum::<u64>();
        }
        // Kernels of the other lane may still compute with evicted experts.
        tier.free_left_unless(|pool, slot| {
            service.returned_slots.contains(&(pool, slot)) || service.held[0].has_slot(pool, slot)
        });
    }

    /// Waits until all copies that were started by [`ExpertCache::begin_returns`] have finished.
    pub(super) fn finish_returns(&mut self) {
        while self.finish_a_return() {}
    }

    /// Waits for the oldest of these copies. Returns false if there is none.
    pub(super) fn finish_a_return(&mut self) -> bool {
        let Some(returning) = self.returning.pop_front() else { return false };
        // If the device has failed, the next queued call reports it, and the RAM slot is lost.
        if let Ok(returned) = returning.finish() {
            self.host.has_returned(returned);
        }
        true
    }

    /// Releases the leases, RAM slots and VRAM slots that copies of earlier kernels used. These kernels must have
    /// run.
    pub(super) fn let_go(&mut self, gpu: &Gpu) {
        if let Some(service) = &mut self.service {
            service.leases.clear();
        }
        self.take_returned(gpu);
        self.tier.free_left();
    }

    /// Takes the experts that kernels have copied back to host memory.
    pub(super) fn take_returned(&mut self, gpu: &Gpu) {
        let Some(service) = &mut self.service else { return };
        while let Some(returned) = service.mailbox.returned(gpu) {
            self.host.has_returned(returned);
        }
    }
}
