//! A detour through a small ring of memory, for machines where the disk writes to few pages faster
//! than to many: virtual disks that are served by copying.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use super::landing::{Landing, Regions};
use super::shared::Shared;
use crate::arena::SlotBuffer;
use crate::engine::{BlockLabel, Completion};
use crate::pieces::Piece;

/// Something that was read and must be copied to its place.
struct Arrived {
    completion: Completion,
    place: Place,
}

/// Where a piece belongs that is read into the ring.
struct Place {
    label: BlockLabel,
    regions: Regions,
    destination: SlotBuffer,
    bytes: usize,
}

/// The ring of a load, as the thread that reads sees it.
pub(super) struct Stage {
    free: Vec<SlotBuffer>,
    /// Of what is being read, by piece.
    reading: HashMap<u64, Place>,
    /// Slots of the ring that are being copied from.
    copying: usize,
    arrived: Sender<Arrived>,
    emptied: Receiver<SlotBuffer>,
}

/// The other side: threads that copy.
pub(super) struct CopyThreads {
    arrived: Mutex<Receiver<Arrived>>,
    emptied: Sender<SlotBuffer>,
}

/// Both sides of a ring.
pub(super) fn stage(ring: Vec<SlotBuffer>) -> (Stage, CopyThreads) {
    let (arrived, taken) = channel();
    let (emptied, back) = channel();
    let reading = HashMap::with_capacity(ring.len());
    let stage = Stage { free: ring, reading, copying: 0, arrived, emptied: back };
    (stage, CopyThreads { arrived: Mutex::new(taken), emptied })
}

impl Stage {
    /// Whether a piece can be begun; waits for a slot if `patient`, as long as one will come.
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

    /// Gives a piece a slot of the ring in place of its own; `false` if it does not fit there.
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

    /// Passes the answer to a piece on to be copied. It comes back if the piece is at its place.
    pub fn leave(&mut self, mut completion: Completion) -> Option<Completion> {
        let Some(place) = self.reading.remove(&completion.id) else { return Some(completion) };
        if completion.result.is_ok() {
            self.copying += 1;
            // The copy threads live until this side is gone.
            let _ = self.arrived.send(Arrived { completion, place });
            return None;
        }
        // A slot that the kernel may still write stays with the engine; the ring goes on without.
        self.free.extend(completion.buffer.replace(place.destination));
        Some(completion)
    }

    /// The ring, when everything is copied.
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
    /// The work of one thread that copies.
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
            shared.answer(completion);
        }
    }
}
