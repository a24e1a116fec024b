//! Swap space: host memory for the KV blocks of suspended sequences.

use std::ops::Range;

use forebay_model::{Backend, HostMemory, ModelError};

/// Bytes that are reserved at a time, or one block if it is larger.
const CHUNK_BYTES: usize = 64 << 20;

/// Room for one KV block of a layer group.
#[derive(Debug, PartialEq, Eq)]
pub struct SwapSlot {
    group: usize,
    slot: usize,
}

/// Host memory for KV blocks. It is reserved in chunks when it is first needed, and then kept.
pub struct SwapSpace {
    most_bytes: u64,
    reserved_bytes: u64,
    /// One for each layer group.
    groups: Vec<Slots>,
}

struct Slots {
    block_bytes: usize,
    chunks: Vec<Box<dyn HostMemory>>,
    per_chunk: usize,
    free: Vec<usize>,
}

impl SwapSpace {
    /// Creates a swap space of at most `most_bytes` for layer groups with blocks of these sizes.
    pub fn new(block_bytes: impl Iterator<Item = usize>, most_bytes: u64) -> SwapSpace {
        let groups = block_bytes.map(|block_bytes| Slots {
            block_bytes,
            chunks: Vec::new(),
            per_chunk: (CHUNK_BYTES / block_bytes.max(1)).max(1),
            free: Vec::new(),
        });
        SwapSpace { most_bytes, reserved_bytes: 0, groups: groups.collect() }
    }

    /// Takes a slot for a block of a group. Returns `None` if the swap space is full.
    ///
    /// # Errors
    /// Returns an error if memory cannot be reserved.
    pub fn take(
        &mut self,
        backend: &dyn Backend,
        group: usize,
    ) -> Result<Option<SwapSlot>, ModelError> {
        let slots = &mut self.groups[group];
        if slots.free.is_empty() && self.reserved_bytes < self.most_bytes {
            let left = (self.most_bytes - self.reserved_bytes) / slots.block_bytes.max(1) as u64;
            let count = slots.per_chunk.min(left as usize);
            if count > 0 {
                let bytes = count * slots.block_bytes;
                let first = slots.chunks.len() * slots.per_chunk;
                slots.chunks.push(backend.host_memory(bytes)?);
                slots.free.extend((first..first + count).rev());
                self.reserved_bytes += bytes as u64;
            }
        }
        Ok(slots.free.pop().map(|slot| SwapSlot { group, slot }))
    }

    /// Gives a slot back.
    pub fn release(&mut self, slot: SwapSlot) {
        self.groups[slot.group].free.push(slot.slot);
    }

    /// Returns the memory of a slot.
    pub fn bytes(&self, of: &SwapSlot) -> &[u8] {
        let slots = &self.groups[of.group];
        let (chunk, bytes) = slots.place(of.slot);
        let chunk: &dyn HostMemory = slots.chunks[chunk].as_ref();
        &chunk.as_ref()[bytes]
    }

    /// Returns the memory of a slot, to write it.
    pub fn bytes_mut(&mut self, of: &SwapSlot) -> &mut [u8] {
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
}
