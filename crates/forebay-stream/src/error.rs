//! Errors of this crate, with details that a caller can act on.

use forebay_store::{ReadError, StoreError};

use crate::blocks::BlockId;
use crate::policy::PolicyKind;

/// Errors of planning and streaming.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error(
        "a RAM budget of {} is too small: {why}; the smallest that works is {}",
        size(*given_bytes),
        size(*needed_bytes)
    )]
    BudgetTooSmall {
        /// Smallest budget that works, in bytes.
        needed_bytes: u64,
        given_bytes: u64,
        why: String,
    },
    #[error("unknown cache policy {name:?}; there are {}", policy_names())]
    UnknownPolicy { name: String },
    /// The read of a block failed. The cause names file, offset and block. The residency stays usable unless a later
    /// call reports otherwise.
    #[error("{cause}")]
    Read { block: BlockId, cause: ReadError },
    #[error(transparent)]
    Store(StoreError),
    /// The caller asked to stop. The residency stays usable; reads in flight arrive later.
    #[error("interrupted")]
    Interrupted,
    #[error("the plan does not belong to these blocks: {why}")]
    PlanMismatch { why: String },
    #[error("there is no {block} in this model")]
    NoSuchBlock { block: BlockId },
    #[error(
        "layer {layer}: the experts of a batch must be distinct, expert {expert} is named twice"
    )]
    ExpertNamedTwice { layer: u32, expert: u32 },
    #[error(
        "{block} needs a slot, but leases hold all of them: drop those that are done with first"
    )]
    LeasesHoldAllSlots { block: BlockId },
    #[error("no batch of experts has begun")]
    NoBatch,
    /// A read that never ended lost its memory, so nothing can be read any more. No wrong bytes are ever returned.
    #[error("streaming has stopped: {why}")]
    Stopped { why: String },
}

forebay_store::keep_interrupts!(StreamError { Store(StoreError) });

fn policy_names() -> String {
    PolicyKind::ALL.map(PolicyKind::name).join(", ")
}

/// Formats a size for a person and for the command line. It is rounded up, so that the shorter form also works.
fn size(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|unit| bytes >= unit.1) {
        Some((name, unit)) => {
            let hundredths = (u128::from(bytes) * 100).div_ceil(u128::from(*unit));
            format!("{bytes} bytes ({}.{:02} {name})", hundredths / 100, hundredths % 100)
        }
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_are_rounded_up() {
        assert_eq!(size(1023), "1023 bytes");
        assert_eq!(size(3 << 20), "3145728 bytes (3.00 MiB)");
        assert_eq!(size((3 << 20) + 1), "3145729 bytes (3.01 MiB)");
        assert_eq!(size(u64::MAX), "18446744073709551615 bytes (17179869184.00 GiB)");
    }
}
