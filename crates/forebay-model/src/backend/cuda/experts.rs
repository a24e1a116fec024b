//! A layer's experts on a GPU: the router's choice, and products with whom it chose, wherever the
//! weights are.

use forebay_cuda::{
    Added, DevicePtr, ExpertOutputs, RouterChoice, RouterMatrix, RouterOutputs, SortedPairs,
};

use super::super::{Step, record_routing};
use super::CudaBackend;
use super::on_cpu::{BatchRows, ExpertMatrices};
use super::products::{ExpertEntries, ExpertProduct, Rows};
use super::streamed::{LayerOfDevice, Streamed};
use crate::ModelError;
use crate::weights::{FeedForwardWeights, PartMatrix};

impl CudaBackend {
    /// Queues the router and what its choice sets going: fetching, sorting, and copies of the ids for
    /// whoever needs them on the host.
    pub(super) fn choose_experts(
        &mut self,
        step: &Step<'_>,
        routing: Option<&mut [i32]>,
    ) -> Result<(), ModelError> {
        let FeedForwardWeights::Experts { router, .. } = step.layer_weights().feed_forward else {
            unreachable!("the caller looked at the weights");
        };
        let (gpu, at, experts) = (&self.gpu, self.at(), step.experts());
        let product = self.product(step, router, at.scores);
        let choice = RouterChoice {
            experts: experts.count,
            k: experts.used,
            sigmoid: false,
            renormalise: experts.renormalise,
            scale: experts.scale,
            logit_bias: DevicePtr::null(),
            correction_bias: DevicePtr::null(),
            groups: None,
        };
        let ids = self.arena.activation(at.expert_ids);
        let outputs = RouterOutputs {
            ids,
            weights: self.float(at.expert_weights),
            flag: self.exchange.flags().offset(1 + step.layer),
        };
        let (x, logits) = (self.float(at.normed), product.out);
        if self.products.is_few(step.count) && RouterMatrix::is_supported(router.ty) {
            let matrix = RouterMatrix { ty: router.ty, data: product.data, cols: router.cols };
            let tickets = self.arena.activation(at.router_tickets);
            gpu.route_few(&choice, matrix, x, logits, &outputs, tickets, step.count)?;
        } else {
            self.products.dense(gpu, x, step.count, &[product])?;
            gpu.route(&choice, logits, &outputs, step.count)?;
        }
        if self.recordings.is_recording()
            && let Some(streamed) = &self.streamed
        {
            return Ok(streamed.queue_fetch(&self.layer_of_device(step.layer), ids, x)?);
        }
        if let Some(chosen) = step.chosen {
            gpu.upload(chosen, ids)?;
        }
        if !self.products.is_few(step.count) {
            let sorted = self.sorted_pairs();
            gpu.sort_pairs(ids, &sorted, step.count, experts.used, experts.count)?;
        }
        let chosen = &mut self.chosen[..step.count * experts.used];
        match (&mut self.streamed, &routing) {
            (Some(streamed), _) => streamed.take_ids(&self.gpu, ids, chosen)?,
            (None, Some(_)) => self.gpu.download_into(ids, chosen)?,
            (None, None) => {}
        }
        if let Some(routing) = routing {
            let layers = step.architecture.layers.len();
            record_routing(chosen, routing, step.layer, layers, step.count);
        }
        Ok(())
    }

    /// All products of a layer's experts; the next norm adds them up.
    pub(super) fn multiply_experts(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let mut streamed = self.streamed.take();
        let computed = self.compute_experts(step, streamed.as_mut());
        self.streamed = streamed;
        self.outputs = Some(Added::Experts(computed?));
        Ok(())
    }

    /// The products of `multiply_experts`, part by part if they come so.
    fn compute_experts(
        &self,
        step: &Step<'_>,
        streamed: Option<&mut Streamed>,
    ) -> Result<ExpertOutputs, ModelError> {
        let FeedForwardWeights::Experts { gate, up, down, .. } = step.layer_weights().feed_forward
        else {
            unreachable!("the caller looked at the weights");
        };
        let (gpu, at, experts) = (&self.gpu, self.at(), step.experts());
        let matrices = ExpertMatrices { gate, up, down };
        let places = self.plan.weights.experts_of[step.layer].expect("the layer has experts");
        let sorted = self.sorted_pairs();
        let fetched = streamed.is_some() && self.recordings.is_recording();
        let (slots, ids) = match fetched {
            // In the order of the choice.
            true => (at.fetch_slots, at.identity),
            false => (at.tables[step.layer], at.expert_ids),
        };
        let entries = ExpertEntries {
            slots: self.arena.activation(slots),
            experts: experts.count,
            tokens: step.count,
            used: experts.used,
            ids: self.arena.activation(ids),
            starts: sorted.starts,
            pair_tokens: sorted.pair_tokens,
        };
        let part = |matrix: PartMatrix, out: u64| ExpertProduct {
            matrix,
            offset: places.parts[matrix.part],
            out: self.float(out),
        };
        let pair = [part(gate, at.gate), part(up, at.up)];
        let down = [part(down, at.outputs)];
        let (x, inner) = (self.float(at.normed), self.float(at.gate));
        let compute = || {
            self.products.gated_experts(gpu, x, &entries, pair)?;
            self.products.experts(gpu, inner, &entries, Rows::Entry, &down)
        };
        match streamed {
            None => compute()?,
            Some(streamed) if fetched => {
                compute()?;
                let on = self.layer_of_device(step.layer);
                streamed.queue_rows(&on, self.float(at.outputs))?;
            }
            Some(streamed) => {
                let on = self.layer_of_device(step.layer);
                let chosen = &self.chosen[..step.count * experts.used];
                let rows = BatchRows {
                    normed: x,
                    outputs: self.float(at.outputs),
                    tokens: step.count,
                    used: experts.used,
                    hidden: step.architecture.hidden,
                };
                let few = self.products.is_few(step.count).then_some(&rows);
                streamed.begin(&on, chosen, few)?;
                while let Some(work) = streamed.next_wave(&on)? {
                    if work.gpu {
                        compute()?;
                    }
                    if work.cpu {
                        streamed.compute_on_cpu(gpu, &matrices, &rows, chosen)?;
                    }
                    streamed.end_wave(gpu)?;
                }
                streamed.end();
            }
        }
        let row_of_pair = match self.products.is_few(step.count) {
            true => self.arena.activation(at.identity),
            false => sorted.row_of_pair,
        };
        Ok(ExpertOutputs {
            parts: self.float(at.outputs),
            weights: self.float(at.expert_weights),
            row_of_pair,
            bias: DevicePtr::null(),
            ids: self.arena.activation(at.expert_ids),
            shared: DevicePtr::null(),
            width: step.architecture.hidden,
            k: experts.used,
        })
    }

    /// The router's pairs, sorted by expert.
    fn sorted_pairs(&self) -> SortedPairs {
        SortedPairs {
            starts: self.arena.activation(self.at().starts),
            pair_tokens: self.arena.activation(self.at().pair_tokens),
            pairs: self.arena.activation(self.at().pairs),
            row_of_pair: self.arena.activation(self.at().row_of_pair),
        }
    }

    fn layer_of_device(&self, layer: usize) -> LayerOfDevice<'_> {
        LayerOfDevice { gpu: &self.gpu, plan: &self.plan, arena: &self.arena, layer }
    }
}
