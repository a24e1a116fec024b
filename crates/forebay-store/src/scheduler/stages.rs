//! Memory that coded bytes are read to, before they are decoded into slots.

use crate::arena::SLOT_ALIGNMENT;

/// Most reads of coded bytes that are at the disk or being decoded.
const STAGES: usize = 48;

/// Equal pieces of memory, each for one request.
pub(super) struct Stages {
    memory: Vec<u8>,
    stage_bytes: usize,
    free: Vec<u32>,
}

impl Stages {
    /// Reserves memory for requests of up to `stage_bytes`, which must be a multiple of 4096, or none if that is 0. Pages that are never
    /// used take no physical memory.
    pub fn new(stage_bytes: usize) -> Stages {
        let count = if stage_bytes == 0 { 0 } else { STAGES };
        let padding = if count == 0 { 0 } else { SLOT_ALIGNMENT };
        let free = (0..count as u32).rev().collect();
        Stages { memory: vec![0; count * stage_bytes + padding], stage_bytes, free }
    }

    /// Returns true if there is memory, and all of it is in use.
    pub fn is_exhausted(&self) -> bool {
        self.free.is_empty() && !self.memory.is_empty()
    }

    pub fn stage_bytes(&self) -> usize {
        self.stage_bytes
    }

    /// Takes memory for a request of `bytes`. Returns `None` if all is in use, or if the request needs more.
    pub fn take(&mut self, bytes: u64) -> Option<u32> {
        if bytes > self.stage_bytes as u64 { None } else { self.free.pop() }
    }

    pub fn give_back(&mut self, stage: u32) {
        self.free.push(stage);
    }

    /// Returns the address of the first byte, which is aligned for direct reads.
    pub fn pointer(&mut self, stage: u32) -> *mut u8 {
        let base = self.memory.as_mut_ptr();
        let at = base.align_offset(SLOT_ALIGNMENT) + stage as usize * self.stage_bytes;
        assert!(at + self.stage_bytes <= self.memory.len(), "a stage lies inside the memory");
        // SAFETY: the assertion says that the address lies inside the vector's memory.
        unsafe { base.add(at) }
    }

    /// Leaves the memory to the kernel, which may still write to it.
    pub fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.memory));
        self.free.clear();
    }
}
