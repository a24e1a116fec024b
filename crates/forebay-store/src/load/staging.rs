//! Reads that go through a small ring of memory. Some virtual disks are served by copying, and write to few pages
//! faster than to many.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use super::landing::{Landing, Regions};
use super::shared::Shared;
use crate::arena::SlotBuffer;
use crate::engine::{BlockLabel, Completion};
use crate::pieces::Piece;

/// A piece that was read into the ring and must be copied to its destination.
struct Arrived {
    completion: Completion,
    place: Place,
}

/// Destination of a piece that is read into the ring.
struct Place {
    label: BlockLabel,
    regions: Regions,
    destination: SlotBuffer,
    bytes: usize,
}

/// The ring of a load, as seen by the reader thread.
pub(super) struct Stage {
    free: Vec<SlotBuffer>,
    /// Destinations of the pieces that are being read, by piece index.
    reading: HashMap<u64, Place>,
    /// Number of ring slots that are being copied from.
    copying: usize,
    arrived: Sender<Arrived>,
    emptied: Receiver<SlotBuffer>,
}

/// The ring of a load, as seen by the copy threads.
pub(super) struct CopyThreads {
    arrived: Mutex<Receiver<Arrived>>,
    emptied: Sender<SlotBuffer>,
}

/// Creates both sides of a ring.
pub(super) fn stage(ring: Vec<SlotBuffer>) -> (Stage, CopyThreads) {
    let (arrived, taken) = channel();
    let (emptied, back) = channel();
    let reading = HashMap::with_capacity(ring.len());
    let stage = Stage { free: ring, reading, copying: 0, arrived, emptied: back };
    (stage, CopyThreads { arrived: Mutex::new(taken), emptied })
}

impl Stage {
    /// Returns true if there is a slot to begin a piece. If `patient`, waits for a slot while any is being copied from.
    pub fn has_room(&mut self, patient: bool) -> bool {
        while let Ok(slot) = self.emptied.try_recv() {
            self.take_back(slot);
        }
        while self.free.is_empty() && patient && self.copying > 0 {
            match self.emptied.recv() {
                Ok(slot) => self.take_back(slot),
                Err(_) => break,
            }
        }
        !self.free.is_empty()
    }

    fn take_back(&mut self, slot: SlotBuffer) {
        self.copying -= 1;
        self.free.push(slot);
    }

    /// Replaces the buffer of a piece by a slot of the ring. Returns false if the piece does not fit in a free slot.
    pub fn enter(&mut self, piece: &mut Piece) -> bool {
        let bytes = piece.layout.slot_bytes;
        let fits = bytes > 0 && bytes <= piece.buffer.len();
        let Some(at) = self.free.iter().position(|slot| fits && bytes <= slot.len()) else {
            return false;
        };
        let slot = self.free.swap_remove(at);
        let destination = std::mem::replace(&mut piece.buffer, slot);
        let (label, regions) = (piece.label, piece.layout.regions.clone());
        self.reading.insert(piece.index as u64, Place { label, regions, destination, bytes });
        true
    }

    /// Passes a finished piece to the copy threads. Returns the completion if there is nothing to copy, because the
    /// piece was read in place or its read failed.
    pub fn leave(&mut self, mut completion: Completion) -> Option<Completion> {
        let Some(place) = self.reading.remove(&completion.id) else { return Some(completion) };
        if completion.result.is_ok() {
            self.copying += 1;
            // Sending cannot fail: the copy threads run until this side is dropped.
            let _ = self.arrived.send(Arrived { completion, place });
            return None;
        }
        // After a stall, the kernel may still write to the slot, so the engine keeps it. The ring continues without it.
        self.free.extend(completion.buffer.replace(place.destination));
        Some(completion)
    }

    /// Waits until everything is copied and returns the slots of the ring.
    pub fn finish(mut self) -> Vec<SlotBuffer> {
        while self.copying > 0 {
            match self.emptied.recv() {
                Ok(slot) => self.take_back(slot),
                Err(_) => break,
            }
        }
        self.free
    }
}

impl CopyThreads {
    /// Runs one copy thread.
    pub fn copy(&self, shared: &Shared, landing: Landing<'_>) {
        loop {
            let next = self.arrived.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(Arrived { mut completion, place }) = next else { return };
            let Place { label, regions, mut destination, bytes } = place;
            if let Some(slot) = completion.buffer.take() {
                let moved = landing.move_over(label, &regions, &mut destination, &slot, bytes);
                if let Err(error) = moved {
                    completion.result = Err(error);
                }
                let _ = self.emptied.send(slot);
            }
            completion.buffer = Some(destination);
            shared.answer(completion, false);
        }
    }
}
