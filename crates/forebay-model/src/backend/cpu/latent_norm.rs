//! The norm in the space of experts.

use forebay_compute::Cpu;

use super::products::norm_in_place;
use crate::arch::LatentNorm;
use crate::backend::Step;
use crate::weights::FeedForwardWeights;

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
