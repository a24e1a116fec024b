//! Work on bytes that have arrived: verifying checksums, decoding, and relayout. Its own threads do the work and sleep while
//! there is none. The reader thread takes part whenever it would otherwise only wait for the disk.

use std::collections::VecDeque;
use std::num::NonZero;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_format::FileIndex;

use crate::chunks::{BadChunk, Chunks};
use crate::error::StoreError;
use crate::relayout::{Copying, Making};

/// Number of queued tasks per thread that is woken. The owner itself finishes a single task sooner.
const WORTH_WAKING: usize = 2;

/// Maximum number of threads. A virtual disk may answer 32 requests at once. Their 4 MiB must not hold up the
/// computation that waits for them. One thread reads memory that a disk has just written at 6 GB/s, so three threads
/// took 0.16 ms of every layer that missed experts.
const THREADS_MAX: usize = 8;

/// Returns the number of threads that verify and decode what an engine reads, on a machine with so many processors.
pub fn checking_threads(processors: usize) -> usize {
    (processors / 2).clamp(1, THREADS_MAX)
}

/// Interval at which a waiting owner checks that the threads are still running.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A range of memory that must match the checksums of whole chunks of a file.
pub(crate) struct Span {
    pub file: FileIndex,
    pub chunks: Chunks,
    /// Offset in the decoded file.
    pub offset: u64,
    pub memory: *const u8,
    pub bytes: usize,
}

/// Chunks of a file that were read, and the memory that they are decoded to.
pub(crate) struct Decoding {
    pub file: FileIndex,
    pub chunks: Chunks,
    /// Range of the decoded file: whole chunks.
    pub range: Range<u64>,
    pub stored: *const u8,
    pub stored_bytes: usize,
    pub to: *mut u8,
    /// Number of the memory at `stored`, which the answer returns.
    pub stage: u32,
}

/// One piece of work.
pub(crate) enum Work {
    Compare(Span),
    Decode(Decoding),
    Make(Making),
    Copy(Copying),
}

struct Task {
    /// Id of the job that the bytes belong to. [`Answer`] returns it.
    job: u32,
    work: Work,
}

// SAFETY: the caller of `Checker::begin` promises that the memory behind the pointers may be used until the answer,
// whichever thread does the work.
unsafe impl Send for Task {}

/// The answer to one piece of work.
pub(crate) struct Answer {
    pub job: u32,
    pub done: Done,
    pub took: Duration,
}

/// What was done.
pub(crate) enum Done {
    /// A [`Span`] was compared with its checksums.
    Compared(Compared),
    /// Chunks were verified and decoded, and the memory with this number is free.
    Decoded(Compared, u32),
    Relayout,
}

/// Result of verifying chunks.
pub(crate) struct Compared {
    pub file: FileIndex,
    pub bytes: u64,
    /// The first chunk that is damaged.
    pub bad: Option<BadChunk>,
}

/// Queue of work with its threads. Answers come in any order.
pub(crate) struct Checker {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Number of tasks that were begun and whose answers have not been returned yet.
    open: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    answered: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Task>,
    answers: Vec<Answer>,
    sleepers: usize,
    owner_waits: bool,
    closing: bool,
}

impl Checker {
    /// Creates a checker without threads. [`Checker::take`] does the work, so that events on a virtual clock happen in
    /// the same order every time.
    pub(crate) fn inline() -> Checker {
        Checker { shared: Arc::default(), threads: Vec::new(), open: 0 }
    }

    pub(crate) fn start() -> Result<Checker, StoreError> {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut checker = Checker::inline();
        for _ in 0..checking_threads(cores) {
            let shared = Arc::clone(&checker.shared);
            let thread = std::thread::Builder::new().name("forebay-check".to_owned());
            checker.threads.push(thread.spawn(move || shared.serve()).map_err(failed)?);
        }
        Ok(checker)
    }

    /// Queues work for a job.
    ///
    /// # Safety
    /// Both conditions must hold until [`Checker::take`] has returned the answer or the checker is dropped. Memory that
    /// the work reads must be initialised, stay valid and not be written to. Memory that it writes must be valid and
    /// not be used elsewhere.
    pub(crate) unsafe fn begin(&mut self, job: u32, work: Work) {
        self.shared.lock().queue.push_back(Task { job, work });
        self.open += 1;
    }

    /// Returns the number of tasks whose answers have not been returned yet.
    pub(crate) fn open(&self) -> usize {
        self.open
    }

    /// Appends the available answers, and wakes as many threads as there is work for.
    pub(crate) fn take(&mut self, answers: &mut Vec<Answer>) {
        if self.open == 0 {
            return;
        }
        if self.threads.is_empty() {
            while self.run_one() {}
        }
        let mut state = self.shared.lock();
        self.open -= state.answers.len();
        answers.append(&mut state.answers);
        let wake = state.sleepers.min(state.queue.len() / WORTH_WAKING);
        drop(state);
        for _ in 0..wake {
            self.shared.work.notify_one();
        }
    }

    /// Runs one queued task on the calling thread. Returns false if no task is queued.
    pub(crate) fn run_one(&self) -> bool {
        if self.open == 0 {
            return false;
        }
        let Some(task) = self.shared.lock().queue.pop_front() else { return false };
        let answer = task.run();
        self.shared.lock().answers.push(answer);
        true
    }

    /// Waits until there is an answer.
    ///
    /// # Errors
    /// Returns [`StoreError::Engine`] if a thread has ended, because its task will never be answered.
    pub(crate) fn wait(&self) -> Result<(), StoreError> {
        let mut state = self.shared.lock();
        state.owner_waits = true;
        while state.answers.is_empty() {
            if self.threads.is_empty() || self.threads.iter().any(JoinHandle::is_finished) {
                return Err(failed(std::io::Error::other(
                    "a thread beside the reading one has ended",
                )));
            }
            let waited = self.shared.answered.wait_timeout(state, LOOK_AGAIN);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.owner_waits = false;
        Ok(())
    }
}

fn failed(source: std::io::Error) -> StoreError {
    StoreError::Engine { engine: "checksums", source }
}

impl Drop for Checker {
    /// Returns only after all threads have ended, so that none of them uses any task's memory afterwards.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.queue.clear();
        state.closing = true;
        drop(state);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock, so the state is consistent even if the lock is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one thread until the checker closes.
    fn serve(&self) {
        let mut state = self.lock();
        while !state.closing {
            let Some(task) = state.queue.pop_front() else {
                state.sleepers += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleepers -= 1;
                continue;
            };
            drop(state);
            let answer = task.run();
            state = self.lock();
            state.answers.push(answer);
            if state.owner_waits {
                self.answered.notify_one();
            }
        }
    }
}

impl Task {
    fn run(&self) -> Answer {
        let started = Instant::now();
        let done = match &self.work {
            Work::Compare(span) => Done::Compared(span.compare()),
            // SAFETY: as below.
            Work::Decode(decoding) => unsafe { Done::Decoded(decoding.decode(), decoding.stage) },
            // SAFETY: the caller of `Checker::begin` promised that memory to be read is initialised and not written to,
            // and that nothing else uses memory to be written, until the answer. The answer is made below.
            Work::Make(share) => unsafe {
                share.run();
                Done::Relayout
            },
            // SAFETY: as above.
            Work::Copy(bytes) => unsafe {
                bytes.run();
                Done::Relayout
            },
        };
        Answer { job: self.job, done, took: started.elapsed() }
    }
}

impl Decoding {
    /// Verifies and decodes the chunks.
    ///
    /// # Safety
    /// `stored` must be valid for reads of `stored_bytes` bytes that are not written to, and `to` for writes of as many bytes as the range
    /// has. Nothing else may use them.
    unsafe fn decode(&self) -> Compared {
        let bytes = self.range.end - self.range.start;
        // SAFETY: the caller promises both.
        let (stored, out) = unsafe {
            let stored = std::slice::from_raw_parts(self.stored, self.stored_bytes);
            (stored, std::slice::from_raw_parts_mut(self.to, bytes as usize))
        };
        let bad = self.chunks.decode(self.range.clone(), stored, out);
        let bytes = if self.chunks.verify { bytes } else { 0 };
        Compared { file: self.file, bytes, bad }
    }
}

impl Span {
    fn compare(&self) -> Compared {
        // SAFETY: the caller of `Checker::begin` promised that the memory is initialised, stays valid and is not
        // written to until the answer. The answer is made here.
        let bytes = unsafe { std::slice::from_raw_parts(self.memory, self.bytes) };
        let bad = self.chunks.first_bad(self.offset, bytes);
        Compared { file: self.file, bytes: self.bytes as u64, bad }
    }
}
