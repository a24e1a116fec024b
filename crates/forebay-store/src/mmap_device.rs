//! A device that copies out of a memory map, page fault by page fault. Most programs load weights this way; this device
//! exists for comparison.
//!
//! If a file shrinks while it is mapped, a program that touches the lost pages gets SIGBUS. So this module never
//! touches the map. The kernel copies out of it: with `process_vm_readv` on this process, or by reading
//! `/proc/self/mem`. Page faults and read-ahead are the same, but a failure is an error and not a signal. The size of
//! the file is read again after each copy, because the part of the last page that lies behind the end of the file reads
//! as zeros.

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::device::Transfer;
use crate::engine::{EngineInfo, EngineOptions};
use crate::error::StoreError;
use crate::files::FileSet;
use crate::pool::{Pool, SpanReader};
use crate::trace::PageFaults;

const NAME: &str = "mmap";
/// Maximum number of pages per call of `mincore`.
const ASKED_PAGES: usize = 512;

pub(crate) struct Mapped {
    maps: Vec<FileMap>,
    page_bytes: usize,
    /// `/proc/self/mem`, if `process_vm_readv` is forbidden.
    memory: Option<File>,
    /// File set, kept so that the descriptors stay open.
    _files: FileSet,
}

/// One whole file in the address space. Only the kernel accesses the mapped memory.
struct FileMap {
    base: *mut c_void,
    bytes: usize,
    descriptor: RawFd,
}

// SAFETY: `base` is only an address; no code of this program dereferences it.
unsafe impl Send for FileMap {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for FileMap {}

impl FileMap {
    fn new(descriptor: RawFd, bytes: u64) -> std::io::Result<FileMap> {
        let bytes = usize::try_from(bytes).map_err(std::io::Error::other)?;
        if bytes == 0 {
            return Ok(FileMap { base: ptr::null_mut(), bytes, descriptor });
        }
        // SAFETY: the file set keeps the descriptor open.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
        // SAFETY: the kernel chooses the address, so the new mapping touches no existing memory. No code of this
        // program ever dereferences it.
        let base =
            unsafe { mmap(ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, 0)? };
        Ok(FileMap { base, bytes, descriptor })
    }

    fn size_now(&self) -> Result<u64, i32> {
        // SAFETY: the file set keeps the descriptor open.
        let file = unsafe { BorrowedFd::borrow_raw(self.descriptor) };
        match rustix::fs::fstat(file) {
            Ok(status) => Ok(status.st_size as u64),
            Err(errno) => Err(errno.raw_os_error()),
        }
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: `new` mapped this range. No thread copies from it any more, because a running thread keeps
            // `Shared` and with it this map.
            let _ = unsafe { munmap(self.base, self.bytes) };
        }
    }
}

pub(crate) fn open(files: &FileSet, options: &EngineOptions) -> Result<Pool<Mapped>, StoreError> {
    let failed = |source| StoreError::Engine { engine: NAME, source };
    let descriptors = files.descriptors(false, NAME)?.into_iter().zip(files.files());
    let maps = descriptors.map(|(descriptor, file)| FileMap::new(descriptor, file.bytes));
    let maps = maps.collect::<Result<_, _>>().map_err(failed)?;
    let memory = match kernel_copies() {
        true => None,
        false => Some(File::open("/proc/self/mem").map_err(|error| {
            let why = format!("neither process_vm_readv nor /proc/self/mem may be used: {error}");
            StoreError::Unavailable { engine: NAME, why }
        })?),
    };
    // One more thread than processors: when read-ahead keeps one thread per processor busy, one thread is left for
    // demand reads.
    let threads = std::thread::available_parallelism().map_or(1, usize::from) + 1;
    let threads = threads.min(options.threads).min(options.queue_depth);
    let info = describe(files, threads, memory.is_some());
    let page_bytes = rustix::param::page_size();
    let reader = Mapped { maps, page_bytes, memory, _files: files.clone() };
    Pool::start(reader, info, threads, options.queue_depth)
}

fn describe(files: &FileSet, threads: usize, through_proc: bool) -> EngineInfo {
    let how = if through_proc { "/proc/self/mem" } else { "process_vm_readv" };
    let owner = rustix::process::geteuid().as_raw();
    // Since Linux 5.2, `mincore` reports every page as present to users who may not write the file.
    let may_ask = |path: &std::path::Path| {
        let owned = std::fs::metadata(path).is_ok_and(|status| status.uid() == owner);
        owner == 0 || owned || rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok()
    };
    let seen = match files.files().iter().all(|file| may_ask(&file.path)) {
        true => "absent pages by mincore before each copy",
        false => "absent pages unknown (mincore answers only for files that this user may write)",
    };
    EngineInfo {
        name: NAME,
        direct: false,
        registered_buffers: false,
        why: format!(
            "a memory map was asked for: {threads} threads copy with {how}; faults are seen as {seen}, \
             and as major faults by getrusage; userfaultfd and perf are not used"
        ),
    }
}

/// Returns true if this process may use `process_vm_readv` on its own address space.
fn kernel_copies() -> bool {
    let source = [0x5A_u8; 8];
    let mut target = [0_u8; 8];
    // SAFETY: both arrays are local, alive and `source.len()` bytes long.
    let copied = unsafe { copy(source.as_ptr().cast(), target.as_mut_ptr(), source.len()) };
    copied == Ok(source.len()) && target == source
}

/// Lets the kernel copy up to `length` bytes within this process. Returns the number of bytes copied, which is smaller
/// if the mapped source ends early.
///
/// # Safety
/// `target` must be valid for writes of `length` bytes, and nothing else may use them. `source` may be any address: if
/// it is not mapped, the kernel returns an error.
unsafe fn copy(source: *const c_void, target: *mut u8, length: usize) -> Result<usize, i32> {
    let local = libc::iovec { iov_base: target.cast(), iov_len: length };
    let remote = libc::iovec { iov_base: source.cast_mut(), iov_len: length };
    // SAFETY: the caller promises that the target is valid, and the kernel checks the source.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    usize::try_from(copied)
        .map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

impl SpanReader for Mapped {
    unsafe fn read(&self, transfer: &Transfer) -> (Result<u32, i32>, Option<PageFaults>) {
        let before = major_faults();
        let (pages, absent) = self.absent_pages(transfer);
        // SAFETY: the caller's promise is passed on.
        let result = unsafe { self.copy_span(transfer) };
        let major = (major_faults() - before) as u32;
        (result, Some(PageFaults { pages, absent, major }))
    }
}

impl Mapped {
    /// Returns the number of pages of the span, and how many of them are not in the page cache.
    fn absent_pages(&self, transfer: &Transfer) -> (u32, u32) {
        let Some(map) = self.maps.get(transfer.file.0 as usize) else { return (0, 0) };
        let mut start = transfer.offset as usize / self.page_bytes * self.page_bytes;
        let end = (transfer.offset as usize).saturating_add(transfer.length as usize);
        let end = end.min(map.bytes);
        let (mut pages, mut absent) = (0, 0);
        while start < end {
            let mut resident = [0_u8; ASKED_PAGES];
            let bytes = (end - start).min(ASKED_PAGES * self.page_bytes);
            let asked_pages = bytes.div_ceil(self.page_bytes);
            // SAFETY: `start` lies inside the mapping, and `resident` has a byte for each page of the range.
            let asked = unsafe {
                libc::mincore(map.base.byte_add(start), bytes, resident.as_mut_ptr().cast())
            };
            if asked == 0 {
                let seen = resident[..asked_pages].iter();
                absent += seen.filter(|&&page| page & 1 == 0).count() as u32;
            }
            pages += asked_pages as u32;
            start += bytes;
        }
        (pages, absent)
    }

    /// Copies the span to the transfer's memory. Returns the number of bytes copied, or an errno.
    ///
    /// # Safety
    /// The requirements of [`SpanReader::read`] apply.
    unsafe fn copy_span(&self, transfer: &Transfer) -> Result<u32, i32> {
        let map = self.maps.get(transfer.file.0 as usize).ok_or(libc::EBADF)?;
        let offset = usize::try_from(transfer.offset).map_err(|_| libc::EINVAL)?;
        let readable = |size: u64| {
            let left = size.min(map.bytes as u64).saturating_sub(transfer.offset);
            left.min(u64::from(transfer.length)) as usize
        };
        let length = readable(map.size_now()?);
        let mut done = 0;
        while done < length {
            // SAFETY: `offset + length` lies inside the mapping. The caller promised memory of at least `length` bytes
            // that nothing else touches.
            let copied = unsafe {
                let source = map.base.byte_add(offset + done);
                self.copy(source, transfer.memory.add(done), length - done)
            };
            match copied {
                Ok(0) => break,
                Ok(count) => done += count,
                // A direct access would have raised SIGBUS. The size of the file tells whether it was truncated.
                Err(libc::EFAULT | libc::EIO) => {
                    return match readable(map.size_now()?) < length {
                        true => Ok(readable(map.size_now()?).min(done) as u32),
                        false => Err(libc::EIO),
                    };
                }
                Err(errno) => return Err(errno),
            }
        }
        Ok(done.min(readable(map.size_now()?)) as u32)
    }

    /// Copies with [`copy`], or through `/proc/self/mem` if that is forbidden.
    ///
    /// # Safety
    /// The requirements of [`copy`] apply.
    unsafe fn copy(
        &self,
        source: *mut c_void,
        target: *mut u8,
        length: usize,
    ) -> Result<usize, i32> {
        let Some(memory) = &self.memory else {
            // SAFETY: the caller's promise is passed on.
            return unsafe { copy(source, target, length) };
        };
        // SAFETY: the caller promises that these bytes are valid and not used elsewhere. They are initialised, because
        // they are arena memory or memory that is lent like it.
        let target = unsafe { std::slice::from_raw_parts_mut(target, length) };
        memory
            .read_at(target, source.addr() as u64)
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Returns the number of major faults of this thread: those that had to wait for a disk.
fn major_faults() -> i64 {
    // SAFETY: all zeros is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours and as large as the call expects.
    let asked = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    if asked == 0 { usage.ru_majflt } else { 0 }
}
