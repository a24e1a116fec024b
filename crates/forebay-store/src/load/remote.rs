//! Loads to memory that the processor does not write itself, such as a GPU's. Every piece is filled into a slot of a
//! ring and goes on from there, by copies that run while other slots are being filled.

use std::collections::VecDeque;
use std::error::Error;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::cached::copy;
use super::landing::Landing;
use super::shared::Shared;
use crate::arena::SlotBuffer;
use crate::engine::{BlockLabel, Completion};
use crate::error::{ReadError, StoreError};
use crate::files::FileSet;
use crate::layout::BlockLayout;
use crate::pieces::{Piece, cut_layout};

/// Why a copy to the device failed, in the words of whoever copies.
pub type UploadError = Box<dyn Error + Send + Sync>;

/// How often a thread that waits for a slot looks whether the load has ended.
const STOP_PAUSE: Duration = Duration::from_millis(50);

/// Memory that is filled by copies which go on by themselves.
pub trait Upload: Sync {
    /// Begins to copy a range of a slot to `to`, in bytes from the start of the memory. Owns the slot until the copy is
    /// finished.
    ///
    /// # Errors
    /// Whatever the device says; the slot may be lost.
    fn begin(
        &self,
        slot: SlotBuffer,
        range: Range<usize>,
        to: u64,
    ) -> Result<Box<dyn Uploading>, UploadError>;
}

/// A copy that was begun. Copies end in the order in which they were begun, or nearly.
pub trait Uploading: Send {
    /// Whether the copy is done, without waiting.
    ///
    /// # Errors
    /// Whatever the device says.
    fn is_done(&self) -> Result<bool, UploadError>;

    /// Waits for the copy and gives the slot back.
    ///
    /// # Errors
    /// Whatever the device says; the slot is lost then.
    fn finish(self: Box<Self>) -> Result<SlotBuffer, UploadError>;
}

/// One block to bring to the device.
#[derive(Debug)]
pub struct UploadItem {
    pub label: BlockLabel,
    pub layout: BlockLayout,
    /// Where the block's slot would begin, in bytes from the start of the memory: its parts land at `to` +
    /// [`crate::Part::at`].
    pub to: u64,
}

/// What of a slot goes where.
pub(super) struct Target {
    range: Range<usize>,
    to: u64,
}

/// Cuts every block; gives the number of pieces of each, and the pieces with their targets.
pub(super) fn cut(
    items: &[UploadItem],
    files: &FileSet,
    piece_bytes: u64,
) -> (Vec<usize>, Vec<Piece>, Vec<Target>) {
    let (mut pieces, mut targets) = (Vec::new(), Vec::new());
    let mut count = |item: &UploadItem| {
        let first = pieces.len();
        for (at, layout) in cut_layout(&item.layout, files, piece_bytes) {
            let Some(region) = layout.regions.first() else { continue };
            let bytes = (region.wanted_end - region.offset) as usize;
            let to = item.to + (at + region.at) as u64;
            targets.push(Target { range: region.at..region.at + bytes, to });
            let buffer = SlotBuffer::empty();
            pieces.push(Piece { index: pieces.len(), label: item.label, layout, buffer });
        }
        pieces.len() - first
    };
    let counts = items.iter().map(&mut count).collect();
    (counts, pieces, targets)
}

/// Slots that are free, and those whose copies go on. Slots that are being filled are with whoever fills them.
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
        if let Some(slot) = self.free.pop() {
            return Ok(Some(slot));
        }
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

    /// A slot, if one is to be had now.
    pub fn try_take(&self) -> Result<Option<SlotBuffer>, StoreError> {
        self.lock().take()
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
    pub fn leave(&self, completion: &mut Completion, target: &Target) -> Result<(), StoreError> {
        let Some(slot) = completion.buffer.take() else { return Ok(()) };
        if completion.result.is_err() {
            self.lock().free.push(slot);
        } else {
            let begun = self.upload.begin(slot, target.range.clone(), target.to);
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
    targets: &'a [Target],
    /// For the next piece.
    held: Option<SlotBuffer>,
}

impl<'a> Outlet<'a> {
    pub fn new(ring: &'a Ring<'a>, targets: &'a [Target]) -> Outlet<'a> {
        Outlet { ring, targets, held: None }
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
        self.ring.leave(completion, &self.targets[completion.id as usize])
    }

    /// Gives back what was not used.
    pub fn close(self) {
        self.ring.lock().free.extend(self.held);
    }
}

/// The work of one thread: fills slots with pieces that the page cache has, until none is left.
pub(super) fn upload_cached(shared: &Shared, files: &FileSet, ring: &Ring<'_>, targets: &[Target]) {
    if let Err(error) = fill_slots(shared, files, ring, targets) {
        shared.stop(error);
    }
}

fn fill_slots(
    shared: &Shared,
    files: &FileSet,
    ring: &Ring<'_>,
    targets: &[Target],
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
            let target = &targets[completion.id as usize];
            ring.leave(&mut completion, target)?;
            done.push(completion);
        }
    }
    Ok(())
}
