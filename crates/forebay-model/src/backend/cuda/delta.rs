//! Recurrent layers.

use forebay_cuda::{CompressedParts, Delta, DeltaRuns, DeltaStates, DevicePtr, ProductColumns};
use forebay_ops::HeadColumns;

use super::backend::CudaBackend;
use super::products::{Rows, TOGETHER};
use super::vectors::optional;
use crate::ModelError;
use crate::arch::PRODUCTS_MAX;
use crate::arch::STATES_PER_SEQUENCE;
use crate::backend::Step;
use crate::weights::{DeltaWeights, RecurrenceBeside, SelectiveWeights};

fn columns(of: forebay_ops::HeadColumns) -> HeadColumns {
    HeadColumns { first: of.first, step: of.step }
}

impl CudaBackend {
    /// Queues the products of the normed input with a recurrent layer's projections.
    pub(super) fn project_delta(
        &mut self,
        step: &Step<'_>,
        weights: &DeltaWeights,
    ) -> Result<(), ModelError> {
        let outs = self.at().delta.products(weights.projections().map(|matrix| matrix.rows));
        let (products, rows) = (self.products(), Rows::of(step));
        let normed = self.float(self.at().normed);
        for (matrices, outs) in weights.products.chunks(TOGETHER).zip(outs.chunks(TOGETHER)) {
            let mut all = [self.product(step, matrices[0], outs[0]); TOGETHER];
            for (product, (matrix, out)) in all.iter_mut().zip(matrices.iter().zip(outs)) {
                *product = self.product(step, *matrix, *out);
            }
            products.dense(&self.gpu, normed, rows, &all[..matrices.len()])?;
        }
        let after = &outs[weights.products.len()..];
        for ((matrix, from), out) in weights.second.iter().zip(after) {
            let x = self.float(outs[*from]);
            products.changed(x);
            products.dense(&self.gpu, x, rows, &[self.product(step, *matrix, *out)])?;
        }
        if let Some(factors) = self.layer_vectors(step).delta.and_then(|of| of.factors) {
            let (factors, width) = (self.vectors().offset(factors), weights.products[0].rows);
            self.gpu.multiply_columns(self.float(outs[0]), factors, step.count, width)?;
        }
        Ok(())
    }

    /// Queues what Mamba projects from the values behind the convolution: compressed steps, keys and queries, and from those the steps.
    fn project_selective(
        &self,
        step: &Step<'_>,
        weights: &SelectiveWeights,
        [mixed, all, steps, narrow]: [u64; 4],
    ) -> Result<(), ModelError> {
        let shape = step.architecture.recurrent.as_ref().expect("the layer is recurrent");
        let vectors = self.layer_vectors(step).delta.expect("the layer is recurrent");
        let (products, rows) = (self.products(), Rows::of(step));
        let (mixed, narrow) = (self.float(mixed), self.float(narrow));
        products.changed(mixed);
        let product = self.product(step, weights.compressed, all);
        products.dense(&self.gpu, mixed, rows, &[product])?;
        let norms = vectors.selective_norms.map(|norms| norms.map(|at| self.vectors().offset(at)));
        let parts = CompressedParts {
            all: product.out,
            rank: shape.low_rank,
            key_dim: shape.key_dim,
            norms: norms.unwrap_or([DevicePtr::null(); 3]),
            epsilon: step.architecture.norm_epsilon,
            steps: narrow,
        };
        self.gpu.norm_compressed(&parts, step.count)?;
        products.changed(narrow);
        let product = self.product(step, weights.steps, steps);
        products.dense(&self.gpu, narrow, rows, &[product])
    }

    /// Queues the steps of the states over the rows of their runs, and the normed and gated outputs.
    pub(super) fn step_states(
        &mut self,
        step: &Step<'_>,
        weights: &DeltaWeights,
    ) -> Result<(), ModelError> {
        let shape = step.architecture.recurrent.as_ref().expect("the layer is recurrent");
        let vectors = self.layer_vectors(step).delta.expect("the layer is recurrent");
        let (at, floats) = (self.at(), self.vectors());
        // Behind the products are compressed steps, if the rule has such.
        let widths = weights.projections().map(|matrix| matrix.rows);
        let outs =
            at.delta.products(widths.chain(weights.selective.as_ref().map(|_| shape.low_rank)));
        let mut widths = [0; PRODUCTS_MAX];
        for (width, matrix) in widths.iter_mut().zip(weights.projections()) {
            *width = matrix.rows;
        }
        let part = |product: usize, of| ProductColumns {
            values: self.float(outs[product]),
            row: widths[product],
            columns: columns(of),
        };
        let (parts, of) = (weights.parts, weights.columns);
        let beside = step.layer_weights().beside.is_some();
        let out = self.float(if beside { at.delta.beside } else { at.attended });
        self.products().changed(out);
        let delta = Delta {
            shape: shape.delta_shape(),
            q: part(parts.q, of.q),
            k: part(parts.k, of.k),
            v: part(parts.v, of.v),
            z: part(parts.z, of.z),
            b: part(parts.b, of.b),
            a: part(parts.a, of.a),
            convolution: floats.offset(vectors.convolution),
            convolution_bias: optional(floats, vectors.convolution_bias),
            decay: floats.offset(vectors.decay),
            step: floats.offset(vectors.step),
            skip: optional(floats, vectors.skip),
            norm: floats.offset(vectors.norm),
            epsilon: step.architecture.delta_epsilon(),
            states: self.device_states(step.architecture.recurrent_index(step.layer)),
            mixed: self.float(at.delta.mixed),
            out,
        };
        let runs = self.state_runs(step);
        let Some(selective) = &weights.selective else {
            return Ok(self.gpu.gated_delta(&delta, &runs)?);
        };
        self.gpu.mix_values(&delta, &runs)?;
        let [_, all, steps, narrow, ..] = outs;
        self.project_selective(step, selective, [at.delta.mixed, all, steps, narrow])?;
        Ok(self.gpu.selective_scan(&delta, &runs)?)
    }

    /// Queues the addition of the output of a recurrence beside attention to that of attention.
    pub(super) fn add_beside(
        &self,
        step: &Step<'_>,
        beside: &RecurrenceBeside,
    ) -> Result<(), ModelError> {
        let at = self.at();
        // The normed input is not needed any more.
        let product = self.product(step, beside.o, at.normed);
        let products = self.products();
        products.dense(&self.gpu, self.float(at.delta.beside), Rows::of(step), &[product])?;
        products.changed(product.out);
        let factor = step.architecture.recurrent.map_or(1.0, |of| of.factors.output);
        let (out, count) = (self.float(at.block_out), step.count * step.architecture.hidden);
        Ok(self.gpu.add_scaled(out, product.out, count, factor)?)
    }

    /// Returns one part of the states of all sequences.
    pub(super) fn device_states(&self, part: usize) -> DeltaStates {
        DeltaStates {
            floats: self.arena.kv(self.plan.kv.states(part)).cast(),
            count: STATES_PER_SEQUENCE * self.plan.kv.sequences(),
        }
    }

    /// Returns the runs of the current lane's rows with their states.
    pub(super) fn state_runs(&self, step: &Step<'_>) -> DeltaRuns {
        let first_row = self.lanes.current().first_row;
        DeltaRuns {
            // In the second lane, each row before the first one is a run of its own.
            words: self.exchange.state_runs(first_row),
            // A CUDA graph of decode rows runs for any runs that have as many rows.
            count: if step.decode > 0 { step.count } else { step.runs.len() },
            first_row,
            rows: step.count,
        }
    }
}
