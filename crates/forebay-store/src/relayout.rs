//! Converts a block from the layout that was read to the layout in which it is held in memory.
//!
//! The relayout of a block is split into shares, which the checker threads work on. Output and input of the shares
//! overlap in the slot. So all shares are first written to scratch memory and then copied into the slot.

use std::ops::Range;
use std::sync::Arc;

use forebay_format::{Relayout, RelayoutShare};

use crate::arena::SlotBuffer;
use crate::checker::{Answer, Checker, Work};
use crate::error::StoreError;
use crate::files::FileSet;
use crate::layout::BlockLayout;

/// Number of bytes that a thread converts or copies at a time. Input and output fit into the core's cache.
const SHARE_BYTES: usize = 256 << 10;

/// The relayout of a block's layout, with the ranges of the slot that it reads and writes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RelayoutBuffer {
    pub relayout: Relayout,
    pub from: Vec<Range<usize>>,
    pub to: Range<usize>,
}

/// One share of a relayout, which reads from the slot and writes to scratch memory.
pub(crate) struct Making {
    layout: Arc<RelayoutBuffer>,
    share: RelayoutShare,
    slot: *const u8,
    scratch: *mut u8,
}

/// One copy from scratch memory to the slot.
pub(crate) struct Copying {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

impl Making {
    /// Converts this share.
    ///
    /// # Safety
    /// The slot must have this layout, be initialised, and not be written to meanwhile. Nothing else may use this
    /// share's part of the scratch memory.
    pub unsafe fn run(&self) {
        let from = |range: &Range<usize>| {
            // SAFETY: the layout's ranges lie inside the slot, and the caller promises that the slot is initialised and
            // not written to.
            unsafe { std::slice::from_raw_parts(self.slot.add(range.start), range.len()) }
        };
        let from: Vec<&[u8]> = self.layout.from.iter().map(from).collect();
        let Range { start, end } = self.share.out;
        // SAFETY: the scratch memory has room for all shares, and nothing else uses this share's part.
        let out = unsafe { std::slice::from_raw_parts_mut(self.scratch.add(start), end - start) };
        self.layout.relayout.make(&self.share, &from, out);
    }
}

impl Copying {
    /// Copies the bytes.
    ///
    /// # Safety
    /// Source and target must be valid for `bytes` bytes and must not overlap. Nothing else may use the target.
    pub unsafe fn run(&self) {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.to.copy_from_nonoverlapping(self.from, self.bytes) };
    }
}

/// Progress of a block's relayout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    AsRead,
    /// The block waits, because another block uses the scratch memory.
    Waiting,
    Made,
    Copied,
}

/// Memory for the shares of one block at a time.
#[derive(Debug)]
pub(crate) struct Scratch {
    memory: Vec<u8>,
}

impl Scratch {
    /// Reserves `bytes`. Pages that are never used take no physical memory.
    pub fn new(bytes: usize) -> Scratch {
        Scratch { memory: vec![0; bytes] }
    }

    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Returns the tasks that convert all shares of a block, for [`Checker::begin`].
    ///
    /// # Panics
    /// Panics if the scratch memory is too small for the block.
    pub fn making(
        &mut self,
        layout: &Arc<RelayoutBuffer>,
        slot: *mut u8,
    ) -> impl Iterator<Item = Work> {
        assert!(layout.to.len() <= self.memory.len(), "the plan counted the relayout buffer");
        let scratch = self.memory.as_mut_ptr();
        layout.relayout.shares(SHARE_BYTES).into_iter().map(move |share| {
            Work::Make(Making { layout: Arc::clone(layout), share, slot, scratch })
        })
    }

    /// Returns the tasks that copy the converted bytes into the slot.
    pub fn copying(&self, layout: &RelayoutBuffer, slot: *mut u8) -> impl Iterator<Item = Work> {
        let (scratch, to) = (self.memory.as_ptr(), layout.to.clone());
        to.clone().step_by(SHARE_BYTES).map(move |at| {
            let bytes = SHARE_BYTES.min(to.end - at);
            // SAFETY: `to` lies inside the slot. `at - to.start` lies inside the scratch memory, because `making` has
            // checked that it holds `to.len()` bytes.
            let (from, to) = unsafe { (scratch.add(at - to.start), slot.add(at)) };
            Work::Copy(Copying { from, to, bytes })
        })
    }
}

/// Converts one block after the other on the threads of `checker`, which must have no other work.
///
/// # Errors
/// Returns an error if a thread has ended, and [`StoreError::Interrupted`] if the interrupt of `files` is raised.
pub(crate) fn relayout_all<'a>(
    files: &FileSet,
    blocks: impl Iterator<Item = (&'a BlockLayout, &'a mut SlotBuffer)>,
    scratch_bytes: usize,
    checker: Checker,
) -> Result<(), StoreError> {
    let mut scratch = Scratch::new(scratch_bytes);
    // Declared after `scratch`, so that it is dropped before the memory that its threads use.
    let mut checker = checker;
    let mut done = Vec::new();
    for (layout, slot) in blocks {
        files.check_interrupt()?;
        let Some(layout) = &layout.relayout else { continue };
        let slot = slot.pointer();
        let making: Vec<Work> = scratch.making(layout, slot).collect();
        let copying: Vec<Work> = scratch.copying(layout, slot).collect();
        for tasks in [making, copying] {
            for work in tasks {
                // SAFETY: this function keeps the slot and the scratch memory until all answers have arrived or the
                // checker is dropped. Tasks that run at the same time do not overlap.
                unsafe { checker.begin(0, work) };
            }
            finish(&mut checker, &mut done)?;
        }
    }
    Ok(())
}

/// Waits for all tasks that were begun. The calling thread works on them too.
fn finish(checker: &mut Checker, done: &mut Vec<Answer>) -> Result<(), StoreError> {
    checker.take(done);
    while checker.open() > 0 {
        if !checker.run_one() {
            checker.wait()?;
        }
        checker.take(done);
    }
    done.clear();
    Ok(())
}
