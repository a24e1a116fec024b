//! Dense blocks: which ones are pinned, and the ring that the others pass through.
//!
//! Dense blocks are used in a cycle, so recency does not tell which ones to keep. Some are pinned and the rest go
//! through the ring. The pinned blocks are spread evenly over the cycle, so that the ring fills while they are used.

use serde::Serialize;

/// Fewest slots of a ring: one block is computed with while the next one is read.
const RING_SLOTS: usize = 2;

/// Placement of the dense blocks in memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DensePlan {
    /// Slot bytes of every block, in execution order.
    pub slot_bytes: Vec<u64>,
    /// For each block in execution order, true if it has a slot of its own.
    pub pinned: Vec<bool>,
    /// Number of slots that the other blocks share; 0 if all blocks are pinned.
    pub ring_slots: usize,
    /// Bytes of one slot of the ring.
    pub ring_slot_bytes: u64,
}

impl DensePlan {
    /// Returns the plan with the most pinned blocks that fits `bytes`.
    pub(super) fn within(sizes: &[u64], bytes: u64) -> Option<DensePlan> {
        choices(sizes.len()).rev().map(|count| DensePlan::with(sizes, count)).find(|plan| {
            // A saturated sum means absurd sizes, which no budget holds.
            plan.bytes() <= bytes && plan.bytes() < u64::MAX
        })
    }

    fn with(sizes: &[u64], pinned_count: usize) -> DensePlan {
        let blocks = sizes.len();
        let is_pinned =
            |index: usize| (index + 1) * pinned_count / blocks > index * pinned_count / blocks;
        let pinned: Vec<bool> = (0..blocks).map(is_pinned).collect();
        let rest = sizes.iter().zip(&pinned).filter(|(_, pinned)| !**pinned);
        let ring_slot_bytes = rest.map(|(size, _)| *size).max().unwrap_or(0);
        let ring_slots = if pinned_count == blocks { 0 } else { RING_SLOTS };
        DensePlan { slot_bytes: sizes.to_vec(), pinned, ring_slots, ring_slot_bytes }
    }

    /// Returns the bytes of all slots.
    pub fn bytes(&self) -> u64 {
        let ring = self.ring_slot_bytes.saturating_mul(self.ring_slots as u64);
        let pinned = self.slot_bytes.iter().zip(&self.pinned).filter(|(_, pinned)| **pinned);
        pinned.fold(ring, |sum, (size, _)| sum.saturating_add(*size))
    }

    /// Returns the number of blocks with a slot of their own.
    pub fn pinned_blocks(&self) -> usize {
        self.pinned.iter().filter(|&&pinned| pinned).count()
    }

    /// Returns true if no block goes through the ring.
    pub fn all_pinned(&self) -> bool {
        self.ring_slots == 0
    }
}

/// Returns the possible numbers of pinned blocks. A ring with at least as many slots as unpinned blocks would only waste
/// memory.
fn choices(blocks: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..=blocks).filter(move |&pinned| pinned == blocks || blocks - pinned > RING_SLOTS)
}

/// Returns the fewest bytes that any choice needs.
pub(super) fn smallest_bytes(sizes: &[u64]) -> u64 {
    choices(sizes.len()).map(|count| DensePlan::with(sizes, count).bytes()).min().unwrap_or(0)
}
