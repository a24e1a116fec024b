//! The interface below the scheduler: a device only moves spans of files into memory.

use std::time::Duration;

use forebay_format::FileIndex;

use crate::engine::{EngineInfo, Priority};
use crate::error::StoreError;
use crate::files::FileSet;
use crate::trace::PageFaults;

/// One span to read. Its offset, length and memory address have the file's alignment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    /// Key chosen by the scheduler, less than the queue depth. It can be used again once its [`Finished`] was reported.
    pub key: u32,
    pub file: FileIndex,
    pub offset: u64,
    pub length: u32,
    pub memory: *mut u8,
    pub priority: Priority,
}

// SAFETY: the pointer is an address that `Device::start` lends to the device, whichever of its threads writes there.
unsafe impl Send for Transfer {}

/// Result of a transfer: the number of bytes read from its start, or an errno.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finished {
    pub key: u32,
    pub result: Result<u32, i32>,
}

pub(crate) trait Device: Send {
    /// Takes a transfer, which may begin now or at the next [`Device::flush`].
    ///
    /// # Safety
    /// `transfer.memory` must be valid for writes of `transfer.length` bytes. Nothing else may read or write there
    /// until the transfer was reported as finished, or [`Device::writing`] is 0.
    unsafe fn start(&mut self, transfer: Transfer) -> Result<(), StoreError>;

    /// Begins all transfers that were taken, together.
    fn flush(&mut self) -> Result<(), StoreError>;

    /// Appends the transfers that have finished, without waiting.
    fn reap(&mut self, finished: &mut Vec<Finished>) -> Result<(), StoreError>;

    /// Waits until `want` transfers have finished or the timeout expires, then appends the finished ones. It may return
    /// with fewer than `want`.
    fn wait(
        &mut self,
        want: usize,
        timeout: Duration,
        finished: &mut Vec<Finished>,
    ) -> Result<(), StoreError>;

    /// Returns the number of transfers that may still write to their memory.
    fn writing(&self) -> usize;

    /// Returns the time of the device's clock.
    fn now(&self) -> Duration;

    fn describe(&self) -> EngineInfo;

    /// Returns the number of attempts of the last transfer with this key, which failed, and the reason in words. Returns
    /// `None` if its errno says all. Such a transfer is not tried again.
    fn take_failure(&mut self, _key: u32) -> Option<(u32, std::io::Error)> {
        None
    }

    /// Ends all transfers early, whose results nobody needs. Returns false if the device can only wait for them.
    fn end_early(&mut self) -> bool {
        false
    }

    /// Returns the page faults of the last finished transfer with this key, or `None` if the device is not a memory
    /// map.
    fn page_faults(&self, _key: u32) -> Option<PageFaults> {
        None
    }
}

/// Returns the reason why some of `files` are not read directly, for [`EngineInfo::why`]. Returns `None` if all are.
pub(crate) fn why_not_direct(files: &FileSet, direct: bool) -> Option<String> {
    if !direct {
        return Some("cached reads were asked for".to_owned());
    }
    files.files().iter().find_map(|file| {
        file.why_not_direct()
            .map(|why| format!("{} is read through the page cache: {why}", file.path.display()))
    })
}
