//! Turns of two lanes: what is free when a lane gets an answer. See `held.rs`.

use forebay_cuda::{CudaError, Gpu};

use super::ExpertCache;
use super::held::HeldExpert;
use super::service::Service;

impl ExpertCache {
    /// Begins an answer: releases what the last answer but one holds, unless the last one holds it, too. The last answer
    /// becomes the first of `held`, and the second is empty.
    pub(super) fn release_older(&mut self, gpu: &Gpu) {
        let ExpertCache { tier, service, host, .. } = self;
        let Service { held, mailbox, .. } = service.as_mut().expect("it serves");
        let [older, last] = held;
        for of in older.experts.drain(..) {
            let is_same = |other: &HeldExpert| (other.layer, other.expert) == (of.layer, of.expert);
            if !last.experts.iter().any(is_same) {
                tier.release(of.layer, of.expert);
            }
        }
        older.leases.clear();
        while let Some(returned) = mailbox.returned(gpu) {
            host.has_returned(returned);
        }
        tier.free_left_unless(|pool, slot| last.has_slot(pool, slot));
        held.swap(0, 1);
    }

    /// Makes room for the experts of the answer for `place`, which have arrived in host memory. If there is too little, waits
    /// until the other lane has computed with the experts of the answer before.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub(super) fn make_room(&mut self, gpu: &Gpu, place: usize) -> Result<(), CudaError> {
        let layer = self.layer;
        if self.tier.free_slots(layer) >= self.ready.len() {
            return Ok(());
        }
        let service = self.service.as_mut().expect("it serves");
        // The other lane asks behind this one.
        let next = place + 1;
        let pairs = if next == service.end_place() { 0 } else { service.pairs_of(next).len() };
        service.wait_for_question(gpu, next, &mut vec![0; pairs])?;
        let ExpertCache { tier, touched, service, .. } = self;
        let Service { held, returned_slots, .. } = service.as_mut().expect("it serves");
        for of in held[0].experts.drain(..) {
            if of.layer != layer || !touched.contains(&of.expert) {
                tier.release(of.layer, of.expert);
            }
        }
        tier.free_left_unless(|pool, slot| returned_slots.contains(&(pool, slot)));
        Ok(())
    }

    /// Releases what all answers hold. Kernels may still use it, but the next pass waits for them. Leases end with
    /// [`ExpertCache::let_go`].
    pub(super) fn release_held(&mut self, gpu: &Gpu) {
        let Service { held, leases, .. } = self.service_mut();
        held.iter_mut().for_each(|held| leases.append(&mut held.leases));
        self.release_older(gpu);
        self.release_older(gpu);
    }
}
