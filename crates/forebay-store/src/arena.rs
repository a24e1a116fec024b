//! Memory that is reserved once at start and handed out as slots, each with a single owner.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::StoreError;
use crate::huge_pages::huge_page_bytes;
use crate::interrupt::Interrupt;

/// Alignment of slots in bytes. Both the start and the length of a slot are multiples of it.
pub const SLOT_ALIGNMENT: usize = 4096;

const HUGE_PAGE: usize = 2 << 20;
/// Size of a small page in bytes. Larger pages are multiples of it.
const PAGE: usize = 4096;
/// Number of bytes that one thread makes resident at a time.
const POPULATE_CHUNK: usize = 4 << 20;

/// An anonymous mapping, which is unmapped when the last slot and the last arena handle are dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    length: usize,
    /// True if the memory belongs to the caller and is not unmapped here.
    foreign: bool,
    /// True if every page is in memory.
    resident: AtomicBool,
}

// SAFETY: a mapping is only an address range. Its bytes are accessed through `SlotBuffer`s, which own disjoint ranges.
unsafe impl Send for Mapping {}
// SAFETY: as above. `Mapping` itself gives no access to the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Returns true if every page is in memory.
    pub(crate) fn is_resident(&self) -> bool {
        self.resident.load(Ordering::Acquire)
    }

    /// Maps `length` bytes, aligned to huge pages and advised to use them.
    fn new(length: usize) -> std::io::Result<Mapping> {
        let reserved = length.checked_add(HUGE_PAGE).ok_or(rustix::io::Errno::NOMEM)?;
        // SAFETY: a fresh anonymous mapping at an address that the kernel chooses touches no existing memory.
        let raw = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                reserved,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        let head = raw.addr().next_multiple_of(HUGE_PAGE) - raw.addr();
        let tail = reserved - head - length;
        // SAFETY: both trimmed ranges lie inside the mapping made above (head + length + tail == reserved), and nothing
        // uses them. Their bounds are page aligned because `length` and `HUGE_PAGE` are.
        let base = unsafe {
            let base = raw.byte_add(head);
            if head > 0 {
                munmap(raw, head)?;
            }
            if tail > 0 {
                munmap(base.byte_add(length), tail)?;
            }
            base
        };
        let base = NonNull::new(base.cast::<u8>()).ok_or(rustix::io::Errno::NOMEM)?;
        // SAFETY: the range is our own mapping, and this advice does not change its contents. A kernel without huge
        // pages refuses it, which only costs speed.
        let _ = unsafe { madvise(base.as_ptr().cast::<c_void>(), length, Advice::LinuxHugepage) };
        Ok(Mapping { base, length, foreign: false, resident: AtomicBool::new(false) })
    }

    /// Makes every page of a range resident now, so that page faults and out-of-memory errors do not occur in the hot path.
    fn make_resident(
        &self,
        range: Range<usize>,
        interrupt: Option<&Interrupt>,
    ) -> std::io::Result<()> {
        if self.is_resident() {
            return Ok(());
        }
        let next = AtomicUsize::new(range.start);
        let threads = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(8)
            .min(range.len().div_ceil(POPULATE_CHUNK));
        std::thread::scope(|scope| {
            let populate = || self.populate_chunks(&next, range.end, interrupt);
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(populate)).collect();
            workers.into_iter().try_for_each(|worker| match worker.join() {
                Ok(result) => result,
                Err(_) => Err(std::io::Error::other("a thread that populates memory panicked")),
            })
        })?;
        let is_whole = range == (0..self.length);
        if is_whole && interrupt.is_none_or(|interrupt| !interrupt.is_requested()) {
            self.resident.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn populate_chunks(
        &self,
        next: &AtomicUsize,
        end: usize,
        interrupt: Option<&Interrupt>,
    ) -> std::io::Result<()> {
        loop {
            if interrupt.is_some_and(Interrupt::is_requested) {
                return Ok(());
            }
            let start = next.fetch_add(POPULATE_CHUNK, Ordering::Relaxed);
            if start >= end {
                return Ok(());
            }
            self.populate(start, POPULATE_CHUNK.min(end - start))?;
        }
    }

    /// Makes the pages of a range resident without changing their contents.
    fn populate(&self, start: usize, length: usize) -> std::io::Result<()> {
        let first = start / PAGE * PAGE;
        let end = (start + length).min(self.length);
        // SAFETY: the range lies inside the mapping, and populating pages changes no byte.
        let populated = unsafe {
            let at = self.base.as_ptr().add(first);
            madvise(at.cast::<c_void>(), end - first, Advice::LinuxPopulateWrite)
        };
        match populated {
            Ok(()) => Ok(()),
            // Linux before 5.14 does not know this advice. Pages then become resident when they are first used.
            Err(rustix::io::Errno::INVAL) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.foreign {
            return;
        }
        // SAFETY: the range was mapped by `new`, and this is its last user. Unmapping a whole mapping of our own cannot
        // fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.length) };
    }
}

/// Memory reserved for weights. Clones share it.
#[derive(Clone, Debug)]
pub struct Arena {
    mapping: Option<Arc<Mapping>>,
    used: Arc<AtomicUsize>,
}

impl Arena {
    /// Reserves `bytes` (rounded up to a multiple of 4096), advised for huge pages, and makes them resident.
    ///
    /// # Errors
    /// Returns [`StoreError::Memory`] if the system does not have that much memory.
    pub fn reserve(bytes: usize) -> Result<Arena, StoreError> {
        let arena = Arena::map(bytes)?;
        arena.make_resident()?;
        Ok(arena)
    }

    /// Reserves `bytes` like [`Arena::reserve`], but without making them resident. Pages become resident when they are
    /// first used, or by [`Arena::make_resident`]. A [`crate::Loader`] makes them resident while it reads.
    ///
    /// # Errors
    /// Returns [`StoreError::Memory`] if the system has no free address range of that size.
    pub fn map(bytes: usize) -> Result<Arena, StoreError> {
        let used = Arc::new(AtomicUsize::new(0));
        if bytes == 0 {
            return Ok(Arena { mapping: None, used });
        }
        let failed = |source| StoreError::Memory { bytes, source };
        let length = bytes
            .checked_next_multiple_of(SLOT_ALIGNMENT)
            .ok_or_else(|| failed(rustix::io::Errno::NOMEM.into()))?;
        let mapping = Mapping::new(length).map_err(failed)?;
        Ok(Arena { mapping: Some(Arc::new(mapping)), used })
    }

    /// Makes every missing page resident, with several threads.
    ///
    /// # Errors
    /// Returns [`StoreError::Memory`] if the system does not have enough memory.
    pub fn make_resident(&self) -> Result<(), StoreError> {
        self.populate(0..self.bytes(), None)
    }

    /// Makes the missing pages of a range of its bytes resident, with several threads.
    ///
    /// # Errors
    /// Returns [`StoreError::Memory`] if the system does not have enough memory.
    ///
    /// # Panics
    /// Panics if the range is not inside the arena.
    pub fn make_resident_in(&self, range: Range<usize>) -> Result<(), StoreError> {
        let bytes = self.bytes();
        assert!(range.start <= range.end && range.end <= bytes, "{range:?} of {bytes} bytes");
        self.populate(range, None)
    }

    /// Makes every missing page resident like [`Arena::make_resident`], but stops early if `interrupt` is requested.
    ///
    /// # Errors
    /// Returns [`StoreError::Memory`] if the system does not have enough memory, and [`StoreError::Interrupted`] if it
    /// was stopped.
    pub fn make_resident_unless(&self, interrupt: &Interrupt) -> Result<(), StoreError> {
        self.populate(0..self.bytes(), Some(interrupt))?;
        interrupt.check()
    }

    fn populate(
        &self,
        range: Range<usize>,
        interrupt: Option<&Interrupt>,
    ) -> Result<(), StoreError> {
        let Some(mapping) = &self.mapping else { return Ok(()) };
        let bytes = range.len();
        let made = mapping.make_resident(range, interrupt);
        made.map_err(|source| StoreError::Memory { bytes, source })
    }

    /// Takes the next `bytes` (rounded up to a multiple of 4096) as a slot. Slots are never returned to the arena,
    /// which lives as long as its plan.
    ///
    /// # Errors
    /// Returns [`StoreError::ArenaFull`] if the arena has not enough bytes left.
    pub fn carve(&self, bytes: usize) -> Result<SlotBuffer, StoreError> {
        let full = |used: usize| StoreError::ArenaFull { wanted: bytes, free: self.bytes() - used };
        let length = bytes
            .checked_next_multiple_of(SLOT_ALIGNMENT)
            .ok_or_else(|| full(self.used_bytes()))?;
        let mapping = match &self.mapping {
            Some(mapping) => mapping,
            None if length == 0 => return Ok(SlotBuffer::empty()),
            None => return Err(full(0)),
        };
        let take = |used: usize| used.checked_add(length).filter(|&end| end <= mapping.length);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(start) => Ok(SlotBuffer { mapping: Some(Arc::clone(mapping)), start, length }),
            Err(used) => Err(full(used)),
        }
    }

    /// Returns the number of bytes reserved.
    pub fn bytes(&self) -> usize {
        self.mapping.as_ref().map_or(0, |mapping| mapping.length)
    }

    /// Returns the reserved address range, which a GPU driver needs to pin the memory.
    pub fn addresses(&self) -> std::ops::Range<usize> {
        let start = self.mapping.as_ref().map_or(0, |mapping| mapping.base().addr());
        start..start + self.bytes()
    }

    /// Returns the number of bytes that lie in huge pages, or `None` if the system does not report it.
    pub fn huge_page_bytes(&self) -> Option<u64> {
        huge_page_bytes(&self.addresses())
    }

    /// Returns the number of bytes carved so far.
    pub fn used_bytes(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn mapping(&self) -> Option<&Arc<Mapping>> {
        self.mapping.as_ref()
    }
}

/// The only owner of a range of an arena. It keeps the arena's memory alive.
#[derive(Debug)]
pub struct SlotBuffer {
    mapping: Option<Arc<Mapping>>,
    start: usize,
    length: usize,
}

impl SlotBuffer {
    /// Creates a slot over memory that the caller owns, of any length and alignment.
    ///
    /// # Safety
    /// The range must be initialised, valid for reads and writes, and not used elsewhere until this slot is dropped. If
    /// an engine keeps the slot because a read stalled, it is never dropped.
    pub(crate) unsafe fn foreign(pointer: *mut u8, length: usize) -> SlotBuffer {
        let base = NonNull::new(pointer).unwrap_or(NonNull::dangling());
        let mapping = Mapping { base, length, foreign: true, resident: AtomicBool::new(true) };
        SlotBuffer { mapping: Some(Arc::new(mapping)), start: 0, length }
    }

    /// Creates a slot of no memory.
    pub(crate) fn empty() -> SlotBuffer {
        SlotBuffer { mapping: None, start: 0, length: 0 }
    }

    /// Returns the length in bytes, which is a multiple of 4096 for every slot that [`Arena::carve`] returned.
    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range belongs to this slot alone and stays mapped while `self` lives. Anonymous memory is
        // initialised, and so is foreign memory, as its owner promised. While an engine writes to a slot, the engine
        // owns it, so no `&self` exists elsewhere.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.length) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`. `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.length) }
    }

    /// Makes the pages of this slot resident.
    pub(crate) fn make_resident(&self) -> std::io::Result<()> {
        match &self.mapping {
            Some(mapping) if !mapping.is_resident() && self.length > 0 => {
                mapping.populate(self.start, self.length)
            }
            _ => Ok(()),
        }
    }

    /// Splits the slot into the bytes before `at` and those from `at` on.
    ///
    /// # Panics
    /// Panics if `at` is past the end.
    pub(crate) fn split_at(self, at: usize) -> (SlotBuffer, SlotBuffer) {
        assert!(at <= self.length, "a slot of {} bytes cannot be split at {at}", self.length);
        let SlotBuffer { mapping, start, length } = self;
        let head = SlotBuffer { mapping: mapping.clone(), start, length: at };
        (head, SlotBuffer { mapping, start: start + at, length: length - at })
    }

    /// Joins two slots that [`SlotBuffer::split_at`] made.
    ///
    /// # Panics
    /// Panics if `tail` does not follow this slot directly.
    pub(crate) fn join(self, tail: SlotBuffer) -> SlotBuffer {
        let same = match (&self.mapping, &tail.mapping) {
            (Some(head), Some(tail)) => Arc::ptr_eq(head, tail),
            (None, None) => true,
            _ => false,
        };
        assert!(same && tail.start == self.start + self.length, "the slots are not neighbours");
        SlotBuffer { length: self.length + tail.length, ..self }
    }

    /// Returns the address of the first byte, for devices that write to the slot while an engine owns it.
    pub(crate) fn pointer(&self) -> *mut u8 {
        match &self.mapping {
            // SAFETY: `carve` and `split_at` checked that start + length lies inside the mapping. A foreign slot is its
            // whole mapping.
            Some(mapping) => unsafe { mapping.base().add(self.start) },
            None => NonNull::<u8>::dangling().as_ptr(),
        }
    }
}

impl AsRef<[u8]> for SlotBuffer {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl AsMut<[u8]> for SlotBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_aligned_apart_and_outlive_the_arena() {
        let arena = Arena::reserve(3 * 4096 + 1).unwrap();
        assert_eq!(arena.bytes(), 4 * 4096);
        let mut first = arena.carve(4097).unwrap();
        let mut second = arena.carve(4096).unwrap();
        assert_eq!((first.len(), second.len(), arena.used_bytes()), (8192, 4096, 12288));
        assert_eq!(first.pointer().addr() % SLOT_ALIGNMENT, 0);
        assert!(matches!(
            arena.carve(4097),
            Err(StoreError::ArenaFull { wanted: 4097, free: 4096 })
        ));
        drop(arena);
        first.as_mut_slice().fill(1);
        second.as_mut_slice().fill(2);
        assert!(first.as_slice().iter().all(|&byte| byte == 1));
    }

    #[test]
    fn slots_split_and_join_again() {
        let arena = Arena::map(8192).unwrap();
        let mut slot = arena.carve(8192).unwrap();
        slot.as_mut_slice()[512] = 7;
        let (head, tail) = slot.split_at(512);
        tail.make_resident().unwrap();
        assert_eq!((head.len(), tail.len(), tail.as_slice()[0]), (512, 7680, 7));
        arena.make_resident().unwrap();
        let whole = head.join(tail);
        assert_eq!((whole.len(), whole.as_slice()[512]), (8192, 7));
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(matches!(Arena::reserve(usize::MAX), Err(StoreError::Memory { .. })));
        assert!(matches!(Arena::reserve(1 << 60), Err(StoreError::Memory { .. })));
        let arena = Arena::reserve(4096).unwrap();
        assert!(matches!(arena.carve(usize::MAX), Err(StoreError::ArenaFull { .. })));
        assert_eq!(arena.carve(0).unwrap().len(), 0);
        let nothing = Arena::reserve(0).unwrap();
        assert!(nothing.carve(0).unwrap().as_slice().is_empty());
        assert!(nothing.carve(1).is_err());
    }
}
