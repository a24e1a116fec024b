//! What is done with bytes that arrived, beside the thread that reads: they are compared with their
//! checksums, and brought into the form in which they are held. Threads of its own, which sleep while
//! nothing is left to do, and the reading thread itself whenever it would only wait for the disk.

use std::collections::VecDeque;
use std::num::NonZero;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_format::FileIndex;

use crate::checks::{BadChunk, Checks};
use crate::error::StoreError;
use crate::relayout::{Copying, Making};

/// Tasks for which a thread is woken: a single one is done sooner by the owner.
const WORTH_WAKING: usize = 2;

/// Most threads. A virtual disk may answer 32 requests at once; what they brought, 4 MiB, must not
/// hold up the computation that waits for it: one thread goes through memory that a disk has just
/// written at 6 GB/s, so that three took 0.16 ms of every layer that missed experts.
const THREADS_MAX: usize = 8;

/// How often a waiting owner makes sure that the threads still live.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Bytes in memory that must match the checksums of whole chunks of a file.
pub(crate) struct Span {
    pub file: FileIndex,
    pub checks: Checks,
    /// Where the bytes are from.
    pub offset: u64,
    pub memory: *const u8,
    pub bytes: usize,
}

/// One piece of work.
pub(crate) enum Work {
    Compare(Span),
    Make(Making),
    Copy(Copying),
}

struct Task {
    /// Whose bytes they are; comes back in [`Answer`].
    job: u32,
    work: Work,
}

// SAFETY: the pointers are addresses whose bytes `Checker::begin` was promised, whichever thread does
// the work.
unsafe impl Send for Task {}

/// The answer to one piece of work.
pub(crate) struct Answer {
    pub job: u32,
    /// What was compared, if something was.
    pub compared: Option<Compared>,
    pub took: Duration,
}

/// What comparing a [`Span`] has found.
pub(crate) struct Compared {
    pub file: FileIndex,
    pub bytes: u64,
    /// The first chunk that does not match.
    pub bad: Option<BadChunk>,
}

/// Takes work and gives answers, in any order.
pub(crate) struct Checker {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Tasks that were taken and whose answers were not given yet.
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
    /// Without a thread: [`Checker::take`] does the work, so that what happens on a virtual clock happens
    /// in the same order every time.
    pub(crate) fn inline() -> Checker {
        Checker { shared: Arc::default(), threads: Vec::new(), open: 0 }
    }

    pub(crate) fn start() -> Result<Checker, StoreError> {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut checker = Checker::inline();
        for _ in 0..(cores / 2).clamp(1, THREADS_MAX) {
            let shared = Arc::clone(&checker.shared);
            let thread = std::thread::Builder::new().name("forebay-check".to_owned());
            checker.threads.push(thread.spawn(move || shared.serve()).map_err(failed)?);
        }
        Ok(checker)
    }

    /// Takes work for a job.
    ///
    /// # Safety
    /// Memory that it reads is initialised, stays valid and is not written to, and memory that it writes
    /// is valid and not used elsewhere, until its answer was given or the checker is dropped.
    pub(crate) unsafe fn begin(&mut self, job: u32, work: Work) {
        self.shared.lock().queue.push_back(Task { job, work });
        self.open += 1;
    }

    /// Tasks without an answer.
    pub(crate) fn open(&self) -> usize {
        self.open
    }

    /// Appends the answers that are there, and wakes as many threads as there is work for.
    pub(crate) fn take(&mut self, answers: &mut Vec<Answer>) {
        if self.open == 0 {
            return;
        }
        if self.threads.is_empty() {
            while self.help() {}
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

    /// Does a task on the calling thread. `false`: all that were taken have been begun.
    pub(crate) fn help(&self) -> bool {
        if self.open == 0 {
            return false;
        }
        let Some(task) = self.shared.lock().queue.pop_front() else { return false };
        let answer = task.run();
        self.shared.lock().answers.push(answer);
        true
    }

    /// Waits until a thread has an answer for a task that it has begun.
    ///
    /// # Errors
    /// [`StoreError::Engine`] when a thread is gone: what it had begun is never answered.
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
    /// Ends when nobody uses any memory any more.
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
        // Nothing panics while it holds the lock, so the state is whole even if it is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread's life.
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
        let compared = match &self.work {
            Work::Compare(span) => Some(span.compare()),
            // SAFETY: `Checker::begin` was promised that memory that is read is initialised and at
            // rest, and that nothing else uses what is written, until the answer, which is made here.
            Work::Make(share) => unsafe {
                share.run();
                None
            },
            // SAFETY: as above.
            Work::Copy(bytes) => unsafe {
                bytes.run();
                None
            },
        };
        Answer { job: self.job, compared, took: started.elapsed() }
    }
}

impl Span {
    fn compare(&self) -> Compared {
        // SAFETY: `Checker::begin` was promised memory that stays valid and unwritten until the
        // answer, which is made here, was given.
        let bytes = unsafe { std::slice::from_raw_parts(self.memory, self.bytes) };
        let bad = self.checks.first_bad(self.offset, bytes);
        Compared { file: self.file, bytes: self.bytes as u64, bad }
    }
}
