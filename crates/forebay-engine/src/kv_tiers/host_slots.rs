//! Host memory for KV blocks.

use std::ops::Range;

use forebay_model::{Backend, HostMemory, ModelError};

/// Bytes that are reserved at a time, or one block if it is larger.
const CHUNK_BYTES: usize = 64 << 20;

/// Room for one KV block of a layer group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostSlot {
    pub group: usize,
    pub slot: usize,
}

/// Host memory for KV blocks. It is reserved in chunks when it is first needed, and then kept.
pub struct HostSlots {
    /// One for each layer group.
    groups: Vec<Slots>,
}

struct Slots {
    block_bytes: usize,
    /// Number of slots that are not reserved yet.
    new: usize,
    chunks: Vec<Box<dyn HostMemory>>,
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
    pub fn new(shares: &[Share], bytes: u64) -> HostSlots {
        let unit: u64 = shares.iter().map(|of| (of.blocks * of.block_bytes) as u64).sum();
        let slots = |&Share { block_bytes, blocks }: &Share| {
            let total = u128::from(bytes) * blocks as u128 / u128::from(unit.max(1));
            let total = usize::try_from(total).unwrap_or(usize::MAX);
            Slots {
                block_bytes,
                new: total,
                chunks: Vec::new(),
                per_chunk: (CHUNK_BYTES / block_bytes.max(1)).clamp(1, total.max(1)),
                free: Vec::new(),
                total,
            }
        };
        HostSlots { groups: shares.iter().map(slots).collect() }
    }

    /// Returns the number of slots of a group, reserved or not.
    pub fn total(&self, group: usize) -> usize {
        self.groups[group].total
    }

    /// Returns the bytes of all slots, reserved or not.
    pub fn most_bytes(&self) -> u64 {
        self.groups.iter().map(|of| (of.total * of.block_bytes) as u64).sum()
    }

    /// Returns the bytes of the slots that are reserved.
    pub fn reserved_bytes(&self) -> u64 {
        self.groups.iter().map(|of| ((of.total - of.new) * of.block_bytes) as u64).sum()
    }

    /// Takes a slot for a block of a group. Returns `None` if all are taken.
    ///
    /// # Errors
    /// Returns an error if memory cannot be reserved.
    pub fn take(
        &mut self,
        backend: &dyn Backend,
        group: usize,
    ) -> Result<Option<HostSlot>, ModelError> {
        let slots = &mut self.groups[group];
        let count = slots.per_chunk.min(slots.new);
        if slots.free.is_empty() && count > 0 {
            let first = slots.chunks.len() * slots.per_chunk;
            slots.chunks.push(backend.host_memory(count * slots.block_bytes)?);
            slots.free.extend((first..first + count).rev());
            slots.new -= count;
        }
        Ok(slots.free.pop().map(|slot| HostSlot { group, slot }))
    }

    /// Gives a slot back.
    pub fn release(&mut self, slot: HostSlot) {
        self.groups[slot.group].free.push(slot.slot);
    }

    /// Returns the memory of a slot.
    pub fn bytes(&self, of: &HostSlot) -> &[u8] {
        let slots = &self.groups[of.group];
        let (chunk, bytes) = slots.place(of.slot);
        let chunk: &dyn HostMemory = slots.chunks[chunk].as_ref();
        &chunk.as_ref()[bytes]
    }

    /// Returns the memory of a slot, to write it.
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
}
