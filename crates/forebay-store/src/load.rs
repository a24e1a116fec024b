//! Fills memory with many blocks as fast as the disk and the page cache together allow.
//!
//! A load cuts blocks into pieces, and page-cache probes go through the pieces in order. A piece that is wholly in
//! the page cache is queued for the copy threads. For any other piece, the probe makes the memory resident and queues
//! the piece for the engine, which reads past the cache. Copies and reads run at the same time. If the disk runs out
//! of work while many copies wait, the engine takes some of those pieces.
//!
//! All bytes land in their slots directly, unless the caller provides a ring to read into (`staging.rs`). Memory that
//! the CPU does not write itself is filled through such a ring (`uploader.rs`), or by a [`DeviceReader`] that needs no
//! host memory of ours (`straight.rs`).

mod cached;
mod filling;
mod landing;
pub(crate) mod past_cache;
mod remote;
mod shared;
mod staging;
mod straight;
mod upload_plan;
mod uploader;

use std::collections::HashMap;
use std::num::NonZero;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use tracing::field::Empty;

use crate::arena::SlotBuffer;
use crate::checker::Checker;
use crate::engine::{BlockLabel, BlockRead, Completion, Priority, ReadDone, ReadEngine};
use crate::error::{ReadError, StoreError};
use crate::files::FileSet;
use crate::layout::BlockLayout;
use crate::page_cache::{CacheProbe, Cached};
use crate::pieces::{Piece, cut_block};
use crate::relayout::relayout_all;
use cached::copy_cached;
use landing::{Landing, Regions};
use remote::Outlet;
pub use remote::{Upload, UploadCopy, UploadError, Uploading};
use shared::{Next, Shared};
use staging::{Stage, stage};
pub use straight::{DeviceReader, DeviceSpan, StraightOptions, load_straight};
pub use upload_plan::{UploadPart, UploadPlan};
pub use uploader::{COPIED_BYTES, ReadSide, Uploader};

/// Interval between progress reports while only copies run, or nothing arrives.
const PROGRESS_PAUSE: Duration = Duration::from_millis(50);

/// Number of threads that copy out of the ring. One thread is about as fast as a disk.
const COPY_THREADS: usize = 2;

/// One block to load.
#[derive(Debug)]
pub struct LoadItem {
    pub label: BlockLabel,
    pub layout: BlockLayout,
    pub buffer: SlotBuffer,
}

/// The answer to one [`LoadItem`]. Its fields mean the same as those of [`Completion`].
#[derive(Debug)]
pub struct Loaded {
    pub buffer: Option<SlotBuffer>,
    pub result: Result<ReadDone, ReadError>,
}

/// Options of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Size of a piece in bytes. A piece is probed in the page cache, copied or read as a unit.
    pub piece_bytes: u64,
    /// Number of threads that copy from the page cache. With 0, the engine reads everything.
    pub copy_threads: usize,
    /// Number of page-cache probe threads, which also make memory resident.
    pub probe_threads: usize,
    /// Number of bytes that the engine has in flight at a time. It should be enough to fill the engine's queue.
    pub engine_bytes: u64,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        LoadOptions {
            piece_bytes: 2 << 20,
            copy_threads: cores.min(16),
            probe_threads: cores.min(4),
            engine_bytes: 64 << 20,
        }
    }
}

/// Statistics of one load.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct LoadStatistics {
    /// Number of bytes of weights.
    pub bytes: u64,
    /// The part of `bytes` that the engine read. With direct I/O, these came from the disk.
    pub engine_bytes: u64,
    /// The part of `bytes` that was copied from the page cache.
    pub cached_bytes: u64,
    /// Bytes in the files of `engine_bytes`, and of `cached_bytes`: fewer if blocks are coded.
    pub engine_stored_bytes: u64,
    pub cached_stored_bytes: u64,
    /// The part of `engine_bytes` that was in the page cache too. The engine read it because the disk had
    /// time to spare.
    pub engine_cached_bytes: u64,
    pub seconds: f64,
    /// CPU time of all threads of the process, in seconds.
    pub cpu_seconds: f64,
    pub copy_threads: usize,
    /// Bytes of staging memory between file and destination, without the kernel's own.
    pub staging_bytes: u64,
}

/// Returns the CPU time that this process has used so far, in seconds.
pub fn process_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call only writes the structure that it is given, which is valid for writes.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Loads blocks with an engine, and at the same time copies cached pieces from the page cache.
pub struct Loader<'a> {
    /// The engine that reads what is not cached. It must have no other reads in flight. If it does not verify
    /// checksums, because it was opened for files without them, the loader does. Verifying while copying out of a ring
    /// costs almost nothing.
    pub engine: &'a mut dyn ReadEngine,
    /// The files that the items' layouts refer to, with the checksums to verify against.
    pub files: &'a FileSet,
    pub options: LoadOptions,
    /// Staging slots that the engine reads into and the copy threads copy out of, for disks where that is faster than
    /// reading in place. If empty, the engine reads in place.
    pub ring: &'a mut Vec<SlotBuffer>,
}

impl Loader<'_> {
    /// Fills the buffer of every item and returns the answers in the order of the items. After the first failure no
    /// further read begins, and the remaining items get [`ReadError::Cancelled`]. `progress` is called on this thread
    /// with the number of bytes done and the total. Its last call has all bytes, unless the load fails.
    ///
    /// # Errors
    /// Returns [`StoreError`] if the engine as a whole fails or memory runs out.
    pub fn load(
        self,
        items: Vec<LoadItem>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(Vec<Loaded>, LoadStatistics), StoreError> {
        self.load_while(items, &mut going_on(progress))
    }

    /// Fills the buffer of every item like [`Loader::load`], but `progress` may stop the load. Then no further read
    /// begins, and the call waits for the reads that the disk already has.
    ///
    /// # Errors
    /// Returns the errors of [`Loader::load`], and [`StoreError::Interrupted`] if `progress` stopped the load. In that
    /// case the buffers are lost.
    pub fn load_while(
        self,
        items: Vec<LoadItem>,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(Vec<Loaded>, LoadStatistics), StoreError> {
        let (started, processor) = (Instant::now(), process_seconds());
        let bytes = items.iter().map(|item| item.layout.wanted_bytes()).sum();
        let (read_bytes, cached_bytes) = (Empty, Empty);
        let span = tracing::debug_span!("fill", bytes, read_bytes, cached_bytes).entered();
        let staging_bytes = self.ring.iter().map(|slot| slot.len() as u64).sum();
        let layouts: Vec<BlockLayout> = items.iter().map(|item| item.layout.clone()).collect();
        let (counts, pieces) = cut(items, self.files, self.options.piece_bytes);
        let shared = Shared::new(pieces, self.options, self.files);
        let probe = (self.options.copy_threads > 0).then(|| CacheProbe::new(self.files, None));
        let mut progress = || shared.tell(bytes, progress);
        progress();
        let landing = Landing::new(self.files, self.engine.compares());
        let (copy_path, copy_threads) = match self.ring.is_empty() {
            true => (CopyPath::InPlace, None),
            false => {
                let (stage, copy_threads) = stage(std::mem::take(self.ring));
                (CopyPath::Staged(stage), Some(copy_threads))
            }
        };
        std::thread::scope(|scope| {
            // Moved into the scope so that the copy threads end even if this thread panics.
            let mut copy_path = copy_path;
            if let Some(copy_threads) = &copy_threads {
                for _ in 0..COPY_THREADS {
                    scope.spawn(|| copy_threads.copy(&shared, landing));
                }
            }
            for _ in 0..self.options.probe_threads.max(1) {
                scope.spawn(|| shared.probe_thread(probe.as_ref()));
            }
            for _ in 0..self.options.copy_threads {
                scope.spawn(|| copy_cached(&shared, self.files));
            }
            let mut reader = Reader {
                shared: &shared,
                engine: self.engine,
                files: self.files,
                engine_bytes: self.options.engine_bytes.max(1),
                landing,
                in_place: HashMap::new(),
            };
            let read = reader.read(&mut copy_path, &mut progress);
            if let Err(error) = read {
                shared.stop(error);
            }
            // Closing this side of the channel ends the copy threads.
            self.ring.extend(copy_path.close());
        });
        // Copy threads may end after the last report.
        progress();
        let (answers, totals) = shared.finish()?;
        let mut loaded = join(counts, answers);
        relayout(self.files, &layouts, &mut loaded)?;
        let statistics = LoadStatistics {
            bytes,
            seconds: started.elapsed().as_secs_f64(),
            cpu_seconds: process_seconds() - processor,
            copy_threads: self.options.copy_threads,
            staging_bytes,
            ..totals
        };
        span.record("read_bytes", statistics.engine_bytes);
        span.record("cached_bytes", statistics.cached_bytes);
        Ok((loaded, statistics))
    }
}

/// Wraps a progress callback that never stops a load.
fn going_on(progress: &mut dyn FnMut(u64, u64)) -> impl FnMut(u64, u64) -> ControlFlow<()> {
    |done, total| {
        progress(done, total);
        ControlFlow::Continue(())
    }
}

/// Path that a piece takes from the engine to its destination.
enum CopyPath<'a> {
    /// The engine reads the piece directly into its slot.
    InPlace,
    Staged(Stage),
    Remote(Outlet<'a>),
}

impl CopyPath<'_> {
    /// Returns true if there is room to begin a piece. If `patient`, waits for room.
    fn has_room(&mut self, patient: bool, shared: &Shared) -> Result<bool, StoreError> {
        match self {
            CopyPath::InPlace => Ok(true),
            CopyPath::Staged(stage) => Ok(stage.has_room(patient)),
            CopyPath::Remote(outlet) => outlet.has_room(patient, shared),
        }
    }

    /// Waits until everything is copied and returns the slots of a stage. Returns nothing for a remote ring, which
    /// keeps its own slots.
    fn close(self) -> Vec<SlotBuffer> {
        match self {
            CopyPath::InPlace => Vec::new(),
            CopyPath::Staged(stage) => stage.finish(),
            CopyPath::Remote(outlet) => {
                outlet.close();
                Vec::new()
            }
        }
    }
}

/// Cuts every block into pieces. The first result has the number of pieces of each block.
fn cut(
    items: Vec<LoadItem>,
    files: &FileSet,
    piece_bytes: u64,
) -> (Vec<(BlockLabel, usize)>, Vec<Piece>) {
    let mut counts = Vec::with_capacity(items.len());
    let mut pieces = Vec::new();
    for LoadItem { label, layout, buffer } in items {
        let first = pieces.len();
        pieces.extend(cut_block(first, label, &layout, buffer, files, piece_bytes));
        counts.push((label, pieces.len() - first));
    }
    (counts, pieces)
}

/// Joins the pieces of every block.
fn join(counts: Vec<(BlockLabel, usize)>, answers: Vec<Option<Completion>>) -> Vec<Loaded> {
    let mut answers = answers.into_iter();
    let mut whole = |(label, count): (BlockLabel, usize)| {
        let mut buffer: Option<SlotBuffer> = None;
        let mut result = Ok(ReadDone::default());
        for number in 0..count {
            let answer = answers.next().flatten();
            let (part, outcome) = match answer {
                Some(answer) => (answer.buffer, answer.result),
                None => (None, Err(ReadError::Cancelled { block: label })),
            };
            buffer = match (number, buffer, part) {
                (0, _, part) => part,
                (_, Some(head), Some(tail)) => Some(head.join(tail)),
                _ => None,
            };
            result = match (result, outcome) {
                (Ok(sum), Ok(done)) => Ok(ReadDone {
                    bytes_read: sum.bytes_read + done.bytes_read,
                    requests: sum.requests + done.requests,
                }),
                // Prefer the failure to the cancellations that it caused.
                (Err(ReadError::Cancelled { .. }), Err(error)) => Err(error),
                (Err(error), _) | (Ok(_), Err(error)) => Err(error),
            };
        }
        Loaded { buffer, result }
    };
    counts.into_iter().map(&mut whole).collect()
}

/// Converts blocks that were read successfully to the layout in which they are held.
fn relayout(
    files: &FileSet,
    layouts: &[BlockLayout],
    loaded: &mut [Loaded],
) -> Result<(), StoreError> {
    let bytes = layouts.iter().filter_map(|layout| layout.relayout.as_ref()).map(|of| of.to.len());
    let Some(scratch_bytes) = bytes.max() else { return Ok(()) };
    let here = layouts.iter().zip(loaded).filter_map(|(layout, loaded)| {
        let buffer = loaded.buffer.as_mut().filter(|_| loaded.result.is_ok());
        Some((layout, buffer?))
    });
    relayout_all(files, here, scratch_bytes, Checker::start()?)
}

/// The thread that owns the engine.
struct Reader<'a> {
    shared: &'a Shared,
    engine: &'a mut dyn ReadEngine,
    files: &'a FileSet,
    engine_bytes: u64,
    landing: Landing<'a>,
    /// Pieces that are being read into their final slot and must be verified there, by piece index.
    in_place: HashMap<u64, (BlockLabel, Regions)>,
}

impl Reader<'_> {
    /// Reads uncached pieces until nothing is left for the engine.
    fn read(
        &mut self,
        copy_path: &mut CopyPath<'_>,
        progress: &mut dyn FnMut(),
    ) -> Result<(), StoreError> {
        let direct = self.engine.describe().direct;
        let (mut done, mut in_flight) = (Vec::new(), 0_u64);
        loop {
            while in_flight < self.engine_bytes {
                if !copy_path.has_room(in_flight == 0, self.shared)? {
                    break;
                }
                // Wait for new work only if no read is in flight to wait for.
                let pause = (in_flight == 0).then_some(PROGRESS_PAUSE);
                match self.shared.next_cold(pause, in_flight, direct) {
                    Next::Piece(piece) => {
                        in_flight += piece.layout.wanted_bytes().max(1);
                        self.begin(piece, copy_path);
                    }
                    Next::NotYet if in_flight == 0 => progress(),
                    Next::NotYet => break,
                    Next::End if in_flight == 0 => return Ok(()),
                    Next::End => break,
                }
            }
            // The caller of a load that gets nothing for a while may want to stop it.
            self.engine.wait_for(PROGRESS_PAUSE, &mut done)?;
            for completion in done.drain(..) {
                let piece = self.shared.planned(completion.id);
                in_flight -= piece.bytes.max(1);
                if !direct && piece.cached == Cached::Nothing {
                    // The read filled the page cache only because the engine cannot read past it.
                    self.files.forget_range(piece.file, piece.offset, piece.bytes);
                }
                self.end(completion, copy_path)?;
            }
            progress();
            // A server may take minutes for what nobody needs any more. Dropping the engine ends its requests.
            if self.files.is_remote() && self.shared.is_interrupted() {
                return Err(StoreError::Interrupted);
            }
        }
    }

    fn begin(&mut self, mut piece: Piece, copy_path: &mut CopyPath<'_>) {
        let compared_on_the_way = match copy_path {
            CopyPath::InPlace => false,
            CopyPath::Staged(stage) => stage.enter(&mut piece),
            CopyPath::Remote(outlet) => {
                outlet.enter(&mut piece);
                false
            }
        };
        if !compared_on_the_way && self.landing.compares() {
            let place = (piece.label, piece.layout.regions.clone());
            self.in_place.insert(piece.index as u64, place);
        }
        submit(self.engine, piece);
    }

    fn end(
        &mut self,
        completion: Completion,
        copy_path: &mut CopyPath<'_>,
    ) -> Result<(), StoreError> {
        let here = match copy_path {
            CopyPath::Staged(stage) => stage.leave(completion),
            CopyPath::InPlace | CopyPath::Remote(_) => Some(completion),
        };
        let Some(mut completion) = here else { return Ok(()) };
        if let Some((label, regions)) = self.in_place.remove(&completion.id) {
            self.landing.settle(&mut completion, label, &regions);
        }
        if let CopyPath::Remote(outlet) = copy_path {
            outlet.leave(&mut completion)?;
        }
        self.shared.answer(completion, false);
        Ok(())
    }
}

fn submit(engine: &mut dyn ReadEngine, piece: Piece) {
    let Piece { index, label, layout, buffer } = piece;
    engine.submit(BlockRead { id: index as u64, label, layout, buffer, priority: Priority::Load });
}
