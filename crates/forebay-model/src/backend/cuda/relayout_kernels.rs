//! Which steps of a relayout are done by kernels, and the memory that they need.

use forebay_format::{Relayout, Step};

use crate::weights::Weights;

/// Returns the bytes of memory that the kernels' largest relayout needs.
pub fn workspace_bytes(weights: &Weights) -> u64 {
    let relayouts = weights.blocks.all().filter_map(|block| block.relayout.as_ref());
    let groups = relayouts.flat_map(Relayout::groups);
    let groups = groups.filter(|group| group.relayout.steps.iter().all(has_kernel));
    groups.map(|group| group.relayout.bytes() as u64).max().unwrap_or(0)
}

/// Returns true if a kernel does the step. Steps that also decode weights, or join tensors, are done on the host.
pub fn has_kernel(step: &Step) -> bool {
    match *step {
        Step::Mxfp4 { .. } | Step::Transposed { .. } => true,
        Step::Heads { ty, .. } => Step::transposed(ty) == ty,
        Step::Turns { .. }
        | Step::Copy { .. }
        | Step::Quantized { .. }
        | Step::QuantizedHeads { .. } => false,
    }
}
