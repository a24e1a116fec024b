//! Passes whose CUDA graph gave up waiting for the host: finds the layer, and gives the answers of the remaining
//! layers in advance.

use forebay_cuda::{CudaError, DevicePtr, GivingUp, Gpu};
use forebay_stream::LayerIndex;

use super::super::memory::{DeviceArena, DevicePlan};
use super::{ExpertCache, LayerOfDevice};
use crate::ModelError;
use crate::weights::Weights;

impl ExpertCache {
    /// Returns the parameters with which kernels give up, or `None` if they wait without a limit.
    pub(super) fn giving_up(&self, plan: &DevicePlan, arena: &DeviceArena) -> Option<GivingUp> {
        let (service, at) = (self.service.as_ref()?, &plan.activations);
        Some(GivingUp {
            bound: service.bound?,
            run: arena.activation(at.fetch_given_up),
            stream: arena.activation(at.x),
            kept: arena.activation(at.fetch_kept),
            width: service.rows * service.width,
        })
    }

    /// Waits for the token's work if it may have given up. Returns the layer from which the work must be repeated, if
    /// it gave up.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub fn given_up(&self, gpu: &Gpu) -> Result<Option<LayerIndex>, CudaError> {
        let Some(service) = self.service.as_ref().filter(|service| service.bound.is_some()) else {
            return Ok(None);
        };
        gpu.synchronize()?;
        Ok(service.mailbox.given_up(service.run).map(|place| service.layers[place]))
    }

    /// Restores the residual stream of the layer that gave up, so that the current token can continue there.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn go_on(
        &mut self,
        gpu: &Gpu,
        plan: &DevicePlan,
        arena: &DeviceArena,
    ) -> Result<(), CudaError> {
        let giving_up = self.giving_up(plan, arena).expect("a run that gives up has a bound");
        let service = self.service.as_mut().expect("it serves");
        service.times.given_up += 1;
        service.mailbox.forget_given_up(gpu, &giving_up)?;
        let (from, to) = (giving_up.kept.cast(), giving_up.stream.cast());
        gpu.copy(from, to, size_of::<f32>() * giving_up.width)
    }

    /// Answers a layer's question before its kernel is queued. Does nothing if the host has already answered it, but
    /// too late for the graph. `ids` is the router's choice and `x` its normed state.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub fn answer_beforehand(
        &mut self,
        on: &LayerOfDevice<'_>,
        weights: &Weights,
        ids: DevicePtr<u32>,
        x: DevicePtr<f32>,
    ) -> Result<(), ModelError> {
        let service = self.service.as_mut().expect("it serves");
        let layer = LayerIndex(on.layer as u32);
        let place = service.layers.binary_search(&layer).expect("the layer has experts");
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
            self.service.as_ref().expect("it serves").mailbox.queue_state(on.gpu, x)?;
        }
        on.gpu.synchronize()?;
        match forced[0] {
            0 => self.ids.read(0, chosen),
            _ => self.service.as_ref().expect("it serves").words.read(2 + pairs.start, chosen),
        }
        // Kernels of earlier layers have finished their copies.
        self.let_go(on.gpu);
        let answered = self.answer_and_compute(on, weights, place, chosen, None);
        self.service.as_mut().expect("it serves").chosen = all;
        if answered.is_err() {
            let _ = on.gpu.synchronize();
            self.give_up();
        }
        answered
    }
}
