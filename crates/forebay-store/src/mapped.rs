//! Loading through a mapping of the files: what programs do that leave reading to the kernel. The
//! baseline, not a way to be fast.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::checks::BadChunk;
use crate::engine::{BlockLabel, Completion, ReadDone};
use crate::error::{ReadError, StoreError};
use crate::files::{FileSet, StoredFile};
use crate::layout::Region;
use crate::load::{LoadItem, LoadStatistics, Loaded, cut, join, process_seconds};
use crate::pieces::Piece;

const PIECE_BYTES: u64 = 2 << 20;

/// A file that is mapped as a whole, to be read only.
struct Mapped<'a> {
    file: &'a StoredFile,
    base: *mut c_void,
    length: usize,
}

// SAFETY: the mapping is read only, and reading it from several threads is fine.
unsafe impl Send for Mapped<'_> {}
// SAFETY: as above.
unsafe impl Sync for Mapped<'_> {}

impl Drop for Mapped<'_> {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: mapped by `map`, and nobody uses it any more.
            let _ = unsafe { munmap(self.base, self.length) };
        }
    }
}

/// As [`crate::Loader::load`], but every byte is copied out of mappings of the files by `threads`
/// threads.
///
/// # Errors
/// [`StoreError::Unavailable`] for files that cannot be mapped.
pub fn load_mapped(
    files: &FileSet,
    items: Vec<LoadItem>,
    threads: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Vec<Loaded>, LoadStatistics), StoreError> {
    let (started, processor) = (Instant::now(), process_seconds());
    let maps = files.files().iter().map(|file| map(files, file)).collect::<Result<Vec<_>, _>>()?;
    let bytes = items.iter().map(|item| item.layout.wanted_bytes()).sum();
    let (counts, pieces) = cut(items, files, PIECE_BYTES);
    let work: Vec<Mutex<Option<Piece>>> =
        pieces.into_iter().map(|piece| Mutex::new(Some(piece))).collect();
    let answers: Vec<Mutex<Option<Completion>>> = work.iter().map(|_| Mutex::new(None)).collect();
    let (next, done, failed) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let copy_pieces = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = work.get(index).and_then(|place| lock(place).take()) else { break };
            let answer = match failed.load(Ordering::Relaxed) {
                true => cancelled(piece),
                false => copy_piece(&maps, piece),
            };
            match &answer.result {
                Ok(read) => drop(done.fetch_add(read.bytes_read, Ordering::Relaxed)),
                Err(_) => failed.store(true, Ordering::Relaxed),
            }
            *lock(&answers[index]) = Some(answer);
        }
    };
    std::thread::scope(|scope| {
        let copies: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(copy_pieces)).collect();
        while copies.iter().any(|copy| !copy.is_finished()) {
            progress(done.load(Ordering::Relaxed).min(bytes), bytes);
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    progress(done.load(Ordering::Relaxed).min(bytes), bytes);
    let statistics = LoadStatistics {
        bytes,
        cached_bytes: bytes,
        seconds: started.elapsed().as_secs_f64(),
        cpu_seconds: process_seconds() - processor,
        copy_threads: threads.max(1),
        ..LoadStatistics::default()
    };
    let answers = answers.into_iter();
    let answers = answers.map(|it| it.into_inner().unwrap_or_else(PoisonError::into_inner));
    Ok((join(counts, answers.collect()), statistics))
}

fn lock<T>(place: &Mutex<T>) -> MutexGuard<'_, T> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

fn cancelled(piece: Piece) -> Completion {
    let result = Err(ReadError::Cancelled { block: piece.label });
    Completion { id: piece.index as u64, buffer: Some(piece.buffer), result }
}

fn map<'a>(files: &FileSet, file: &'a StoredFile) -> Result<Mapped<'a>, StoreError> {
    let unavailable = |why: String| StoreError::Unavailable { engine: "mmap", why };
    let index = files.files().iter().position(|other| ptr::eq(other, file)).unwrap_or_default();
    let descriptor = files
        .cached_file(forebay_format::FileIndex(index as u32))
        .ok_or_else(|| unavailable("files in memory cannot be mapped".to_owned()))?;
    let length = usize::try_from(file.bytes).map_err(|error| unavailable(error.to_string()))?;
    if length == 0 {
        return Ok(Mapped { file, base: ptr::null_mut(), length });
    }
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapped =
        unsafe { mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, descriptor, 0) };
    let base = mapped
        .map_err(|error| unavailable(format!("cannot map {}: {error}", file.path.display())))?;
    Ok(Mapped { file, base, length })
}

fn copy_piece(maps: &[Mapped<'_>], mut piece: Piece) -> Completion {
    let mut done = ReadDone::default();
    let mut result = Ok(());
    if piece.buffer.len() < piece.layout.slot_bytes {
        result = Err(ReadError::SlotTooSmall {
            needed_bytes: piece.layout.slot_bytes,
            given_bytes: piece.buffer.len(),
            block: piece.label,
        });
    }
    for &region in piece.layout.regions.iter() {
        let into = piece.buffer.as_mut_slice();
        result = result.and_then(|()| copy_region(maps, region, piece.label, into));
        done.bytes_read += region.wanted_end - region.offset;
        done.requests += 1;
    }
    Completion { id: piece.index as u64, buffer: Some(piece.buffer), result: result.map(|()| done) }
}

/// Copies what is wanted of a region to its place in the slot.
fn copy_region(
    maps: &[Mapped<'_>],
    region: Region,
    block: BlockLabel,
    slot: &mut [u8],
) -> Result<(), ReadError> {
    let Some(map) = maps.get(region.file.0 as usize) else {
        let (index, files) = (region.file.0, maps.len());
        return Err(ReadError::UnknownFile { index, files, block });
    };
    if region.wanted_end > map.length as u64 {
        return Err(unexpected_end(map, map.length as u64, region.wanted_end, block));
    }
    let (start, end) = (region.offset as usize, region.wanted_end as usize);
    let into = &mut slot[region.at..region.at + end - start];
    // SAFETY: the range lies inside the mapping, rounded down to a page like the mapping itself.
    // Populating reads every page like touching would, but a page that cannot be read, because the
    // file was truncated or the disk fails, is an error here and not a signal.
    let populated = unsafe {
        let page = start / 4096 * 4096;
        madvise(map.base.byte_add(page), end - page, Advice::LinuxPopulateRead)
    };
    match populated {
        // Linux before 5.14 does not know the advice; touching is what remains.
        Ok(()) | Err(rustix::io::Errno::INVAL) => {}
        Err(error) => {
            let now = std::fs::metadata(&map.file.path).map_or(0, |about| about.len());
            if now < region.wanted_end {
                return Err(unexpected_end(map, now, region.wanted_end, block));
            }
            return Err(ReadError::Io {
                file: map.file.path.clone(),
                offset: region.offset,
                block,
                attempts: 1,
                source: error.into(),
            });
        }
    }
    // SAFETY: the range lies inside the mapping and its pages were just there; `into` is this
    // piece's own memory.
    unsafe {
        let from = map.base.cast::<u8>().add(start);
        ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len());
    }
    let checks = map.file.checks.as_ref();
    let Some(bad) = checks.and_then(|checks| checks.first_bad(region.offset, into)) else {
        return Ok(());
    };
    let BadChunk { offset, place, expected, found } = bad;
    let file = map.file.path.clone();
    Err(ReadError::Corrupt { file, offset, place, block, expected, found })
}

fn unexpected_end(
    map: &Mapped<'_>,
    file_end: u64,
    wanted_end: u64,
    block: BlockLabel,
) -> ReadError {
    ReadError::UnexpectedEnd { file: map.file.path.clone(), file_end, wanted_end, block }
}
