//! Memory plans of sessions: the one place where both a session and a prediction get them.

use forebay_model::Weights;
use forebay_stream::{Budget, MemoryPlan, ModelBlocks, PolicyKind, StreamError};

/// The blocks that are in host memory where a GPU computes: experts, and nothing else.
pub(crate) fn experts(weights: &Weights) -> ModelBlocks {
    ModelBlocks { dense: Vec::new(), ..weights.blocks.clone() }
}

/// Host memory for `blocks`: all of a model's, or those that a GPU has no room for.
///
/// # Errors
/// A budget that is too small, with the smallest that works.
pub(crate) fn host(
    weights: &Weights,
    blocks: &ModelBlocks,
    ram_bytes: u64,
    policy: PolicyKind,
) -> Result<MemoryPlan, StreamError> {
    Budget::plan(blocks, Some(ram_bytes), weights.small_bytes, policy)
}
