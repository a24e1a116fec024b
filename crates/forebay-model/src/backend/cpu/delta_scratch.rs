//! Activations of recurrent layers.

use forebay_compute::{MatmulJob, StateRun};
use forebay_ops::DeltaRule;

use crate::arch::{Architecture, PRODUCTS_MAX, Recurrent};
use crate::weights::Weights;

/// Activations of recurrent layers, for one batch.
#[derive(Default)]
pub struct DeltaScratch {
    /// Products with the projections.
    pub(super) products: [Vec<f32>; PRODUCTS_MAX],
    /// What [`forebay_compute::Cpu::gated_delta`] needs, or the values behind the convolution of Mamba.
    pub(super) scratch: Vec<f32>,
    /// Compressed steps `[tokens, rank]` of Mamba; empty with other rules.
    pub(super) compressed: Vec<f32>,
    /// Outputs `[tokens, values]` of recurrences beside attention; empty without such layers.
    pub(super) beside: Vec<f32>,
    /// Always empty between calls; kept for its memory.
    pub(super) runs: Vec<StateRun>,
    /// Always empty between calls; kept for its memory.
    pub(super) jobs: Vec<MatmulJob<'static>>,
}

impl DeltaScratch {
    pub fn reserve(architecture: &Architecture, weights: &Weights, batch: usize) -> DeltaScratch {
        let Some(shape) = &architecture.recurrent else { return DeltaScratch::default() };
        let mut widths = [0; PRODUCTS_MAX];
        for layer in &weights.layers {
            let Some(of) = layer.delta() else { continue };
            for (width, matrix) in widths.iter_mut().zip(of.projections()) {
                *width = matrix.rows.max(*width);
            }
        }
        DeltaScratch {
            products: widths.map(|width| vec![0.0; batch * width]),
            scratch: vec![0.0; batch * shape.delta_shape().scratch_floats()],
            compressed: vec![0.0; batch * compressed_steps(shape)],
            beside: vec![0.0; batch * beside_width(architecture)],
            runs: Vec::with_capacity(batch),
            jobs: Vec::with_capacity(2 * PRODUCTS_MAX),
        }
    }

    /// Returns the outputs `[tokens, values]` of a recurrence beside attention.
    pub(super) fn beside(&self, tokens: usize, values: usize) -> &[f32] {
        &self.beside[..tokens * values]
    }

    /// Returns the number of floats for one token of a batch.
    pub fn floats_per_token(architecture: &Architecture) -> usize {
        let own = |shape: Recurrent| shape.projected_width() + shape.delta_shape().scratch_floats();
        architecture.recurrent.map_or(0, own) + beside_width(architecture)
    }
}

/// Returns the number of a token's compressed steps; 0 if the layers do not compress them.
fn compressed_steps(shape: &Recurrent) -> usize {
    if shape.rule == DeltaRule::Mamba { shape.low_rank } else { 0 }
}

/// Returns the number of elements of the output of a recurrence beside attention; 0 without such layers.
fn beside_width(architecture: &Architecture) -> usize {
    let values = architecture.recurrent.map_or(0, |of| of.value_width());
    if architecture.has_beside() { values } else { 0 }
}
