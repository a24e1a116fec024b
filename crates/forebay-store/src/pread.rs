//! A device that calls `pread` on threads. It works everywhere, and it is the baseline for
//! io_uring.

use std::os::fd::{BorrowedFd, RawFd};

use crate::device::{Transfer, why_not_direct};
use crate::engine::{EngineInfo, EngineOptions};
use crate::error::StoreError;
use crate::files::FileSet;
use crate::pool::{Pool, SpanReader};
use crate::trace::PageFaults;

const NAME: &str = "pread";

pub(crate) struct Pread {
    descriptors: Vec<RawFd>,
    /// File set, kept so that the descriptors stay open.
    _files: FileSet,
}

/// Opens the device. `refused` is the reason why a faster engine is not used, if one was tried.
pub(crate) fn open(
    files: &FileSet,
    options: &EngineOptions,
    refused: Option<String>,
) -> Result<Pool<Pread>, StoreError> {
    let descriptors = files.descriptors(options.direct, NAME)?;
    let not_direct = why_not_direct(files, options.direct);
    let info = EngineInfo {
        name: NAME,
        direct: not_direct.is_none(),
        registered_buffers: false,
        why: [refused, not_direct].into_iter().flatten().collect::<Vec<_>>().join("; "),
    };
    let reader = Pread { descriptors, _files: files.clone() };
    Pool::start(reader, info, options.threads, options.queue_depth)
}

impl SpanReader for Pread {
    unsafe fn read(&self, transfer: &Transfer) -> (Result<u32, i32>, Option<PageFaults>) {
        let Some(&descriptor) = self.descriptors.get(transfer.file.0 as usize) else {
            return (Err(libc::EBADF), None);
        };
        // SAFETY: `_files` keeps the descriptor open for as long as `self` lives.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        // SAFETY: the caller promises that the memory is valid for this many bytes, initialised,
        // and not used elsewhere.
        let memory =
            unsafe { std::slice::from_raw_parts_mut(transfer.memory, transfer.length as usize) };
        let read = rustix::io::pread(descriptor, memory, transfer.offset);
        (read.map(|count| count as u32).map_err(rustix::io::Errno::raw_os_error), None)
    }
}
