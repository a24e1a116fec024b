//! Records every read request (what, when and why) in memory that is reserved at start.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_format::FileIndex;

use crate::engine::{BlockLabel, Priority};

/// Reason for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Why {
    /// The computation waited for the block.
    Demand,
    /// The block would probably be needed soon.
    ReadAhead,
    /// Memory was filled at start.
    Load,
    /// A small read through the page cache: a row of the embedding table, a norm.
    Small,
    /// A block of keys and values was read back.
    KvRead,
    /// A block of keys and values was written.
    KvWrite,
}

impl Why {
    pub const ALL: [Why; 6] =
        [Why::Demand, Why::ReadAhead, Why::Load, Why::Small, Why::KvRead, Why::KvWrite];

    /// Returns true for keys and values.
    pub fn is_kv(self) -> bool {
        matches!(self, Why::KvRead | Why::KvWrite)
    }
}

impl From<Priority> for Why {
    fn from(priority: Priority) -> Why {
        match priority {
            Priority::Demand => Why::Demand,
            Priority::ReadAhead | Priority::Prefetch => Why::ReadAhead,
            Priority::Load => Why::Load,
        }
    }
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadEnd {
    /// It returned the recorded number of bytes, which may be fewer than requested.
    Done,
    /// It failed with this errno.
    Failed(i32),
    /// The engine was closed, or the device refused the request, before there was an answer.
    Lost,
}

/// Page faults of one copy out of a memory map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageFaults {
    /// Number of pages that the copy touched.
    pub pages: u32,
    /// Number of these pages that were not in the page cache right before, according to `mincore`.
    pub absent: u32,
    /// Number of faults that waited for the disk, according to `getrusage` of the copying thread.
    pub major: u32,
}

/// Record of one request, which is one attempt to read one span. Times are in nanoseconds since the
/// recorder was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRecord {
    pub start_nanoseconds: u64,
    /// Time until the engine noticed the end of the request.
    pub duration_nanoseconds: u64,
    pub file: FileIndex,
    pub offset: u64,
    /// Number of bytes requested.
    pub length: u32,
    /// Number of bytes read.
    pub bytes: u32,
    /// Block that was read; `None` for small reads.
    pub block: Option<BlockLabel>,
    pub why: Why,
    /// 0 for the first request of a span, then 1, 2, … for retries and for the rest after a short
    /// read.
    pub attempt: u32,
    pub end: ReadEnd,
    /// Page faults; `None` unless the engine reads through a memory map.
    pub faults: Option<PageFaults>,
}

/// Record of a period in which the caller of the engine was blocked and waited for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitRecord {
    pub start_nanoseconds: u64,
    pub duration_nanoseconds: u64,
    /// Reason of the most urgent read in flight when the wait began.
    pub why: Why,
}

/// The records of a recorder, in the order in which the engine noticed them, and the counts of
/// those that did not fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    pub reads: Vec<ReadRecord>,
    pub waits: Vec<WaitRecord>,
    pub dropped_reads: u64,
    /// Number of bytes read by the dropped reads.
    pub dropped_bytes: u64,
    pub dropped_waits: u64,
    /// Time from the creation of the recorder until this recording was taken.
    pub nanoseconds: u64,
}

impl Recording {
    /// Makes `file` the file of all keys and values. Moves them together, so that the first one is at its start. Returns the end
    /// of the last one, if there are any.
    pub fn place_kv(&mut self, file: FileIndex) -> Option<u64> {
        let of_kv = || self.reads.iter().filter(|read| read.why.is_kv());
        let first = of_kv().map(|read| read.offset).min()?;
        let end = of_kv().map(|read| read.offset - first + u64::from(read.length)).max();
        for read in self.reads.iter_mut().filter(|read| read.why.is_kv()) {
            read.file = file;
            read.offset -= first;
        }
        end
    }
}

/// A recorder that keeps up to a fixed number of records. Clones share the records.
///
/// Pass it to [`crate::FileSet::recorded`]. From then on it records every engine that is opened for
/// those files, and every small read of them.
#[derive(Clone, Debug)]
pub struct IoRecorder {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    made: Instant,
    capacity: usize,
    recording: Mutex<Recording>,
}

impl IoRecorder {
    /// Default capacity in records. It reserves 200 MB of address space, of which only the used
    /// part takes memory. At the full speed of a 3 GB/s disk it lasts for five minutes.
    pub const DEFAULT_CAPACITY: usize = 1 << 21;

    /// Reserves room for `capacity` reads and as many waits.
    pub fn new(capacity: usize) -> IoRecorder {
        let recording = Recording {
            reads: Vec::with_capacity(capacity),
            waits: Vec::with_capacity(capacity),
            ..Recording::default()
        };
        let shared = Shared { made: Instant::now(), capacity, recording: Mutex::new(recording) };
        IoRecorder { shared: Arc::new(shared) }
    }

    /// Takes all records out of the recorder. Afterwards it keeps no new records and only counts
    /// them as dropped.
    pub fn take(&self) -> Recording {
        let nanoseconds = nanoseconds(self.now());
        let taken = std::mem::take(&mut *self.lock());
        Recording { nanoseconds, ..taken }
    }

    /// Records a read or a write of keys and values that began at `started` and has just ended. [`Recording::place_kv`] sets its
    /// file later.
    pub fn kv(&self, why: Why, started: Instant, offset: u64, length: u32, end: ReadEnd) {
        self.read(ReadRecord {
            start_nanoseconds: nanoseconds(started.saturating_duration_since(self.shared.made)),
            duration_nanoseconds: nanoseconds(started.elapsed()),
            file: FileIndex(u32::MAX),
            offset,
            length,
            bytes: if end == ReadEnd::Done { length } else { 0 },
            block: None,
            why,
            attempt: 0,
            end,
            faults: None,
        });
    }

    /// Returns the time since the recorder was created.
    pub(crate) fn now(&self) -> Duration {
        self.shared.made.elapsed()
    }

    pub(crate) fn read(&self, record: ReadRecord) {
        let mut recording = self.lock();
        // After `take` the capacity is 0: pushing must never allocate.
        if recording.reads.len() < self.shared.capacity.min(recording.reads.capacity()) {
            recording.reads.push(record);
        } else {
            recording.dropped_reads += 1;
            recording.dropped_bytes += u64::from(record.bytes);
        }
    }

    pub(crate) fn wait(&self, record: WaitRecord) {
        let mut recording = self.lock();
        if recording.waits.len() < self.shared.capacity.min(recording.waits.capacity()) {
            recording.waits.push(record);
        } else {
            recording.dropped_waits += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Recording> {
        // No code panics while it holds the lock, so the recording is consistent.
        self.shared.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_recorder_counts_what_it_drops_and_does_not_grow() {
        let recorder = IoRecorder::new(2);
        let record = ReadRecord {
            start_nanoseconds: 0,
            duration_nanoseconds: 1,
            file: FileIndex(0),
            offset: 0,
            length: 10,
            bytes: 7,
            block: None,
            why: Why::Small,
            attempt: 0,
            end: ReadEnd::Done,
            faults: None,
        };
        for offset in 0..5 {
            recorder.read(ReadRecord { offset, ..record });
        }
        let wait = WaitRecord { start_nanoseconds: 0, duration_nanoseconds: 1, why: Why::Demand };
        (0..3).for_each(|_| recorder.wait(wait));
        let recording = recorder.take();
        assert_eq!(recording.reads.iter().map(|read| read.offset).collect::<Vec<_>>(), [0, 1]);
        assert_eq!((recording.dropped_reads, recording.dropped_bytes), (3, 21));
        assert_eq!((recording.waits.len(), recording.dropped_waits), (2, 1));
        recorder.read(record);
        assert_eq!(recorder.take().dropped_reads, 1);
    }
}
