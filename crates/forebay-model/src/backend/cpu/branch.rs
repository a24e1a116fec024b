//! The low-rank branch beside attention.

use super::backend::CpuBackend;
use super::predicted::PredictedScratch;
use super::products::{multiply, norm_in_place};
use crate::ModelError;
use crate::backend::Step;
use crate::weights::PredictedWeights;

impl CpuBackend {
    /// Computes the low-rank branch from attention's normed input.
    pub(super) fn project_branch(
        &mut self,
        step: &Step<'_>,
        weights: &PredictedWeights,
    ) -> Result<(), ModelError> {
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (count, hidden) = (step.count, step.architecture.hidden);
        let normed = &scratch.normed[..count * hidden];
        let (rank, rows) = (weights.left.rows, scratch.rows.of(step));
        let PredictedScratch { branch, low, input, .. } = &mut scratch.predicted;
        let (branch, low) = (&mut branch[..count * hidden], &mut low[..count * rank]);
        input.prepare(cpu, normed, count, hidden, &[weights.left.ty]);
        multiply(cpu, residency, lease, &weights.left, input, rows, low)?;
        input.prepare(cpu, low, count, rank, &[weights.right.ty]);
        multiply(cpu, residency, lease, &weights.right, input, rows, branch)?;
        norm_in_place(cpu, branch, Some(&weights.branch_norm), step.architecture.norm_epsilon);
        cpu.add_assign(branch, normed);
        Ok(())
    }
}
