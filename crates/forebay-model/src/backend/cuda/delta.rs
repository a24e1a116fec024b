//! Recurrent layers with the gated delta rule.

use forebay_cuda::{Delta, DeltaRuns, DeltaStates, HeadColumns, ProductColumns};

use super::backend::CudaBackend;
use super::delta_shape::device_shape;
use super::products::{Product, Rows};
use crate::ModelError;
use crate::arch::STATES_PER_SEQUENCE;
use crate::backend::Step;
use crate::weights::DeltaWeights;

fn columns(of: forebay_compute::HeadColumns) -> HeadColumns {
    HeadColumns { first: of.first, step: of.step }
}

impl CudaBackend {
    /// Queues the products of the normed input with a recurrent layer's projections.
    pub(super) fn project_delta(
        &mut self,
        step: &Step<'_>,
        weights: &DeltaWeights,
    ) -> Result<(), ModelError> {
        let at = &self.at().delta;
        let product = |matrix, out| self.product(step, matrix, out);
        let mut all: [Option<Product>; 4] = [None; 4];
        let products = [
            Some((weights.qkv, at.qkv)),
            weights.z.map(|z| (z, at.z)),
            Some((weights.b, at.b)),
            weights.a.map(|a| (a, at.a)),
        ];
        let mut count = 0;
        for (matrix, out) in products.into_iter().flatten() {
            all[count] = Some(product(matrix, out));
            count += 1;
        }
        let first = all[0].expect("every layer has queries, keys and values");
        let all = all.map(|product| product.unwrap_or(first));
        let normed = self.float(self.at().normed);
        self.products().dense(&self.gpu, normed, Rows::of(step), &all[..count])
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
        let [qkv, z, b, a] =
            [at.delta.qkv, at.delta.z, at.delta.b, at.delta.a].map(|at| self.float(at));
        let part = |own: Option<(_, usize)>, shared: (_, usize), of| {
            let (values, row) = own.unwrap_or(shared);
            ProductColumns { values, row, columns: columns(of) }
        };
        let [own_z, own_a] =
            [(weights.z, z), (weights.a, a)].map(|(of, out)| of.map(|of| (out, of.rows)));
        let out = self.float(at.attended);
        self.products().changed(out);
        let states = self.plan.kv.states(step.architecture.recurrent_index(step.layer));
        let delta = Delta {
            shape: device_shape(shape),
            qkv,
            qkv_row: weights.qkv.rows,
            q: columns(weights.columns.q),
            k: columns(weights.columns.k),
            v: columns(weights.columns.v),
            z: part(own_z, (qkv, weights.qkv.rows), weights.columns.z),
            b: part(None, (b, weights.b.rows), weights.columns.b),
            a: part(own_a, (b, weights.b.rows), weights.columns.a),
            convolution: floats.offset(vectors.convolution),
            decay: floats.offset(vectors.decay),
            step: floats.offset(vectors.step),
            norm: floats.offset(vectors.norm),
            epsilon: step.architecture.norm_epsilon,
            states: DeltaStates {
                floats: self.arena.kv(states).cast(),
                count: STATES_PER_SEQUENCE * self.plan.kv.sequences(),
            },
            mixed: self.float(at.delta.mixed),
            out,
        };
        let first_row = self.lanes.current().first_row;
        let runs = DeltaRuns {
            // In the second lane, each row before the first one is a run of its own.
            words: self.exchange.state_runs(first_row),
            // A CUDA graph of decode rows runs for any runs that have as many rows.
            count: if step.decode > 0 { step.count } else { step.runs.len() },
            first_row,
            rows: step.count,
        };
        Ok(self.gpu.gated_delta(&delta, &runs)?)
    }
}
