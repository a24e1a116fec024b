//! Requests that wait: how they begin, and how running requests are suspended for others.
//!
//! Waiting requests are ordered by rank: by priority, then in the order in which they came. Callers take turns
//! (`shares.rs`). A request begins if there is a place among the running ones and room for its keys and values. If there is
//! neither, it takes the place of a running request with a lower priority, or of a caller that has more. If the room ends
//! while requests generate, one of the lowest priority is suspended. A suspended request waits by its old rank.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use forebay_ops::KV_BLOCK;

use super::Engine;
use super::active::{Active, CachedFrom};
use super::request::{Event, Request, RequestEnd, RequestId, RequestStatistics, Sink};
use crate::EngineError;
use crate::kv::Row;
use crate::kv_tiers::Fetching;
use crate::runner::{Begun, FetchRates, Growth, SavedSequence};

/// KV blocks that are left free for the growth of every running request in each layer group when another one begins, so
/// that it need not be suspended again at once.
const BLOCKS_LEFT_FREE: usize = 4;

/// Requests that read KV blocks from the disk, or have read them and wait, at a time.
const FETCHES: usize = 4;

/// Longest wait for a block from the disk if nothing else is to be done.
const WAIT_FOR_BLOCKS: Duration = Duration::from_millis(5);

/// Prompt tokens after which the measured rate replaces the predicted one.
const MEASURED_TOKENS: u64 = 256;

/// A request's place in the order in which requests run, the first one first.
type Rank = (Reverse<i32>, RequestId);

pub struct Waiting {
    pub id: RequestId,
    pub priority: i32,
    pub state: State,
    /// True while the disk is asked for its blocks, so that others may begin before it.
    pub is_passed_over: bool,
}

pub enum State {
    New(Submitted),
    /// A request that ran. Without a copy of its sequence, its rows are computed again, which gives the same bits.
    Suspended {
        active: Box<Active>,
        saved: Option<SavedSequence>,
    },
}

/// Errors of a queue that is full.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    #[error("the queue is full: try again later (waiting requests: {waiting})")]
    Full { waiting: usize },
    #[error(
        "your part of the queue is full: try again later (your waiting requests: {waiting}; places left for others: {left})"
    )]
    ShareFull { waiting: usize, left: usize },
}

/// A request as it came.
pub struct Submitted {
    pub request: Box<Request>,
    pub sink: Sink,
    pub submitted: Instant,
    pub lookup: Lookup,
}

/// Whether the disk has keys and values for a request.
pub enum Lookup {
    /// It was not searched.
    NotYet,
    /// Nothing is read from it.
    Nothing,
    /// Blocks are read, or were read. They are leased until the request begins.
    Reads(Box<Fetching>),
}

impl Submitted {
    pub fn new(request: Request, sink: Sink) -> Submitted {
        let (request, submitted) = (Box::new(request), Instant::now());
        Submitted { request, sink, submitted, lookup: Lookup::NotYet }
    }
}

impl Waiting {
    pub fn new(id: RequestId, priority: i32, state: State) -> Waiting {
        Waiting { id, priority, state, is_passed_over: false }
    }

    /// Returns the number of its caller.
    pub fn share(&self) -> u64 {
        match &self.state {
            State::New(new) => new.request.share,
            State::Suspended { active, .. } => active.share,
        }
    }

    fn rank(&self) -> Rank {
        (Reverse(self.priority), self.id)
    }
}

impl Engine<'_> {
    /// Queues a request by its rank.
    pub(super) fn queue(&mut self, waiting: Waiting) {
        let rank = waiting.rank();
        let at = self.waiting.partition_point(|other| other.rank() < rank);
        self.waiting.insert(at, waiting);
    }

    /// Ends a request that waits.
    pub(super) fn end_waiting(&mut self, waiting: Waiting, end: RequestEnd) {
        match waiting.state {
            State::New(Submitted { request, mut sink, submitted, lookup }) => {
                if let Lookup::Reads(fetching) = lookup {
                    fetching.end(self.session.runner.tiers_mut());
                }
                let statistics = RequestStatistics {
                    exact: self.session.is_independent(),
                    prompt_tokens: request.prompt.len(),
                    waited_seconds: submitted.elapsed().as_secs_f64(),
                    total_seconds: submitted.elapsed().as_secs_f64(),
                    ..RequestStatistics::default()
                };
                let _ = sink(Event::Finished {
                    end,
                    text: String::new(),
                    embedding: None,
                    prompt: Vec::new(),
                    end_token: None,
                    statistics,
                });
            }
            State::Suspended { active, saved } => {
                saved.into_iter().for_each(|saved| self.session.runner.forget(saved));
                active.finish(end);
            }
        }
    }

    /// Starts the requests that there is room for. If the longest latency does not matter, only those start that generate
    /// as soon as their prompt is read.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn begin_waiting(&mut self) -> Result<(), EngineError> {
        let most = match self.pace.is_bounded() {
            true => self.limits.running,
            false => self.limits.decode_rows,
        };
        self.waiting.iter_mut().for_each(|waiting| waiting.is_passed_over = false);
        loop {
            self.count_shares();
            let Some(at) = self.next_waiting() else { return Ok(()) };
            if self.reads_blocks(at) {
                // Others may begin meanwhile.
                self.waiting[at].is_passed_over = true;
                continue;
            }
            let share = self.waiting[at].share();
            if self.has_place(share, most) && self.begin_at(at)? {
                self.shares.note_begun(share);
                continue;
            }
            match self.gives_way_to(&self.waiting[at]) {
                Some(last) => self.suspend(last)?,
                None => return Ok(()),
            }
        }
    }

    /// Looks a new request up on the disk, and takes over blocks that have come from there. Returns true if the request must wait
    /// for more.
    fn reads_blocks(&mut self, at: usize) -> bool {
        if self.session.runner.tiers().disk().is_none() {
            return false;
        }
        let reads = |waiting: &&Waiting| match &waiting.state {
            State::New(new) => matches!(new.lookup, Lookup::Reads(_)),
            State::Suspended { .. } => false,
        };
        let may_begin = self.waiting.iter().filter(reads).count() < FETCHES;
        let rates = self.fetch_rates();
        let runner = &mut self.session.runner;
        let State::New(new) = &mut self.waiting[at].state else { return false };
        if let Lookup::NotYet = new.lookup {
            if new.request.reads_all() {
                return false;
            }
            if !may_begin {
                return true;
            }
            let root = runner.root(&new.request.namespace);
            let rows = Row::of_prompt(&new.request.prompt);
            new.lookup = match runner.fetch(root, &rows, rates) {
                Some(fetching) => Lookup::Reads(Box::new(fetching)),
                None => Lookup::Nothing,
            };
        }
        match &mut new.lookup {
            Lookup::Reads(fetching) => !runner.advance(fetching, Duration::ZERO),
            _ => false,
        }
    }

    /// Waits a moment for blocks from the disk. Returns false if no request waits for any.
    pub(super) fn wait_for_blocks(&mut self) -> bool {
        let runner = &mut self.session.runner;
        for waiting in &mut self.waiting {
            if let State::New(Submitted { lookup: Lookup::Reads(fetching), .. }) =
                &mut waiting.state
                && !fetching.has_ended()
            {
                runner.advance(fetching, WAIT_FOR_BLOCKS);
                return true;
            }
        }
        false
    }

    /// Returns how long it takes to compute rows again, measured if possible, and to read from the disk.
    fn fetch_rates(&self) -> FetchRates {
        let statistics = &self.statistics;
        let predicted = || self.predicted.get_or_init(|| self.session.predicted_rates());
        let seconds_per_row = match statistics.prompt_tokens {
            MEASURED_TOKENS.. => statistics.prompt_seconds / statistics.prompt_tokens as f64,
            _ => predicted().seconds_per_row,
        };
        let disk = self.session.runner.tiers().disk();
        let measured = disk.and_then(|disk| disk.bytes_per_second());
        let disk_bytes_per_second = measured.unwrap_or_else(|| predicted().disk_bytes_per_second);
        FetchRates { seconds_per_row, disk_bytes_per_second }
    }

    /// Starts a waiting request if there is room for it.
    fn begin_at(&mut self, at: usize) -> Result<bool, EngineError> {
        let Some(Waiting { id, priority, state, .. }) = self.waiting.remove(at) else {
            return Ok(false);
        };
        let context = self.session.context();
        let runner = &mut self.session.runner;
        let running = self.running.iter().map(|active| Growth {
            sequence: active.sequence,
            known_rows: active.tokens().len(),
            rows_max: active.rows_max(context),
        });
        let left_free = runner.blocks_left(running, BLOCKS_LEFT_FREE);
        let (begun, state) = match state {
            State::New(new) => {
                let request = &new.request;
                let (rows, reuse) = (Row::of_prompt(&request.prompt), !request.reads_all());
                let root = runner.root(&request.namespace);
                match runner.begin_with_room(root, &rows, reuse, &left_free) {
                    Ok(Some(begun)) => {
                        let active = self.begin_new(id, new, begun);
                        self.run_request(active);
                        return Ok(true);
                    }
                    begun => (begun.map(|_| false), State::New(new)),
                }
            }
            State::Suspended { mut active, saved: None } => {
                let (root, reuse) = (active.root, !active.reads_all());
                match runner.begin_with_room(root, &active.rows(), reuse, &left_free) {
                    Ok(Some(begun)) => {
                        active.resume(begun.sequence, begun.rows);
                        self.run_request(*active);
                        self.statistics.computed_again += 1;
                        return Ok(true);
                    }
                    begun => (begun.map(|_| false), State::Suspended { active, saved: None }),
                }
            }
            State::Suspended { mut active, saved: Some(saved) } => {
                match runner.resume(&saved, active.tokens().len(), &left_free) {
                    Ok(Some(sequence)) => {
                        active.resume(sequence, saved.len());
                        runner.forget(saved);
                        self.run_request(*active);
                        return Ok(true);
                    }
                    begun => {
                        (begun.map(|_| false), State::Suspended { active, saved: Some(saved) })
                    }
                }
            }
        };
        self.waiting.insert(at, Waiting::new(id, priority, state));
        begun
    }

    /// Makes a running request of a new one, and notes where its cached tokens came from.
    fn begin_new(&mut self, id: RequestId, mut new: Submitted, begun: Begun) -> Active {
        // Only what is not computed needs a rate.
        let seconds_per_row = if begun.rows > 0 { self.fetch_rates().seconds_per_row } else { 0.0 };
        let tiers = self.session.runner.tiers_mut();
        let mut from = CachedFrom::default();
        if let Lookup::Reads(fetching) = std::mem::replace(&mut new.lookup, Lookup::Nothing) {
            from.disk = fetching.read_blocks(begun.rows / KV_BLOCK) * KV_BLOCK;
            from.read_seconds = fetching.seconds();
            fetching.end(tiers);
        }
        from.ram = begun.rows_from_below.saturating_sub(from.disk);
        from.saved_seconds = begun.rows as f64 * seconds_per_row - from.read_seconds;
        let from_pool = begun.rows - from.ram - from.disk;
        tiers.note_positions(from_pool, from.ram, from.disk, from.saved_seconds);
        let mut active = Active::new(id, new, (begun.sequence, begun.rows), &self.session);
        active.note_cached(&from);
        active
    }

    /// Suspends a running request. It waits by its old rank.
    fn suspend(&mut self, at: usize) -> Result<(), EngineError> {
        self.settle_proposals()?;
        let saved = self.session.runner.suspend(self.running[at].sequence)?;
        let mut active = Box::new(self.running.remove(at));
        self.read_no_more(active.id);
        active.note_suspended();
        self.statistics.suspended += 1;
        let (id, priority) = (active.id, active.priority);
        self.queue(Waiting::new(id, priority, State::Suspended { active, saved }));
        Ok(())
    }

    /// Suspends the running request that gives way first, because a pass lacks KV blocks. Returns false if it is the only one.
    pub(super) fn make_room(&mut self) -> Result<bool, EngineError> {
        self.count_shares();
        match self.last_running() {
            Some(last) if self.running.len() > 1 => self.suspend(last).map(|()| true),
            _ => Ok(false),
        }
    }
}
