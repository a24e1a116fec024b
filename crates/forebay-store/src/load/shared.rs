//! What the threads of a load share: who gets which piece, and the answers.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_format::FileIndex;

use super::{LoadOptions, LoadStatistics};
use crate::engine::Completion;
use crate::error::StoreError;
use crate::interrupt::Interrupt;
use crate::page_cache::{CacheProbe, Cached};
use crate::pieces::Piece;

/// Pieces that a probing thread takes at a time: several huge pages, so that two threads seldom want the same one.
const BATCH: usize = 8;
/// Most pieces that a thread which copies takes at a time.
const COPIED_AT_ONCE: usize = 4;
/// What the disk gets of the cached pieces before it is known how fast it is: bytes.
const FIRST_HELP: u64 = 4 << 20;

/// An answer to "what shall I do next?".
pub(super) enum Next {
    Piece(Piece),
    /// Nothing now; ask again.
    NotYet,
    /// Nothing any more.
    End,
}

/// What is known of a piece while an engine has it.
#[derive(Clone, Copy)]
pub(super) struct Planned {
    pub file: FileIndex,
    pub offset: u64,
    pub bytes: u64,
    /// How much of it was in the page cache when it was probed.
    pub cached: Cached,
}

struct State {
    unseen: std::vec::IntoIter<Piece>,
    cold: VecDeque<Piece>,
    cached: VecDeque<Piece>,
    /// Probing threads that may still bring work.
    probe_threads: usize,
    cached_left_bytes: u64,
    planned: Vec<Planned>,
    answers: Vec<Option<Completion>>,
    totals: LoadStatistics,
    /// No piece is begun any more.
    stopped: bool,
    failure: Option<StoreError>,
}

pub(super) struct Shared {
    state: Mutex<State>,
    /// The state has changed, as far as the thread with the engine is concerned.
    news: Condvar,
    /// There is something to copy, or there never will be.
    to_copy: Condvar,
    started: Instant,
    /// Threads that copy.
    copiers: usize,
    interrupt: Option<Interrupt>,
}

impl Shared {
    pub fn new(pieces: Vec<Piece>, options: LoadOptions, interrupt: Option<Interrupt>) -> Shared {
        let plan = |piece: &Piece| Planned {
            file: piece.layout.regions.first().map_or(FileIndex(0), |region| region.file),
            offset: piece.layout.regions.first().map_or(0, |region| region.offset),
            bytes: piece.layout.wanted_bytes(),
            cached: Cached::Part,
        };
        let state = State {
            planned: pieces.iter().map(plan).collect(),
            answers: pieces.iter().map(|_| None).collect(),
            unseen: pieces.into_iter(),
            cold: VecDeque::new(),
            cached: VecDeque::new(),
            probe_threads: options.probe_threads.max(1),
            cached_left_bytes: 0,
            totals: LoadStatistics::default(),
            stopped: false,
            failure: None,
        };
        Shared {
            state: Mutex::new(state),
            news: Condvar::new(),
            to_copy: Condvar::new(),
            started: Instant::now(),
            copiers: options.copy_threads.max(1),
            interrupt,
        }
    }

    /// Ends the load if it was asked to stop. Every thread of the load calls this before it takes more work.
    fn look(&self) {
        if self.interrupt.as_ref().is_some_and(Interrupt::is_requested) {
            self.stop(StoreError::Interrupted);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock, so the state is whole even if the lock is
        // poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The work of one probing thread.
    pub fn probe_thread(&self, probe: Option<&CacheProbe>) {
        loop {
            self.look();
            let mut state = self.lock();
            // What is not taken here comes back as cancelled, with its slot.
            let wanted = if state.stopped { 0 } else { BATCH };
            let batch: Vec<Piece> = state.unseen.by_ref().take(wanted).collect();
            if batch.is_empty() {
                state.probe_threads -= 1;
                drop(state);
                self.tell_all();
                return;
            }
            drop(state);
            let seen: Vec<(Piece, Cached)> = batch
                .into_iter()
                .filter_map(|piece| {
                    let cached = probe.map_or(Cached::Part, |probe| ask(probe, &piece));
                    // The thread that copies a piece meets its pages when they are in its cache
                    // anyway.
                    let ready = match cached {
                        Cached::Whole => Ok(()),
                        _ => piece.buffer.make_resident(),
                    };
                    match ready {
                        Ok(()) => Some((piece, cached)),
                        Err(source) => {
                            self.stop(StoreError::Memory { bytes: piece.buffer.len(), source });
                            None
                        }
                    }
                })
                .collect();
            self.queue(seen);
        }
    }

    fn queue(&self, seen: Vec<(Piece, Cached)>) {
        let mut state = self.lock();
        let (cold, cached) = (state.cold.len(), state.cached.len());
        for (piece, known) in seen {
            state.planned[piece.index].cached = known;
            if known == Cached::Whole {
                state.cached_left_bytes += piece.layout.wanted_bytes();
                state.cached.push_back(piece);
            } else {
                state.cold.push_back(piece);
            }
        }
        let (more_cold, more_cached) = (state.cold.len() > cold, state.cached.len() > cached);
        drop(state);
        if more_cold {
            self.news.notify_all();
        }
        if more_cached {
            self.to_copy.notify_one();
        }
    }

    /// The next piece for the engine, which has `in_flight` bytes. Waits at most `pause` for one.
    pub fn next_cold(&self, pause: Option<Duration>, in_flight: u64, may_offload: bool) -> Next {
        let mut state = self.lock();
        let deadline = pause.map(|pause| Instant::now() + pause);
        loop {
            if let Some(next) = state.for_engine(in_flight, may_offload, self.started.elapsed()) {
                return next;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match left {
                Some(left) if !left.is_zero() => {
                    let waited = self.news.wait_timeout(state, left);
                    (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
                }
                _ => return Next::NotYet,
            }
        }
    }

    /// Takes the answers to copied pieces and gives the next ones, several at a time, so that many
    /// threads do not queue up here; waits for them. `false`: nothing is left to copy.
    pub fn next_cached(&self, done: &mut Vec<Completion>, next: &mut Vec<Piece>) -> bool {
        self.look();
        let mut state = self.lock();
        let mut tell = false;
        for completion in done.drain(..) {
            tell |= state.answer(completion, true);
        }
        if tell {
            self.news.notify_all();
        }
        let found = loop {
            if state.stopped || state.cached.is_empty() && state.probe_threads == 0 {
                break false;
            }
            if !state.cached.is_empty() {
                break true;
            }
            state = self.to_copy.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        if found {
            // Few at the end, so that all threads end together.
            let count = (state.cached.len() / (2 * self.copiers)).clamp(1, COPIED_AT_ONCE);
            next.extend(state.cached.drain(..count));
        }
        // The next thread looks at what is left, or finds the end.
        let wake = !found || !state.cached.is_empty();
        drop(state);
        if wake {
            self.to_copy.notify_one();
        }
        found
    }

    pub fn planned(&self, id: u64) -> Planned {
        self.lock().planned[id as usize]
    }

    /// Takes the answer to a piece that the engine read.
    pub fn answer(&self, completion: Completion) {
        if self.lock().answer(completion, false) {
            self.tell_all();
        }
    }

    /// Wakes the threads that wait here.
    fn tell_all(&self) {
        self.news.notify_all();
        self.to_copy.notify_all();
    }

    /// Whether nothing is begun any more.
    pub fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// Ends the load because something other than one read failed.
    pub fn stop(&self, failure: StoreError) {
        let mut state = self.lock();
        state.stopped = true;
        state.failure.get_or_insert(failure);
        drop(state);
        self.tell_all();
    }

    /// Bytes that have arrived.
    pub fn done_bytes(&self) -> u64 {
        let state = self.lock();
        state.totals.engine_bytes + state.totals.cached_bytes
    }

    /// Tells how many of `bytes` have arrived; the answer may end the load.
    pub fn tell(&self, bytes: u64, progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>) {
        self.look();
        if progress(self.done_bytes().min(bytes), bytes).is_break() {
            self.stop(StoreError::Interrupted);
        }
    }

    /// The answers by piece; pieces that were never begun come back as cancelled.
    pub fn finish(self) -> Result<(Vec<Option<Completion>>, LoadStatistics), StoreError> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let State { unseen, cold, cached, mut answers, totals, failure, .. } = state;
        if let Some(failure) = failure {
            return Err(failure);
        }
        for piece in unseen.chain(cold).chain(cached) {
            let result = Err(crate::error::ReadError::Cancelled { block: piece.label });
            let completion =
                Completion { id: piece.index as u64, buffer: Some(piece.buffer), result };
            answers[piece.index] = Some(completion);
        }
        Ok((answers, totals))
    }
}

fn ask(probe: &CacheProbe, piece: &Piece) -> Cached {
    let mut answers = piece
        .layout
        .regions
        .iter()
        .map(|region| probe.ask(region.file, region.offset, region.wanted_end - region.offset));
    let first = answers.next().unwrap_or(Cached::Part);
    if answers.all(|other| other == first) { first } else { Cached::Part }
}

impl State {
    /// Takes the answer to a piece. `true`: others may want to know.
    fn answer(&mut self, completion: Completion, copied: bool) -> bool {
        let Planned { bytes, cached, .. } = self.planned[completion.id as usize];
        let was_cached = cached == Cached::Whole;
        match &completion.result {
            Ok(_) if copied => self.totals.cached_bytes += bytes,
            Ok(_) => {
                self.totals.engine_bytes += bytes;
                self.totals.engine_cached_bytes += if was_cached { bytes } else { 0 };
            }
            Err(_) => self.stopped = true,
        }
        if was_cached {
            self.cached_left_bytes -= bytes;
        }
        let index = completion.id as usize;
        self.answers[index] = Some(completion);
        self.stopped || self.cached_left_bytes == 0
    }

    /// What the engine shall read; `None` if that is not known yet.
    fn for_engine(&mut self, in_flight: u64, may_offload: bool, elapsed: Duration) -> Option<Next> {
        if self.stopped {
            return Some(Next::End);
        }
        if let Some(piece) = self.cold.pop_front() {
            return Some(Next::Piece(piece));
        }
        if self.probe_threads > 0 {
            return None;
        }
        if self.cached.is_empty() || !may_offload {
            return Some(Next::End);
        }
        if in_flight < self.cpu_offload_bytes(elapsed) {
            // From the end: the copies come from the front.
            return self.cached.pop_back().map(Next::Piece);
        }
        // Whether the disk may take more is seen when something that it has is done.
        Some(if in_flight > 0 { Next::NotYet } else { Next::End })
    }

    /// How many bytes of what is cached the disk may have at a time: half of what it can read until
    /// the copies are done, so that nobody waits for it at the end.
    fn cpu_offload_bytes(&self, elapsed: Duration) -> u64 {
        if self.totals.engine_bytes == 0 {
            return FIRST_HELP.min(self.cached_left_bytes / 8);
        }
        let seconds = elapsed.as_secs_f64();
        let disk = self.totals.engine_bytes as f64 / seconds;
        let copies = self.totals.cached_bytes.max(1) as f64 / seconds;
        let left_seconds = self.cached_left_bytes as f64 / copies;
        (disk * left_seconds / 2.0) as u64
    }
}
