//! A layer's experts on a GPU: the router's choice, and products with the chosen experts, wherever their weights are.

use forebay_cuda::{
    Added, CudaError, DevicePtr, ExpertOutputs, GateBiases, Norm, Normed, RouterChoice,
    RouterMatrix, RouterOutputs, SortedPairs, TokenExperts,
};

use super::backend::CudaBackend;
use super::expert_cache::ExpertWork;
use super::expert_inputs::has_own_input;
use super::memory::Device;
use super::on_cpu::{BatchRows, expert_matrices};
use super::products::{EntryRow, ExpertEntries, ExpertProduct, Rows};
use super::vectors::{ExpertNormVectors, optional};
use crate::ModelError;
use crate::arch::{ExpertInput, LatentNorm};
use crate::backend::{Step, record_routing};
use crate::weights::{FeedForwardWeights, PartMatrix};

impl CudaBackend {
    /// Queues the router and the work that follows its choice: fetching and sorting experts, and copying the ids to
    /// the host if the host needs them.
    pub(super) fn choose_experts(
        &mut self,
        step: &Step<'_>,
        routing: Option<&mut [i32]>,
    ) -> Result<(), ModelError> {
        let FeedForwardWeights::Experts { router, latent, .. } = step.layer_weights().feed_forward
        else {
            unreachable!("the caller looked at the weights");
        };
        let (gpu, at, experts) = (&self.gpu, self.at(), step.experts());
        let product = self.product(step, router, at.scores);
        let vectors = self.layer_vectors(step);
        let choice = RouterChoice {
            experts: experts.count,
            k: experts.used,
            scoring: experts.scoring,
            by_token: vectors.by_token.map(|table| self.experts_of_tokens(step, table)),
            renormalise: experts.renormalise,
            scale: experts.scale,
            logit_bias: optional(self.vectors(), vectors.router_bias),
            correction_bias: optional(self.vectors(), vectors.correction_bias),
            expert_scales: optional(self.vectors(), vectors.expert_scales),
            always: experts.always,
            groups: experts.groups,
        };
        let ids = self.arena.activation(at.expert_ids);
        let outputs = RouterOutputs {
            ids,
            weights: self.float(at.expert_weights),
            flag: self.exchange.flags(self.lanes.number()).offset(1 + step.layer),
        };
        let (x, logits) = (self.router_input(step)?, product.out);
        let by_row = self.products().takes_matvec(step.kind());
        let has_factor = experts.logit_scale != 1.0;
        if by_row && RouterMatrix::is_supported(router.ty) && !has_factor {
            let matrix = RouterMatrix { ty: router.ty, data: product.data, cols: router.cols };
            let tickets = self.arena.activation(at.router_tickets);
            gpu.route_few(&choice, matrix, x, logits, &outputs, tickets, step.count)?;
        } else {
            self.products().dense(gpu, x, Rows::of(step), &[product])?;
            if has_factor {
                gpu.scale(logits, step.count * experts.count, experts.logit_scale)?;
            }
            gpu.route(&choice, logits, &outputs, step.count)?;
        }
        let input = self.expert_input(step);
        if let Some([down, _]) = latent {
            let product = self.product(step, down, at.expert_input);
            self.products().dense(gpu, x, Rows::of(step), &[product])?;
            if let Some(norm) = self.latent_norm(step, LatentNorm::Before) {
                let plain = Normed::plain(input);
                gpu.rms_norm(input, Added::Nothing, &norm, plain, step.count, None)?;
            }
            self.products().changed(input);
        }
        if experts.scaled_input {
            let hidden = step.architecture.hidden;
            gpu.take_factors(x, outputs.weights, input, step.count, hidden)?;
            self.products().changed(input);
        }
        let lane = self.lanes.number();
        let (source, on) = self.source_and_device();
        source.take_choice(on, step, lane, ids, input)?;
        self.sort_pairs(step, ids)?;
        let CudaBackend { gpu, source, chosen, .. } = self;
        let chosen = &mut chosen[..step.count * experts.used];
        let is_here = source.download_choice(gpu, ids, chosen, routing.is_some())?;
        if let Some(routing) = routing.filter(|_| is_here) {
            let layers = step.architecture.main_layers();
            record_routing(chosen, routing, step.layer, layers, step.count);
        }
        Ok(())
    }

    /// Returns the table with the experts of all tokens, and the tokens of the rows of a lane.
    fn experts_of_tokens(&self, step: &Step<'_>, table: usize) -> TokenExperts {
        // Rows that are read from the file replace the numbers of tokens, but only if a dense model does not fit.
        assert!(self.embedding_rows.is_none(), "the numbers of tokens are not there");
        TokenExperts {
            table: self.vectors().offset(table).cast(),
            vocabulary: step.architecture.vocabulary,
            tokens: self.exchange.tokens().offset(self.lanes.current().first_row),
        }
    }

    /// Returns the input of a layer's experts: the normed stream, its rows times the weights of their experts, a norm of its own, or
    /// a projection.
    fn expert_input(&self, step: &Step<'_>) -> DevicePtr<f32> {
        let (at, experts) = (self.at(), step.experts());
        self.float(if has_own_input(experts) { at.expert_input } else { at.normed })
    }

    /// Returns where the residual stream before the layer is kept for the layer's router, for the rows of a lane. Every layer has a place of
    /// its own for decode rows: if a graph gives up waiting for a layer's experts, later layers must not have replaced what this layer's router takes
    /// when the pass goes on.
    fn layer_input(&self, step: &Step<'_>) -> DevicePtr<f32> {
        let of_first_lane = &self.plan.activations;
        let of_layer = if step.decode == step.count { step.layer } else { 0 };
        let row = of_layer * of_first_lane.decode_rows + self.lanes.current().first_row;
        self.float(of_first_lane.router_input).offset(row * step.architecture.hidden)
    }

    /// Queues a copy of the residual stream, if the layer's router takes it as it is before the layer.
    pub(super) fn keep_input(&self, step: &Step<'_>) -> Result<(), ModelError> {
        if step.architecture.layers[step.layer].expert_input() == ExpertInput::OfFeedForward {
            return Ok(());
        }
        let (x, kept) = (self.float(self.at().x), self.layer_input(step));
        self.products().changed(kept);
        Ok(self.gpu.copy(x.cast(), kept.cast(), 4 * step.count * step.architecture.hidden)?)
    }

    /// Returns the address of the input of the router. Queues its norm and that of the experts' input if they have norms of their
    /// own.
    fn router_input(&self, step: &Step<'_>) -> Result<DevicePtr<f32>, ModelError> {
        let at = self.at();
        match step.experts().input {
            ExpertInput::OfFeedForward => {}
            ExpertInput::RouterOfLayer => return Ok(self.layer_input(step)),
            ExpertInput::OfLayer => return self.norm_layer_input(step),
        }
        let Some(norms) = self.layer_vectors(step).expert_norms else {
            return Ok(self.float(at.normed));
        };
        for (norm, to) in [(norms.router, at.router_input), (norms.input, at.expert_input)] {
            let epsilon = step.architecture.stream_epsilon();
            let (norm, to) = (Norm { epsilon, ..self.norm_of(step, norm) }, self.float(to));
            self.products().changed(to);
            let x = self.float(at.x);
            self.gpu.rms_norm(x, Added::Nothing, &norm, Normed::plain(to), step.count, None)?;
        }
        Ok(self.float(at.router_input))
    }

    /// Queues the norm of the residual stream before the layer, which router and experts take. Returns its address.
    fn norm_layer_input(&self, step: &Step<'_>) -> Result<DevicePtr<f32>, ModelError> {
        let norm = self.layer_vectors(step).input_norm.expect("such inputs are normed");
        let epsilon = step.architecture.stream_epsilon();
        let norm = Norm { epsilon, ..self.norm_of(step, norm) };
        let (x, to) = (self.layer_input(step), self.float(self.at().expert_input));
        self.products().changed(to);
        self.gpu.rms_norm(x, Added::Nothing, &norm, Normed::plain(to), step.count, None)?;
        Ok(to)
    }

    /// Returns the norm of a block's output with this weight.
    fn norm_of(&self, step: &Step<'_>, weight: usize) -> Norm {
        Norm {
            weight: self.vectors().offset(weight),
            width: step.architecture.hidden,
            epsilon: step.architecture.norm_epsilon,
        }
    }

    /// Adds up the outputs of experts and shared experts, if each of them has a norm. Returns what the next norm adds.
    fn add_normed(
        &self,
        step: &Step<'_>,
        experts: ExpertOutputs,
        norms: ExpertNormVectors,
    ) -> Result<Added, ModelError> {
        let (gpu, rows, out) = (&self.gpu, step.count, self.float(self.at().block_out));
        let shared = experts.shared;
        let experts = ExpertOutputs { shared: DevicePtr::null(), ..experts };
        gpu.fill(out.cast(), 0, 4 * rows * step.architecture.hidden)?;
        let output = self.norm_of(step, norms.output);
        let plain = Normed::plain(out);
        gpu.rms_norm(out, Added::Experts(experts), &output, plain, rows, None)?;
        let epsilon = step.architecture.post_norm_epsilon;
        let sum = Norm { epsilon, ..self.norm_of(step, norms.sum) };
        if shared.is_null() {
            gpu.rms_norm(out, Added::Nothing, &sum, plain, rows, None)?;
        } else {
            let of_shared = self.norm_of(step, norms.shared);
            gpu.rms_norm(shared, Added::Nothing, &of_shared, Normed::plain(shared), rows, None)?;
            gpu.rms_norm(shared, Added::Rows(out), &sum, plain, rows, None)?;
        }
        self.products().changed(out);
        Ok(Added::Rows(out))
    }

    /// Norms the sum of the outputs of experts with a space of their own, and projects it back. Returns what the next norm adds.
    fn add_projected(
        &self,
        step: &Step<'_>,
        experts: ExpertOutputs,
        back: PartMatrix,
    ) -> Result<Added, ModelError> {
        let (gpu, at, rows) = (&self.gpu, self.at(), step.count);
        // The experts have taken their input.
        let (sum, shared) = (self.float(at.expert_input), experts.shared);
        gpu.fill(sum.cast(), 0, 4 * rows * back.cols)?;
        let added = Added::Experts(ExpertOutputs { shared: DevicePtr::null(), ..experts });
        match self.latent_norm(step, LatentNorm::After) {
            Some(norm) => gpu.rms_norm(sum, added, &norm, Normed::plain(sum), rows, None)?,
            None => gpu.add_rows(sum, added, back.cols, rows, None)?,
        }
        self.products().changed(sum);
        let product = self.product(step, back, at.block_out);
        self.products().dense(gpu, sum, Rows::of(step), &[product])?;
        if shared.is_null() {
            return Ok(Added::Rows(product.out));
        }
        let width = step.architecture.hidden;
        gpu.add_rows(shared, Added::Rows(product.out), width, rows, None)?;
        Ok(Added::Rows(shared))
    }

    /// Returns the norm in the space of the layer's experts, if it is in this place.
    fn latent_norm(&self, step: &Step<'_>, place: LatentNorm) -> Option<Norm> {
        let width = step.experts().latent.filter(|of| of.norm == place)?.width;
        let norm = self.layer_vectors(step).latent_norm?;
        Some(Norm { width, ..self.norm_of(step, norm) })
    }

    /// Multiplies the outputs of all pairs by factors, and norms them, if the model does.
    fn norm_outputs(&self, step: &Step<'_>, outputs: &ExpertOutputs) -> Result<(), ModelError> {
        let Some([factors, weight]) = self.layer_vectors(step).expert_output_norm else {
            return Ok(());
        };
        assert!(outputs.bias.is_null(), "outputs that are normed have no bias");
        let (parts, width) = (outputs.parts, outputs.width);
        let rows = step.count * outputs.k;
        let epsilon = step.architecture.post_norm_epsilon;
        let norm = Norm { weight: self.vectors().offset(weight), width, epsilon };
        self.gpu.multiply_columns(parts, self.vectors().offset(factors), rows, width)?;
        self.gpu.rms_norm(parts, Added::Nothing, &norm, Normed::plain(parts), rows, None)?;
        Ok(())
    }

    /// Queues the sorting of the pairs of a row and an expert, for kernels that need it.
    fn sort_pairs(&self, step: &Step<'_>, ids: DevicePtr<u32>) -> Result<(), CudaError> {
        // The mat-vec kernels need no order. They compute the pairs of one expert together if there are several rows.
        if self.products().takes_matvec(step.kind()) && step.count == 1 {
            return Ok(());
        }
        let experts = step.experts();
        self.gpu.sort_pairs(ids, &self.sorted_pairs(), step.count, experts.used, experts.count)
    }

    /// Computes all products of a layer's experts. The next norm adds them up.
    pub(super) fn multiply_experts(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let FeedForwardWeights::Experts { gate, up, down, latent, .. } =
            step.layer_weights().feed_forward
        else {
            unreachable!("the caller looked at the weights");
        };
        let shared = self.compute_shared(step)?;
        let (at, experts) = (self.at(), step.experts());
        let matrices = expert_matrices(step.layer_weights());
        let matrices = matrices.expect("the layer has experts");
        let layout = self.plan.weights.experts_of[step.layer].expect("the layer has experts");
        let sorted = self.sorted_pairs();
        let by_row = self.products().takes_matvec(step.kind());
        // A single row has one pair for each expert.
        let is_ordered = by_row && step.count > 1;
        let chosen = self.arena.activation(at.expert_ids);
        let entries = move |slots| ExpertEntries {
            slots,
            experts: experts.count,
            rows: Rows::of(step),
            used: experts.used,
            ids: chosen,
            order: if is_ordered { sorted.pairs } else { DevicePtr::null() },
            starts: sorted.starts,
            pair_tokens: sorted.pair_tokens,
        };
        let part = |matrix: PartMatrix, out: u64| ExpertProduct {
            matrix,
            offset: layout.parts[matrix.part],
            out: self.float(out),
        };
        let pair = [part(gate, at.gate), part(up, at.up)];
        let down = [part(down, at.outputs)];
        let (x, inner) = (self.expert_input(step), self.float(at.gate));
        let vectors = self.layer_vectors(step);
        let [gate_bias, up_bias, down_bias] =
            vectors.expert_biases.map(|bias| optional(self.vectors(), bias));
        let biases = (!gate_bias.is_null()).then_some(GateBiases {
            gate: gate_bias,
            up: up_bias,
            ids: chosen,
            // Outputs are otherwise sorted by expert.
            pairs: if by_row { DevicePtr::null() } else { sorted.pairs },
        });
        let gating = step.layer_weights().gatings.experts;
        let row_of_pair = match by_row {
            true => self.arena.activation(at.identity),
            false => sorted.row_of_pair,
        };
        let parts = self.float(at.outputs);
        let hidden = experts.outer_width(step.architecture.hidden);
        let outputs = ExpertOutputs {
            parts,
            weights: self.float(at.expert_weights),
            row_of_pair,
            bias: down_bias,
            ids: chosen,
            shared,
            width: hidden,
            k: experts.used,
        };
        let rows =
            BatchRows { normed: x, outputs: parts, tokens: step.count, used: experts.used, hidden };
        let CudaBackend { gpu, plan, arena, source, lanes, chosen, .. } = self;
        let products = &lanes.current().products;
        let chosen = &chosen[..step.count * experts.used];
        let lane = lanes.number();
        let work = ExpertWork { layer: step.layer, lane, matrices, rows, chosen, few: by_row };
        source.compute_experts(Device { gpu, plan, arena }, &work, |slots| {
            let entries = entries(slots);
            products.gated_experts(gpu, gating, biases, x, &entries, pair)?;
            products.experts(gpu, inner, &entries, EntryRow::Own, &down)
        })?;
        self.norm_outputs(step, &outputs)?;
        let added = match (vectors.expert_norms, latent) {
            (Some(norms), _) => self.add_normed(step, outputs, norms)?,
            (None, Some([_, back])) => self.add_projected(step, outputs, back)?,
            (None, None) => Added::Experts(outputs),
        };
        self.lanes.current_mut().outputs = Some(added);
        self.finish_feed_forward(step)
    }

    /// Computes the shared expert, which processes every token. Returns the address of its output, or null if the
    /// layer has none.
    fn compute_shared(&self, step: &Step<'_>) -> Result<DevicePtr<f32>, ModelError> {
        let FeedForwardWeights::Experts { shared: Some([gate, up, down]), .. } =
            step.layer_weights().feed_forward
        else {
            return Ok(DevicePtr::null());
        };
        let (gpu, at) = (&self.gpu, self.at());
        let pair = [self.product(step, gate, at.shared_gate), self.product(step, up, at.shared_up)];
        let gating = (step.layer_weights().gatings.others, None);
        self.products().gated(gpu, gating, self.float(at.normed), Rows::of(step), pair)?;
        let down = self.product(step, down, at.shared);
        self.products().dense(gpu, self.float(at.shared_gate), Rows::of(step), &[down])?;
        if let Some(weight) = self.layer_vectors(step).shared_scale {
            let hidden = step.architecture.hidden;
            let weight = (self.vectors().offset(weight), hidden);
            gpu.gate_rows((down.out, hidden), self.float(at.normed), weight, step.count)?;
        }
        Ok(down.out)
    }

    /// Returns the buffers of the router's pairs, sorted by expert.
    fn sorted_pairs(&self) -> SortedPairs {
        SortedPairs {
            starts: self.arena.activation(self.at().starts),
            pair_tokens: self.arena.activation(self.at().pair_tokens),
            pairs: self.arena.activation(self.at().pairs),
            row_of_pair: self.arena.activation(self.at().row_of_pair),
        }
    }
}
