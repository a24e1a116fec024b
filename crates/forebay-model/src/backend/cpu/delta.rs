//! Recurrent layers with the gated delta rule.

use forebay_compute::{DeltaInputs, DeltaVectors, ProductRows, StateRun};

use super::backend::CpuBackend;
use super::products::{both_kinds, matmul_beside_reads, matrix};
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
        let DeltaWeights { qkv, z, b, a, .. } = weights;
        let [z_type, a_type] = [z, a].map(|of| of.as_ref().map_or(qkv.ty, |matrix| matrix.ty));
        scratch.input.prepare(cpu, normed, count, hidden, &[qkv.ty, z_type, b.ty, a_type]);
        let (x, rows, at) = (&scratch.input, scratch.rows.of(step), &mut scratch.delta);
        let job = |of, out| both_kinds(matrix(residency, lease, of), x, rows, out);
        let [c, d] = job(qkv, &mut at.qkv[..count * qkv.rows]);
        let [e, f] = job(b, &mut at.b[..count * b.rows]);
        match (z, a) {
            (Some(z), Some(a)) => {
                let [g, h] = job(z, &mut at.z[..count * z.rows]);
                let [i, j] = job(a, &mut at.a[..count * a.rows]);
                matmul_beside_reads(cpu, residency, &mut [c, d, e, f, g, h, i, j])
            }
            (Some(z), None) => {
                let [g, h] = job(z, &mut at.z[..count * z.rows]);
                matmul_beside_reads(cpu, residency, &mut [c, d, e, f, g, h])
            }
            (None, Some(a)) => {
                let [i, j] = job(a, &mut at.a[..count * a.rows]);
                matmul_beside_reads(cpu, residency, &mut [c, d, e, f, i, j])
            }
            (None, None) => matmul_beside_reads(cpu, residency, &mut [c, d, e, f]),
        }
    }

    /// Moves the states of the runs over their rows, and computes the normed and gated outputs.
    pub(super) fn step_states(&mut self, step: &Step<'_>, weights: &DeltaWeights) {
        let shape = step.architecture.recurrent.as_ref().expect("the layer is recurrent");
        let (shape, count) = (shape.delta_shape(), step.count);
        let CpuBackend { cpu, states, scratch, .. } = self;
        let layers = step.architecture.recurrent_layers();
        let of_layer = states.len() / layers;
        let first = step.architecture.recurrent_index(step.layer) * of_layer;
        let states = &mut states[first..first + of_layer];
        let at = &mut scratch.delta;
        let floats = shape.state_floats();
        let mut runs = std::mem::take(&mut at.runs);
        runs.extend(step.runs.iter().zip(step.states).map(|(run, places)| StateRun {
            tokens: run.count,
            from: places.from.map(|from| from * floats),
            to: places.to * floats,
        }));
        let qkv = product(&at.qkv, count, weights.qkv.rows);
        let b = product(&at.b, count, weights.b.rows);
        let inputs = DeltaInputs {
            columns: weights.columns,
            qkv,
            z: weights.z.as_ref().map_or(qkv, |z| product(&at.z, count, z.rows)),
            b,
            a: weights.a.as_ref().map_or(b, |a| product(&at.a, count, a.rows)),
        };
        let vectors = DeltaVectors {
            convolution: &weights.convolution,
            decay: &weights.decay,
            step: &weights.step,
            norm: &weights.norm,
            epsilon: step.architecture.norm_epsilon,
        };
        let buffer = &mut at.scratch[..count * shape.scratch_floats()];
        let out = &mut scratch.attended[..count * shape.value_width()];
        cpu.gated_delta(&shape, &vectors, &inputs, &runs, states, buffer, out);
        runs.clear();
        at.runs = runs;
    }
}

/// Returns the first `count` rows of a product, of `row` columns.
fn product(values: &[f32], count: usize, row: usize) -> ProductRows<'_> {
    ProductRows { values: &values[..count * row], row }
}
