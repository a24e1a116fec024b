//! Recurrent layers.

use forebay_compute::{DeltaInputs, DeltaVectors, MatmulJob, ProductRows, StateRun};

use super::backend::CpuBackend;
use super::delta_scratch::PRODUCTS_MAX;
use super::products::{both_kinds, matmul_beside_reads, matrix, recycle};
use crate::ModelError;
use crate::backend::Step;
use crate::weights::DeltaWeights;

impl CpuBackend {
    /// Computes the products of the normed input with a recurrent layer's projections.
    pub(super) fn project_delta(
        &mut self,
        step: &Step<'_>,
        weights: &DeltaWeights,
    ) -> Result<(), ModelError> {
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (count, hidden) = (step.count, step.architecture.hidden);
        let normed = &scratch.normed[..count * hidden];
        let at = &mut scratch.delta;
        let mut types = [weights.products[0].ty; PRODUCTS_MAX];
        for (ty, matrix) in types.iter_mut().zip(&weights.products) {
            *ty = matrix.ty;
        }
        scratch.input.prepare(cpu, normed, count, hidden, &types);
        let (first, second) = at.products.split_at_mut(weights.products.len());
        let mut jobs = recycle(std::mem::take(&mut at.jobs));
        for (of, out) in weights.products.iter().zip(first.iter_mut()) {
            let (w, out) = (matrix(residency, lease, of), &mut out[..count * of.rows]);
            jobs.extend(both_kinds(w, &scratch.input, scratch.rows.of(step), out));
        }
        matmul_beside_reads(cpu, residency, &mut jobs)?;
        let mut jobs = recycle::<MatmulJob, MatmulJob>(jobs);
        let inputs = [&mut scratch.inner, &mut scratch.dense_input];
        for (((of, from), out), input) in weights.second.iter().zip(second).zip(inputs) {
            input.prepare(cpu, &first[*from][..count * of.cols], count, of.cols, &[of.ty]);
            let (w, out) = (matrix(residency, lease, of), &mut out[..count * of.rows]);
            jobs.extend(both_kinds(w, input, scratch.rows.of(step), out));
        }
        if !jobs.is_empty() {
            matmul_beside_reads(cpu, residency, &mut jobs)?;
        }
        at.jobs = recycle(jobs);
        Ok(())
    }

    /// Moves the states of the runs over their rows, and computes the normed and gated outputs.
    pub(super) fn step_states(&mut self, step: &Step<'_>, weights: &DeltaWeights) {
        let shape = step.architecture.recurrent.as_ref().expect("the layer is recurrent");
        let (shape, count) = (shape.delta_shape(), step.count);
        let of_layer = self.states_of(step.architecture.recurrent_index(step.layer));
        let CpuBackend { cpu, states, scratch, .. } = self;
        let states = &mut states[of_layer];
        let at = &mut scratch.delta;
        let floats = shape.state_floats();
        let mut runs = std::mem::take(&mut at.runs);
        runs.extend(step.runs.iter().zip(step.states).map(|(run, places)| StateRun {
            tokens: run.count,
            from: places.from.map(|from| from * floats),
            to: places.to * floats,
        }));
        let widths = weights.projections().map(|matrix| matrix.rows);
        let mut products = [ProductRows { values: &[], row: 0 }; PRODUCTS_MAX];
        for ((rows, row), values) in products.iter_mut().zip(widths).zip(&at.products) {
            *rows = ProductRows { values: &values[..count * row], row };
        }
        let parts = weights.parts;
        let inputs = DeltaInputs {
            columns: weights.columns,
            q: products[parts.q],
            k: products[parts.k],
            v: products[parts.v],
            z: products[parts.z],
            b: products[parts.b],
            a: products[parts.a],
        };
        let vectors = DeltaVectors {
            convolution: &weights.convolution,
            convolution_bias: weights.convolution_bias.as_deref(),
            decay: &weights.decay,
            step: &weights.step,
            skip: weights.skip.as_deref(),
            norm: &weights.norm,
            epsilon: step.architecture.delta_epsilon(),
        };
        let buffer = &mut at.scratch[..count * shape.scratch_floats()];
        let out = &mut scratch.attended[..count * shape.value_width()];
        cpu.gated_delta(&shape, &vectors, &inputs, &runs, states, buffer, out);
        runs.clear();
        at.runs = runs;
    }
}
