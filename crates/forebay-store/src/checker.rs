//! Compares what arrived with its checksums, beside the thread that reads: threads of its own, which
//! sleep while nothing is left to compare, and the reading thread itself whenever it would only wait
//! for the disk.

use std::collections::VecDeque;
use std::num::NonZero;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_format::FileIndex;

use crate::checks::{BadChunk, Checks};
use crate::error::StoreError;

/// Spans for which a thread is woken: a single one is compared sooner by the owner.
const WORTH_WAKING: usize = 2;

/// Most threads. A virtual disk may answer 32 requests at once; what they brought, 4 MiB, must not
/// hold up the computation that waits for it: one thread goes through memory that a disk has just
/// written at 6 GB/s, so that three took 0.16 ms of every layer that missed experts.
const THREADS_MAX: usize = 8;

/// How often a waiting owner makes sure that the threads still live.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Bytes in memory that must match the checksums of whole chunks of a file.
pub(crate) struct Span {
    /// Whose bytes they are; comes back in [`Compared`].
    pub job: u32,
    pub file: FileIndex,
    pub checks: Checks,
    /// Where the bytes are from.
    pub offset: u64,
    pub memory: *const u8,
    pub bytes: usize,
}

// SAFETY: the pointer is an address whose bytes `Checker::begin` was promised for reading, whichever
// thread does it.
unsafe impl Send for Span {}

/// The answer to one [`Span`].
pub(crate) struct Compared {
    pub job: u32,
    pub file: FileIndex,
    pub bytes: u64,
    /// The first chunk that does not match.
    pub bad: Option<BadChunk>,
    pub took: Duration,
}

/// Takes spans and gives answers, in any order.
pub(crate) struct Checker {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Spans that were taken and whose answers were not given yet.
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
    queue: VecDeque<Span>,
    answers: Vec<Compared>,
    sleepers: usize,
    owner_waits: bool,
    closing: bool,
}

impl Checker {
    /// Without a thread: [`Checker::take`] compares, so that what happens on a virtual clock happens
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

    /// Takes a span.
    ///
    /// # Safety
    /// Its memory is initialised, stays valid and is not written to until its answer was given or the
    /// checker is dropped.
    pub(crate) unsafe fn begin(&mut self, span: Span) {
        self.shared.lock().queue.push_back(span);
        self.open += 1;
    }

    /// Spans without an answer.
    pub(crate) fn open(&self) -> usize {
        self.open
    }

    /// Appends the answers that are there, and wakes as many threads as there is work for.
    pub(crate) fn take(&mut self, answers: &mut Vec<Compared>) {
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

    /// Compares a span on the calling thread. `false`: all that were taken have been begun.
    pub(crate) fn help(&self) -> bool {
        if self.open == 0 {
            return false;
        }
        let Some(span) = self.shared.lock().queue.pop_front() else { return false };
        let answer = span.compare();
        self.shared.lock().answers.push(answer);
        true
    }

    /// Waits until a thread has an answer for a span that it has begun.
    ///
    /// # Errors
    /// [`StoreError::Engine`] when a thread is gone: what it had begun is never answered.
    pub(crate) fn wait(&self) -> Result<(), StoreError> {
        let mut state = self.shared.lock();
        state.owner_waits = true;
        while state.answers.is_empty() {
            if self.threads.is_empty() || self.threads.iter().any(JoinHandle::is_finished) {
                return Err(failed(std::io::Error::other("a thread that compares has ended")));
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
    /// Ends when nobody reads from any span any more.
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
            let Some(span) = state.queue.pop_front() else {
                state.sleepers += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleepers -= 1;
                continue;
            };
            drop(state);
            let answer = span.compare();
            state = self.lock();
            state.answers.push(answer);
            if state.owner_waits {
                self.answered.notify_one();
            }
        }
    }
}

impl Span {
    fn compare(&self) -> Compared {
        let started = Instant::now();
        // SAFETY: `Checker::begin` was promised memory that stays valid and unwritten until the
        // answer, which is made here, was given.
        let bytes = unsafe { std::slice::from_raw_parts(self.memory, self.bytes) };
        let bad = self.checks.first_bad(self.offset, bytes);
        let (job, file, bytes) = (self.job, self.file, self.bytes as u64);
        Compared { job, file, bytes, bad, took: started.elapsed() }
    }
}
