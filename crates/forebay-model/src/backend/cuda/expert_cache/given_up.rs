//! Passes whose CUDA graph gave up waiting for the host: finds the layer, and gives the answers of the remaining
//! layers in advance.

use forebay_cuda::{CudaError, DevicePtr, GivingUp, Gpu};

use super::super::memory::Device;
use super::ExpertCache;
use crate::ModelError;
use crate::backend::Step;

impl ExpertCache {
    /// Returns the parameters with which kernels give up, or `None` if they wait without a limit.
    pub(super) fn giving_up(&self, on: Device<'_>) -> Option<GivingUp> {
        let (service, arena, at) = (self.service(), on.arena, &on.plan.activations);
        Some(GivingUp {
            bound: service.bound?,
            run: arena.activation(at.fetch_given_up),
            stream: arena.activation(at.x),
            kept: arena.activation(at.fetch_kept),
            width: service.rows * service.width,
        })
    }

    /// Waits for the pass's graph if graphs may give up. Returns the layer from which the work must be repeated, if
    /// it gave up.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub(super) fn layer_given_up(&self, gpu: &Gpu) -> Result<Option<usize>, CudaError> {
        let service = self.service();
        if service.bound.is_none() {
            return Ok(None);
        }
        gpu.synchronize()?;
        let place = service.mailbox.given_up(service.run);
        Ok(place.map(|place| service.layer_of(place).0 as usize))
    }

    /// Restores the residual stream of the layer that gave up, so that the pass can continue there.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub(super) fn restore_layer(&mut self, on: Device<'_>) -> Result<(), CudaError> {
        let giving_up = self.giving_up(on).expect("a graph that gives up has a bound");
        let service = self.service_mut();
        service.times.given_up += 1;
        service.mailbox.forget_given_up(on.gpu, &giving_up)?;
        let (from, to) = (giving_up.kept.cast(), giving_up.stream.cast());
        on.gpu.copy(from, to, size_of::<f32>() * giving_up.width)
    }

    /// Answers a layer's question before its kernel is queued. Does nothing if the host has already answered it, but
    /// too late for the graph. `ids` is the router's choice and `x` its normed state.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub(super) fn answer_beforehand(
        &mut self,
        on: Device<'_>,
        step: &Step<'_>,
        ids: DevicePtr<u32>,
        x: DevicePtr<f32>,
    ) -> Result<(), ModelError> {
        let service = self.service_mut();
        let place = service.place_of(step.layer, 0);
        if place < service.answered {
            return Ok(());
        }
        let pairs = service.pairs_of(place);
        let mut all = std::mem::take(&mut service.chosen);
        let chosen = &mut all[pairs.clone()];
        let mut forced = [0_u32];
        service.words.read(1, &mut forced);
        on.gpu.queue_download(ids, &self.ids, 0..pairs.len())?;
        if self.split().is_some() {
            self.service().mailbox.queue_state(on.gpu, x)?;
        }
        on.gpu.synchronize()?;
        match forced[0] {
            0 => self.ids.read(0, chosen),
            _ => self.service().words.read(2 + pairs.start, chosen),
        }
        // Kernels of earlier layers have finished their copies.
        self.let_go(on.gpu);
        let answered = self.answer_and_compute(on, step.weights, place, chosen, None);
        self.service_mut().chosen = all;
        if answered.is_err() {
            let _ = on.gpu.synchronize();
            self.give_up();
        }
        answered
    }
}
