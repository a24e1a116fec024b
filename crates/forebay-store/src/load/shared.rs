//! State that the threads of a load share: the queues of pieces and the answers.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_format::{Extent, FileIndex};

use super::{LoadOptions, LoadStatistics};
use crate::engine::Completion;
use crate::error::StoreError;
use crate::files::FileSet;
use crate::interrupt::Interrupt;
use crate::layout::Region;
use crate::page_cache::{CacheProbe, Cached};
use crate::pieces::Piece;

/// Number of pieces that a probe thread takes at a time. They span several huge pages, so that two threads seldom
/// touch the same one.
const BATCH: usize = 8;
/// Maximum number of pieces that a copy thread takes at a time.
const COPIED_AT_ONCE: usize = 4;
/// Number of bytes of cached pieces that the disk may have while its speed is unknown.
const FIRST_CACHED_BYTES: u64 = 4 << 20;

/// Time that copies run before an engine that is not open yet may help, so that their rate is known.
const COPIED_ALONE: Duration = Duration::from_millis(100);
/// Time that copies still take if it is worth opening an engine that helps. Memory for it takes 10 ms.
const LONG_COPIES: Duration = Duration::from_millis(250);

/// Answer to a thread that asks for work.
pub(super) enum Next {
    Piece(Piece),
    /// There is no work now, but there may be later.
    NotYet,
    /// There will be no more work.
    End,
}

/// Description of a piece, available while an engine owns the piece itself.
#[derive(Clone, Copy)]
pub(super) struct Planned {
    pub file: FileIndex,
    pub offset: u64,
    pub bytes: u64,
    /// Number of bytes in the file.
    pub stored_bytes: u64,
    /// How much of it was in the page cache when it was probed.
    pub cached: Cached,
}

struct State {
    unseen: std::vec::IntoIter<Piece>,
    cold: VecDeque<Piece>,
    cached: VecDeque<Piece>,
    /// Number of probe threads that may still queue work.
    probe_threads: usize,
    cached_left_bytes: u64,
    planned: Vec<Planned>,
    answers: Vec<Option<Completion>>,
    totals: LoadStatistics,
    /// True if no further piece may begin.
    stopped: bool,
    failure: Option<StoreError>,
}

pub(super) struct Shared {
    state: Mutex<State>,
    /// Signals a change of state to the thread that owns the engine.
    news: Condvar,
    /// Signals that there is something to copy, or that there never will be.
    to_copy: Condvar,
    started: Instant,
    /// Number of copy threads, at least 1.
    copiers: usize,
    interrupt: Option<Interrupt>,
}

impl Shared {
    pub fn new(pieces: Vec<Piece>, options: LoadOptions, files: &FileSet) -> Shared {
        let interrupt = files.interrupt().cloned();
        let stored = |region: &Region| {
            let length = region.wanted_end - region.offset;
            files.stored(Extent { file: region.file, offset: region.offset, length }).length
        };
        // Without coded blocks, the bytes around the wanted ones do not count.
        let stored_bytes = |piece: &Piece| match files.is_coded() {
            true => piece.layout.regions.iter().map(stored).sum(),
            false => piece.layout.wanted_bytes(),
        };
        let plan = |piece: &Piece| Planned {
            file: piece.layout.regions.first().map_or(FileIndex(0), |region| region.file),
            offset: piece.layout.regions.first().map_or(0, |region| region.offset),
            bytes: piece.layout.wanted_bytes(),
            stored_bytes: stored_bytes(piece),
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

    /// Stops the load if an interrupt was requested. Every thread of the load calls this before it takes more work.
    fn look(&self) {
        if self.interrupt.as_ref().is_some_and(Interrupt::is_requested) {
            self.stop(StoreError::Interrupted);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock, so the state is consistent even if the lock is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one probe thread.
    pub fn probe_thread(&self, probe: Option<&CacheProbe>) {
        loop {
            self.look();
            let mut state = self.lock();
            // `finish` returns the pieces that are not taken here as cancelled, with their slots.
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
                    // The copy thread makes the pages of a cached piece resident when it writes to them, which is
                    // when they enter its CPU cache anyway.
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

    /// Waits until there is work for an engine that is not open yet, at most `pause`. Returns false if there will be none: all
    /// pieces are cached, and the copy threads are done with them before an engine could help.
    pub fn needs_engine(&self, pause: Duration) -> Option<bool> {
        self.wait_for(pause, |state, elapsed| state.needs_engine(elapsed))
    }

    /// Returns the next piece for the engine, which has `in_flight` bytes in flight. Waits at most `pause` for one.
    /// With `may_take_cached`, the engine also gets some of the cached pieces once no uncached piece is left.
    pub fn next_cold(
        &self,
        pause: Option<Duration>,
        in_flight: u64,
        may_take_cached: bool,
    ) -> Next {
        let next = self.wait_for(pause.unwrap_or_default(), |state, elapsed| {
            state.for_engine(in_flight, may_take_cached, elapsed)
        });
        next.unwrap_or(Next::NotYet)
    }

    /// Waits until `find` finds something, which also gets the time since the load began. Returns `None` after `pause`.
    fn wait_for<T>(
        &self,
        pause: Duration,
        find: impl Fn(&mut State, Duration) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        let deadline = Instant::now() + pause;
        loop {
            if let Some(found) = find(&mut state, self.started.elapsed()) {
                return Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.news.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes the answers to copied pieces, then waits for the next pieces and appends them to `next`. It gives several
    /// at a time so that many threads do not contend for the lock. Returns false if nothing is left to copy.
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
        let (mut found, mut wake) = (false, true);
        if let Some(mut state) = self.wait_for_cached(state) {
            // Give fewer near the end, so that all threads finish at about the same time.
            let count = (state.cached.len() / (2 * self.copiers)).clamp(1, COPIED_AT_ONCE);
            next.extend(state.cached.drain(..count));
            (found, wake) = (true, !state.cached.is_empty());
        }
        // Wake the next thread, which takes pieces that are left or finds that there are none.
        if wake {
            self.to_copy.notify_one();
        }
        found
    }

    /// Waits for the next piece to copy. Returns `None` if nothing is left.
    pub fn next_cached_piece(&self) -> Option<Piece> {
        self.look();
        self.wait_for_cached(self.lock())?.cached.pop_front()
    }

    /// Waits until there is a piece to copy. Returns `None` if nothing is left, or if the load has stopped.
    fn wait_for_cached<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> Option<MutexGuard<'a, State>> {
        loop {
            if state.stopped || state.cached.is_empty() && state.probe_threads == 0 {
                return None;
            }
            if !state.cached.is_empty() {
                return Some(state);
            }
            state = self.to_copy.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub fn planned(&self, id: u64) -> Planned {
        self.lock().planned[id as usize]
    }

    /// Records the answer to a piece that the engine read, or that was copied from the page cache.
    pub fn answer(&self, completion: Completion, copied: bool) {
        if self.lock().answer(completion, copied) {
            self.tell_all();
        }
    }

    /// Wakes all waiting threads.
    fn tell_all(&self) {
        self.news.notify_all();
        self.to_copy.notify_all();
    }

    /// Returns true if no further piece may begin.
    pub fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// Returns true if the caller has stopped the load.
    pub fn is_interrupted(&self) -> bool {
        matches!(self.lock().failure, Some(StoreError::Interrupted))
    }

    /// Stops the load because of a failure other than that of a single read.
    pub fn stop(&self, failure: StoreError) {
        let mut state = self.lock();
        state.stopped = true;
        state.failure.get_or_insert(failure);
        drop(state);
        self.tell_all();
    }

    /// Returns the number of bytes that have arrived.
    pub fn done_bytes(&self) -> u64 {
        let state = self.lock();
        state.totals.engine_bytes + state.totals.cached_bytes
    }

    /// Reports to `progress` how many of `bytes` have arrived. Stops the load if `progress` returns `Break`.
    pub fn tell(&self, bytes: u64, progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>) {
        self.look();
        if progress(self.done_bytes().min(bytes), bytes).is_break() {
            self.stop(StoreError::Interrupted);
        }
    }

    /// Returns the answers by piece. Pieces that never began are returned as cancelled.
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
    /// Records the answer to a piece. Returns true if waiting threads must be woken.
    fn answer(&mut self, completion: Completion, copied: bool) -> bool {
        let Planned { bytes, stored_bytes, cached, .. } = self.planned[completion.id as usize];
        let was_cached = cached == Cached::Whole;
        match &completion.result {
            Ok(_) if copied => {
                self.totals.cached_bytes += bytes;
                self.totals.cached_stored_bytes += stored_bytes;
            }
            Ok(_) => {
                self.totals.engine_bytes += bytes;
                self.totals.engine_stored_bytes += stored_bytes;
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

    /// Returns true if an engine that is not open yet has work, and `None` if that is not known yet.
    fn needs_engine(&self, elapsed: Duration) -> Option<bool> {
        if self.stopped {
            return Some(false);
        }
        if !self.cold.is_empty() {
            return Some(true);
        }
        if self.probe_threads > 0 {
            return None;
        }
        if self.cached.is_empty() {
            return Some(false);
        }
        let left =
            elapsed.mul_f64(self.cached_left_bytes as f64 / self.totals.cached_bytes.max(1) as f64);
        (elapsed >= COPIED_ALONE && left >= LONG_COPIES).then_some(true)
    }

    /// Returns the next work of the engine, or `None` if that is not known yet.
    fn for_engine(
        &mut self,
        in_flight: u64,
        may_take_cached: bool,
        elapsed: Duration,
    ) -> Option<Next> {
        if self.stopped {
            return Some(Next::End);
        }
        if let Some(piece) = self.cold.pop_front() {
            return Some(Next::Piece(piece));
        }
        if self.probe_threads > 0 {
            return None;
        }
        if self.cached.is_empty() || !may_take_cached {
            return Some(Next::End);
        }
        if in_flight < self.cached_bytes_to_take(elapsed) {
            // Take from the back, because the copy threads take from the front.
            return self.cached.pop_back().map(Next::Piece);
        }
        // Decide again if the disk may take more when one of its reads is done.
        Some(if in_flight > 0 { Next::NotYet } else { Next::End })
    }

    /// Returns how many bytes of cached pieces the disk may have at a time. That is half of what it can read until the
    /// copies are done, so that the copy threads do not wait for the disk at the end.
    fn cached_bytes_to_take(&self, elapsed: Duration) -> u64 {
        if self.totals.engine_bytes == 0 {
            return FIRST_CACHED_BYTES.min(self.cached_left_bytes / 8);
        }
        let seconds = elapsed.as_secs_f64();
        let disk = self.totals.engine_bytes as f64 / seconds;
        let copies = self.totals.cached_bytes.max(1) as f64 / seconds;
        let left_seconds = self.cached_left_bytes as f64 / copies;
        (disk * left_seconds / 2.0) as u64
    }
}
