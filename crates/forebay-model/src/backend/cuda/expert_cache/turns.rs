//! Turns of two lanes: what is free when a lane gets an answer. See `held.rs`.

use forebay_cuda::{CudaError, Gpu, LANES};
use forebay_stream::BatchPart;

use super::ExpertCache;
use super::held::HeldExpert;
use super::service::Service;

impl ExpertCache {
    /// Begins the tier's part of a batch of an answer for `place`. Lists in `there` the experts that only the first lane has
    /// brought and that stay, which become known to the tables with this answer.
    pub(super) fn begin_part(&mut self, gpu: &Gpu, place: usize) {
        self.release_older(gpu);
        let ExpertCache { tier, batch, host, touched, layer, service, earlier, there, .. } = self;
        let held = &service.as_ref().expect("it serves").held[0];
        // The answer before that for the first lane was for another layer.
        earlier.clear();
        earlier.extend(held.of_layer(*layer).map(|of| of.expert));
        let part = match place.is_multiple_of(LANES) {
            true => BatchPart::First,
            false => BatchPart::Last(earlier),
        };
        tier.begin(*layer, touched, part, |misses| misses, batch);
        let stays = |of: &&HeldExpert| of.is_new && tier.stays(*layer, of.expert);
        let stays = held.of_layer(*layer).filter(stays).map(|of| of.expert);
        there.clear();
        there.extend(stays.filter(|expert| !touched.contains(expert)));
        there.iter().for_each(|&expert| host.hand_over(*layer, expert));
    }

    /// Releases what the last answer but one holds, unless the last one holds it, too. The last answer becomes the first of
    /// `held`, and the second is empty.
    fn release_older(&mut self, gpu: &Gpu) {
        self.take_returned(gpu);
        let ExpertCache { tier, service, .. } = self;
        let Service { held, .. } = service.as_mut().expect("it serves");
        let [older, last] = held;
        for of in older.experts.drain(..) {
            let is_same = |other: &HeldExpert| (other.layer, other.expert) == (of.layer, of.expert);
            if !last.experts.iter().any(is_same) {
                tier.release(of.layer, of.expert);
            }
        }
        older.leases.clear();
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
        service.wait_for_question(gpu, place + 1, &mut [])?;
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
