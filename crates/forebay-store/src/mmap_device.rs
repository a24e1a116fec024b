//! Copies out of a memory map, page fault by page fault: how most programs bring weights in, built
//! to be compared with.
//!
//! A file that shrinks while it is mapped would end the process with SIGBUS at the next touch. So
//! nothing here touches the map: the kernel copies out of it (`process_vm_readv` on ourselves, or
//! reading `/proc/self/mem`), with the same faults and the same read-ahead, but with an error
//! instead of a signal. The size of the file is asked again after each copy, because the rest of a
//! page that lies behind the end reads as zeros.

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
/// Pages that `mincore` is asked about at a time.
const ASKED_PAGES: usize = 512;

pub(crate) struct Mapped {
    maps: Vec<FileMap>,
    page_bytes: usize,
    /// `/proc/self/mem`, where `process_vm_readv` is forbidden.
    memory: Option<File>,
    /// Keeps the descriptors open.
    _files: FileSet,
}

/// One whole file in the address space; never touched, only named to the kernel.
struct FileMap {
    base: *mut c_void,
    bytes: usize,
    descriptor: RawFd,
}

// SAFETY: an address range that no code of ours dereferences.
unsafe impl Send for FileMap {}
// SAFETY: as above.
unsafe impl Sync for FileMap {}

impl FileMap {
    fn new(descriptor: RawFd, bytes: u64) -> std::io::Result<FileMap> {
        let bytes = usize::try_from(bytes).map_err(std::io::Error::other)?;
        if bytes == 0 {
            return Ok(FileMap { base: ptr::null_mut(), bytes, descriptor });
        }
        // SAFETY: the file set keeps the descriptor open.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory;
        // nothing of ours ever dereferences it.
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
            // SAFETY: mapped by `new`; the threads that copy from it have ended or keep `Shared`.
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
    // One more than processors, so that read-ahead on all of them leaves one for demand.
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
    // Since Linux 5.2 others see every page as present.
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

/// Whether the kernel lets us copy from our own address space.
fn kernel_copies() -> bool {
    let source = [0x5A_u8; 8];
    let mut target = [0_u8; 8];
    // SAFETY: both arrays are ours, alive, and as long as said.
    let copied = unsafe { copy(source.as_ptr().cast(), target.as_mut_ptr(), source.len()) };
    copied == Ok(source.len()) && target == source
}

/// Has the kernel copy `length` bytes of this process; fewer when the source ends.
///
/// # Safety
/// `target` is valid for writes of `length` bytes and nothing else uses them. `source` may be any
/// address: what is not mapped there is an error.
unsafe fn copy(source: *const c_void, target: *mut u8, length: usize) -> Result<usize, i32> {
    let local = libc::iovec { iov_base: target.cast(), iov_len: length };
    let remote = libc::iovec { iov_base: source.cast_mut(), iov_len: length };
    // SAFETY: the caller vouches for the target; the kernel checks the source.
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
    /// Pages of the span, and those of them that are not in the page cache.
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
            // SAFETY: start lies inside the mapping, and there is a byte for each page asked for.
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

    /// # Safety
    /// As [`SpanReader::read`].
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
            // SAFETY: offset + length lies inside the mapping, and the caller promised
            // memory of at least `length` bytes that nothing else touches.
            let copied = unsafe {
                let source = map.base.byte_add(offset + done);
                self.copy(source, transfer.memory.add(done), length - done)
            };
            match copied {
                Ok(0) => break,
                Ok(count) => done += count,
                // What a touch would have answered with SIGBUS. The size says what was cut off.
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

    /// # Safety
    /// As [`copy`].
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
        // SAFETY: the caller promises that these bytes are valid and not used elsewhere; arena memory
        // and whatever stands for it is initialised.
        let target = unsafe { std::slice::from_raw_parts_mut(target, length) };
        memory
            .read_at(target, source.addr() as u64)
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Faults of this thread so far that had to wait for a disk.
fn major_faults() -> i64 {
    // SAFETY: all zeros is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours and as large as the call expects.
    let asked = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    if asked == 0 { usage.ru_majflt } else { 0 }
}
