//! Copies the bytes of many extents into a new order, and converts some of them, at the speed of the disk and with bounded memory.
//!
//! The output is cut into windows of a few MiB. An engine reads the bytes of the windows with many requests in flight.
//! A few worker threads put the bytes of a window in order and pass them to the sink, which checks or writes them. The
//! sink handles several windows at the same time.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use forebay_format::Extent;
use forebay_format::pack::{Conversion, PackSpan};

use crate::arena::{Arena, SLOT_ALIGNMENT, SlotBuffer};
use crate::engine::{
    BlockLabel, BlockRead, EngineInfo, EngineOptions, IoKind, Priority, ReadEngine, open_engine,
};
use crate::error::StoreError;
use crate::files::FileSet;
use crate::layout::BlockLayout;
use crate::page_cache::{CacheProbe, Cached};

/// Size of a window in bytes, before it is cut to chunks or to its cost.
const WINDOW_BYTES: u64 = 4 << 20;
/// Bytes of memory for reads. Windows that are put in order need more besides.
const READ_BYTES: usize = 36 << 20;
/// Most threads that put windows in order and pass them to the sink, which may encode them.
const WORKERS_MAX: usize = 16;
/// Number of windows that may be read before an earlier one has arrived. It bounds the memory of a sink that needs them in order.
const AHEAD: usize = 32;
/// Assumed cost of an extent in bytes, in addition to its own bytes, when a window is cut.
const EXTENT_BYTES: u64 = 8 << 10;
const WINDOW_COST_MAX: u64 = 8 << 20;

/// Description of the output. Bytes that neither the header nor a span provides are zeros.
pub struct CopyJob<'a> {
    /// The part of the output to make. Its start must be a multiple of 4096.
    pub range: Range<u64>,
    /// The first bytes of the output, which come from memory.
    pub header: &'a [u8],
    /// What the output takes from files, in its order and without overlaps.
    pub spans: Vec<PackSpan>,
    /// Called with the number of a tensor if some of its bytes cannot be converted. The output is zero there, and the copy goes
    /// on.
    pub refused: &'a (dyn Fn(usize) + Sync),
    /// Returns the range of the chunk that holds a byte of the output. The output is cut where chunks end, so that every window consists of
    /// whole chunks.
    pub chunk_at: Option<&'a ChunkAt<'a>>,
}

/// Function that returns the range of the chunk that holds a byte, if there is one.
pub type ChunkAt<'a> = dyn Fn(u64) -> Option<Range<u64>> + Sync + 'a;

/// Receiver of windows of the output. It is called from several threads, in any order. But a window is not read before all others that are
/// more than 32 before it.
pub trait Sink: Sync {
    /// Takes `bytes` of the output from `offset` on. Their address is aligned to 4096.
    ///
    /// # Errors
    /// Returns any error that is to stop the copy.
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError>;
}

/// Statistics of one copy.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyReport {
    /// Number of bytes of output.
    pub bytes: u64,
    pub bytes_read: u64,
    pub seconds: f64,
    pub engine: EngineInfo,
    /// Bytes of memory used for reads and windows.
    pub memory_bytes: u64,
}

struct Window {
    range: Range<u64>,
    layout: BlockLayout,
    /// Indices of the spans that overlap the window.
    spans: Range<usize>,
}

impl Window {
    fn is_absent(&self, probe: &CacheProbe) -> bool {
        self.layout.regions.iter().all(|region| {
            let length = region.wanted_end - region.offset;
            probe.ask(region.file, region.offset, length) == Cached::Nothing
        })
    }
}

/// Function that opens the engine of a copy, which reads into slots of the arena.
pub type OpenEngine<'a> =
    dyn Fn(&Arena, &EngineOptions) -> Result<Box<dyn ReadEngine>, StoreError> + 'a;

/// Makes the output of `job` from `files`. `progress` is called with the number of bytes done and the total, and
/// stops the copy by returning false. The page cache keeps what it has of the files and gets nothing new, except when
/// a memory map is read.
///
/// # Errors
/// Returns [`StoreError::Interrupted`] if the copy was stopped, and the errors of reading and of the sink.
pub fn copy(
    files: &FileSet,
    job: &CopyJob<'_>,
    io: IoKind,
    sink: &dyn Sink,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<CopyReport, StoreError> {
    let open = |arena: &Arena, options: &EngineOptions| open_engine(io, files, arena, options);
    copy_through(files, job, &open, sink, progress)
}

/// Makes the output of `job` like [`copy`], with an engine that the caller opens, for tests with injected faults.
///
/// # Errors
/// Returns the errors of [`copy`].
pub fn copy_through(
    files: &FileSet,
    job: &CopyJob<'_>,
    open: &OpenEngine<'_>,
    sink: &dyn Sink,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<CopyReport, StoreError> {
    let started = Instant::now();
    let windows = cut(files, job);
    let slot_bytes = windows.iter().map(|window| window.layout.slot_bytes).max().unwrap_or(0);
    let window_bytes =
        windows.iter().map(|w| (w.range.end - w.range.start) as usize).max().unwrap_or(0);
    let slots = (READ_BYTES / slot_bytes.max(1)).clamp(2, 32);
    let window_room = window_bytes.next_multiple_of(SLOT_ALIGNMENT);
    let workers =
        std::thread::available_parallelism().map_or(1, NonZero::get).clamp(4, WORKERS_MAX);
    let arena = Arena::reserve(slot_bytes * slots + window_room * workers)?;
    let options = EngineOptions { background_depth: 64, ..EngineOptions::default() };
    let mut engine = open(&arena, &options)?;
    let absent = absent_windows(files, &windows, &engine.describe());

    let shared = Shared {
        job,
        windows: &windows,
        sink,
        done: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        failure: Mutex::new(None),
    };
    let total = job.range.end - job.range.start;
    let (give, taken) = channel::<(usize, SlotBuffer)>();
    let (give_back, free) = channel();
    let taken = Mutex::new(taken);
    let outcome = std::thread::scope(|scope| {
        for _ in 0..slots {
            // Sending cannot fail: the receiver lives until everything is read.
            let _ = give_back.send(arena.carve(slot_bytes)?);
        }
        for _ in 0..workers {
            let buffer = arena.carve(window_room)?;
            let (shared, taken, give_back) = (&shared, &taken, give_back.clone());
            scope.spawn(move || shared.work(taken, &give_back, buffer));
        }
        drop(give_back);
        let lines = Lines { give, free };
        let mut go_on = || {
            let running = !shared.stop.load(Ordering::Relaxed);
            running && progress(shared.done.load(Ordering::Relaxed), total)
        };
        let mut forget = |index: usize| {
            for region in windows[index].layout.regions.iter().filter(|_| absent[index]) {
                files.forget_range(region.file, region.offset, region.wanted_end - region.offset);
            }
        };
        read_all(files, &windows, engine.as_mut(), lines, &mut go_on, &mut forget)
    });
    let failure = shared.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = failure {
        return Err(error);
    }
    outcome?;
    progress(total, total);
    Ok(CopyReport {
        bytes: total,
        bytes_read: engine.io_statistics().bytes_read,
        seconds: started.elapsed().as_secs_f64(),
        engine: engine.describe(),
        memory_bytes: arena.bytes() as u64,
    })
}

/// Returns, for each window, true if it must be dropped from the page cache after it was read.
fn absent_windows(files: &FileSet, windows: &[Window], engine: &EngineInfo) -> Vec<bool> {
    // Direct reads never fill the page cache, and mapped pages cannot be dropped from it.
    if engine.direct || engine.name == "mmap" {
        return vec![false; windows.len()];
    }
    // Read-ahead would fill the page cache with bytes that nothing drops again.
    files.never_read_ahead();
    let probe = CacheProbe::new(files, None);
    windows.iter().map(|window| window.is_absent(&probe)).collect()
}

/// Channels to the worker threads and back.
struct Lines {
    give: Sender<(usize, SlotBuffer)>,
    free: Receiver<SlotBuffer>,
}

/// Reads all windows. Stops early if `go_on` returns false. Calls `arrived` with the index of each window that was
/// read.
fn read_all(
    files: &FileSet,
    windows: &[Window],
    engine: &mut dyn ReadEngine,
    lines: Lines,
    go_on: &mut dyn FnMut() -> bool,
    arrived: &mut dyn FnMut(usize),
) -> Result<(), StoreError> {
    let mut next = 0;
    let mut given = 0;
    // Windows before `first` have all arrived, and those in `early` behind it.
    let (mut first, mut early) = (0, BTreeSet::new());
    let mut completions = Vec::new();
    while given < windows.len() {
        files.check_interrupt()?;
        if !go_on() {
            return Err(StoreError::Interrupted);
        }
        while next < windows.len().min(first + AHEAD) {
            // If no read is in flight, nothing can continue until a slot is free, so wait for one.
            let slot = match engine.in_flight() {
                0 => lines.free.recv().ok(),
                _ => lines.free.try_recv().ok(),
            };
            let Some(buffer) = slot else { break };
            engine.submit(BlockRead {
                id: next as u64,
                label: BlockLabel::Other(next as u64),
                layout: windows[next].layout.clone(),
                buffer,
                priority: Priority::Load,
            });
            next += 1;
        }
        if engine.in_flight() == 0 {
            // All threads that could return a slot have ended.
            return Err(StoreError::Interrupted);
        }
        engine.wait(&mut completions)?;
        for completion in completions.drain(..) {
            completion.result?;
            arrived(completion.id as usize);
            early.insert(completion.id as usize);
            while early.remove(&first) {
                first += 1;
            }
            let Some(buffer) = completion.buffer else { continue };
            let _ = lines.give.send((completion.id as usize, buffer));
            given += 1;
        }
    }
    Ok(())
}

struct Shared<'a> {
    job: &'a CopyJob<'a>,
    windows: &'a [Window],
    sink: &'a dyn Sink,
    done: AtomicU64,
    stop: AtomicBool,
    failure: Mutex<Option<StoreError>>,
}

impl Shared<'_> {
    /// Runs one worker thread: handles windows until there are no more.
    fn work(
        &self,
        taken: &Mutex<Receiver<(usize, SlotBuffer)>>,
        give_back: &Sender<SlotBuffer>,
        mut buffer: SlotBuffer,
    ) {
        loop {
            let received = taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok((index, slot)) = received else { return };
            if self.stop.load(Ordering::Relaxed) {
                // Return the slot, so that the reader does not wait for one forever.
                let _ = give_back.send(slot);
                continue;
            }
            let window = &self.windows[index];
            let bytes = self.in_order(window, &slot, &mut buffer);
            match self.sink.take(window.range.start, bytes) {
                Ok(()) => {
                    let bytes = window.range.end - window.range.start;
                    self.done.fetch_add(bytes, Ordering::Relaxed);
                }
                Err(error) => {
                    let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                    failure.get_or_insert(error);
                    self.stop.store(true, Ordering::Relaxed);
                }
            }
            let _ = give_back.send(slot);
        }
    }

    /// Returns the bytes of the window in order. If they are already in order in the slot, returns them from there
    /// without copying.
    fn in_order<'b>(
        &self,
        window: &Window,
        slot: &'b SlotBuffer,
        buffer: &'b mut SlotBuffer,
    ) -> &'b [u8] {
        let (start, end) = (window.range.start, window.range.end);
        let length = (end - start) as usize;
        let parts = &window.layout.parts;
        let spans = &self.job.spans[window.spans.clone()];
        if let ([part], [span]) = (&parts[..], spans)
            && span.conversion.is_none()
            && part.extent.length == end - start
            && part.at.is_multiple_of(SLOT_ALIGNMENT)
            && start >= self.job.header.len() as u64
        {
            return &slot.as_slice()[part.at..part.at + length];
        }
        let out = &mut buffer.as_mut_slice()[..length];
        let mut filled = 0;
        let header = self.job.header.get(start as usize..).unwrap_or(&[]);
        if !header.is_empty() {
            filled = header.len().min(length);
            out[..filled].copy_from_slice(&header[..filled]);
        }
        for (part, span) in parts.iter().zip(spans) {
            let (first, last) = (span.to.max(start), span.end().min(end));
            let at = (first - start) as usize..(last - start) as usize;
            if at.start > filled {
                out[filled..at.start].fill(0);
            }
            let from = &slot.as_slice()[part.at..part.at + part.extent.length as usize];
            filled = filled.max(at.end);
            let to = &mut out[at];
            match span.conversion {
                None => to.copy_from_slice(from),
                Some(conversion) => {
                    if !convert(conversion, (first - span.to) as usize, from, to) {
                        (self.job.refused)(span.tensor);
                        to.fill(0);
                    }
                }
            }
        }
        out[filled..].fill(0);
        out
    }
}

/// Converts whole blocks, of which `to` gets the bytes from `skipped` on of all converted blocks of the span. `from` begins with the
/// block that has the first of these bytes. Returns false if a block cannot be converted.
fn convert(conversion: Conversion, skipped: usize, from: &[u8], to: &mut [u8]) -> bool {
    let (from_bytes, to_bytes) = conversion.block_bytes();
    let (from_bytes, to_bytes) = (from_bytes as usize, to_bytes as usize);
    // Windows may begin and end inside of blocks.
    let before = (to_bytes - skipped % to_bytes) % to_bytes;
    let (begin, rest) = to.split_at_mut(before.min(to.len()));
    let mut from = from;
    let mut block = vec![0; to_bytes];
    if !begin.is_empty() {
        let (first, others) = from.split_at(from_bytes);
        if !conversion.convert(first, &mut block) {
            return false;
        }
        let at = skipped % to_bytes;
        begin.copy_from_slice(&block[at..at + begin.len()]);
        from = others;
    }
    let whole = rest.len() / to_bytes;
    let (middle, end) = rest.split_at_mut(whole * to_bytes);
    let (inside, last) = from.split_at(whole * from_bytes);
    if !conversion.convert(inside, middle) {
        return false;
    }
    if !end.is_empty() {
        if !conversion.convert(last, &mut block) {
            return false;
        }
        end.copy_from_slice(&block[..end.len()]);
    }
    true
}

/// Cuts the output into windows that fit in memory.
fn cut(files: &FileSet, job: &CopyJob<'_>) -> Vec<Window> {
    let mut windows = Vec::new();
    let mut start = job.range.start;
    let mut first = 0;
    while start < job.range.end {
        while job.spans.get(first).is_some_and(|span| span.end() <= start) {
            first += 1;
        }
        let mut size = WINDOW_BYTES;
        loop {
            let limit = (start + size).min(job.range.end);
            let end = job.chunk_at.map_or(limit, |chunk_at| chunk_end(chunk_at, start, limit));
            let window = window(files, job, start..end, first);
            let cost = window.layout.slot_bytes as u64 + window.spans.len() as u64 * EXTENT_BYTES;
            if cost <= WINDOW_COST_MAX || size <= SLOT_ALIGNMENT as u64 {
                start = end;
                windows.push(window);
                break;
            }
            size /= 2;
        }
    }
    windows
}

/// Returns the last end of a chunk up to `limit`, or else the first one after `start`.
fn chunk_end(chunk_at: &ChunkAt<'_>, start: u64, limit: u64) -> u64 {
    match chunk_at(limit) {
        Some(chunk) if chunk.start > start => chunk.start,
        Some(chunk) => chunk.end,
        None => limit,
    }
}

fn window(files: &FileSet, job: &CopyJob<'_>, range: Range<u64>, first: usize) -> Window {
    let inside = job.spans[first..].iter().take_while(|span| span.to < range.end);
    let extents: Vec<Extent> = inside
        .map(|span| {
            let (first, end) = (range.start.max(span.to), range.end.min(span.end()));
            let (skipped, taken) = (first - span.to, end - span.to);
            // Whole blocks are read if they are converted.
            let (from_bytes, to_bytes) = span.conversion.map_or((1, 1), Conversion::block_bytes);
            let (first, last) =
                (skipped / to_bytes * from_bytes, taken.div_ceil(to_bytes) * from_bytes);
            Extent { file: span.from.file, offset: span.from.offset + first, length: last - first }
        })
        .collect();
    let layout = files.plan(&extents, SLOT_ALIGNMENT);
    Window { range, layout, spans: first..first + extents.len() }
}

#[cfg(test)]
mod tests {
    use forebay_format::TensorType;

    use super::*;

    #[test]
    fn converted_bytes_do_not_depend_on_where_a_window_cuts_blocks() {
        for ty in [TensorType::BF16_C2048, TensorType::BF16_C256] {
            let of = ty.compact().unwrap();
            let numbers = 0..4 * of.weights();
            let weights = numbers.map(|index| (0x3f00 | ((index * 7919) >> 3 & 0x80ff)) as u16);
            let plain: Vec<u8> = weights.flat_map(u16::to_le_bytes).collect();
            let mut compact = vec![0; 4 * of.bytes()];
            assert!(Conversion::Compact(of).convert(&plain, &mut compact));
            for (conversion, from, to) in [
                (Conversion::Compact(of), &plain, &compact),
                (Conversion::Plain(of), &compact, &plain),
            ] {
                let (from_bytes, to_bytes) = conversion.block_bytes();
                let (from_bytes, to_bytes) = (from_bytes as usize, to_bytes as usize);
                let (one, all) = (to_bytes, to.len());
                let places = [0, 1, one - 1, one, one + 7, 2 * one, 3 * one + 5, all - 1, all];
                for (start, end) in places.iter().flat_map(|start| places.map(|end| (*start, end)))
                {
                    if start >= end {
                        continue;
                    }
                    let blocks = start / to_bytes * from_bytes..end.div_ceil(to_bytes) * from_bytes;
                    let mut out = vec![0xA5; end - start];
                    assert!(convert(conversion, start, &from[blocks], &mut out));
                    assert!(out == to[start..end], "{ty}: {start} to {end}");
                }
            }
            // More exceptions than a block has room for, in the last block only.
            let mut apart = plain.clone();
            let last = 3 * of.weights()..4 * of.weights();
            last.step_by(9).for_each(|index| apart[2 * index..][..2].fill(0));
            let mut out = vec![0; compact.len()];
            assert!(!convert(Conversion::Compact(of), 0, &apart, &mut out));
            let whole = 3 * of.bytes();
            assert!(convert(
                Conversion::Compact(of),
                0,
                &apart[..6 * of.weights()],
                &mut out[..whole]
            ));
        }
    }
}
