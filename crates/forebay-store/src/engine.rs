//! What callers see of reading: requests, answers, options, and the trait of all engines.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::arena::{Arena, SlotBuffer};
use crate::checker::Checker;
use crate::device::Device;
use crate::error::{ReadError, StoreError};
use crate::faults::{FaultPlan, Faulty};
use crate::files::FileSet;
use crate::layout::BlockLayout;
use crate::scheduler::Scheduler;
use crate::uring::Uring;
use crate::{mmap_device, pread};

/// Names a block in errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockLabel {
    /// Dense block by its position in execution order.
    Dense(u32),
    Expert {
        layer: u32,
        expert: u32,
    },
    Other(u64),
}

impl fmt::Display for BlockLabel {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlockLabel::Dense(index) => write!(out, "dense block {index}"),
            BlockLabel::Expert { layer, expert } => write!(out, "expert {expert} of layer {layer}"),
            BlockLabel::Other(index) => write!(out, "block {index}"),
        }
    }
}

/// The order of requests that the kernel does not have yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// The computation waits for it.
    Demand,
    /// Will be needed soon.
    ReadAhead,
    /// May be needed soon: goes to the disk only while no demanded request is there, in
    /// small requests, so that it is out of the way again when something is.
    Prefetch,
    /// Filling memory at start.
    Load,
}

impl Priority {
    /// How many there are: queues by priority have this length.
    pub(crate) const COUNT: usize = Priority::Load as usize + 1;
}

/// One block to read. The engine owns the buffer until the completion hands it back.
#[derive(Debug)]
pub struct BlockRead {
    /// Chosen by the caller; comes back in the completion. Ids of reads in flight should differ.
    pub id: u64,
    pub label: BlockLabel,
    pub layout: BlockLayout,
    pub buffer: SlotBuffer,
    pub priority: Priority,
}

/// The answer to one [`BlockRead`].
#[derive(Debug)]
pub struct Completion {
    pub id: u64,
    /// The slot; `None` only when the read stalled: the kernel may still write there, so the engine
    /// keeps it.
    pub buffer: Option<SlotBuffer>,
    /// On success every part that the layout holds is complete in the buffer. On error its bytes mean
    /// nothing.
    pub result: Result<ReadDone, ReadError>,
}

/// What a finished read cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadDone {
    /// Bytes that the disk gave, over-read head and tail included.
    pub bytes_read: u64,
    pub requests: u32,
}

/// Which path runs, for the statistics of every command.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct EngineInfo {
    /// "io_uring", "pread", "mmap" or "simulated".
    pub name: &'static str,
    /// Whether every file is read past the page cache.
    pub direct: bool,
    /// Whether the arena is registered with the kernel.
    pub registered_buffers: bool,
    /// Why something faster is not in use; empty when nothing had to give way.
    pub why: String,
}

/// Totals since the engine was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct IoStatistics {
    /// Bytes that the finished reads were asked for.
    pub bytes_requested: u64,
    /// Bytes that the disk gave: over-read and repeated spans included.
    pub bytes_read: u64,
    pub requests: u64,
    /// Time with at least one request at the disk, as the engine noticed: a request counts as there
    /// until `poll` or `wait` sees its end.
    pub busy_seconds: f64,
    /// Requests that were repeated after an error or continued after a short read.
    pub retries: u64,
    /// Bytes that were compared with their checksums, and the time that took, added up over the
    /// threads that did it.
    pub bytes_checked: u64,
    pub check_seconds: f64,
    /// The part of the waiting in which nothing was at the disk: the waiting thread compared checksums, or waited for threads
    /// that did.
    pub check_wait_seconds: f64,
    /// Blocks whose bytes did not match their checksums.
    pub checksum_mismatches: u64,
    /// Bytes that were brought into another form than files have, and the time of all threads that did it.
    pub bytes_relaid_out: u64,
    pub relayout_seconds: f64,
}

/// Reads blocks into slots, asynchronously.
///
/// `submit` starts requests at once as far as the queue depth allows; `poll` and `wait` collect
/// what has finished and start what still waits for a place.
pub trait ReadEngine: Send {
    /// Takes a read. Never fails: refusals come back as a completion.
    fn submit(&mut self, read: BlockRead);

    /// As [`ReadEngine::submit`], but starts nothing: the next `submit`, `poll` or `wait` does, for
    /// all that was queued in one call to the kernel.
    fn queue(&mut self, read: BlockRead);

    /// Appends what has finished, without waiting. Cheap when nothing has: no system call.
    ///
    /// # Errors
    /// [`StoreError`] when the engine as a whole has failed; what goes wrong with one block is in
    /// its completion.
    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError>;

    /// Blocks in the kernel until at least one completion was appended or nothing is in flight. A
    /// request that the disk holds for longer than the stall timeout ends its read with
    /// [`ReadError::Stalled`].
    ///
    /// # Errors
    /// As [`ReadEngine::poll`]; [`StoreError::Interrupted`] when the files' [`Interrupt`] says so. Nothing is lost then:
    /// what has finished, or will, is handed out by a later call.
    ///
    /// [`Interrupt`]: crate::Interrupt
    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError>;

    /// Gives up a read. Requests that the kernel does not have yet are dropped; the completion
    /// still comes, with [`ReadError::Cancelled`], or with success if nothing was left to drop. An
    /// unknown id is ignored.
    fn cancel(&mut self, id: u64);

    /// Raises a read that is in flight to [`Priority::Demand`]. An unknown id is ignored.
    fn promote(&mut self, id: u64);

    /// Reads whose completions have not been handed out yet.
    fn in_flight(&self) -> usize;

    /// Whether what it hands out was compared with checksums, where there are any.
    fn compares(&self) -> bool;

    fn describe(&self) -> EngineInfo;

    fn io_statistics(&self) -> IoStatistics;
}

/// Which engine to open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoKind {
    /// io_uring where it works, else the pread pool.
    #[default]
    Auto,
    Uring,
    Pread,
    /// Copies out of a memory map, page fault by page fault: what others do, for comparison.
    Mmap,
}

impl fmt::Display for IoKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            IoKind::Auto => "auto",
            IoKind::Uring => "uring",
            IoKind::Pread => "pread",
            IoKind::Mmap => "mmap",
        })
    }
}

impl FromStr for IoKind {
    type Err = String;

    fn from_str(text: &str) -> Result<IoKind, String> {
        match text {
            "auto" => Ok(IoKind::Auto),
            "uring" => Ok(IoKind::Uring),
            "pread" => Ok(IoKind::Pread),
            "mmap" => Ok(IoKind::Mmap),
            other => {
                Err(format!("unknown read engine {other:?}; there are auto, uring, pread and mmap"))
            }
        }
    }
}

/// How an engine reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Requests at the disk at a time, 1 to 4096.
    pub queue_depth: usize,
    /// Of these, how many may be read-ahead or load: bounds how long a demand read waits behind
    /// them. 8 requests of 512 KiB nearly fill a fast NVMe disk; with 16 the slowest demand reads
    /// take more than 10 ms.
    pub background_depth: usize,
    /// Largest request in bytes, a multiple of 4096 up to 1 GiB.
    pub request_bytes: usize,
    /// Largest request of a demand read or a prefetch, also a multiple of 4096; `request_bytes` bounds
    /// it too. A burst of a few megabytes ends earlier as many requests side by side than as few
    /// large ones.
    pub demand_request_bytes: usize,
    /// How often a failed request is repeated before its block's read fails.
    pub retries: u32,
    /// How long one request may stay at the disk.
    pub stall_timeout: Duration,
    /// Read past the page cache where the files allow it.
    pub direct: bool,
    /// Threads that read where the engine has any, 1 to 256.
    pub threads: usize,
    /// Memory in which blocks are recast: room for the largest of them.
    pub relayout_bytes: usize,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            queue_depth: 256,
            background_depth: 8,
            request_bytes: 512 << 10,
            demand_request_bytes: 128 << 10,
            retries: 3,
            stall_timeout: Duration::from_secs(30),
            direct: true,
            threads: 8,
            relayout_bytes: 0,
        }
    }
}

/// Requests at the disk at a time where checksums are compared. A virtual disk may answer all that it
/// was given at once, when the last byte is there: with 66 requests, comparing began when reading
/// had ended. With 32 the disk reads on meanwhile; fewer leave it idle.
const CHECKED_DEPTH: usize = 32;

impl EngineOptions {
    /// The defaults for reading blocks of `files` on demand.
    pub fn suited_to(files: &FileSet) -> EngineOptions {
        let defaults = EngineOptions::default();
        match files.is_checked() {
            true => EngineOptions { queue_depth: CHECKED_DEPTH, ..defaults },
            false => defaults,
        }
    }

    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let in_range = |option, value: usize, range: std::ops::RangeInclusive<usize>, remedy| {
            if range.contains(&value) {
                return Ok(());
            }
            Err(StoreError::Option { option, given: value as u64, remedy })
        };
        in_range("queue_depth", self.queue_depth, 1..=4096, "take 1 to 4096")?;
        in_range("background_depth", self.background_depth, 1..=4096, "take 1 to 4096")?;
        in_range("threads", self.threads, 1..=256, "take 1 to 256")?;
        for (option, bytes) in [
            ("request_bytes", self.request_bytes),
            ("demand_request_bytes", self.demand_request_bytes),
        ] {
            let whole = bytes.is_multiple_of(crate::arena::SLOT_ALIGNMENT);
            let size = if whole { bytes } else { 0 };
            in_range(option, size, 4096..=1 << 30, "take a multiple of 4096 up to 1 GiB")?;
        }
        if self.stall_timeout.is_zero() {
            let remedy = "take more than no time at all";
            return Err(StoreError::Option { option: "stall_timeout", given: 0, remedy });
        }
        Ok(())
    }

    /// Largest request of a read of this priority.
    pub(crate) fn largest_request(&self, priority: Priority) -> u64 {
        let bytes = match priority {
            Priority::Demand | Priority::Prefetch => {
                self.request_bytes.min(self.demand_request_bytes)
            }
            Priority::ReadAhead | Priority::Load => self.request_bytes,
        };
        bytes as u64
    }
}

/// Opens an engine for `files` that reads into slots of `arena` (slots of other arenas work too,
/// more slowly).
///
/// # Errors
/// [`StoreError::Option`]; [`StoreError::Unavailable`] when `kind` names an engine that does not
/// work here.
pub fn open_engine(
    kind: IoKind,
    files: &FileSet,
    arena: &Arena,
    options: &EngineOptions,
) -> Result<Box<dyn ReadEngine>, StoreError> {
    open(kind, files, arena, options, None)
}

/// As [`open_engine`], but the disk misbehaves as `faults` says: for tests of everything above.
///
/// # Errors
/// As [`open_engine`].
pub fn open_faulty_engine(
    kind: IoKind,
    files: &FileSet,
    arena: &Arena,
    options: &EngineOptions,
    faults: FaultPlan,
) -> Result<Box<dyn ReadEngine>, StoreError> {
    open(kind, files, arena, options, Some(faults))
}

fn open(
    kind: IoKind,
    files: &FileSet,
    arena: &Arena,
    options: &EngineOptions,
    faults: Option<FaultPlan>,
) -> Result<Box<dyn ReadEngine>, StoreError> {
    options.check()?;
    let refused = match kind {
        IoKind::Pread => None,
        IoKind::Mmap => {
            let device = mmap_device::open(files, options)?;
            // What waits for a thread that copies is not at the disk.
            let queue_depth = device.threads();
            let background_depth = options.background_depth.min(queue_depth - 1).max(1);
            let options = EngineOptions { queue_depth, background_depth, ..*options };
            return scheduled(device, files, &options, faults);
        }
        IoKind::Auto | IoKind::Uring => match Uring::open(files, arena, options) {
            Ok(device) => return scheduled(device, files, options, faults),
            Err(error) if kind == IoKind::Uring => return Err(error),
            Err(error) => Some(error.to_string()),
        },
    };
    let device = pread::open(files, options, refused)?;
    scheduled(device, files, options, faults)
}

/// A device that is really there, and a checker beside it where something is to be checked or recast.
fn scheduled<D: Device + 'static>(
    device: D,
    files: &FileSet,
    options: &EngineOptions,
    faults: Option<FaultPlan>,
) -> Result<Box<dyn ReadEngine>, StoreError> {
    let beside = files.is_checked() || options.relayout_bytes > 0;
    let checker = if beside { Checker::start()? } else { Checker::inline() };
    Ok(with_checker(device, checker, files, options, faults))
}

pub(crate) fn with_checker<D: Device + 'static>(
    device: D,
    checker: Checker,
    files: &FileSet,
    options: &EngineOptions,
    faults: Option<FaultPlan>,
) -> Box<dyn ReadEngine> {
    let (files, options) = (files.clone(), *options);
    match faults {
        None => Box::new(Scheduler::new(device, checker, files, options)),
        Some(plan) => Box::new(Scheduler::new(Faulty::new(device, plan), checker, files, options)),
    }
}
