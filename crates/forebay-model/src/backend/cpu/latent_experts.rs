//! The space of experts that compute between two projections.

use forebay_compute::Cpu;
use forebay_format::TensorType;

use super::backend::CpuBackend;
use super::products::{both_kinds, matrix, norm_in_place};
use super::scratch::Scratch;
use crate::arch::LatentNorm;
use crate::backend::Step;
use crate::weights::{FeedForwardWeights, PartMatrix};

/// Norms rows in the space of the step's experts, if the norm is in this place.
pub fn norm_latent(cpu: &Cpu, step: &Step<'_>, place: LatentNorm, rows: &mut [f32]) {
    let FeedForwardWeights::Experts { vectors, .. } = &step.layer_weights().feed_forward else {
        unreachable!("the caller looked at the weights");
    };
    if step.experts().latent.is_some_and(|latent| latent.norm == place) {
        let epsilon = step.architecture.norm_epsilon;
        norm_in_place(cpu, rows, vectors.latent_norm.as_deref(), epsilon);
    }
}

impl CpuBackend {
    /// Projects the prepared input of the layer's experts to their space, and prepares it there for products with matrices of
    /// these types.
    pub(super) fn enter_expert_space(
        &mut self,
        step: &Step<'_>,
        down: &PartMatrix,
        types: [TensorType; 2],
    ) {
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let Scratch { input, latent_experts, rows, .. } = scratch;
        let out = &mut latent_experts[..step.count * down.rows];
        let w = matrix(residency, lease, down);
        cpu.matmul(&mut both_kinds(w, input, rows.of(step), &mut *out));
        norm_latent(cpu, step, LatentNorm::Before, out);
        input.prepare(cpu, out, step.count, down.rows, &types);
    }
}
