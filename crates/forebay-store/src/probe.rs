//! Measures the best rates of the disk and the page cache. Loads are compared with these limits.

use std::collections::VecDeque;
use std::num::NonZero;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_format::{Extent, FileIndex};

use crate::arena::{Arena, SLOT_ALIGNMENT, SlotBuffer};
use crate::engine::{
    BlockLabel, BlockRead, EngineInfo, EngineOptions, IoKind, Priority, ReadEngine, open_engine,
};
use crate::error::{ReadError, StoreError};
use crate::files::FileSet;
use crate::layout::BlockLayout;
use crate::load::process_seconds;

/// Minimum size of the memory that copies fill in turn, in bytes. It is larger than a usual CPU cache. It is small
/// enough that the process does not need noticeably more memory, even with many threads.
const COPY_BYTES: usize = 64 << 20;
const COPY_BYTES_PER_THREAD: usize = 12 << 20;
const COPY_PIECE: usize = 1 << 20;

/// A measurement with plain reads of one size into a small ring of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskProbe {
    pub kind: IoKind,
    /// Bytes per request, a multiple of 4096.
    pub request_bytes: usize,
    /// Number of requests in flight. With an engine that reads on threads, also the number of threads, up to 256.
    pub depth: usize,
    /// Size of the memory that reads fill in turn, in bytes; at least what `depth` requests need is used. With little
    /// memory the probe measures the disk. With much memory it measures what a load into its final memory can reach.
    pub memory_bytes: usize,
}

/// Length of a probe. It ends after `bytes`, but not before `at_least` has passed. It starts no read after `at_most`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeLength {
    pub bytes: u64,
    pub at_least: Duration,
    pub at_most: Duration,
}

impl ProbeLength {
    /// Returns a length that is limited only by time.
    pub fn of_time(time: Duration) -> ProbeLength {
        ProbeLength { bytes: u64::MAX, at_least: time, at_most: time }
    }

    fn is_reached(&self, asked_bytes: u64, elapsed: Duration) -> bool {
        elapsed >= self.at_most || asked_bytes >= self.bytes && elapsed >= self.at_least
    }
}

/// Result of [`DiskProbe::rate`].
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct DiskRate {
    pub bytes: u64,
    pub seconds: f64,
    pub bytes_per_second: f64,
    pub cpu_seconds: f64,
    pub engine: EngineInfo,
}

/// Latencies of single reads, one after the other: seconds from the request to its completion.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Latencies {
    pub reads: usize,
    pub p50_seconds: f64,
    pub p99_seconds: f64,
}

impl DiskProbe {
    /// Measures the rate of reading `range` of a file in order. If the range ends early, the probe starts again at its
    /// beginning.
    ///
    /// # Errors
    /// Returns [`StoreError::Unavailable`] if the engine does not work here or the range is smaller than one request.
    /// Returns [`StoreError::Probe`] if a read fails.
    pub fn rate(
        &self,
        files: &FileSet,
        file: FileIndex,
        range: Range<u64>,
        length: ProbeLength,
    ) -> Result<DiskRate, StoreError> {
        let size = self.request_bytes as u64;
        let steps = range.end.saturating_sub(range.start) / size;
        let offset = |index: u64| range.start / 4096 * 4096 + index % steps.max(1) * size;
        let mut seconds = Vec::new();
        self.run(files, file, steps, &offset, length, &mut seconds)
    }

    /// Measures the latency of reads at random multiples of 4096 in `range`, one at a time, for about `time`.
    ///
    /// # Errors
    /// Returns the errors of [`DiskProbe::rate`].
    pub fn latency(
        &self,
        files: &FileSet,
        file: FileIndex,
        range: Range<u64>,
        time: Duration,
    ) -> Result<Latencies, StoreError> {
        let steps = (range.end.saturating_sub(range.start) / 4096)
            .saturating_sub(self.request_bytes as u64 / 4096);
        let offset = |index: u64| {
            // A multiplicative walk visits offsets in no order and hardly ever visits one twice.
            let place = (index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 16;
            range.start / 4096 * 4096 + place % steps.max(1) * 4096
        };
        let (length, mut seconds) = (ProbeLength::of_time(time), Vec::new());
        DiskProbe { depth: 1, ..*self }.run(files, file, steps, &offset, length, &mut seconds)?;
        seconds.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let index = (seconds.len() as f64 * share) as usize;
            seconds.get(index.min(seconds.len().saturating_sub(1))).copied().unwrap_or(0.0)
        };
        Ok(Latencies { reads: seconds.len(), p50_seconds: at(0.5), p99_seconds: at(0.99) })
    }

    fn run(
        &self,
        files: &FileSet,
        file: FileIndex,
        steps: u64,
        offset: &dyn Fn(u64) -> u64,
        length: ProbeLength,
        seconds: &mut Vec<f64>,
    ) -> Result<DiskRate, StoreError> {
        if steps == 0 {
            let why = "the file is too small to measure the disk with".to_owned();
            return Err(StoreError::Unavailable { engine: "probe", why });
        }
        // A layout reserves room for an extent that begins anywhere in an alignment unit.
        let slot_bytes = self.request_bytes + SLOT_ALIGNMENT;
        let slots = self.depth.max(self.memory_bytes / slot_bytes);
        let arena = Arena::reserve(slots * slot_bytes)?;
        let mut idle = VecDeque::with_capacity(slots);
        for _ in 0..slots {
            idle.push_back(arena.carve(slot_bytes)?);
        }
        let options = EngineOptions {
            queue_depth: self.depth,
            background_depth: self.depth,
            request_bytes: self.request_bytes,
            threads: self.depth.min(256),
            ..EngineOptions::default()
        };
        let mut engine = open_engine(self.kind, files, &arena, &options)?;
        let (started, processor) = (Instant::now(), process_seconds());
        let request_bytes = self.request_bytes as u64;
        let mut index = 0;
        let mut begin = |engine: &mut dyn ReadEngine, buffer: SlotBuffer| {
            let extent = Extent { file, offset: offset(index), length: request_bytes };
            let layout = BlockLayout::plan(&[extent], SLOT_ALIGNMENT);
            // The priority is not `Demand`: demand reads are split into smaller requests, for latency.
            let (label, priority) = (BlockLabel::Other(index), Priority::Load);
            engine.submit(BlockRead { id: index, label, layout, buffer, priority });
            index += 1;
            index * request_bytes
        };
        let mut asked_bytes = 0;
        for buffer in idle.drain(..self.depth).collect::<Vec<_>>() {
            asked_bytes = begin(engine.as_mut(), buffer);
        }
        let (mut done, mut bytes, mut asked) = (Vec::new(), 0, Instant::now());
        while engine.in_flight() > 0 {
            engine.wait(&mut done)?;
            for completion in done.drain(..) {
                bytes += completion.result.map_err(probe_failed)?.bytes_read;
                let over = length.is_reached(asked_bytes, started.elapsed());
                idle.extend(completion.buffer);
                if let Some(buffer) = idle.pop_front().filter(|_| !over) {
                    if self.depth == 1 {
                        seconds.push(asked.elapsed().as_secs_f64());
                        asked = Instant::now();
                    }
                    asked_bytes = begin(engine.as_mut(), buffer);
                }
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        Ok(DiskRate {
            bytes,
            seconds,
            bytes_per_second: bytes as f64 / seconds,
            cpu_seconds: process_seconds() - processor,
            engine: engine.describe(),
        })
    }
}

fn probe_failed(error: ReadError) -> StoreError {
    StoreError::Probe { why: error.to_string() }
}

/// Returns the size of the L3 cache in bytes, or 0 if the system does not report it.
pub fn last_cache_bytes() -> usize {
    let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
    let kib = size.ok().and_then(|text| text.trim().strip_suffix('K')?.parse::<usize>().ok());
    kib.unwrap_or(0) * 1024
}

/// Measures how many bytes per second `threads` threads copy from the page cache into resident memory, for about
/// `time`. The caller has made sure that `range` of the file is cached. Returns `None` if the file is not on a disk or
/// the range is shorter than 1 MiB.
///
/// # Errors
/// Returns [`StoreError::Memory`] if memory cannot be reserved, [`StoreError::Read`] if a read fails, and
/// [`StoreError::Interrupted`] if the caller asks the work to stop.
pub fn copy_rate(
    files: &FileSet,
    file: FileIndex,
    range: Range<u64>,
    threads: usize,
    time: Duration,
) -> Result<Option<f64>, StoreError> {
    let pieces = range.end.saturating_sub(range.start) / COPY_PIECE as u64;
    let (Some(stored), Some(_)) = (files.file(file), files.cached_file(file)) else {
        return Ok(None);
    };
    if pieces == 0 {
        return Ok(None);
    }
    let threads = NonZero::new(threads).map_or(1, NonZero::get);
    // The 300 MiB cache of a server would hold the minimum completely, and no copy would reach main memory.
    let bytes = COPY_BYTES.max(2 * last_cache_bytes());
    let places = (bytes / threads).max(COPY_BYTES_PER_THREAD) / COPY_PIECE;
    let slot_bytes = places * COPY_PIECE;
    let arena = Arena::reserve(threads * slot_bytes)?;
    let slots = (0..threads).map(|_| arena.carve(slot_bytes)).collect::<Result<Vec<_>, _>>()?;
    let (next, copied, started) = (AtomicU64::new(0), AtomicU64::new(0), Instant::now());
    let copy = |mut slot: SlotBuffer| -> Result<(), StoreError> {
        for place in (0..places).cycle() {
            files.check_interrupt()?;
            if started.elapsed() >= time {
                break;
            }
            let piece = next.fetch_add(1, Ordering::Relaxed) % pieces;
            let offset = range.start + piece * COPY_PIECE as u64;
            let into = &mut slot.as_mut_slice()[place * COPY_PIECE..][..COPY_PIECE];
            let count = stored.read_at(offset, into).map_err(|source| StoreError::Read {
                file: stored.path.clone(),
                offset,
                source,
            })?;
            copied.fetch_add(count as u64, Ordering::Relaxed);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let copies: Vec<_> = slots.into_iter().map(|slot| scope.spawn(|| copy(slot))).collect();
        copies.into_iter().try_for_each(|copy| match copy.join() {
            Ok(result) => result,
            Err(_) => Err(StoreError::Probe { why: "a thread that copies panicked".to_owned() }),
        })
    })?;
    Ok(Some(copied.into_inner() as f64 / started.elapsed().as_secs_f64()))
}
