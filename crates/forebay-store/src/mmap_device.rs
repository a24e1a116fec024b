//! Copies out of a memory map, page fault by page fault: how most programs bring weights in, built
//! to be compared with.
//!
//! A file that shrinks while it is mapped would end the process with SIGBUS at the next touch. So
//! nothing here touches the map: the kernel copies out of it (`process_vm_readv` on ourselves, or
//! reading `/proc/self/mem`), with the same faults and the same read-ahead, but with an error
//! instead of a signal. The size of the file is asked again after each copy, because the rest of a
//! page that lies behind the end reads as zeros.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::device::{Device, Finished, Transfer};
use crate::engine::{EngineInfo, EngineOptions};
use crate::error::StoreError;
use crate::files::FileSet;
use crate::trace::PageFaults;

const NAME: &str = "mmap";

pub(crate) struct Mapped {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    started: Instant,
    writing: usize,
    info: EngineInfo,
    /// By transfer key, of the last transfer.
    faults: Vec<PageFaults>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    finished: Condvar,
    maps: Vec<FileMap>,
    page_bytes: usize,
    /// `/proc/self/mem`, where `process_vm_readv` is forbidden.
    memory: Option<File>,
    /// Keeps the descriptors open.
    _files: FileSet,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Transfer>,
    finished: Vec<(Finished, PageFaults)>,
    /// How many finished transfers the waiting owner wants; 0 when it does not wait.
    wanted: usize,
    closing: bool,
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

impl Mapped {
    pub(crate) fn open(files: &FileSet, options: &EngineOptions) -> Result<Mapped, StoreError> {
        let failed = |source| StoreError::Engine { engine: NAME, source };
        let mut maps = Vec::with_capacity(files.len());
        for file in files.files() {
            let Some(descriptor) = file.descriptor(false) else {
                let why = "files in memory can be read by the simulated engine only".to_owned();
                return Err(StoreError::Unavailable { engine: NAME, why });
            };
            maps.push(FileMap::new(descriptor, file.bytes).map_err(failed)?);
        }
        let memory = match kernel_copies() {
            true => None,
            false => Some(File::open("/proc/self/mem").map_err(|error| {
                let why =
                    format!("neither process_vm_readv nor /proc/self/mem may be used: {error}");
                StoreError::Unavailable { engine: NAME, why }
            })?),
        };
        // One more than processors, so that read-ahead on all of them leaves one for demand.
        let threads = std::thread::available_parallelism().map_or(1, usize::from) + 1;
        let threads = threads.min(options.threads).min(options.queue_depth);
        let info = describe(files, threads, memory.is_some());
        let shared = Arc::new(Shared {
            state: Mutex::new(State::default()),
            work: Condvar::new(),
            finished: Condvar::new(),
            maps,
            page_bytes: rustix::param::page_size(),
            memory,
            _files: files.clone(),
        });
        let faults = vec![PageFaults::default(); options.queue_depth];
        let mut mapped = Mapped {
            shared,
            threads: Vec::new(),
            started: Instant::now(),
            writing: 0,
            info,
            faults,
        };
        for index in 0..threads {
            let shared = Arc::clone(&mapped.shared);
            let thread = std::thread::Builder::new()
                .name(format!("forebay-fault-{index}"))
                .spawn(move || shared.serve())
                .map_err(failed)?;
            mapped.threads.push(thread);
        }
        Ok(mapped)
    }

    /// Copies that run at a time.
    pub(crate) fn threads(&self) -> usize {
        self.threads.len()
    }

    fn collect(&mut self, ended: Vec<(Finished, PageFaults)>, finished: &mut Vec<Finished>) {
        self.writing -= ended.len();
        for (end, faults) in ended {
            if let Some(place) = self.faults.get_mut(end.key as usize) {
                *place = faults;
            }
            finished.push(end);
        }
    }
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

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut resident = Vec::new();
        while let Some(transfer) = self.next() {
            let before = major_faults();
            let absent = self.absent_pages(&transfer, &mut resident);
            let result = self.read(&transfer);
            let faults = PageFaults {
                pages: resident.len() as u32,
                absent,
                major: (major_faults() - before) as u32,
            };
            let mut state = self.lock();
            state.finished.push((Finished { key: transfer.key, result }, faults));
            let enough = state.wanted > 0 && state.finished.len() >= state.wanted;
            drop(state);
            if enough {
                self.finished.notify_one();
            }
        }
    }

    fn next(&self) -> Option<Transfer> {
        let mut state = self.lock();
        loop {
            if state.closing {
                return None;
            }
            if let Some(transfer) = state.waiting.pop_front() {
                return Some(transfer);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Pages of the span that are not in the page cache; `resident` gets one entry for each page.
    fn absent_pages(&self, transfer: &Transfer, resident: &mut Vec<u8>) -> u32 {
        resident.clear();
        let Some(map) = self.maps.get(transfer.file.0 as usize) else { return 0 };
        let start = transfer.offset as usize / self.page_bytes * self.page_bytes;
        let end = (transfer.offset as usize).saturating_add(transfer.length as usize);
        let end = end.min(map.bytes);
        if start >= end {
            return 0;
        }
        resident.resize((end - start).div_ceil(self.page_bytes), 0);
        // SAFETY: start lies inside the mapping, and the vector has a byte for each page asked for.
        let asked = unsafe {
            libc::mincore(map.base.byte_add(start), end - start, resident.as_mut_ptr().cast())
        };
        match asked {
            0 => resident.iter().filter(|&&page| page & 1 == 0).count() as u32,
            _ => 0,
        }
    }

    fn read(&self, transfer: &Transfer) -> Result<u32, i32> {
        let map = self.maps.get(transfer.file.0 as usize).ok_or(libc::EBADF)?;
        let offset = usize::try_from(transfer.offset).map_err(|_| libc::EINVAL)?;
        let readable = |size: u64| {
            let left = size.min(map.bytes as u64).saturating_sub(transfer.offset);
            left.min(u64::from(transfer.length)) as usize
        };
        let length = readable(map.size_now()?);
        let mut done = 0;
        while done < length {
            // SAFETY: offset + length lies inside the mapping, and the caller of `Device::start`
            // promised memory of at least `length` bytes that nobody else touches.
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
        // SAFETY: the caller promises that these bytes are valid and nobody else's; arena memory
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

impl Device for Mapped {
    unsafe fn start(&mut self, transfer: Transfer) -> Result<(), StoreError> {
        self.shared.lock().waiting.push_back(transfer);
        self.writing += 1;
        self.shared.work.notify_one();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        Ok(())
    }

    fn reap(&mut self, finished: &mut Vec<Finished>) -> Result<(), StoreError> {
        let ended = std::mem::take(&mut self.shared.lock().finished);
        self.collect(ended, finished);
        Ok(())
    }

    fn wait(
        &mut self,
        want: usize,
        timeout: Duration,
        finished: &mut Vec<Finished>,
    ) -> Result<(), StoreError> {
        let mut state = self.shared.lock();
        state.wanted = want.max(1);
        let missing = |state: &mut State| state.finished.len() < state.wanted;
        let waited = self.shared.finished.wait_timeout_while(state, timeout, missing);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.wanted = 0;
        let ended = std::mem::take(&mut state.finished);
        drop(state);
        self.collect(ended, finished);
        Ok(())
    }

    fn writing(&self) -> usize {
        self.writing
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn describe(&self) -> EngineInfo {
        self.info.clone()
    }

    fn page_faults(&self, key: u32) -> Option<PageFaults> {
        self.faults.get(key as usize).copied()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        // A thread whose copy never ends cannot be joined; it keeps what it needs alive by itself.
        if self.writing == 0 {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}
