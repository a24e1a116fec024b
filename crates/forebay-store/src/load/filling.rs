//! Copy threads fill the slots of a ring together. A slot is as long as a transfer to the device should be, and is cut into
//! parts, which several threads copy from the page cache at the same time. So only a few slots are being filled at a
//! time, however many threads there are. A ring of so few slots stays in the processor's cache, and its memory takes
//! little time to pin.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::cached::copy;
use super::landing::Landing;
use super::remote::{Ring, UploadCopy};
use super::shared::Shared;
use super::{Loaded, join};
use crate::engine::{BlockLabel, Completion};
use crate::error::StoreError;
use crate::files::FileSet;
use crate::pieces::{Piece, cut_block};

/// Bytes that one thread copies at a time.
const PART_BYTES: u64 = 256 << 10;

/// Work of the copy threads.
pub(super) struct Filling<'a> {
    shared: &'a Shared,
    files: &'a FileSet,
    ring: &'a Ring<'a>,
    /// Copies to the device, by piece.
    copies: &'a [Arc<[UploadCopy]>],
    threads: usize,
    work: Mutex<Work>,
    /// Signals that there are parts, or that there will be no more.
    changed: Condvar,
}

#[derive(Default)]
struct Work {
    /// Parts that no thread has taken.
    parts: VecDeque<Part>,
    /// True while a thread waits for the next piece or for its slot.
    is_beginning: bool,
    /// True if no further piece will begin.
    has_ended: bool,
}

/// A part of a piece. It owns its part of the slot.
struct Part {
    of: Arc<Begun>,
    piece: Piece,
}

/// A piece with parts that are not copied.
struct Begun {
    index: usize,
    label: BlockLabel,
    /// Parts that were copied, by their number.
    copied: Mutex<Vec<Option<Completion>>>,
}

impl<'a> Filling<'a> {
    pub fn new(
        shared: &'a Shared,
        files: &'a FileSet,
        ring: &'a Ring<'a>,
        copies: &'a [Arc<[UploadCopy]>],
        threads: usize,
    ) -> Filling<'a> {
        let (work, changed) = (Mutex::default(), Condvar::new());
        Filling { shared, files, ring, copies, threads, work, changed }
    }

    /// Runs one copy thread: fills slots with cached pieces until none is left.
    pub fn run(&self) {
        // Verify here, while the bytes are in this core's cache.
        let landing = Landing::new(self.files, false);
        while let Some(Part { of, piece }) = self.next() {
            let copied = copy(piece, self.files, landing);
            let done = of.add(copied).map_or(Ok(()), |done| self.leave(done));
            if let Err(error) = done {
                self.shared.stop(error);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a part. Returns `None` if there will be no more.
    fn next(&self) -> Option<Part> {
        let mut work = self.lock();
        loop {
            // A piece begins before all parts of the last one are taken, so that threads need not wait for it.
            if work.parts.len() < self.threads && !work.is_beginning && !work.has_ended {
                work.is_beginning = true;
                let patient = work.parts.is_empty();
                drop(work);
                let begun = self.begin(patient);
                work = self.lock();
                work.is_beginning = false;
                match begun {
                    Beginning::Begun(parts) => {
                        for part in parts {
                            work.parts.push_back(part);
                            self.changed.notify_one();
                        }
                    }
                    Beginning::NoSlot => {}
                    Beginning::End => {
                        work.has_ended = true;
                        self.changed.notify_all();
                    }
                }
            }
            if let Some(part) = work.parts.pop_front() {
                return Some(part);
            }
            if work.has_ended {
                return None;
            }
            // Otherwise this thread begins the next piece.
            if work.is_beginning {
                work = self.changed.wait(work).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Takes the next piece and cuts it into parts. If `patient`, waits for a slot.
    fn begin(&self, patient: bool) -> Beginning {
        let slot = match patient {
            true => self.ring.take(self.shared),
            false => self.ring.try_take(),
        };
        let slot = match slot {
            Ok(Some(slot)) => slot,
            Ok(None) if patient => return Beginning::End,
            Ok(None) => return Beginning::NoSlot,
            Err(error) => {
                self.shared.stop(error);
                return Beginning::End;
            }
        };
        let Some(Piece { index, label, layout, .. }) = self.shared.next_cached_piece() else {
            self.ring.give_back(slot);
            return Beginning::End;
        };
        let pieces = cut_block(0, label, &layout, slot, self.files, PART_BYTES);
        let copied = Mutex::new(pieces.iter().map(|_| None).collect());
        let of = Arc::new(Begun { index, label, copied });
        let part = |piece| Part { of: Arc::clone(&of), piece };
        Beginning::Begun(pieces.into_iter().map(part).collect())
    }

    /// Begins the copies to the device of a piece whose parts are all there.
    fn leave(&self, mut done: Completion) -> Result<(), StoreError> {
        let copies = &self.copies[done.id as usize];
        self.ring.leave(&mut done, copies)?;
        self.shared.answer(done, true);
        Ok(())
    }
}

/// What came of the attempt to begin a piece.
enum Beginning {
    Begun(Vec<Part>),
    /// No slot is free at the moment.
    NoSlot,
    /// There are no more pieces, or the load has stopped.
    End,
}

impl Begun {
    /// Adds a part. Returns the whole piece after its last part.
    fn add(&self, part: Completion) -> Option<Completion> {
        let mut copied = self.copied.lock().unwrap_or_else(PoisonError::into_inner);
        let number = part.id as usize;
        copied[number] = Some(part);
        if copied.iter().any(Option::is_none) {
            return None;
        }
        let parts = std::mem::take(&mut *copied);
        let Loaded { buffer, result } = join(vec![(self.label, parts.len())], parts).pop()?;
        Some(Completion { id: self.index as u64, buffer, result })
    }
}
