//! Slots of the arena, and the leases that pin them.

use std::sync::Arc;

use forebay_store::SlotBuffer;

use crate::blocks::BlockId;

/// Index of a slot among all slots of a residency.
pub(crate) type SlotIndex = u32;

/// A place for one block.
#[derive(Debug)]
pub(crate) struct Slot {
    /// `None` while an engine writes it. Leases share it.
    buffer: Option<Arc<SlotBuffer>>,
    pub bytes: u64,
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
    /// The computation waits for it.
    Demand,
    /// It will probably be needed.
    Ahead,
    /// Nobody any more; its bytes are dropped.
    Nobody,
}

impl Slot {
    pub fn new(buffer: SlotBuffer) -> Slot {
        let bytes = buffer.len() as u64;
        Slot { buffer: Some(Arc::new(buffer)), bytes, block: None, read: None }
    }

    /// Whether a lease pins it.
    pub fn is_leased(&self) -> bool {
        self.buffer.as_ref().is_some_and(|buffer| Arc::strong_count(buffer) > 1)
    }

    /// Whether a read may start into it.
    pub fn is_idle(&self) -> bool {
        self.read.is_none() && self.buffer.is_some() && !self.is_leased()
    }

    /// Whether its memory is here, and not with an engine.
    pub fn has_buffer(&self) -> bool {
        self.buffer.is_some()
    }

    /// The memory, unless an engine has it.
    pub fn memory(&self) -> Option<&[u8]> {
        self.buffer.as_ref().map(|buffer| buffer.as_slice())
    }

    /// The memory, for an engine.
    ///
    /// # Panics
    /// When it is leased, or with an engine already.
    pub fn take_buffer(&mut self) -> SlotBuffer {
        let buffer = self.buffer.take().expect("an idle slot has its buffer");
        Arc::into_inner(buffer).expect("nothing is read into a leased slot")
    }

    /// The memory comes back; `None`: it is lost.
    pub fn put_buffer(&mut self, buffer: Option<SlotBuffer>) {
        self.buffer = buffer.map(Arc::new);
    }

    pub fn lease(&self, index: SlotIndex, block: BlockId) -> Lease {
        debug_assert_eq!(self.block, Some(block));
        let buffer = self.buffer.as_ref().expect("a block that is present is in memory");
        Lease { block, slot: index, buffer: Arc::clone(buffer) }
    }

    /// Whether the lease was given for this slot.
    pub fn gave(&self, lease: &Lease) -> bool {
        self.buffer.as_ref().is_some_and(|buffer| Arc::ptr_eq(buffer, &lease.buffer))
    }
}

/// A guard: while it lives, its block stays where it is.
///
/// Read the bytes with [`crate::Residency::bytes`]. Dropping it on another thread is fine.
#[derive(Debug)]
pub struct Lease {
    block: BlockId,
    pub(crate) slot: SlotIndex,
    /// Shared with the slot: what is shared is not given to an engine.
    buffer: Arc<SlotBuffer>,
}

impl AsRef<[u8]> for Lease {
    /// The whole slot.
    fn as_ref(&self) -> &[u8] {
        self.slot_bytes()
    }
}

impl Lease {
    /// The block that it pins.
    pub fn block(&self) -> BlockId {
        self.block
    }

    pub(crate) fn slot_bytes(&self) -> &[u8] {
        self.buffer.as_slice()
    }
}
