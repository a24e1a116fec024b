//! The norm before a block, and dense feed-forwards.

use forebay_cuda::{Added, DevicePtr, FiniteFlag, Gate, Norm, NormForm, Normed, is_alone};

use super::CudaBackend;
use super::products::{Product, Rows};
use super::vectors::optional;
use crate::ModelError;
use crate::backend::{NextBlock, Step};
use crate::weights::FeedForwardWeights;

impl CudaBackend {
    /// Queues the norm before a block, for the rows of a lane.
    pub(super) fn norm_rows(
        &mut self,
        step: &Step<'_>,
        block: NextBlock,
        add: bool,
    ) -> Result<(), ModelError> {
        if let Some(streams) = &step.architecture.streams {
            return self.norm_streams(step, streams, block, add);
        }
        let weight = match block {
            NextBlock::Attention => self.layer_vectors(step).attention_norm,
            NextBlock::FeedForward => self.layer_vectors(step).feed_forward_norm,
            NextBlock::Head => self.head_norm(step),
            // The stream itself is what follows.
            NextBlock::NGrams | NextBlock::Embeddings => None,
        };
        // Without a weight, rows are added and converted, but not normed.
        let norm = Norm {
            weight: optional(self.vectors(), weight),
            width: step.architecture.hidden,
            epsilon: step.architecture.stream_epsilon(),
        };
        let x = self.float(self.at().x);
        let exchanged = match block {
            NextBlock::FeedForward => self.source.exchanged(step.layer),
            NextBlock::NGrams | NextBlock::Attention | NextBlock::Embeddings | NextBlock::Head => {
                None
            }
        };
        let has_input = !matches!(block, NextBlock::NGrams | NextBlock::Embeddings);
        let usual = if has_input { self.float(self.at().normed) } else { DevicePtr::null() };
        let rows = exchanged.map_or(usual, |[input, _]| input);
        let (added, factor, flag) = match add && !step.takes_layer_input(block) {
            true => self.added(step, block)?,
            false => (Added::Nothing, 1.0, None),
        };
        let also = match exchanged {
            None if has_input => {
                self.products().converted_too(rows, Rows::of(step), step.architecture.hidden)
            }
            _ => None,
        };
        self.products().changed(x);
        let form = match block {
            NextBlock::Head => step.head_norm_form(),
            _ => step.architecture.norm_form,
        };
        let (out, form) = (Normed { rows, also }, device_form(form));
        self.gpu.norm_of_scaled(form, x, (added, factor), &norm, out, (step.count, flag))?;
        match block {
            NextBlock::Attention => self.keep_input(step),
            _ => Ok(()),
        }
    }

    /// Returns the weights of the norm before the output projection: that of the predicting layer, if its rows are computed.
    pub(super) fn head_norm(&self, step: &Step<'_>) -> Option<usize> {
        match step.prediction(true) {
            Some(_) => self.plan.vectors.mtp.map(|of| of.norm),
            None => self.plan.vectors.final_norm,
        }
    }

    /// Returns what the norm before a block adds to the residual stream, the factor of the sum, and where it reports sums that are not
    /// finite. Queues what must be there before.
    fn added(
        &mut self,
        step: &Step<'_>,
        block: NextBlock,
    ) -> Result<(Added, f32, Option<FiniteFlag>), ModelError> {
        self.add_parallel(step, block)?;
        let usual = Added::Rows(self.float(self.at().block_out));
        let added = self.lanes.current_mut().outputs.take().unwrap_or(usual);
        let added = self.post_norm(step, block, added)?;
        if let Some(factor) = step.architecture.normed_residual {
            // The input of the block whose output is added. Such models have experts, so no such input is on the host.
            let [x, input] = [self.at().x, self.at().normed].map(|at| self.float(at));
            self.gpu.copy_scaled(x, input, step.count * step.architecture.hidden, factor)?;
        }
        if let Some(gate) = self.gate_vectors(step, block) {
            let (x, keep) = (self.float(self.at().x), self.vectors().offset(gate.keep));
            self.gpu.multiply_columns(x, keep, step.count, step.architecture.hidden)?;
        }
        let factor = step.added_norm(block).1;
        let (layer, is_mixer) = step.added(block);
        let flag = self.finite_flag(2 * layer + usize::from(!is_mixer), 0);
        Ok((added, factor, Some(flag)))
    }

    /// Adds the output of attention of the layer before, if that is a parallel block. It waits until then, so that a pass that goes on
    /// in the middle of a layer finds the layer's input.
    fn add_parallel(&mut self, step: &Step<'_>, block: NextBlock) -> Result<(), ModelError> {
        if !step.has_parallel_blocks() || !step.is_first(block) {
            return Ok(());
        }
        let (layer, _) = step.added(block);
        let (at, width) = (self.at(), step.architecture.hidden);
        let (x, beside) = (self.float(at.x), Added::Rows(self.float(at.beside)));
        let flag = Some(self.finite_flag(2 * layer, 0));
        Ok(self.gpu.add_rows(x, beside, width, step.count, flag)?)
    }

    /// Returns where the output of attention goes.
    pub(super) fn mixer_out(&self, step: &Step<'_>) -> u64 {
        match step.has_parallel_blocks() {
            true => self.at().beside,
            false => self.at().block_out,
        }
    }

    /// Queues a dense feed-forward whose weights are there, for the rows of a lane.
    pub(super) fn multiply_dense(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let FeedForwardWeights::Dense { gate, up, down } = step.layer_weights().feed_forward else {
            unreachable!("the caller looked at the weights");
        };
        if let Some(out) = self.source.compute_on_cpu(&self.gpu, step, [gate, up, down])? {
            self.lanes.current_mut().outputs = Some(Added::Rows(out));
            return self.finish_feed_forward(step);
        }
        let at = self.at();
        let pair = [self.product(step, gate, at.gate), self.product(step, up, at.up)];
        let gating = step.layer_weights().gatings.others;
        let biases = self.layer_vectors(step).biases;
        match biases.gate.is_some() || biases.up.is_some() || is_alone(gating) {
            true => self.gate_with_biases(step, pair)?,
            false => {
                let (products, normed) = (self.products(), self.float(at.normed));
                products.gated(&self.gpu, (gating, step.cut()), normed, Rows::of(step), pair)?;
            }
        }
        let down = self.product(step, down, at.block_out);
        self.products().dense(&self.gpu, self.float(at.gate), Rows::of(step), &[down])?;
        if let Some(bias) = biases.down {
            let (bias, hidden) = (self.vectors().offset(bias), step.architecture.hidden);
            self.gpu.add_bias_rows(down.out, bias, step.count, hidden)?;
        }
        self.finish_feed_forward(step)
    }

    /// Queues the products with gate and up, their biases, and the activation, in kernels of their own.
    fn gate_with_biases(
        &self,
        step: &Step<'_>,
        [gate, up]: [Product; 2],
    ) -> Result<(), ModelError> {
        let (gpu, products, normed) = (&self.gpu, self.products(), self.float(self.at().normed));
        let gating = step.layer_weights().gatings.others;
        let biases = self.layer_vectors(step).biases;
        let (rows, width) = (step.count, gate.matrix.rows);
        if !gating.has_gate() {
            products.dense(gpu, normed, Rows::of(step), &[gate])?;
            let bias = optional(self.vectors(), biases.up);
            gpu.activate_rows(gate.out, bias, rows, width, gating)?;
        } else {
            products.dense(gpu, normed, Rows::of(step), &[gate, up])?;
            for (bias, out) in [(biases.gate, gate.out), (biases.up, up.out)] {
                if let Some(bias) = bias {
                    gpu.add_bias_rows(out, self.vectors().offset(bias), rows, width)?;
                }
            }
            let (gate, up) = (gate.out, up.out);
            let of = Gate { gate, up, out: gate, rows, width, gating, biases: None, halves: None };
            gpu.gate(&of)?;
        }
        products.changed(gate.out);
        Ok(())
    }
}

/// Converts the description's form of norms to the kernels' type.
fn device_form(form: forebay_compute::NormForm) -> NormForm {
    match form {
        forebay_compute::NormForm::RootMeanSquare => NormForm::RootMeanSquare,
        forebay_compute::NormForm::Layer => NormForm::Layer,
    }
}
