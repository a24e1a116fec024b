//! What is used in turn, and comes back: memory of the GPU for coded weights, and pinned memory through which they go there.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use forebay_cuda::{DeviceMemory, DevicePtr, Gpu, InFlight, Pinned, StreamMoment, StreamPoint};
use forebay_store::{Arena, SlotBuffer};

use super::failed;
use crate::device::DeviceError;

/// Items that are taken in the order in which they came back.
pub struct Ring<T> {
    items: Mutex<Items<T>>,
    /// Notified when an item comes back.
    returned: Condvar,
    count: usize,
}

struct Items<T> {
    /// Those that nobody has.
    free: VecDeque<T>,
    /// True once one is lost, because the GPU failed and may still use it.
    is_lost: bool,
}

/// Item of a ring.
pub trait RingItem {
    /// Returns true if the GPU may use the item for ever.
    fn is_lost(&self) -> bool;
}

impl<T: RingItem> Ring<T> {
    fn new(items: Vec<T>) -> Arc<Ring<T>> {
        let count = items.len();
        let items = Mutex::new(Items { free: items.into(), is_lost: false });
        Arc::new(Ring { items, returned: Condvar::new(), count })
    }

    pub fn count(&self) -> usize {
        self.count
    }

    fn lock(&self) -> MutexGuard<'_, Items<T>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if more than so many items are free.
    pub fn has_more_than(&self, count: usize) -> bool {
        self.lock().free.len() > count
    }

    /// Takes the item that came back first, unless only so many are free.
    pub fn take_if_more_than(
        self: &Arc<Ring<T>>,
        count: usize,
    ) -> Result<Option<Taken<T>>, DeviceError> {
        self.take_of(self.lock(), count)
    }

    /// Takes the item that came back first. Waits until one is free.
    pub fn take(self: &Arc<Ring<T>>) -> Result<Taken<T>, DeviceError> {
        let is_none = |items: &mut Items<T>| items.free.is_empty() && !items.is_lost;
        let items = self.returned.wait_while(self.lock(), is_none);
        let item = self.take_of(items.unwrap_or_else(PoisonError::into_inner), 0)?;
        Ok(item.expect("one is free"))
    }

    fn take_of(
        self: &Arc<Ring<T>>,
        mut items: MutexGuard<'_, Items<T>>,
        count: usize,
    ) -> Result<Option<Taken<T>>, DeviceError> {
        if items.is_lost {
            return Err(failed("the GPU failed while it copied weights"));
        }
        let item = if items.free.len() > count { items.free.pop_front() } else { None };
        Ok(item.map(|item| Taken { item: Some(item), ring: Arc::clone(self) }))
    }
}

/// An item that goes back to its ring when it is dropped.
pub struct Taken<T: RingItem> {
    item: Option<T>,
    ring: Arc<Ring<T>>,
}

impl<T: RingItem> Deref for Taken<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.item.as_ref().expect("it goes back when this is dropped")
    }
}

impl<T: RingItem> DerefMut for Taken<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.item.as_mut().expect("it goes back when this is dropped")
    }
}

impl<T: RingItem> Drop for Taken<T> {
    fn drop(&mut self) {
        let Some(item) = self.item.take() else { return };
        let mut items = self.ring.lock();
        match item.is_lost() {
            true => items.is_lost = true,
            false => items.free.push_back(item),
        }
        drop(items);
        self.ring.returned.notify_all();
    }
}

/// Memory of the GPU in slots. Weights are there as they were outside, until they are decoded.
pub struct Stage {
    // Fields are dropped in this order: what uses memory, then memory.
    pub slots: Arc<Ring<Slot>>,
    pub slot_bytes: usize,
    _memory: DeviceMemory,
}

/// A part of the stage.
pub struct Slot {
    memory: DevicePtr<u8>,
    /// The point at which nothing reads the memory any more.
    pub used: Option<StreamPoint>,
    /// When what it has was decoded, and the coded bytes, if this is measured.
    pub decoded: Option<(StreamMoment, StreamMoment, u64)>,
    /// True if the GPU may use the memory for ever.
    pub is_lost: bool,
}

impl RingItem for Slot {
    fn is_lost(&self) -> bool {
        self.is_lost
    }
}

impl Slot {
    pub fn memory(&self) -> DevicePtr<u8> {
        self.memory
    }
}

impl Stage {
    /// Reserves memory for so many slots.
    pub fn new(gpu: &Gpu, count: usize, slot_bytes: usize) -> Result<Stage, DeviceError> {
        let memory = gpu.allocate(count * slot_bytes).map_err(failed)?;
        let slot = |at: usize| {
            let memory = memory.ptr::<u8>().offset(at * slot_bytes);
            Slot { memory, used: None, decoded: None, is_lost: false }
        };
        let slots = Ring::new((0..count).map(slot).collect());
        Ok(Stage { slots, slot_bytes, _memory: memory })
    }
}

/// Pinned memory in pieces.
pub struct PinnedPieces {
    // Fields are dropped in this order: what uses memory, then memory.
    pub pieces: Arc<Ring<Piece>>,
    pub piece_bytes: usize,
    _pinned: Pinned,
}

/// A piece of pinned memory.
pub struct Piece {
    /// None once it is lost.
    memory: Option<PieceMemory>,
    /// When its copy began and ended, and the bytes, if this is measured.
    pub copied: Option<(StreamMoment, StreamMoment, u64)>,
}

enum PieceMemory {
    Free(SlotBuffer),
    /// The GPU reads the memory, which comes back then.
    UnderWay(InFlight<SlotBuffer>),
}

impl RingItem for Piece {
    fn is_lost(&self) -> bool {
        self.memory.is_none()
    }
}

impl Piece {
    /// Takes the memory, without which the piece is lost. Waits until the GPU has read what was in it.
    pub fn take_memory(&mut self) -> Result<SlotBuffer, DeviceError> {
        match self.memory.take().expect("a piece in a ring has its memory") {
            PieceMemory::Free(buffer) => Ok(buffer),
            PieceMemory::UnderWay(flight) => flight.finish().map_err(failed),
        }
    }

    pub fn give_memory(&mut self, buffer: SlotBuffer) {
        self.memory = Some(PieceMemory::Free(buffer));
    }

    /// Notes that the GPU reads the memory.
    pub fn send_memory(&mut self, flight: InFlight<SlotBuffer>) {
        self.memory = Some(PieceMemory::UnderWay(flight));
    }
}

impl PinnedPieces {
    /// Reserves memory for so many pieces.
    pub fn new(gpu: &Gpu, count: usize, piece_bytes: usize) -> Result<PinnedPieces, DeviceError> {
        let arena = Arena::map(count * piece_bytes).map_err(failed)?;
        arena.make_resident().map_err(failed)?;
        let pinned = gpu.pin(arena.addresses(), arena.clone()).map_err(failed)?;
        let piece = |_| -> Result<Piece, DeviceError> {
            let buffer = arena.carve(piece_bytes).map_err(failed)?;
            Ok(Piece { memory: Some(PieceMemory::Free(buffer)), copied: None })
        };
        let pieces = (0..count).map(piece).collect::<Result<_, _>>()?;
        Ok(PinnedPieces { pieces: Ring::new(pieces), piece_bytes, _pinned: pinned })
    }

    pub fn bytes(&self) -> usize {
        self.pieces.count() * self.piece_bytes
    }
}
