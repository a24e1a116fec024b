//! What kernels of a run with two lanes may still use: experts in VRAM that they compute with, and experts in host memory
//! that they copy.
//!
//! The lanes take turns with answers. A lane asks for a layer's experts after it has computed with those of the layer
//! before. So the experts of the last answer but one are free when an answer is given, and those of the last one are
//! not.

use forebay_cuda::{CudaError, Gpu};
use forebay_stream::{ExpertIndex, LayerIndex, Lease};

use super::ExpertCache;
use super::service::Service;

/// An expert that kernels of a lane may still compute with.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldExpert {
    pub layer: LayerIndex,
    pub expert: ExpertIndex,
    pub pool: usize,
    pub slot: u32,
    /// True if the answer brought it, so that the tables on the GPU do not name it.
    pub is_new: bool,
}

/// What an answer holds.
#[derive(Default)]
pub(super) struct Held {
    pub experts: Vec<HeldExpert>,
    pub leases: Vec<(ExpertIndex, Lease)>,
}

impl Held {
    /// Reserves room for `pairs` pairs of a row and an expert.
    pub fn new(pairs: usize) -> Held {
        Held { experts: Vec::with_capacity(pairs), leases: Vec::with_capacity(pairs) }
    }

    /// Returns the experts of a layer.
    pub fn of_layer(&self, layer: LayerIndex) -> impl Iterator<Item = &HeldExpert> {
        self.experts.iter().filter(move |of| of.layer == layer)
    }

    /// Returns true if it holds slot number `slot` of a pool.
    pub fn has_slot(&self, pool: usize, slot: u32) -> bool {
        self.experts.iter().any(|of| (of.pool, of.slot) == (pool, slot))
    }
}

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
