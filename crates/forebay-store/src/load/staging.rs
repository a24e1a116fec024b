//! A detour through a small ring of memory, for machines where the disk writes to few pages faster
//! than to many: virtual disks that are served by copying.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use super::shared::Shared;
use crate::arena::SlotBuffer;
use crate::engine::Completion;
use crate::pieces::Piece;

/// Something that was read and must be copied to its place.
struct Arrived {
    completion: Completion,
    destination: SlotBuffer,
    bytes: usize,
}

/// The ring of a load, as the thread that reads sees it.
pub(super) struct Stage {
    free: Vec<SlotBuffer>,
    /// Destinations of what is being read, by piece.
    reading: HashMap<u64, (SlotBuffer, usize)>,
    /// Slots of the ring that are being copied from.
    copying: usize,
    arrived: Sender<Arrived>,
    emptied: Receiver<SlotBuffer>,
}

/// The other side: threads that copy.
pub(super) struct Movers {
    arrived: Mutex<Receiver<Arrived>>,
    emptied: Sender<SlotBuffer>,
}

/// Both sides of a ring.
pub(super) fn stage(ring: Vec<SlotBuffer>) -> (Stage, Movers) {
    let (arrived, taken) = channel();
    let (emptied, back) = channel();
    let reading = HashMap::with_capacity(ring.len());
    let stage = Stage { free: ring, reading, copying: 0, arrived, emptied: back };
    (stage, Movers { arrived: Mutex::new(taken), emptied })
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

    /// Gives a piece a slot of the ring in place of its own, if it fits there.
    pub fn enter(&mut self, piece: &mut Piece) {
        let bytes = piece.layout.slot_bytes;
        let fits = bytes > 0 && bytes <= piece.buffer.len();
        if let Some(at) = self.free.iter().position(|slot| fits && bytes <= slot.len()) {
            let slot = self.free.swap_remove(at);
            let destination = std::mem::replace(&mut piece.buffer, slot);
            self.reading.insert(piece.index as u64, (destination, bytes));
        }
    }

    /// Passes an answer on: to be copied, or as it is.
    pub fn leave(&mut self, mut completion: Completion, shared: &Shared) {
        let Some((destination, bytes)) = self.reading.remove(&completion.id) else {
            return shared.answer(completion, false);
        };
        if completion.result.is_ok() {
            self.copying += 1;
            // The movers live until this side is gone.
            let _ = self.arrived.send(Arrived { completion, destination, bytes });
            return;
        }
        // A slot that the kernel may still write stays with the engine; the ring goes on without.
        self.free.extend(completion.buffer.replace(destination));
        shared.answer(completion, false);
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

impl Movers {
    /// The work of one thread that copies.
    pub fn copy(&self, shared: &Shared) {
        loop {
            let next = self.arrived.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(Arrived { mut completion, mut destination, bytes }) = next else { return };
            if let Some(slot) = completion.buffer.take() {
                copy_past_cache(
                    &mut destination.as_mut_slice()[..bytes],
                    &slot.as_slice()[..bytes],
                );
                let _ = self.emptied.send(slot);
            }
            completion.buffer = Some(destination);
            shared.answer(completion, false);
        }
    }
}

/// Copies to memory that nobody reads soon: what is written need not be fetched into the cache
/// first, and does not push the ring out of it.
///
/// # Panics
/// When the lengths differ.
fn copy_past_cache(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy has one length");
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        let head = to.as_ptr().align_offset(32).min(to.len());
        let (to_head, to) = to.split_at_mut(head);
        let (from_head, from) = from.split_at(head);
        to_head.copy_from_slice(from_head);
        let whole = to.len() / 32 * 32;
        to[whole..].copy_from_slice(&from[whole..]);
        // SAFETY: the machine has AVX2; both slices have these bytes, and `to` is aligned.
        unsafe { stream(&mut to[..whole], &from[..whole]) };
        return;
    }
    to.copy_from_slice(from);
}

/// # Safety
/// The machine has AVX2, both slices have the same length, a multiple of 32, and `to` begins at a
/// multiple of 32 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    for (to, from) in to.chunks_exact_mut(32).zip(from.chunks_exact(32)) {
        // SAFETY: both chunks have 32 bytes, and `to` is aligned by the caller's promise.
        unsafe {
            let bytes = _mm256_loadu_si256(from.as_ptr().cast());
            _mm256_stream_si256(to.as_mut_ptr().cast(), bytes);
        }
    }
    // Others must see these stores when they see what follows.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::copy_past_cache;

    #[test]
    fn copies_of_every_length_and_alignment_are_exact() {
        let from: Vec<u8> = (0..400).map(|i| (i * 7 % 251) as u8).collect();
        for start in 0..40 {
            for length in (0..300).step_by(7) {
                let mut to = vec![255; 400];
                copy_past_cache(&mut to[start..start + length], &from[3..3 + length]);
                assert_eq!(to[start..start + length], from[3..3 + length]);
                assert!(to[..start].iter().chain(&to[start + length..]).all(|&byte| byte == 255));
            }
        }
    }
}
