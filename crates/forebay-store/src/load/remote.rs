//! Loads to memory that the CPU does not write itself, such as a GPU's. Every piece is read into a slot of a ring.
//! Asynchronous copies bring it to the device while other slots are being filled.

use std::collections::VecDeque;
use std::error::Error;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::shared::Shared;
use crate::arena::SlotBuffer;
use crate::engine::Completion;
use crate::error::StoreError;
use crate::pieces::Piece;

/// Error of a copy to the device, as reported by the [`Upload`] implementation.
pub type UploadError = Box<dyn Error + Send + Sync>;

/// Interval at which a thread that waits for a slot checks if the load has ended.
const STOP_PAUSE: Duration = Duration::from_millis(50);

/// Memory that is filled by asynchronous copies.
pub trait Upload: Sync {
    /// Begins copies out of a slot and owns the slot until all of them are done.
    ///
    /// # Errors
    /// Returns any error of the device. The slot may then be lost.
    fn begin(
        &self,
        slot: SlotBuffer,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Uploading>, UploadError>;
}

/// A range of bytes in a slot and its destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadCopy {
    pub range: Range<usize>,
    /// Address of the first byte on the device.
    pub to: u64,
}

/// Copies out of one slot, in progress. Copies end in about the order in which they began.
pub trait Uploading: Send {
    /// Returns true if the copies are done. Does not wait.
    ///
    /// # Errors
    /// Returns any error of the device.
    fn is_done(&self) -> Result<bool, UploadError>;

    /// Waits for the copies and returns the slot.
    ///
    /// # Errors
    /// Returns any error of the device. The slot is then lost.
    fn finish(self: Box<Self>) -> Result<SlotBuffer, UploadError>;
}

/// A ring of slots: those that are free and those that are being copied from. A slot that is being filled belongs to
/// the thread that fills it.
pub(super) struct Ring<'a> {
    upload: &'a dyn Upload,
    slots: Mutex<Slots>,
    changed: Condvar,
}

struct Slots {
    /// Free slots. The one freed last is taken first, because it is most likely to be in a CPU cache.
    free: Vec<SlotBuffer>,
    going: VecDeque<Box<dyn Uploading>>,
}

impl Slots {
    /// Takes a slot that is free or whose copies are done.
    fn take(&mut self) -> Result<Option<SlotBuffer>, StoreError> {
        match self.free.pop() {
            Some(slot) => Ok(Some(slot)),
            None => self.emptied(),
        }
    }

    /// Takes the slot of the oldest copies, if they are done.
    fn emptied(&mut self) -> Result<Option<SlotBuffer>, StoreError> {
        match self.going.front().map(|first| first.is_done()) {
            None | Some(Ok(false)) => return Ok(None),
            Some(Err(source)) => return Err(StoreError::Upload { source }),
            Some(Ok(true)) => {}
        }
        self.going.pop_front().map(finish).transpose()
    }
}

fn finish(copy: Box<dyn Uploading>) -> Result<SlotBuffer, StoreError> {
    copy.finish().map_err(|source| StoreError::Upload { source })
}

impl<'a> Ring<'a> {
    pub fn new(slots: Vec<SlotBuffer>, upload: &'a dyn Upload) -> Ring<'a> {
        let slots = Slots { going: VecDeque::with_capacity(slots.len()), free: slots };
        Ring { upload, slots: Mutex::new(slots), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot if one is available now. Slots whose copies are done come first, because a virtual disk is faster
    /// the fewer pages it writes to.
    pub fn try_take(&self) -> Result<Option<SlotBuffer>, StoreError> {
        let mut slots = self.lock();
        while let Some(slot) = slots.emptied()? {
            slots.free.push(slot);
        }
        Ok(slots.free.pop())
    }

    /// Waits for a slot. Returns `None` if the load ends first.
    pub fn take(&self, shared: &Shared) -> Result<Option<SlotBuffer>, StoreError> {
        let mut slots = self.lock();
        loop {
            if let Some(slot) = slots.take()? {
                return Ok(Some(slot));
            }
            // Each thread waits for a different copy, without holding the lock.
            if let Some(copy) = slots.going.pop_front() {
                drop(slots);
                return finish(copy).map(Some);
            }
            if shared.is_stopped() {
                return Ok(None);
            }
            let waited = self.changed.wait_timeout(slots, STOP_PAUSE);
            (slots, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes back a slot that was not filled.
    pub fn give_back(&self, slot: SlotBuffer) {
        self.lock().free.push(slot);
        self.changed.notify_one();
    }

    /// Begins the copies out of a slot that was filled, or frees the slot if its read failed.
    pub fn leave(
        &self,
        completion: &mut Completion,
        copies: &[UploadCopy],
    ) -> Result<(), StoreError> {
        let Some(slot) = completion.buffer.take() else { return Ok(()) };
        if completion.result.is_err() {
            self.lock().free.push(slot);
        } else {
            let begun = self.upload.begin(slot, copies);
            let copy = begun.map_err(|source| StoreError::Upload { source })?;
            self.lock().going.push_back(copy);
        }
        self.changed.notify_one();
        Ok(())
    }

    /// Waits for every copy and returns all slots.
    pub fn drain(self) -> Result<Vec<SlotBuffer>, StoreError> {
        let slots = self.slots.into_inner().unwrap_or_else(PoisonError::into_inner);
        let Slots { mut free, going } = slots;
        for copy in going {
            free.push(finish(copy)?);
        }
        Ok(free)
    }
}

/// The ring as seen by the thread that owns the engine.
pub(super) struct Outlet<'a> {
    ring: &'a Ring<'a>,
    copies: &'a [Arc<[UploadCopy]>],
    /// Slot reserved for the next piece.
    held: Option<SlotBuffer>,
}

impl<'a> Outlet<'a> {
    pub fn new(ring: &'a Ring<'a>, copies: &'a [Arc<[UploadCopy]>]) -> Outlet<'a> {
        Outlet { ring, copies, held: None }
    }

    /// Returns true if there is a slot to begin a piece. If `patient`, waits for a slot.
    pub fn has_room(&mut self, patient: bool, shared: &Shared) -> Result<bool, StoreError> {
        if self.held.is_none() {
            self.held = match patient {
                true => self.ring.take(shared)?,
                false => self.ring.try_take()?,
            };
        }
        Ok(self.held.is_some())
    }

    /// Gives a piece its slot.
    pub fn enter(&mut self, piece: &mut Piece) {
        if let Some(slot) = self.held.take() {
            piece.buffer = slot;
        }
    }

    pub fn leave(&self, completion: &mut Completion) -> Result<(), StoreError> {
        self.ring.leave(completion, &self.copies[completion.id as usize])
    }

    /// Returns an unused slot to the ring.
    pub fn close(self) {
        if let Some(slot) = self.held {
            self.ring.give_back(slot);
        }
    }
}
