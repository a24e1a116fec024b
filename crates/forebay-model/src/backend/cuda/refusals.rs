//! Parts of models that only the CPU computes.

use forebay_compute::{Gating, Growth};

use crate::arch::{Architecture, Experts, LatentNorm};

/// Returns the first part of a model that has no kernels, if there is one.
pub fn parts_without_kernels(architecture: &Architecture) -> Option<&'static str> {
    let has = |of: fn(&Experts) -> bool| architecture.expert_layers().any(of);
    let has_biases = architecture.attentions.iter().any(|of| of.relative.is_some());
    let grows = architecture.temperature.is_some_and(|of| of.growth != Growth::WholeSteps);
    let parts = [
        (has_biases, "scores with biases by the distance of the key"),
        (grows, "queries that grow with every position"),
        (architecture.convolutions.is_some(), "short convolutions beside attention"),
        (architecture.feed_forward_scales, "factors of the outputs of feed-forwards"),
        (matches!(architecture.gating, Gating::Xielu { .. }), "xIELU"),
        (architecture.residual_gates.is_some(), "gates of the residual stream"),
        (architecture.attentions.iter().any(|of| of.output_norm), "norms of attention's outputs"),
        (has(|of| of.always > 0), "shared experts that the router scores"),
        (has(takes_normed_input), "experts that take normed inputs in a space of their own"),
        (has(|of| of.output_norms), "norms of every expert's output"),
        (has(|of| of.logit_scale != 1.0), "routers whose logits have a factor"),
    ];
    parts.into_iter().find(|(has, _)| *has).map(|(_, what)| what)
}

fn takes_normed_input(experts: &Experts) -> bool {
    experts.latent.is_some_and(|of| of.norm == LatentNorm::Before)
}
