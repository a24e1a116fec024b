//! What routers and experts take.

use forebay_compute::{Cpu, Matrix};
use forebay_format::TensorType;

use super::products::{add_bias, both_kinds};
use super::scratch::Scratch;
use crate::arch::ExpertInput;
use crate::backend::Step;
use crate::weights::ExpertVectors;

impl Scratch {
    /// Keeps the residual stream, if the experts of the step's layer take it as it is before the layer.
    pub(super) fn keep_input(&mut self, step: &Step<'_>) {
        if step.architecture.layers[step.layer].expert_input() != ExpertInput::OfFeedForward {
            let kept = step.count * step.architecture.hidden;
            self.layer_input[..kept].copy_from_slice(&self.x[..kept]);
        }
    }
}

/// Computes the logits of a layer's router, a matrix `router`, and prepares the input of the experts for products with matrices of these
/// `types`.
pub(super) fn score_experts(
    cpu: &Cpu,
    step: &Step<'_>,
    scratch: &mut Scratch,
    vectors: &ExpertVectors,
    router: Matrix<'_>,
    types: [TensorType; 2],
) {
    let (count, hidden) = (step.count, step.architecture.hidden);
    let values = count * hidden;
    let Scratch { input, inner, x, layer_input, block_out, normed, moe, rows, .. } = scratch;
    let out = &mut moe.scores[..count * router.rows];
    let all = [router.ty, types[0], types[1]];
    // `inner` is free until a feed-forward is computed, and the output of attention has been added.
    let own = &mut block_out[..values];
    let epsilon = step.architecture.stream_epsilon();
    match (vectors.input, &vectors.norms) {
        (ExpertInput::OfFeedForward, None) => {
            input.prepare(cpu, &normed[..values], count, hidden, &all);
            cpu.matmul(&mut both_kinds(router, input, rows.of(step), out));
        }
        (ExpertInput::OfFeedForward, Some(norms)) => {
            let x = &x[..values];
            cpu.rms_norm(x, &norms.router, epsilon, own);
            inner.prepare(cpu, own, count, hidden, &all[..1]);
            cpu.matmul(&mut both_kinds(router, inner, rows.of(step), out));
            cpu.rms_norm(x, &norms.input, epsilon, own);
            input.prepare(cpu, own, count, hidden, &types);
        }
        (ExpertInput::RouterOfLayer, _) => {
            inner.prepare(cpu, &layer_input[..values], count, hidden, &all[..1]);
            cpu.matmul(&mut both_kinds(router, inner, rows.of(step), out));
            input.prepare(cpu, &normed[..values], count, hidden, &types);
        }
        (ExpertInput::OfLayer, _) => {
            let norm = vectors.input_norm.as_deref().expect("such inputs are normed");
            cpu.rms_norm(&layer_input[..values], norm, epsilon, own);
            input.prepare(cpu, own, count, hidden, &all);
            cpu.matmul(&mut both_kinds(router, input, rows.of(step), out));
        }
    }
    add_bias(cpu, out, vectors.router_bias.as_deref());
}
