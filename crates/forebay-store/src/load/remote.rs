//! Loads to memory that the processor does not write itself, such as a GPU's. Every piece is filled into a slot of a
//! ring and goes on from there, by copies that run while other slots are being filled.

use std::collections::VecDeque;
use std::error::Error;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::cached::copy;
use super::landing::Landing;
use super::shared::Shared;
use crate::arena::SlotBuffer;
use crate::engine::Completion;
use crate::error::{ReadError, StoreError};
use crate::files::FileSet;
use crate::pieces::Piece;

/// Why a copy to the device failed, in the words of the copying code.
pub type UploadError = Box<dyn Error + Send + Sync>;

/// How often a thread that waits for a slot looks whether the load has ended.
const STOP_PAUSE: Duration = Duration::from_millis(50);

/// Memory that is filled by copies which go on by themselves.
pub trait Upload: Sync {
    /// Begins copies out of a slot, which is owned until all of them are done.
    ///
    /// # Errors
    /// Whatever the device says; the slot may be lost.
    fn begin(
        &self,
        slot: SlotBuffer,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Uploading>, UploadError>;
}

/// Bytes of a slot and where they go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadCopy {
    pub range: Range<usize>,
    /// Address of the first byte on the device.
    pub to: u64,
}

/// Copies of one slot that were begun. They end in the order in which they were begun, or nearly.
pub trait Uploading: Send {
    /// Whether they are done, without waiting.
    ///
    /// # Errors
    /// Whatever the device says.
    fn is_done(&self) -> Result<bool, UploadError>;

    /// Waits for them and gives the slot back.
    ///
    /// # Errors
    /// Whatever the device says; the slot is lost then.
    fn finish(self: Box<Self>) -> Result<SlotBuffer, UploadError>;
}

/// Slots that are free, and those whose copies go on. Slots that are being filled belong to the filling threads.
pub(super) struct Ring<'a> {
    upload: &'a dyn Upload,
    slots: Mutex<Slots>,
    changed: Condvar,
}

struct Slots {
    /// The last one freed is taken first: it is the likeliest to be in a cache.
    free: Vec<SlotBuffer>,
    going: VecDeque<Box<dyn Uploading>>,
}

impl Slots {
    /// A slot that is free, or whose copy is done.
    fn take(&mut self) -> Result<Option<SlotBuffer>, StoreError> {
        match self.free.pop() {
            Some(slot) => Ok(Some(slot)),
            None => self.emptied(),
        }
    }

    /// The slot of the oldest copies, if they are done.
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

    /// A slot, if one is to be had now. Slots whose copies are done come first: the fewer pages a virtual disk writes
    /// to, the faster it is.
    pub fn try_take(&self) -> Result<Option<SlotBuffer>, StoreError> {
        let mut slots = self.lock();
        while let Some(slot) = slots.emptied()? {
            slots.free.push(slot);
        }
        Ok(slots.free.pop())
    }

    /// Waits for a slot; `None` when the load ends meanwhile.
    pub fn take(&self, shared: &Shared) -> Result<Option<SlotBuffer>, StoreError> {
        let mut slots = self.lock();
        loop {
            if let Some(slot) = slots.take()? {
                return Ok(Some(slot));
            }
            // Each waits for a copy of its own, outside the lock.
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

    /// Sends what was read into a slot on its way, or takes the slot back if nothing was.
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

    /// All slots, when every copy is done.
    pub fn drain(self) -> Result<Vec<SlotBuffer>, StoreError> {
        let slots = self.slots.into_inner().unwrap_or_else(PoisonError::into_inner);
        let Slots { mut free, going } = slots;
        for copy in going {
            free.push(finish(copy)?);
        }
        Ok(free)
    }
}

/// The ring as the thread with the engine sees it.
pub(super) struct Outlet<'a> {
    ring: &'a Ring<'a>,
    copies: &'a [Arc<[UploadCopy]>],
    /// For the next piece.
    held: Option<SlotBuffer>,
}

impl<'a> Outlet<'a> {
    pub fn new(ring: &'a Ring<'a>, copies: &'a [Arc<[UploadCopy]>]) -> Outlet<'a> {
        Outlet { ring, copies, held: None }
    }

    /// Whether a piece can be begun; waits for a slot if `patient`.
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

    /// Gives back what was not used.
    pub fn close(self) {
        self.ring.lock().free.extend(self.held);
    }
}

/// The work of one thread: fills slots with pieces that the page cache has, until none is left.
pub(super) fn upload_cached(
    shared: &Shared,
    files: &FileSet,
    ring: &Ring<'_>,
    copies: &[Arc<[UploadCopy]>],
) {
    if let Err(error) = fill_slots(shared, files, ring, copies) {
        shared.stop(error);
    }
}

fn fill_slots(
    shared: &Shared,
    files: &FileSet,
    ring: &Ring<'_>,
    copies: &[Arc<[UploadCopy]>],
) -> Result<(), StoreError> {
    // Compares while the bytes are in this core's cache.
    let landing = Landing::new(files, false);
    let (mut done, mut next) = (Vec::new(), Vec::new());
    while shared.next_cached(&mut done, &mut next) {
        for mut piece in next.drain(..) {
            let Some(slot) = ring.take(shared)? else {
                let result = Err(ReadError::Cancelled { block: piece.label });
                done.push(Completion { id: piece.index as u64, buffer: None, result });
                continue;
            };
            piece.buffer = slot;
            let mut completion = copy(piece, files, landing);
            let copies = &copies[completion.id as usize];
            ring.leave(&mut completion, copies)?;
            done.push(completion);
        }
    }
    Ok(())
}
