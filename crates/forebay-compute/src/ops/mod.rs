//! Element-wise operations and small reductions between the large products. Each gives the same
//! bits for every number of threads: work is cut by the data's shape, never by the pool's size.

mod elementwise;
mod gating;
mod norm;
mod rope;
mod router;
mod softmax;

pub use gating::Gating;
pub use rope::{RopeConfig, RopeLayout, RopeScaling, RopeTable};
pub use router::{RouterGroups, RouterRule, Scoring};

/// Elements below which an operation is not worth a parallel region (about 2 us).
const PARALLEL_ELEMENTS: usize = 16 * 1024;

/// Elements of one worker's share.
const CHUNK_ELEMENTS: usize = 4 * 1024;

/// Elements of one share when `total` elements come in rows of `row`: whole rows, and everything
/// where a parallel region would not pay.
fn share(total: usize, row: usize) -> usize {
    if total < PARALLEL_ELEMENTS {
        return total.max(1);
    }
    row * (CHUNK_ELEMENTS / row).max(1)
}
