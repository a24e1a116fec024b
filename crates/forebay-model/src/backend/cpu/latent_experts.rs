//! The space of experts that compute between two projections.

use forebay_format::TensorType;

use super::backend::CpuBackend;
use super::latent_norm::norm_latent;
use super::products::{both_kinds, matrix};
use super::scratch::Scratch;
use crate::arch::LatentNorm;
use crate::backend::Step;
use crate::weights::PartMatrix;

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
