//! Fairness among callers: whose request begins next, and whose request gives way.
//!
//! Callers have equal parts of the requests that run. Among requests of one priority, the next one to begin is that of the
//! caller with the fewest running requests, and callers with equally many take turns. A caller with at least two more running requests than another one that waits loses
//! the last of them: it is suspended, and goes on with the same bits later.

use super::Engine;
use super::waiting::Waiting;

/// Most callers without running requests whose turns are remembered.
const REMEMBERED_MAX: usize = 256;

/// The callers of running requests, and those that had some.
#[derive(Default)]
pub struct Shares {
    callers: Vec<Caller>,
    /// Number of requests that have begun.
    begun: u64,
}

struct Caller {
    share: u64,
    running: usize,
    /// Number of requests that had begun when the last one of this caller did.
    begun: u64,
}

impl Shares {
    fn count(&mut self, running: impl Iterator<Item = u64>) {
        self.callers.iter_mut().for_each(|caller| caller.running = 0);
        for share in running {
            match self.callers.iter_mut().find(|caller| caller.share == share) {
                Some(caller) => caller.running += 1,
                None => self.callers.push(Caller { share, running: 1, begun: self.begun }),
            }
        }
        if self.callers.len() > REMEMBERED_MAX {
            self.callers.sort_unstable_by_key(|caller| std::cmp::Reverse(caller.begun));
            let mut at = 0;
            self.callers.retain(|caller| {
                at += 1;
                caller.running > 0 || at <= REMEMBERED_MAX / 2
            });
        }
    }

    /// Notes that a request of this caller begins.
    pub(super) fn note_begun(&mut self, share: u64) {
        self.begun += 1;
        let begun = self.begun;
        match self.callers.iter_mut().find(|caller| caller.share == share) {
            Some(caller) => caller.begun = begun,
            None => self.callers.push(Caller { share, running: 0, begun }),
        }
    }

    /// Returns the number of running requests of a caller, and when the last one began. The smallest is next.
    fn turn(&self, share: u64) -> (usize, u64) {
        let caller = self.callers.iter().find(|caller| caller.share == share);
        caller.map_or((0, 0), |caller| (caller.running, caller.begun))
    }

    fn of(&self, share: u64) -> usize {
        self.turn(share).0
    }
}

impl Engine {
    /// Counts the running requests of each caller.
    pub(super) fn count_shares(&mut self) {
        self.shares.count(self.running.iter().map(|active| active.share));
    }

    /// Returns the index of the waiting request that should begin next: of the highest priority, then of the caller with the
    /// fewest running requests, then of the one whose turn is longest ago, then the oldest. Requests that wait for blocks from
    /// the disk are passed over.
    pub(super) fn next_waiting(&self) -> Option<usize> {
        let mut best: Option<(usize, (usize, u64))> = None;
        let mut priority = None;
        for (at, waiting) in self.waiting.iter().enumerate() {
            if waiting.is_passed_over {
                continue;
            }
            // The queue is ordered by priority.
            if priority.is_some_and(|priority| waiting.priority < priority) {
                break;
            }
            priority = Some(waiting.priority);
            let turn = self.shares.turn(waiting.share());
            if best.is_none_or(|(_, first)| turn < first) {
                best = Some((at, turn));
            }
        }
        best.map(|(at, _)| at)
    }

    /// Returns the running request that gives way to a waiting one: of a lower priority, or of a caller that has at least two
    /// more.
    pub(super) fn gives_way_to(&self, waiting: &Waiting) -> Option<usize> {
        let last = self.last_running()?;
        let of = &self.running[last];
        let has_more = || self.shares.of(of.share) >= self.shares.of(waiting.share()) + 2;
        let gives_way =
            of.priority < waiting.priority || of.priority == waiting.priority && has_more();
        gives_way.then_some(last)
    }

    /// Returns the running request that is suspended first: of the lowest priority, then of the caller with the most running
    /// requests, then the newest.
    pub(super) fn last_running(&self) -> Option<usize> {
        (0..self.running.len()).max_by_key(|&at| {
            let of = &self.running[at];
            (std::cmp::Reverse(of.priority), self.shares.of(of.share), of.id)
        })
    }

    /// Returns the number of waiting requests of a caller.
    pub(super) fn waiting_of(&self, share: u64) -> usize {
        self.waiting.iter().filter(|waiting| waiting.share() == share).count()
    }
}
