//! Pinned memory through which weights go to a GPU.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use forebay_cuda::{DeviceMemory, DevicePtr, Gpu, InFlight, Pinned, StreamMoment, StreamPoint};
use forebay_store::{Arena, SlotBuffer};

use super::failed;
use crate::device::DeviceError;

/// Slots of pinned memory, each with as much memory of the GPU.
pub struct Ring {
    // Fields are dropped in this order: what uses memory, then memory.
    slots: Mutex<Slots>,
    /// Notified when a slot comes back.
    returned: Condvar,
    count: usize,
    slot_bytes: usize,
    _pinned: Pinned,
    /// As large as all slots.
    _stage: DeviceMemory,
}

struct Slots {
    /// Those that nobody fills or waits for, in the order in which they were used.
    free: VecDeque<Slot>,
    /// True once the memory of a slot is lost, because the GPU failed and may still use it.
    is_lost: bool,
}

/// A part of the ring.
pub struct Slot {
    /// What is under way from it. The memory comes back with it.
    flight: Option<InFlight<SlotBuffer>>,
    buffer: Option<SlotBuffer>,
    /// Memory of the GPU for its chunks.
    pub stage: DevicePtr<u8>,
    /// The point at which nothing reads that memory any more.
    pub used: Option<StreamPoint>,
    /// When its copies began and ended, and when what it has was decoded, and the coded bytes, if this is measured.
    pub copied: Option<(StreamMoment, StreamMoment, u64)>,
    pub decoded: Option<(StreamMoment, StreamMoment, u64)>,
}

impl Ring {
    /// Reserves memory for so many slots.
    pub fn new(gpu: &Gpu, count: usize, slot_bytes: usize) -> Result<Arc<Ring>, DeviceError> {
        let stage = gpu.allocate(count * slot_bytes).map_err(failed)?;
        let arena = Arena::map(count * slot_bytes).map_err(failed)?;
        arena.make_resident().map_err(failed)?;
        let pinned = gpu.pin(arena.addresses(), arena.clone()).map_err(failed)?;
        let slot = |at: usize| -> Result<Slot, DeviceError> {
            let buffer = Some(arena.carve(slot_bytes).map_err(failed)?);
            let stage = stage.ptr::<u8>().offset(at * slot_bytes);
            Ok(Slot { flight: None, buffer, stage, used: None, copied: None, decoded: None })
        };
        let free = (0..count).map(slot).collect::<Result<_, _>>()?;
        Ok(Arc::new(Ring {
            slots: Mutex::new(Slots { free, is_lost: false }),
            returned: Condvar::new(),
            count,
            slot_bytes,
            _pinned: pinned,
            _stage: stage,
        }))
    }

    pub fn count(&self) -> usize {
        self.count
    }

    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if more than so many slots are free.
    pub fn has_more_than(&self, count: usize) -> bool {
        self.lock().free.len() > count
    }

    /// Takes the slot that was used first, unless only so many are free.
    pub fn take_if_more_than(
        self: &Arc<Ring>,
        count: usize,
    ) -> Result<Option<RingSlot>, DeviceError> {
        self.take_of(self.lock(), count)
    }

    /// Takes the slot that was used first. Waits until one is free.
    pub fn take(self: &Arc<Ring>) -> Result<RingSlot, DeviceError> {
        let is_none = |slots: &mut Slots| slots.free.is_empty() && !slots.is_lost;
        let slots = self.returned.wait_while(self.lock(), is_none);
        let slot = self.take_of(slots.unwrap_or_else(PoisonError::into_inner), 0)?;
        Ok(slot.expect("one is free"))
    }

    fn take_of(
        self: &Arc<Ring>,
        mut slots: MutexGuard<'_, Slots>,
        count: usize,
    ) -> Result<Option<RingSlot>, DeviceError> {
        if slots.is_lost {
            return Err(failed("the GPU failed while it copied weights"));
        }
        let slot = if slots.free.len() > count { slots.free.pop_front() } else { None };
        Ok(slot.map(|slot| RingSlot { slot: Some(slot), ring: Arc::clone(self) }))
    }
}

/// A slot that goes back to the ring when it is dropped.
pub struct RingSlot {
    slot: Option<Slot>,
    ring: Arc<Ring>,
}

impl RingSlot {
    /// Takes the pinned memory. Waits until the GPU has read what was in it.
    pub fn take_memory(&mut self) -> Result<SlotBuffer, DeviceError> {
        match self.flight.take() {
            Some(flight) => flight.finish().map_err(failed),
            None => Ok(self.buffer.take().expect("a slot has its memory, or is under way")),
        }
    }

    pub fn give_memory(&mut self, buffer: SlotBuffer) {
        self.buffer = Some(buffer);
    }

    /// Notes that the GPU reads the memory.
    pub fn send_memory(&mut self, flight: InFlight<SlotBuffer>) {
        self.flight = Some(flight);
    }

    /// Gives up the slot, whose memory the GPU may use for ever after an error.
    pub fn lose(&mut self) {
        self.buffer = None;
        if let Some(flight) = self.flight.take() {
            std::mem::forget(flight);
        }
    }

    /// Returns memory of the GPU for a range of the slot.
    pub fn staged(&self, range: &Range<usize>) -> DevicePtr<u8> {
        self.stage.offset(range.start)
    }
}

impl Deref for RingSlot {
    type Target = Slot;

    fn deref(&self) -> &Slot {
        self.slot.as_ref().expect("it goes back when this is dropped")
    }
}

impl DerefMut for RingSlot {
    fn deref_mut(&mut self) -> &mut Slot {
        self.slot.as_mut().expect("it goes back when this is dropped")
    }
}

impl Drop for RingSlot {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        let mut slots = self.ring.lock();
        match slot.buffer.is_some() || slot.flight.is_some() {
            true => slots.free.push_back(slot),
            false => slots.is_lost = true,
        }
        drop(slots);
        self.ring.returned.notify_all();
    }
}
