//! Slots of the arena, and the leases that pin them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay_store::SlotBuffer;

use crate::blocks::BlockId;

/// Index of a slot among all slots of a residency.
pub(crate) type SlotIndex = u32;

/// A place for one block.
#[derive(Debug)]
pub(crate) struct Slot {
    /// `None` while an engine writes it.
    pub buffer: Option<SlotBuffer>,
    pub bytes: u64,
    /// Leases alive.
    pins: Arc<AtomicU32>,
    /// The block whose bytes are here, or on their way.
    pub block: Option<BlockId>,
    /// The read in flight.
    pub read: Option<ReadInFlight>,
}

/// A read that an engine holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadInFlight {
    pub id: u64,
    pub purpose: Purpose,
}

/// Who a read is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// Somebody waits for it.
    Demand,
    /// It will probably be needed.
    Ahead,
    /// Nobody any more; its bytes are dropped.
    Nobody,
}

impl Slot {
    pub fn new(buffer: SlotBuffer) -> Slot {
        let bytes = buffer.len() as u64;
        Slot { buffer: Some(buffer), bytes, pins: Arc::default(), block: None, read: None }
    }

    /// Whether a lease pins it.
    pub fn is_leased(&self) -> bool {
        // Acquire: what the last holder did with the bytes happened before they are overwritten.
        self.pins.load(Ordering::Acquire) > 0
    }

    /// Whether a read may start into it.
    pub fn is_idle(&self) -> bool {
        self.read.is_none() && self.buffer.is_some() && !self.is_leased()
    }

    pub fn lease(&self, index: SlotIndex, block: BlockId) -> Lease {
        debug_assert_eq!(self.block, Some(block));
        self.pins.fetch_add(1, Ordering::Relaxed);
        Lease { block, slot: index, pins: Arc::clone(&self.pins) }
    }

    /// Whether the lease was given for this slot.
    pub fn gave(&self, lease: &Lease) -> bool {
        Arc::ptr_eq(&self.pins, &lease.pins)
    }
}

/// A guard: while it lives, its block stays where it is.
///
/// Read the bytes with [`crate::Residency::bytes`]. Dropping it on another thread is fine.
#[derive(Debug)]
pub struct Lease {
    block: BlockId,
    pub(crate) slot: SlotIndex,
    pins: Arc<AtomicU32>,
}

impl Lease {
    /// The block that it pins.
    pub fn block(&self) -> BlockId {
        self.block
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pins.fetch_sub(1, Ordering::Release);
    }
}
