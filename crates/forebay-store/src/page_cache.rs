//! Finds out which bytes of a file are in the page cache, and drops them from it.
//!
//! There are three methods, best first: `cachestat` (Linux 6.5), `mincore` on a mapping, and reads
//! that must not wait (`RWF_NOWAIT`). The last one also works for files that the user may only
//! read: there `cachestat` may fail, and `mincore` may report every page as present. But a read of
//! a missing page makes the kernel fetch it, so this method stops at the first missing page.

use std::ffi::c_void;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::ptr;

use forebay_format::{Extent, FileIndex};
use rustix::fs::{Advice, fadvise};
use rustix::io::ReadWriteFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::StoreError;
use crate::files::FileSet;

/// Number of the system call `cachestat`, the same on every architecture.
const CACHESTAT: libc::c_long = 451;
/// Maximum number of attempts to drop a file's pages. Pages in transfer to or from the disk cannot
/// be dropped, so one attempt may not be enough.
const DROPS: usize = 5;
/// Maximum number of bytes of a file that are mapped at a time.
const MAPPED_BYTES: u64 = 1 << 30;

/// A way to ask the kernel which pages of a file are cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMethod {
    Cachestat,
    Mincore,
    /// `preadv2` with `RWF_NOWAIT`.
    Nowait,
}

/// `struct cachestat_range` of the kernel.
#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

/// `struct cachestat` of the kernel, in pages.
#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

impl CacheMethod {
    /// Every method, best first.
    pub const ALL: [CacheMethod; 3] =
        [CacheMethod::Cachestat, CacheMethod::Mincore, CacheMethod::Nowait];

    /// Returns the best method that gives true answers for this file.
    fn for_file(file: BorrowedFd<'_>) -> CacheMethod {
        match cachestat(file, 0, 1) {
            Ok(_) => CacheMethod::Cachestat,
            // Linux before 6.5. `mincore` reports every page of other users' files as cached.
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) && is_own(file) => {
                CacheMethod::Mincore
            }
            Err(_) => CacheMethod::Nowait,
        }
    }

    /// Returns how many pages of a range are cached. `Nowait` counts only up to the first missing
    /// page.
    fn cached_pages(self, file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<u64> {
        match self {
            CacheMethod::Cachestat => cachestat(file, offset, length).map(|counts| counts.cached),
            CacheMethod::Mincore => mincore(file, offset, length),
            CacheMethod::Nowait => leading_pages(file, offset, length),
        }
    }
}

fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// Returns the number of pages that a range of bytes touches.
fn pages(offset: u64, length: u64) -> u64 {
    let page = page_bytes();
    if length == 0 { 0 } else { (offset + length).div_ceil(page) - offset / page }
}

fn cachestat(file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<Counts> {
    let range = Range { offset, length };
    let mut counts = Counts::default();
    // SAFETY: both structures have the kernel's layout and outlive the call. The kernel writes only
    // to the second one.
    let result = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut counts, 0_u32)
    };
    if result == 0 { Ok(counts) } else { Err(io::Error::last_os_error()) }
}

fn mincore(file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<u64> {
    let (mut at, end) = (offset / page_bytes() * page_bytes(), offset + length);
    let mut cached = 0;
    while at < end {
        let bytes = (end - at).min(MAPPED_BYTES);
        cached += mincore_mapped(file, at, bytes as usize)?;
        at += bytes;
    }
    Ok(cached)
}

fn mincore_mapped(file: BorrowedFd<'_>, offset: u64, length: usize) -> io::Result<u64> {
    let mut state = vec![0_u8; length.div_ceil(page_bytes() as usize)];
    // SAFETY: the kernel chooses the address of the new mapping, and no code reads through it. The
    // vector has a byte for every page of the mapping.
    let (result, error) = unsafe {
        let map = mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, offset)?;
        let result = libc::mincore(map.cast::<c_void>(), length, state.as_mut_ptr());
        let error = io::Error::last_os_error();
        munmap(map, length)?;
        (result, error)
    };
    if result != 0 {
        return Err(error);
    }
    Ok(state.iter().filter(|&&page| page & 1 != 0).count() as u64)
}

fn leading_pages(file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<u64> {
    let page = page_bytes();
    let first = offset / page;
    for index in 0..pages(offset, length) {
        let mut byte = [0];
        let mut into = [io::IoSliceMut::new(&mut byte)];
        let at = ((first + index) * page).max(offset);
        match rustix::io::preadv2(file, &mut into, at, ReadWriteFlags::NOWAIT) {
            Ok(1..) => {}
            Ok(_) | Err(rustix::io::Errno::AGAIN) => return Ok(index),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(pages(offset, length))
}

/// Returns true if the user owns the file or may write it. For other files the kernel does not
/// reveal the state of the page cache.
fn is_own(file: BorrowedFd<'_>) -> bool {
    let owner = rustix::fs::fstat(file).is_ok_and(|status| {
        let user = rustix::process::geteuid();
        user.is_root() || status.st_uid == user.as_raw()
    });
    owner || {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok()
    }
}

/// Share of a range that is in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cached {
    Nothing,
    Part,
    Whole,
}

/// Answers how much of a range is cached. It prepares once per file what every query needs.
#[derive(Debug)]
pub(crate) struct CacheProbe {
    files: FileSet,
    /// Method for each file, or `None` if the file has no page cache. A method that may start reads
    /// has a descriptor of its own, on which read-ahead is off.
    methods: Vec<Option<(CacheMethod, Option<OwnedFd>)>>,
}

impl CacheProbe {
    /// Prepares queries for `files`. If `method` is `None`, each file gets the best method that
    /// works for it.
    pub(crate) fn new(files: &FileSet, method: Option<CacheMethod>) -> CacheProbe {
        let methods = (0..files.len() as u32).map(|index| {
            let cached = files.cached_file(FileIndex(index))?;
            let method = method.unwrap_or_else(|| CacheMethod::for_file(cached));
            if method != CacheMethod::Nowait {
                return Some((method, None));
            }
            let path = format!("/proc/self/fd/{}", cached.as_raw_fd());
            let own = std::fs::File::open(path).ok().map(OwnedFd::from)?;
            fadvise(&own, 0, None, Advice::Random).ok()?;
            Some((method, Some(own)))
        });
        CacheProbe { methods: methods.collect(), files: files.clone() }
    }

    /// Returns how much of a range of the decoded file is cached. If the kernel does not tell, the answer is
    /// [`Cached::Part`]: the caller then reads from the disk and leaves the cached pages alone,
    /// which is always correct.
    pub(crate) fn ask(&self, file: FileIndex, offset: u64, length: u64) -> Cached {
        let Extent { offset, length, .. } = self.files.stored(Extent { file, offset, length });
        let Some(Some((method, own))) = self.methods.get(file.0 as usize) else {
            return Cached::Part;
        };
        let descriptor = own.as_ref().map(AsFd::as_fd).or_else(|| self.files.cached_file(file));
        let counted = descriptor.map(|descriptor| method.cached_pages(descriptor, offset, length));
        match counted {
            Some(Ok(count)) if count == pages(offset, length) => Cached::Whole,
            // `Nowait` stops at the first missing page, so later pages may still be cached.
            Some(Ok(0)) if *method != CacheMethod::Nowait => Cached::Nothing,
            _ => Cached::Part,
        }
    }
}

impl FileSet {
    /// Returns how many bytes of all files are in the page cache, in whole pages, and the method
    /// that counted those of the last file. Files in memory count as 0.
    ///
    /// # Errors
    /// Returns [`StoreError::PageCache`] if the kernel does not tell.
    pub fn cached_bytes(&self) -> Result<(u64, CacheMethod), StoreError> {
        let (mut total, mut method) = (0, CacheMethod::Cachestat);
        for (index, stored) in self.files().iter().enumerate() {
            let Some(file) = self.cached_file(FileIndex(index as u32)) else { continue };
            method = CacheMethod::for_file(file);
            let counted = method.cached_pages(file, 0, stored.bytes.max(1));
            let failed = |source| StoreError::PageCache { file: stored.path.clone(), source };
            total += counted.map_err(failed)? * page_bytes();
        }
        Ok((total, method))
    }

    /// Drops every page of these files from the page cache and verifies that they are gone.
    ///
    /// # Errors
    /// Returns [`StoreError::StillCached`] if some pages remain, and [`StoreError::PageCache`] if a
    /// system call fails.
    pub fn drop_cached(&self) -> Result<(), StoreError> {
        for (index, stored) in self.files().iter().enumerate() {
            let Some(file) = self.cached_file(FileIndex(index as u32)) else { continue };
            let failed = |source| StoreError::PageCache { file: stored.path.clone(), source };
            let left = drop_file(file, stored.bytes).map_err(failed)?;
            if left > 0 {
                let file: PathBuf = stored.path.clone();
                return Err(StoreError::StillCached { file, bytes: left });
            }
        }
        Ok(())
    }

    /// Asks the kernel to bring a range of the decoded file into the page cache, and does not wait for it. This is only
    /// advice to the kernel, so a failure is ignored.
    pub fn read_ahead(&self, extent: Extent) {
        let Extent { file, offset, length } = self.stored(extent);
        // Advice for a length of 0 holds up to the end of the file.
        let Some(length) = NonZeroU64::new(length) else { return };
        if let Some(file) = self.cached_file(file) {
            let _ = fadvise(file, offset, Some(length), Advice::WillNeed);
        }
    }

    /// Drops the pages of a range of the decoded file that was not cached before it was read. This is only advice to
    /// the kernel, so a failure is ignored.
    pub(crate) fn forget_range(&self, file: FileIndex, offset: u64, length: u64) {
        let Extent { offset, length, .. } = self.stored(Extent { file, offset, length });
        if let Some(file) = self.cached_file(file) {
            // The kernel keeps a page if the range covers only a part of it.
            let start = offset / page_bytes() * page_bytes();
            let length = pages(offset, length) * page_bytes();
            let _ = fadvise(file, start, NonZeroU64::new(length), Advice::DontNeed);
        }
    }

    /// Turns off read-ahead: cached reads then bring only the requested pages into the page cache.
    pub(crate) fn never_read_ahead(&self) {
        for index in 0..self.len() as u32 {
            if let Some(file) = self.cached_file(FileIndex(index)) {
                // This is only advice to the kernel, so a failure is ignored.
                let _ = fadvise(file, 0, None, Advice::Random);
            }
        }
    }

    /// Returns the descriptor for cached reads, or `None` for a file in memory.
    pub(crate) fn cached_file(&self, index: FileIndex) -> Option<BorrowedFd<'_>> {
        let descriptor = self.file(index)?.descriptor(false)?;
        // SAFETY: the set keeps the descriptor open for as long as the borrow lives.
        Some(unsafe { BorrowedFd::borrow_raw(descriptor) })
    }
}

/// Drops the pages of a file. Returns how many bytes are still cached after the last attempt.
fn drop_file(file: BorrowedFd<'_>, bytes: u64) -> io::Result<u64> {
    let method = CacheMethod::for_file(file);
    let mut left = 0;
    for attempt in 0..DROPS {
        // Dirty pages cannot be dropped, so write them to the disk first.
        rustix::fs::fdatasync(file)?;
        fadvise(file, 0, None, Advice::DontNeed)?;
        left = method.cached_pages(file, 0, bytes.max(1))? * page_bytes();
        if left == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10 << attempt));
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 64;

    /// Creates a file on a disk with only some of its pages cached. Returns `None` and prints a
    /// message if pages cannot be dropped here.
    fn half_cached(folder: &tempfile::TempDir) -> Option<FileSet> {
        let path = folder.path().join("weights");
        std::fs::write(&path, vec![3; (PAGES * page_bytes()) as usize - 100]).unwrap();
        let files = FileSet::open(&[&path]).unwrap();
        if let Err(error) = files.drop_cached() {
            use std::io::Write as _;
            let _ = writeln!(io::stderr(), "SKIPPED: the page cache: {error}");
            return None;
        }
        let file = files.cached_file(FileIndex(0)).unwrap();
        fadvise(file, 0, None, Advice::Random).unwrap();
        for page in (16..32).chain([40, PAGES - 1]) {
            rustix::io::pread(file, &mut [0; 1], page * page_bytes()).unwrap();
        }
        Some(files)
    }

    #[test]
    fn the_methods_agree() {
        let folder = tempfile::tempdir().unwrap();
        let Some(files) = half_cached(&folder) else { return };
        let page = page_bytes();
        let end = PAGES * page - 100;
        let ranges = [
            (16 * page, 16 * page, true),
            (16 * page + 5, 15 * page, true),
            (20 * page + 1, 1, true),
            (end - 5, 5, true),
            (15 * page, 2 * page, false),
            (31 * page, page + 1, false),
            (0, end, false),
            (40 * page, page, true),
        ];
        // `Nowait` may itself change what is cached, so it comes last.
        for method in CacheMethod::ALL {
            let probe = CacheProbe::new(&files, Some(method));
            let file = files.cached_file(FileIndex(0)).unwrap();
            if method == CacheMethod::Cachestat && cachestat(file, 0, 1).is_err() {
                continue;
            }
            for (offset, length, expected) in ranges {
                // A fast disk may deliver a missing page while this method asks for it.
                if method == CacheMethod::Nowait && !expected {
                    continue;
                }
                let found = probe.ask(FileIndex(0), offset, length);
                assert_eq!(found == Cached::Whole, expected, "{method:?} {offset} {length}");
            }
            if method != CacheMethod::Nowait {
                assert_eq!(method.cached_pages(file, 0, end).unwrap(), 18, "{method:?}");
            }
        }
    }

    #[test]
    fn dropping_is_verified() {
        let folder = tempfile::tempdir().unwrap();
        let Some(files) = half_cached(&folder) else { return };
        assert!(files.cached_bytes().unwrap().0 >= 18 * page_bytes());
        files.drop_cached().unwrap();
        assert_eq!(files.cached_bytes().unwrap().0, 0);

        let file = files.cached_file(FileIndex(0)).unwrap();
        let length = 8 * page_bytes() as usize;
        // SAFETY: the mapping is new, and it is only read inside the length of the file.
        unsafe {
            let map =
                mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, 0).unwrap();
            std::hint::black_box(map.cast::<u8>().read_volatile());
            let error = files.drop_cached().unwrap_err();
            munmap(map, length).unwrap();
            assert!(matches!(error, StoreError::StillCached { .. }), "{error}");
            assert!(error.to_string().contains("weights"), "{error}");
        }
        files.drop_cached().unwrap();
    }

    #[test]
    fn files_in_memory_have_no_page_cache() {
        let files = FileSet::in_memory(vec![vec![0; 10_000]]);
        assert_eq!(files.cached_bytes().unwrap().0, 0);
        assert_eq!(CacheProbe::new(&files, None).ask(FileIndex(0), 0, 10), Cached::Part);
    }
}
