//! Requests that wait: how they begin, and how running requests are suspended for others.
//!
//! Waiting requests are ordered by rank: by priority, then in the order in which they came. A request begins if there is a
//! place among the running ones and room for its keys and values. If there is neither, it takes the place of a running
//! request with a lower priority. If the room ends while requests generate, the one of the lowest rank is suspended. A
//! suspended request waits by its old rank.

use std::cmp::Reverse;
use std::time::Instant;

use super::Engine;
use super::active::Active;
use super::request::{Event, Request, RequestEnd, RequestId, RequestStatistics, Sink};
use crate::EngineError;
use crate::kv::Row;
use crate::runner::{Growth, SavedSequence};

/// KV blocks that are left free for the growth of every running request in each layer group when another one begins, so
/// that it need not be suspended again at once.
const BLOCKS_LEFT_FREE: usize = 4;

/// A request's place in the order in which requests run, the first one first.
type Rank = (Reverse<i32>, RequestId);

pub struct Waiting {
    pub id: RequestId,
    pub priority: i32,
    pub state: State,
}

pub enum State {
    New(Submitted),
    /// A request that ran. Without a copy of its sequence, its rows are computed again, which gives the same bits.
    Suspended {
        active: Box<Active>,
        saved: Option<SavedSequence>,
    },
}

/// A request as it came.
pub struct Submitted {
    pub request: Box<Request>,
    pub sink: Sink,
    pub submitted: Instant,
}

impl Waiting {
    fn rank(&self) -> Rank {
        (Reverse(self.priority), self.id)
    }
}

impl Active {
    fn rank(&self) -> Rank {
        (Reverse(self.priority), self.id)
    }
}

impl Engine {
    /// Queues a request by its rank.
    pub(super) fn queue(&mut self, waiting: Waiting) {
        let rank = waiting.rank();
        let at = self.waiting.partition_point(|other| other.rank() < rank);
        self.waiting.insert(at, waiting);
    }

    /// Ends a request that waits.
    pub(super) fn end_waiting(&mut self, waiting: Waiting, end: RequestEnd) {
        match waiting.state {
            State::New(Submitted { request, mut sink, submitted }) => {
                let statistics = RequestStatistics {
                    prompt_tokens: request.prompt.len(),
                    waited_seconds: submitted.elapsed().as_secs_f64(),
                    total_seconds: submitted.elapsed().as_secs_f64(),
                    ..RequestStatistics::default()
                };
                let text = String::new();
                let _ = sink(Event::Finished { end, text, embedding: None, statistics });
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
        while let Some(next) = self.waiting.front() {
            let priority = next.priority;
            if self.running.len() < most && self.begin_next()? {
                continue;
            }
            match self.last_running() {
                Some(last) if self.running[last].priority < priority => self.suspend(last)?,
                _ => break,
            }
        }
        Ok(())
    }

    /// Starts the next waiting request if there is room for it.
    fn begin_next(&mut self) -> Result<bool, EngineError> {
        let Some(Waiting { id, priority, state }) = self.waiting.pop_front() else {
            return Ok(false);
        };
        let context = self.session.context();
        let runner = &mut self.session.runner;
        let running = self.running.iter().map(|active| Growth {
            sequence: active.sequence,
            known_rows: active.tokens().len(),
            most_rows: active.most_rows(context),
        });
        let left_free = runner.blocks_left(running, BLOCKS_LEFT_FREE);
        let state = match state {
            State::New(new) => {
                let request = &new.request;
                let (rows, reuse) = (Row::of_prompt(&request.prompt), request.pooling.is_none());
                match runner.begin_with_room(&rows, reuse, &left_free) {
                    Some(begun) => {
                        self.running.push(Active::new(id, new, begun, &self.session));
                        return Ok(true);
                    }
                    None => State::New(new),
                }
            }
            State::Suspended { mut active, saved: None } => {
                match runner.begin_with_room(&active.rows(), !active.pools(), &left_free) {
                    Some((sequence, cached)) => {
                        active.resume(sequence, cached);
                        self.running.push(*active);
                        self.statistics.computed_again += 1;
                        return Ok(true);
                    }
                    None => State::Suspended { active, saved: None },
                }
            }
            State::Suspended { mut active, saved: Some(saved) } => {
                match runner.resume(&saved, active.tokens().len(), &left_free) {
                    Ok(Some(sequence)) => {
                        active.resume(sequence, saved.len());
                        runner.forget(saved);
                        self.running.push(*active);
                        return Ok(true);
                    }
                    resumed => {
                        let state = State::Suspended { active, saved: Some(saved) };
                        self.waiting.push_front(Waiting { id, priority, state });
                        return resumed.map(|_| false);
                    }
                }
            }
        };
        self.waiting.push_front(Waiting { id, priority, state });
        Ok(false)
    }

    /// Returns the running request of the lowest rank.
    fn last_running(&self) -> Option<usize> {
        (0..self.running.len()).max_by_key(|&at| self.running[at].rank())
    }

    /// Suspends a running request. It waits by its old rank.
    fn suspend(&mut self, at: usize) -> Result<(), EngineError> {
        let saved = self.session.runner.suspend(self.running[at].sequence)?;
        let mut active = Box::new(self.running.remove(at));
        self.read_no_more(active.id);
        active.note_suspended();
        self.statistics.suspended += 1;
        let (id, priority) = (active.id, active.priority);
        self.queue(Waiting { id, priority, state: State::Suspended { active, saved } });
        Ok(())
    }

    /// Suspends the running request of the lowest rank, because a pass lacks KV blocks. Returns false if it is the only one.
    pub(super) fn make_room(&mut self) -> Result<bool, EngineError> {
        match self.last_running() {
            Some(last) if self.running.len() > 1 => self.suspend(last).map(|()| true),
            _ => Ok(false),
        }
    }
}
