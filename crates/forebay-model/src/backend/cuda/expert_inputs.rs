//! What routers and experts take.

use crate::arch::{Architecture, ExpertInput, Experts, Layer};

/// Returns true if the input of experts is not that of the feed-forward.
pub(super) fn has_own_input(of: &Experts) -> bool {
    of.scaled_input || of.own_norms || of.latent.is_some() || of.input == ExpertInput::OfLayer
}

/// Returns the rows `[rows, hidden]` of the inputs of routers that have inputs of their own, in passes of up to `batch` rows, or of
/// `decode_rows` decode rows; 0 if there are none. The stream before a layer has a place for each layer.
pub(super) fn router_rows(architecture: &Architecture, batch: usize, decode_rows: usize) -> usize {
    let of_layer = |of: &Layer| of.expert_input() != ExpertInput::OfFeedForward;
    if architecture.layers.iter().any(of_layer) {
        return batch.max(architecture.layers.len() * decode_rows);
    }
    if architecture.expert_layers().any(|of| of.own_norms) { batch } else { 0 }
}
