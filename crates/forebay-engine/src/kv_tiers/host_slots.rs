//! Host memory for KV blocks.

use std::collections::VecDeque;
use std::ops::Range;
use std::thread::{self, JoinHandle};

use forebay_model::{HostMemory, HostReserver, ModelError};
use forebay_store::StoreError;

/// Bytes that are reserved at a time, or one block if it is larger.
const CHUNK_BYTES: usize = 64 << 20;
/// Chunks that are reserved before they are needed. More would not help: while memory is pinned, the GPU gets little other work.
const AHEAD: usize = 2;

/// Room for one KV block of a layer group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostSlot {
    pub group: usize,
    pub slot: usize,
}

/// Host memory for KV blocks. It is reserved in chunks, and then kept. Reserving takes longer than filling a chunk, so threads
/// reserve chunks before they are needed.
pub struct HostSlots {
    reserver: HostReserver,
    /// One for each layer group.
    groups: Vec<Slots>,
}

type Reserved = Result<Box<dyn HostMemory>, ModelError>;

struct Slots {
    block_bytes: usize,
    /// Number of slots for which no memory was asked yet.
    new: usize,
    chunks: Vec<Box<dyn HostMemory>>,
    /// Chunks that are being reserved, in order, with their numbers of slots.
    coming: VecDeque<(usize, JoinHandle<Reserved>)>,
    per_chunk: usize,
    free: Vec<usize>,
    total: usize,
}

/// What a group of layers needs for a typical conversation, from which follows its share of the memory.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    pub block_bytes: usize,
    /// Blocks for every [`Share::UNIT`] positions.
    pub blocks: usize,
}

impl Share {
    /// Positions for which shares are counted: about the length of one turn.
    pub const UNIT: usize = 1024;
}

impl HostSlots {
    /// Divides `bytes` among layer groups.
    pub fn new(reserver: HostReserver, shares: &[Share], bytes: u64) -> HostSlots {
        let unit: u64 = shares.iter().map(|of| (of.blocks * of.block_bytes) as u64).sum();
        let slots = |&Share { block_bytes, blocks }: &Share| {
            let total = u128::from(bytes) * blocks as u128 / u128::from(unit.max(1));
            let total = usize::try_from(total).unwrap_or(usize::MAX);
            Slots {
                block_bytes,
                new: total,
                chunks: Vec::new(),
                coming: VecDeque::new(),
                per_chunk: (CHUNK_BYTES / block_bytes.max(1)).clamp(1, total.max(1)),
                free: Vec::new(),
                total,
            }
        };
        HostSlots { reserver, groups: shares.iter().map(slots).collect() }
    }

    /// Returns the number of slots of a group, reserved or not.
    pub fn total(&self, group: usize) -> usize {
        self.groups[group].total
    }

    /// Returns the bytes of all slots, reserved or not.
    pub fn bytes_max(&self) -> u64 {
        self.groups.iter().map(|of| (of.total * of.block_bytes) as u64).sum()
    }

    /// Returns the bytes of the slots that are reserved, or being reserved.
    pub fn reserved_bytes(&self) -> u64 {
        self.groups.iter().map(|of| ((of.total - of.new) * of.block_bytes) as u64).sum()
    }

    /// Takes a slot for a block of a group. Returns `None` if all are taken.
    ///
    /// # Errors
    /// Returns an error if memory cannot be reserved.
    pub fn take(&mut self, group: usize) -> Result<Option<HostSlot>, ModelError> {
        let slots = &mut self.groups[group];
        if slots.free.is_empty() && slots.coming.is_empty() {
            slots.begin_chunk(&self.reserver)?;
        }
        if slots.free.is_empty() {
            slots.take_chunk()?;
        }
        let slot = slots.free.pop();
        slots.reserve_ahead(&self.reserver);
        Ok(slot.map(|slot| HostSlot { group, slot }))
    }

    /// Gives a slot back.
    pub fn release(&mut self, slot: HostSlot) {
        self.groups[slot.group].free.push(slot.slot);
    }

    /// Returns the memory of a slot, and where the slot is there.
    pub fn place(&self, of: &HostSlot) -> (&dyn HostMemory, Range<usize>) {
        let slots = &self.groups[of.group];
        let (chunk, bytes) = slots.place(of.slot);
        (slots.chunks[chunk].as_ref(), bytes)
    }

    /// Returns the bytes of a slot.
    pub fn bytes(&self, of: &HostSlot) -> &[u8] {
        let (memory, bytes) = self.place(of);
        &memory.as_ref()[bytes]
    }

    /// Returns the bytes of a slot, to write them.
    pub fn bytes_mut(&mut self, of: &HostSlot) -> &mut [u8] {
        let slots = &mut self.groups[of.group];
        let (chunk, bytes) = slots.place(of.slot);
        let chunk: &mut dyn HostMemory = slots.chunks[chunk].as_mut();
        &mut chunk.as_mut()[bytes]
    }
}

impl Slots {
    /// Returns the index of the chunk with a slot, and the slot's bytes in it.
    fn place(&self, slot: usize) -> (usize, Range<usize>) {
        let at = slot % self.per_chunk * self.block_bytes;
        (slot / self.per_chunk, at..at + self.block_bytes)
    }

    /// Begins to reserve a chunk, if there are slots without memory.
    fn begin_chunk(&mut self, reserver: &HostReserver) -> Result<(), ModelError> {
        let count = self.per_chunk.min(self.new);
        if count == 0 {
            return Ok(());
        }
        let (reserver, bytes) = (reserver.clone(), count * self.block_bytes);
        let builder = thread::Builder::new().name("kv-memory".into());
        let thread = builder.spawn(move || reserver(bytes));
        let thread = thread.map_err(|source| StoreError::Memory { bytes, source })?;
        self.coming.push_back((count, thread));
        self.new -= count;
        Ok(())
    }

    /// Waits for the next chunk that is being reserved, if there is one.
    fn take_chunk(&mut self) -> Result<(), ModelError> {
        let Some((count, thread)) = self.coming.pop_front() else { return Ok(()) };
        let reserved = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let chunk = reserved.inspect_err(|_| self.new += count)?;
        let first = self.chunks.len() * self.per_chunk;
        self.chunks.push(chunk);
        self.free.extend((first..first + count).rev());
        Ok(())
    }

    /// Begins to reserve chunks, if less than half of one is free. If that fails, memory is reserved once it is needed.
    fn reserve_ahead(&mut self, reserver: &HostReserver) {
        while self.free.len() < self.per_chunk / 2 && self.coming.len() < AHEAD && self.new > 0 {
            if self.begin_chunk(reserver).is_err() {
                return;
            }
        }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        for (_, thread) in self.coming.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const BLOCK: usize = 16 << 20;

    #[test]
    fn chunks_are_reserved_ahead_and_never_more_than_all() {
        let reserved = Arc::new(AtomicUsize::new(0));
        let counter = reserved.clone();
        let reserver: HostReserver = Arc::new(move |bytes| {
            counter.fetch_add(bytes, Ordering::Relaxed);
            Ok(Box::new(vec![0_u8; bytes]))
        });
        let share = Share { block_bytes: BLOCK, blocks: 1 };
        // Fifteen blocks, of which four are in a chunk.
        let mut slots = HostSlots::new(reserver, &[share], 15 * BLOCK as u64);
        let mut taken: Vec<HostSlot> = (0..2).map(|_| slots.take(0).unwrap().unwrap()).collect();
        assert_eq!(slots.reserved_bytes(), 4 * BLOCK as u64);
        // One of four is left, so two more chunks have begun.
        taken.push(slots.take(0).unwrap().unwrap());
        assert_eq!(slots.reserved_bytes(), 12 * BLOCK as u64);
        let more: Vec<HostSlot> = std::iter::from_fn(|| slots.take(0).unwrap()).collect();
        assert_eq!((taken.len() + more.len(), slots.reserved_bytes()), (15, slots.bytes_max()));
        slots.bytes_mut(&more[7])[BLOCK - 1] = 3;
        slots.release(more[7]);
        assert_eq!(slots.take(0).unwrap(), Some(more[7]));
        assert_eq!(slots.bytes(&more[7])[BLOCK - 1], 3);
        drop(slots);
        assert_eq!(reserved.load(Ordering::Relaxed), 15 * BLOCK);
    }

    #[test]
    fn slots_whose_memory_cannot_be_reserved_are_asked_for_again() {
        let fails = Arc::new(AtomicUsize::new(1));
        let reserver: HostReserver = Arc::new(move |bytes| {
            let fails = fails.swap(0, Ordering::Relaxed) == 1;
            let source = std::io::ErrorKind::OutOfMemory.into();
            let error = StoreError::Memory { bytes, source };
            if fails { Err(error.into()) } else { Ok(Box::new(vec![0_u8; bytes])) }
        });
        let share = Share { block_bytes: BLOCK, blocks: 1 };
        let mut slots = HostSlots::new(reserver, &[share], BLOCK as u64);
        assert!(slots.take(0).is_err());
        assert!(slots.take(0).unwrap().is_some() && slots.take(0).unwrap().is_none());
    }
}
