//! Recurrent layers.

use forebay_compute::{DeltaInputs, DeltaVectors, MatmulJob, ProductRows, StateRun};

use super::backend::CpuBackend;
use super::products::{both_kinds, matmul_beside_reads, matrix, multiply, recycle};
use crate::ModelError;
use crate::arch::PRODUCTS_MAX;
use crate::arch::Recurrent;
use crate::backend::Step;
use crate::weights::{DeltaWeights, SelectiveWeights};

/// What reads and writes states in a recurrent layer.
#[derive(Clone, Copy)]
enum Part {
    /// The convolution of Mamba, whose output is projected before the steps.
    Convolution,
    /// The steps, with the convolution except for Mamba.
    Steps,
}

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
        if let Some(factors) = &weights.factors {
            cpu.multiply_columns(&mut at.products[0][..count * factors.len()], factors);
        }
        Ok(())
    }

    /// Computes what Mamba projects from the values behind the convolution: compressed steps, keys and queries, and from those the
    /// steps.
    fn project_selective(
        &mut self,
        step: &Step<'_>,
        shape: &Recurrent,
        weights: &SelectiveWeights,
    ) -> Result<(), ModelError> {
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (count, values) = (step.count, shape.value_width());
        let rows = scratch.rows.of(step);
        let at = &mut scratch.delta;
        let SelectiveWeights { compressed, steps, norms } = weights;
        let (_, after) = at.products.split_at_mut(1);
        let [all, out, ..] = after else { unreachable!("there are more products") };
        let (all, out) = (&mut all[..count * compressed.rows], &mut out[..count * values]);
        let mixed = &at.scratch[..count * values];
        scratch.inner.prepare(cpu, mixed, count, values, &[compressed.ty]);
        multiply(cpu, residency, lease, compressed, &scratch.inner, rows, all)?;
        let (rank, dim) = (shape.low_rank, shape.key_dim);
        if let Some(norms) = norms {
            let epsilon = step.architecture.norm_epsilon;
            let firsts = [0, rank, rank + dim];
            for (norm, first) in norms.iter().zip(firsts) {
                cpu.rms_norm_columns(all, compressed.rows, first, norm, epsilon);
            }
        }
        let narrow = &mut at.compressed[..count * rank];
        for (to, from) in narrow.chunks_exact_mut(rank).zip(all.chunks_exact(compressed.rows)) {
            to.copy_from_slice(&from[..rank]);
        }
        scratch.inner.prepare(cpu, narrow, count, rank, &[steps.ty]);
        multiply(cpu, residency, lease, steps, &scratch.inner, rows, out)
    }

    /// Moves the states of the runs over their rows, and computes the normed and gated outputs.
    pub(super) fn step_states(
        &mut self,
        step: &Step<'_>,
        weights: &DeltaWeights,
    ) -> Result<(), ModelError> {
        let own = step.architecture.recurrent.as_ref().expect("the layer is recurrent");
        if let Some(selective) = &weights.selective {
            self.with_states(step, weights, Part::Convolution);
            self.project_selective(step, own, selective)?;
        }
        self.with_states(step, weights, Part::Steps);
        Ok(())
    }

    /// Calls the operation that a part of a recurrent layer is.
    fn with_states(&mut self, step: &Step<'_>, weights: &DeltaWeights, part: Part) {
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
        let out = match step.layer_weights().beside {
            Some(_) => &mut at.beside,
            None => &mut scratch.attended,
        };
        let out = &mut out[..count * shape.value_width()];
        match (part, &weights.selective) {
            (Part::Convolution, _) => {
                cpu.mix_values(&shape, &vectors, &inputs, &runs, states, buffer);
            }
            (Part::Steps, Some(_)) => {
                cpu.selective_scan(&shape, &vectors, &inputs, buffer, &runs, states, out);
            }
            (Part::Steps, None) => {
                cpu.gated_delta(&shape, &vectors, &inputs, &runs, states, buffer, out);
            }
        }
        runs.clear();
        at.runs = runs;
    }
}
