//! The floor below the scheduler: something that moves spans of files into memory, and nothing
//! else.

use std::time::Duration;

use forebay_format::FileIndex;

use crate::engine::{EngineInfo, Priority};
use crate::error::StoreError;
use crate::files::FileSet;
use crate::trace::PageFaults;

/// One span to read. Offset, length and memory keep the file's alignment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    /// Chosen by the scheduler, below the queue depth; free again when its [`Finished`] was
    /// reported.
    pub key: u32,
    pub file: FileIndex,
    pub offset: u64,
    pub length: u32,
    pub memory: *mut u8,
    pub priority: Priority,
}

// SAFETY: the pointer is an address that `Device::start` lends to the device, whichever of its
// threads writes there.
unsafe impl Send for Transfer {}

/// How a transfer ended: bytes from its start, or an errno.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finished {
    pub key: u32,
    pub result: Result<u32, i32>,
}

pub(crate) trait Device: Send {
    /// Takes a transfer; it may begin now or with [`Device::flush`].
    ///
    /// # Safety
    /// `transfer.memory` is valid for writes of `transfer.length` bytes and nothing else reads or
    /// writes there until the transfer was reported as finished, or [`Device::writing`] is 0.
    unsafe fn start(&mut self, transfer: Transfer) -> Result<(), StoreError>;

    /// Begins everything that was taken, in one go.
    fn flush(&mut self) -> Result<(), StoreError>;

    /// Appends what has finished, without waiting.
    fn reap(&mut self, finished: &mut Vec<Finished>) -> Result<(), StoreError>;

    /// Waits until `want` transfers have finished (fewer may come) or the time is over, then
    /// appends what has.
    fn wait(
        &mut self,
        want: usize,
        timeout: Duration,
        finished: &mut Vec<Finished>,
    ) -> Result<(), StoreError>;

    /// Transfers that may still write to their memory.
    fn writing(&self) -> usize;

    /// The device's clock.
    fn now(&self) -> Duration;

    fn describe(&self) -> EngineInfo;

    /// What the last finished transfer with this key met in a memory map; `None` for other devices.
    fn page_faults(&self, _key: u32) -> Option<PageFaults> {
        None
    }
}

/// Why `files` are not all read directly, for [`EngineInfo::why`]; `None` if they are.
pub(crate) fn why_not_direct(files: &FileSet, direct: bool) -> Option<String> {
    if !direct {
        return Some("cached reads were asked for".to_owned());
    }
    files.files().iter().find_map(|file| {
        file.why_not_direct()
            .map(|why| format!("{} is read through the page cache: {why}", file.path.display()))
    })
}
