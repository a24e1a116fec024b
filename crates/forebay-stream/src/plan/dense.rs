//! Dense blocks: which are pinned, and the ring that the others pass through.
//!
//! Dense blocks are visited in a cycle, so recency says nothing about which one to keep: a part is pinned and the rest
//! goes round. The pinned ones are spread evenly over the cycle: while they compute, the ring fills.

use serde::Serialize;

/// Fewest slots of a ring: one block computes while the next one is read.
const RING_SLOTS: usize = 2;

/// Where dense blocks lie in memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DensePlan {
    /// Slot bytes of every block, in execution order.
    pub slot_bytes: Vec<u64>,
    /// Whether a block has a slot of its own, in execution order.
    pub pinned: Vec<bool>,
    /// Slots that the other blocks share; 0 when all are pinned.
    pub ring_slots: usize,
    /// Bytes of one slot of the ring.
    pub ring_slot_bytes: u64,
}

impl DensePlan {
    /// The plan with the most pinned blocks that fits `bytes`.
    pub(super) fn within(sizes: &[u64], bytes: u64) -> Option<DensePlan> {
        choices(sizes.len()).rev().map(|count| DensePlan::with(sizes, count)).find(|plan| {
            // Saturated sums are absurd sizes; no budget holds them.
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

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        let ring = self.ring_slot_bytes.saturating_mul(self.ring_slots as u64);
        let pinned = self.slot_bytes.iter().zip(&self.pinned).filter(|(_, pinned)| **pinned);
        pinned.fold(ring, |sum, (size, _)| sum.saturating_add(*size))
    }

    /// Blocks with a slot of their own.
    pub fn pinned_blocks(&self) -> usize {
        self.pinned.iter().filter(|&&pinned| pinned).count()
    }

    /// Whether nothing goes through the ring.
    pub fn all_pinned(&self) -> bool {
        self.ring_slots == 0
    }
}

/// How many blocks may be pinned. A ring for no more blocks than it has slots would only waste room.
fn choices(blocks: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..=blocks).filter(move |&pinned| pinned == blocks || blocks - pinned > RING_SLOTS)
}

/// The least that any choice takes.
pub(super) fn smallest_bytes(sizes: &[u64]) -> u64 {
    choices(sizes.len()).map(|count| DensePlan::with(sizes, count).bytes()).min().unwrap_or(0)
}
