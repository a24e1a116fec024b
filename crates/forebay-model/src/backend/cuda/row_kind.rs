//! The kind of the rows of a pass, as the kernels of attention name it.

use forebay_cuda::RowKind;

use crate::backend::Step;

/// Returns the kind of a batch's rows, which selects the kernels of attention.
pub(super) fn row_kind(step: &Step<'_>) -> RowKind {
    match step.kind() {
        forebay_compute::RowKind::Prompt => RowKind::Prompt,
        forebay_compute::RowKind::Decode => RowKind::Decode,
    }
}
