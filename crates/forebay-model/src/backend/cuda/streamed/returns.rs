//! Experts between VRAM and host memory where neither holds all: who comes leaves its home there to who goes.
//!
//! What both hold together is as much as they have slots. An expert that goes is copied back beside those that come, by
//! the other direction of the bus, which is idle else.

use forebay_cuda::{CudaError, DevicePtr, ExpertReturn, Gpu};
use forebay_stream::{ExpertIndex, GoneExpert, TierBatch};

use super::super::memory::{DeviceArena, DevicePlan};
use super::Streamed;

/// Where gate, up and down of an expert that goes are, and how many bytes they have.
fn parts(
    plan: &DevicePlan,
    arena: &DeviceArena,
    pool: usize,
    gone: &GoneExpert,
) -> Option<[(DevicePtr<u8>, u64); 3]> {
    let from = plan.slot(arena, pool, gone.slot?);
    let layout = plan.weights.experts_of[gone.layer.0 as usize].expect("the layer has experts");
    Some([0, 1, 2].map(|part| (from.offset(layout.parts[part] as usize), layout.part_bytes[part])))
}

impl Streamed {
    /// What of the batch comes to stay needs no home in host memory, unless all have one.
    pub(super) fn hand_over(&mut self) {
        let Streamed { tier, host, batch, layer, .. } = self;
        let stays = |expert: &&ExpertIndex| tier.stays(*layer, **expert);
        batch.misses.iter().filter(stays).for_each(|&expert| host.hand_over(*layer, expert));
    }

    /// Begins to copy what the batch drives out back to host memory, as far as it is worth a home there. Copies that are begun
    /// later may overwrite it.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub(super) fn begin_returns(
        &mut self,
        plan: &DevicePlan,
        arena: &DeviceArena,
    ) -> Result<(), CudaError> {
        let Streamed { tier, host, batch, copies, returning, .. } = self;
        let TierBatch { gone, .. } = &*batch;
        for gone in gone {
            let Some(parts) = parts(plan, arena, tier.pool(gone.layer), gone) else { continue };
            let Some(to) = host.take_back(gone.layer, gone.expert) else { continue };
            let ranges = to.parts();
            let from = parts.map(|(from, _)| from);
            returning.push_back(copies.download(to, from.into_iter().zip(ranges))?);
            self.experts_returned += 1;
            self.bytes_returned += parts.iter().map(|(_, bytes)| bytes).sum::<u64>();
        }
        tier.free_left();
        Ok(())
    }

    /// As [`Streamed::begin_returns`], for a kernel that copies. Their slots are free with [`Streamed::let_go`].
    pub(super) fn queue_returns(&mut self, plan: &DevicePlan, arena: &DeviceArena) {
        let Streamed { tier, host, batch, service, .. } = self;
        let service = service.as_mut().expect("it serves");
        service.returns.clear();
        for gone in &batch.gone {
            if service.returns.len() == service.used {
                break;
            }
            let Some(parts) = parts(plan, arena, tier.pool(gone.layer), gone) else { continue };
            let Some(to) = host.take_back(gone.layer, gone.expert) else { continue };
            let ranges = to.parts();
            service.returns.push(ExpertReturn { from: parts.map(|(from, _)| from), to, ranges });
            self.experts_returned += 1;
            self.bytes_returned += parts.iter().map(|(_, bytes)| bytes).sum::<u64>();
        }
    }

    /// Waits until what was begun has come back.
    pub(super) fn finish_returns(&mut self) {
        while self.finish_a_return() {}
    }

    /// Waits for the first of them. `false`: there is none.
    pub(super) fn finish_a_return(&mut self) -> bool {
        let Some(returning) = self.returning.pop_front() else { return false };
        // If the device has failed, whatever is queued next says so, and the slot is lost with it.
        if let Ok(returned) = returning.finish() {
            self.host.has_returned(returned);
        }
        true
    }

    /// What kernels copied, they have copied.
    pub(super) fn let_go(&mut self, gpu: &Gpu) {
        let Streamed { service, host, tier, .. } = self;
        if let Some(service) = service {
            service.leases.clear();
            while let Some(returned) = service.mailbox.returned(gpu) {
                host.has_returned(returned);
            }
        }
        tier.free_left();
    }
}
