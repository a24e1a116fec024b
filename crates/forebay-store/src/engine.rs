//! The caller's interface for reading: requests, answers, options, and the trait of all engines.

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

/// Name of a block in errors and traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockLabel {
    /// A dense block, by its position in execution order.
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

/// Priority of requests that have not been passed to the kernel yet, highest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// The computation waits for the block.
    Demand,
    /// The block will be needed soon.
    ReadAhead,
    /// The block may be needed soon. It is read only while no demand request is at the disk, and in small requests, so
    /// that it does not delay the next demand read for long.
    Prefetch,
    /// The block fills memory at start.
    Load,
}

impl Priority {
    /// Number of priorities, which is the length of a list of queues by priority.
    pub(crate) const COUNT: usize = Priority::Load as usize + 1;
}

/// One block to read. The engine owns the buffer until the completion hands it back.
#[derive(Debug)]
pub struct BlockRead {
    /// Id chosen by the caller and returned in the completion. Reads in flight should have different ids.
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
    /// The slot. It is `None` only if the read stalled: the kernel may still write to the slot, so the engine keeps it.
    pub buffer: Option<SlotBuffer>,
    /// Result of the read. On success, every part that the layout holds is complete in the buffer. On error, the bytes
    /// in the buffer are meaningless.
    pub result: Result<ReadDone, ReadError>,
}

/// Cost of a finished read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadDone {
    /// Number of bytes that the disk returned, including those over-read at the head and tail.
    pub bytes_read: u64,
    pub requests: u32,
}

/// Description of the read path in use, for the statistics of every command.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct EngineInfo {
    /// Name of the engine: "io_uring", "pread", "mmap" or "simulated".
    pub name: &'static str,
    /// True if every file is read past the page cache.
    pub direct: bool,
    /// True if the arena is registered with the kernel.
    pub registered_buffers: bool,
    /// Reason why a faster path is not in use. Empty if the fastest one is.
    pub why: String,
}

/// Totals since the engine was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct IoStatistics {
    /// Number of bytes that the finished reads were asked for.
    pub bytes_requested: u64,
    /// Number of bytes that the disk returned, including over-read and repeated spans.
    pub bytes_read: u64,
    pub requests: u64,
    /// Time during which at least one request was at the disk, in seconds. A request counts until `poll` or `wait`
    /// sees its end.
    pub busy_seconds: f64,
    /// Number of requests that were repeated after an error or continued after a short read.
    pub retries: u64,
    /// Number of bytes whose checksums were verified. `check_seconds` is the time that took, summed over all threads.
    pub bytes_checked: u64,
    pub check_seconds: f64,
    /// Part of the waiting time, in seconds, in which no request was at the disk. The waiting thread verified
    /// checksums, or waited for threads that did.
    pub check_wait_seconds: f64,
    /// Time spent verifying and decoding coded blocks, summed over all threads.
    pub decode_seconds: f64,
    /// Number of blocks whose bytes did not match their checksums, or could not be decoded.
    pub checksum_mismatches: u64,
    /// Number of bytes that a relayout made. `relayout_seconds` is the time that took, summed over all threads.
    pub bytes_relaid_out: u64,
    pub relayout_seconds: f64,
}

/// An engine that reads blocks into slots asynchronously.
///
/// `submit` starts requests at once, as far as the queue depth allows. `poll` and `wait` collect reads that have
/// finished, and start requests that were waiting for room in the queue.
pub trait ReadEngine: Send {
    /// Takes a read and starts it. This never fails: a read that is refused is returned as a completion.
    fn submit(&mut self, read: BlockRead);

    /// Takes a read like [`ReadEngine::submit`], but does not start it. The next `submit`, `poll` or `wait` starts all
    /// queued reads with one call to the kernel.
    fn queue(&mut self, read: BlockRead);

    /// Appends the reads that have finished, without waiting. If none has, this is cheap: it makes no system call.
    ///
    /// # Errors
    /// Returns [`StoreError`] if the engine as a whole has failed. The failure of one block's read is in its
    /// completion.
    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError>;

    /// Blocks in the kernel until at least one completion was appended or nothing is in flight. If a request stays at
    /// the disk for longer than the stall timeout, its read ends with [`ReadError::Stalled`].
    ///
    /// # Errors
    /// Returns the errors of [`ReadEngine::poll`], and [`StoreError::Interrupted`] if the files' [`Interrupt`] was
    /// requested. An interrupt loses nothing: a later call returns the reads that have finished or will finish.
    ///
    /// [`Interrupt`]: crate::Interrupt
    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError>;

    /// Waits like [`ReadEngine::wait`], but at most for about `patience`. After it, nothing may have been appended.
    ///
    /// # Errors
    /// Returns the errors of [`ReadEngine::wait`].
    fn wait_for(
        &mut self,
        patience: Duration,
        done: &mut Vec<Completion>,
    ) -> Result<(), StoreError>;

    /// Cancels a read. Requests that have not been passed to the kernel are dropped. The completion is still returned,
    /// with [`ReadError::Cancelled`], or with success if nothing was left to drop. An unknown id is ignored.
    fn cancel(&mut self, id: u64);

    /// Raises a read that is in flight to [`Priority::Demand`]. An unknown id is ignored.
    fn promote(&mut self, id: u64);

    /// Returns the number of reads whose completions have not been returned yet.
    fn in_flight(&self) -> usize;

    /// Returns true if the engine verifies the checksums of the blocks that it returns, if they have any.
    fn compares(&self) -> bool;

    fn describe(&self) -> EngineInfo;

    fn io_statistics(&self) -> IoStatistics;
}

/// Kind of engine to open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoKind {
    /// io_uring if it works, otherwise the pread pool.
    #[default]
    Auto,
    Uring,
    Pread,
    /// Copies out of a memory map, page fault by page fault, for comparison with programs that do so.
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

/// Options of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Maximum number of requests at the disk, 1 to 4096.
    pub queue_depth: usize,
    /// Maximum number of requests at the disk that are not demand reads. It bounds how long a demand read waits behind
    /// them. 8 requests of 512 KiB nearly saturate a fast NVMe disk. With 16, the slowest demand reads take more than
    /// 10 ms.
    pub background_depth: usize,
    /// Largest request in bytes, a multiple of 4096 up to 1 GiB.
    pub request_bytes: usize,
    /// Largest request of a demand read or a prefetch in bytes, also a multiple of 4096. `request_bytes` limits it too.
    /// A burst of a few megabytes finishes earlier as many parallel requests than as a few large ones.
    pub demand_request_bytes: usize,
    /// Number of times that a failed request is repeated before its block's read fails.
    pub retries: u32,
    /// Longest time that one request may stay at the disk.
    pub stall_timeout: Duration,
    /// True to read past the page cache if the files allow it.
    pub direct: bool,
    /// Number of reader threads, 1 to 256, if the engine uses any.
    pub threads: usize,
    /// Bytes of memory for relayouts: room for the largest relayout of a block.
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

/// Queue depth if checksums are verified. A virtual disk may answer all its requests at once, when the last byte has
/// arrived. With 66 requests, verifying began only when reading had ended. With 32, the disk reads on meanwhile. With
/// fewer, it is idle.
const CHECKED_DEPTH: usize = 32;

impl EngineOptions {
    /// Returns the default options for reading blocks of `files` on demand.
    pub fn suited_to(files: &FileSet) -> EngineOptions {
        let defaults = EngineOptions::default();
        match files.is_checked() || files.is_coded() {
            true => EngineOptions { queue_depth: CHECKED_DEPTH, ..defaults },
            false => defaults,
        }
    }

    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let in_range = |option, value: usize, range: std::ops::RangeInclusive<usize>, remedy| {
            if range.contains(&value) {
                return Ok(());
            }
            Err(StoreError::Option { option, given: value.to_string(), remedy })
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
            return Err(StoreError::Option {
                option: "stall_timeout",
                given: "0".to_owned(),
                remedy,
            });
        }
        Ok(())
    }

    /// Returns the largest request in bytes for a read of this priority.
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

/// Opens an engine for `files` that reads into slots of `arena`. Slots of other arenas work too, but are slower.
///
/// # Errors
/// Returns [`StoreError::Option`] if an option is out of range, and [`StoreError::Unavailable`] if `kind` names an
/// engine that does not work here.
pub fn open_engine(
    kind: IoKind,
    files: &FileSet,
    arena: &Arena,
    options: &EngineOptions,
) -> Result<Box<dyn ReadEngine>, StoreError> {
    open(kind, files, arena, options, None)
}

/// Opens an engine like [`open_engine`], with the disk faults of `faults` injected, for tests of the code above it.
///
/// # Errors
/// Returns the errors of [`open_engine`].
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
    if files.is_remote() {
        return open_objects(kind, files, options, faults);
    }
    let refused = match kind {
        IoKind::Pread => None,
        IoKind::Mmap => {
            let device = mmap_device::open(files, options)?;
            // A request that waits for a copy thread is not at the disk, so allow only one for each thread.
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

/// Opens the only engine that reads objects.
fn open_objects(
    kind: IoKind,
    files: &FileSet,
    options: &EngineOptions,
    faults: Option<FaultPlan>,
) -> Result<Box<dyn ReadEngine>, StoreError> {
    #[cfg(feature = "objects")]
    if let (IoKind::Auto, Some((source, objects))) = (kind, files.objects()) {
        let device = crate::objects::ObjectDevice::open(source, objects.into());
        // The device repeats and ends its requests itself.
        let options = EngineOptions { stall_timeout: Duration::from_secs(86_400), ..*options };
        return scheduled(device, files, &options, faults);
    }
    let _ = (files, options, faults);
    let why = format!("{kind} reads files on a disk, and these are in a store");
    Err(StoreError::Unavailable { engine: "objects", why })
}

/// Wraps a real device in a scheduler. Starts the threads of a checker only if checksums, codecs or relayouts
/// need them.
fn scheduled<D: Device + 'static>(
    device: D,
    files: &FileSet,
    options: &EngineOptions,
    faults: Option<FaultPlan>,
) -> Result<Box<dyn ReadEngine>, StoreError> {
    let beside = files.is_checked() || files.is_coded() || options.relayout_bytes > 0;
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
