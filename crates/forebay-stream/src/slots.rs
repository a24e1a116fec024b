//! Slots of the arena, and the leases that pin them.

use std::sync::Arc;

use forebay_store::SlotBuffer;

use crate::blocks::BlockId;

/// Index of a slot among all slots of a residency.
pub(crate) type SlotIndex = u32;

/// Memory for one block.
#[derive(Debug)]
pub(crate) struct Slot {
    /// The slot's memory, which leases share; `None` while an engine writes to it.
    buffer: Option<Arc<SlotBuffer>>,
    pub bytes: u64,
    /// The block that the slot holds or that is being read into it.
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

/// Purpose of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// A computation waits for the block.
    Demand,
    /// The block will probably be needed.
    Ahead,
    /// The read was abandoned and its bytes are dropped.
    Nobody,
}

impl Slot {
    pub fn new(buffer: SlotBuffer) -> Slot {
        let bytes = buffer.len() as u64;
        Slot { buffer: Some(Arc::new(buffer)), bytes, block: None, read: None }
    }

    /// Returns true if a lease pins the slot.
    pub fn is_leased(&self) -> bool {
        self.buffer.as_ref().is_some_and(|buffer| Arc::strong_count(buffer) > 1)
    }

    /// Returns true if a read may start into the slot.
    pub fn is_idle(&self) -> bool {
        self.read.is_none() && self.buffer.is_some() && !self.is_leased()
    }

    /// Returns true if the slot has its memory, that is, if no engine holds it.
    pub fn has_buffer(&self) -> bool {
        self.buffer.is_some()
    }

    /// Returns the memory, unless an engine holds it.
    pub fn memory(&self) -> Option<&[u8]> {
        self.buffer.as_ref().map(|buffer| buffer.as_slice())
    }

    /// Takes the memory out of the slot, for an engine.
    ///
    /// # Panics
    /// Panics if the slot is leased, or an engine already holds its memory.
    pub fn take_buffer(&mut self) -> SlotBuffer {
        let buffer = self.buffer.take().expect("an idle slot has its buffer");
        Arc::into_inner(buffer).expect("nothing is read into a leased slot")
    }

    /// Puts the memory back; `None` means that it is lost.
    pub fn put_buffer(&mut self, buffer: Option<SlotBuffer>) {
        self.buffer = buffer.map(Arc::new);
    }

    pub fn lease(&self, index: SlotIndex, block: BlockId) -> Lease {
        debug_assert_eq!(self.block, Some(block));
        let buffer = self.buffer.as_ref().expect("a block that is present is in memory");
        Lease { block, slot: index, buffer: Arc::clone(buffer) }
    }

    /// Returns true if the lease was given for this slot.
    pub fn gave(&self, lease: &Lease) -> bool {
        self.buffer.as_ref().is_some_and(|buffer| Arc::ptr_eq(buffer, &lease.buffer))
    }
}

/// A guard that keeps its block in its slot while it lives.
///
/// Read the bytes with [`crate::Residency::bytes`]. A lease may be dropped on any thread.
#[derive(Debug)]
pub struct Lease {
    block: BlockId,
    pub(crate) slot: SlotIndex,
    /// Shared with the slot. Shared memory is never given to an engine.
    buffer: Arc<SlotBuffer>,
}

impl AsRef<[u8]> for Lease {
    /// Returns the whole slot.
    fn as_ref(&self) -> &[u8] {
        self.slot_bytes()
    }
}

impl Lease {
    /// Returns the block that the lease pins.
    pub fn block(&self) -> BlockId {
        self.block
    }

    pub(crate) fn slot_bytes(&self) -> &[u8] {
        self.buffer.as_slice()
    }
}
