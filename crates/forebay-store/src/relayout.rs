//! Bringing a block that was read into the form in which it is held: cut into tasks, for the threads
//! that compare checksums. All shares are made in memory of their own first, since what is made lies
//! where others are made from; then they are copied to their places.

use std::ops::Range;
use std::sync::Arc;

use forebay_format::{Relayout, RelayoutShare};

use crate::arena::SlotBuffer;
use crate::checker::{Answer, Checker, Work};
use crate::error::StoreError;
use crate::files::FileSet;
use crate::layout::BlockLayout;

/// What a thread makes or copies at a time: it and what it is made from stay in the core's cache.
const SHARE_BYTES: usize = 256 << 10;

/// Of a layout: where in the slot the extents are that are recast, and where the parts go.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RelayoutBuffer {
    pub relayout: Relayout,
    pub from: Vec<Range<usize>>,
    pub to: Range<usize>,
}

/// One share of a recast, from a slot to memory beside it.
pub(crate) struct Making {
    layout: Arc<RelayoutBuffer>,
    share: RelayoutShare,
    slot: *const u8,
    scratch: *mut u8,
}

/// Bytes to copy.
pub(crate) struct Copying {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

impl Making {
    /// # Safety
    /// The slot, planned by the layout, is initialised and not written to, and the share of the
    /// scratch memory is not used elsewhere.
    pub unsafe fn run(&self) {
        let from = |range: &Range<usize>| {
            // SAFETY: the layout's ranges lie inside the slot; the caller vouches for it.
            unsafe { std::slice::from_raw_parts(self.slot.add(range.start), range.len()) }
        };
        let from: Vec<&[u8]> = self.layout.from.iter().map(from).collect();
        let Range { start, end } = self.share.out;
        // SAFETY: the scratch memory has room for all shares, of which this one is ours.
        let out = unsafe { std::slice::from_raw_parts_mut(self.scratch.add(start), end - start) };
        self.layout.relayout.make(&self.share, &from, out);
    }
}

impl Copying {
    /// # Safety
    /// Both are valid for so many bytes, lie apart, and nothing else uses the target.
    pub unsafe fn run(&self) {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.to.copy_from_nonoverlapping(self.from, self.bytes) };
    }
}

/// How far a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    AsRead,
    /// Another block has the scratch memory.
    Waiting,
    Made,
    Copied,
}

/// Memory in which shares are made, for one block at a time.
#[derive(Debug)]
pub(crate) struct Scratch {
    memory: Vec<u8>,
}

impl Scratch {
    /// Pages that are never used are never there.
    pub fn new(bytes: usize) -> Scratch {
        Scratch { memory: vec![0; bytes] }
    }

    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// The tasks that make all shares of a block, for [`Checker::begin`].
    ///
    /// # Panics
    /// If it is too small.
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

    /// The tasks that bring them to their places.
    pub fn copying(&self, layout: &RelayoutBuffer, slot: *mut u8) -> impl Iterator<Item = Work> {
        let (scratch, to) = (self.memory.as_ptr(), layout.to.clone());
        to.clone().step_by(SHARE_BYTES).map(move |at| {
            let bytes = SHARE_BYTES.min(to.end - at);
            // SAFETY: the layout's places lie inside the slot, and as far from the first in the
            // scratch memory, which `making` has found large enough.
            let (from, to) = unsafe { (scratch.add(at - to.start), slot.add(at)) };
            Work::Copy(Copying { from, to, bytes })
        })
    }
}

/// Recasts one block after the other on the threads of `checker`, which has nothing else to do.
///
/// # Errors
/// A thread that has ended; [`StoreError::Interrupted`] when `files` say so.
pub(crate) fn relayout_all<'a>(
    files: &FileSet,
    blocks: impl Iterator<Item = (&'a BlockLayout, &'a mut SlotBuffer)>,
    scratch_bytes: usize,
    checker: Checker,
) -> Result<(), StoreError> {
    let mut scratch = Scratch::new(scratch_bytes);
    // Dropped before the memory that its threads use.
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
                // SAFETY: the slot and the scratch memory are ours until all answers are here or the
                // checker was dropped, and tasks that are under way together lie apart.
                unsafe { checker.begin(0, work) };
            }
            finish(&mut checker, &mut done)?;
        }
    }
    Ok(())
}

/// Waits for all that was begun, and takes part in it.
fn finish(checker: &mut Checker, done: &mut Vec<Answer>) -> Result<(), StoreError> {
    checker.take(done);
    while checker.open() > 0 {
        if !checker.help() {
            checker.wait()?;
        }
        checker.take(done);
    }
    done.clear();
    Ok(())
}
