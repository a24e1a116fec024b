//! Memory plans of sessions: the one place where both a session and a prediction get them.

use forebay_model::Weights;
use forebay_stream::{Budget, MemoryPlan, ModelBlocks, PolicyKind, StreamError};

/// The blocks that are in host memory where a GPU computes: experts, and nothing else.
pub(crate) fn host_blocks(weights: &Weights) -> ModelBlocks {
    ModelBlocks { dense: Vec::new(), ..weights.blocks.clone() }
}

/// Host memory for experts that a GPU has no slots for.
///
/// # Errors
/// A budget that is too small, with the smallest that works.
pub(crate) fn host_experts(
    weights: &Weights,
    ram_bytes: u64,
    policy: PolicyKind,
) -> Result<MemoryPlan, StreamError> {
    Budget::plan(&host_blocks(weights), Some(ram_bytes), weights.small_bytes, policy)
}

/// Host memory where the CPU computes with `blocks`: all of the model's, or those of its layers.
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
