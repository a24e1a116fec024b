//! Element-wise operations and small reductions between the large products. Each gives the same
//! bits for every number of threads: the work is divided by the shape of the data, never by the
//! size of the pool.

mod cut;
mod elementwise;
mod gating;
mod mix;
mod norm;
mod rope;
mod router;
mod row_factors;
mod row_gate;
mod softmax;

pub(crate) use gating::times_logistic;
pub use norm::NormForm;
pub(crate) use norm::{norm_row, row_scale};
pub use rope::{RopeConfig, RopeLayout, RopeScaling, RopeTable};
pub use router::RouterRule;
pub use row_factors::{Growth, Temperature};

/// Returns `1 / (1 + e^-x)`.
pub(crate) fn logistic(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Number of elements below which an operation is not worth a parallel region (about 2 us).
const PARALLEL_ELEMENTS: usize = 16 * 1024;

/// Number of elements in one worker's share.
const CHUNK_ELEMENTS: usize = 4 * 1024;

/// Returns the number of elements in one share of `total` elements in rows of `row`. A share is a
/// whole number of rows, or everything if a parallel region would not pay.
pub(crate) fn share(total: usize, row: usize) -> usize {
    if total < PARALLEL_ELEMENTS {
        return total.max(1);
    }
    row * (CHUNK_ELEMENTS / row).max(1)
}
