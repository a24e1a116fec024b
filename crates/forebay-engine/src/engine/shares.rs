//! Fairness among callers: whose request begins next, whose request gives way, and how many generate together.
//!
//! Callers have equal parts of the requests that run. Among requests of one priority, the next one to begin is that of the
//! caller with the fewest running requests, and callers with equally many take turns. A caller with at least two more running
//! requests than another one that waits loses the last of them: it is suspended, and goes on with the same bits later.
//!
//! With N callers, a pass has so many rows that it takes less than N times as long as a pass with the rows of the one that has the
//! fewest. Where a pass of many rows takes hardly longer, all generate. Otherwise, the requests of a caller take turns.
//!
//! Over a second, callers that ask all the time have equal parts of the time of passes, too. While one has had clearly less than
//! others, two thirds of the time are its own: others have rows in its passes as far as these cost nearly nothing. So a caller that
//! asks now and then hardly waits for one that always does.
//!
//! Most callers ask again soon. So a caller counts for a moment after its last request, too: a place is left free for it, and
//! passes of others stay as short as if it were there. Its next request then neither suspends another one nor waits for a long
//! pass.

use std::time::{Duration, Instant};

use super::Engine;
use super::active::Active;
use super::latency::follow;
use super::schedule::{Limits, Part, count_callers};
use super::waiting::Waiting;

/// Most callers without running requests whose turns are remembered.
const REMEMBERED_MAX: usize = 256;

/// Part of a caller's time that passes may take. The rest is for the wait until the next pass begins.
pub const PASS_SHARE: f64 = 0.8;

/// Time over which callers have equal parts of the time of passes.
const WINDOW: Duration = Duration::from_secs(1);
/// Seconds of passes in this time that a caller may have had more than another one and not be ahead of it.
const AHEAD: f64 = 0.1;
/// Passes whose time a caller may have had more, if that is longer. Otherwise callers would take turns with long passes of their
/// own, although passes together are quicker.
const AHEAD_PASSES: f64 = 2.0;
/// Most time of passes in a row from which callers that are ahead are left out, in usual times of a pass that leaves out none. So the time
/// between two of their tokens grows to about three times at most. Counted in passes, callers whose rows make passes long would
/// have most of the time.
const WITHOUT_AHEAD_MAX: f64 = 2.0;
/// How much longer a pass may be because of rows of callers that are ahead.
const LONGER: f64 = 0.1;

/// The callers of requests, and those that had some.
pub struct Shares {
    callers: Vec<Caller>,
    /// Time for which a caller without requests counts as one.
    presence: Duration,
    /// Number of requests that have begun.
    begun: u64,
    /// Times of passes that generate.
    pub(super) costs: PassCosts,
    /// True if passes of prompts alone are as short as if others generated, because another caller may come.
    pub(super) passes_are_short: bool,
    /// True if a request that generates had no row in the last pass.
    left_out: bool,
    /// When the times of callers were last brought up to date.
    noted: Instant,
    /// Usual seconds of a pass.
    pass_seconds: Option<f64>,
    /// The callers that the next pass leaves out, because they have had more time than others.
    ahead: Vec<u64>,
    /// Seconds of passes in a row that left some out.
    without_ahead: f64,
    /// Usual seconds of a pass that leaves out none.
    with_all: Option<f64>,
}

struct Caller {
    share: u64,
    running: usize,
    /// True if one of its requests waits.
    waits: bool,
    /// When it last had a request.
    seen: Instant,
    /// Number of requests that had begun when the last one of this caller did.
    begun: u64,
    /// Seconds of passes that it has had, of which older ones count less.
    used: f64,
}

impl Caller {
    fn new(share: u64, begun: u64, seen: Instant) -> Caller {
        Caller { share, running: 0, waits: false, seen, begun, used: 0.0 }
    }

    fn is_present(&self, presence: Duration, now: Instant) -> bool {
        self.running > 0 || self.waits || now.duration_since(self.seen) < presence
    }
}

impl Shares {
    /// Begins without callers. One without requests counts for `presence` after its last request.
    pub(super) fn new(presence: Duration) -> Shares {
        Shares {
            callers: Vec::new(),
            presence,
            begun: 0,
            costs: PassCosts::default(),
            passes_are_short: false,
            left_out: false,
            noted: Instant::now(),
            pass_seconds: None,
            ahead: Vec::new(),
            without_ahead: 0.0,
            with_all: None,
        }
    }

    fn count(
        &mut self,
        running: impl Iterator<Item = u64>,
        waiting: impl Iterator<Item = u64>,
        now: Instant,
    ) {
        for caller in &mut self.callers {
            (caller.running, caller.waits) = (0, false);
        }
        running.for_each(|share| self.seen(share, now).running += 1);
        waiting.for_each(|share| self.seen(share, now).waits = true);
        if self.callers.len() > REMEMBERED_MAX {
            self.callers.sort_unstable_by_key(|caller| std::cmp::Reverse(caller.begun));
            let mut at = 0;
            self.callers.retain(|caller| {
                at += 1;
                caller.running > 0 || caller.waits || at <= REMEMBERED_MAX / 2
            });
        }
    }

    fn find(&self, share: u64) -> Option<&Caller> {
        self.callers.iter().find(|caller| caller.share == share)
    }

    /// Returns a caller that has a request.
    fn seen(&mut self, share: u64, now: Instant) -> &mut Caller {
        let at =
            self.callers.iter().position(|caller| caller.share == share).unwrap_or_else(|| {
                self.callers.push(Caller::new(share, self.begun, now));
                self.callers.len() - 1
            });
        self.callers[at].seen = now;
        &mut self.callers[at]
    }

    /// Returns the number of callers that have requests, or had some a moment ago.
    fn present(&self, now: Instant) -> usize {
        self.callers.iter().filter(|caller| caller.is_present(self.presence, now)).count()
    }

    /// Returns the number of places that should stay free when a request of this caller begins: one for each of the others that have
    /// no request now but had some a moment ago, unless it is the caller's first one.
    fn kept_free(&self, share: u64, now: Instant) -> usize {
        let may_ask = |caller: &&Caller| {
            caller.running == 0 && !caller.waits && caller.is_present(self.presence, now)
        };
        match self.of(share) {
            0 => 0,
            _ => self.callers.iter().filter(may_ask).count(),
        }
    }

    /// Notes that a request of this caller begins.
    pub(super) fn note_begun(&mut self, share: u64) {
        self.begun += 1;
        let begun = self.begun;
        self.seen(share, Instant::now()).begun = begun;
    }

    /// Notes the time of a pass in which callers had so many rows.
    fn note_use(
        &mut self,
        rows: impl Iterator<Item = (u64, usize)> + Clone,
        seconds: f64,
        now: Instant,
    ) {
        let passed = now.duration_since(self.noted);
        let left = (-passed.as_secs_f64() / WINDOW.as_secs_f64()).exp();
        self.noted = now;
        follow(&mut self.pass_seconds, seconds);
        if self.ahead.is_empty() {
            self.without_ahead = 0.0;
            follow(&mut self.with_all, seconds);
        } else {
            self.without_ahead += seconds;
        }
        self.callers.iter_mut().for_each(|caller| caller.used *= left);
        let all: usize = rows.clone().map(|(_, rows)| rows).sum();
        for (share, rows) in rows {
            if let Some(caller) = self.callers.iter_mut().find(|caller| caller.share == share) {
                caller.used += seconds * rows as f64 / all as f64;
            }
        }
    }

    /// Finds the callers that the next pass leaves out, of those that could have rows.
    fn find_ahead(&mut self, could_run: impl Iterator<Item = u64> + Clone) {
        self.ahead.clear();
        let more = AHEAD.max(AHEAD_PASSES * self.pass_seconds.unwrap_or(0.0));
        let used = |shares: &Shares, share| shares.find(share).map_or(0.0, |caller| caller.used);
        let least = could_run.clone().map(|share| used(self, share)).fold(f64::INFINITY, f64::min);
        if self.without_ahead < WITHOUT_AHEAD_MAX * self.with_all.unwrap_or(0.0) {
            for share in could_run {
                if used(self, share) > least + more && !self.is_ahead(share) {
                    self.ahead.push(share);
                }
            }
        }
    }

    /// Returns true if the next pass leaves out the rows of this caller that cost time.
    pub(super) fn is_ahead(&self, share: u64) -> bool {
        self.ahead.contains(&share)
    }

    /// Returns the number of running requests of a caller, and when the last one began. The smallest is next.
    fn turn(&self, share: u64) -> (usize, u64) {
        self.find(share).map_or((0, 0), |caller| (caller.running, caller.begun))
    }

    fn of(&self, share: u64) -> usize {
        self.turn(share).0
    }
}

/// Usual times of passes that generate, by their number of rows.
#[derive(Default)]
pub struct PassCosts {
    /// Seconds of a pass with `index + 1` rows, if there was one.
    seconds: Vec<Option<f64>>,
}

impl PassCosts {
    /// Notes the time of a pass.
    pub fn note(&mut self, rows: usize, seconds: f64) {
        let Some(at) = rows.checked_sub(1) else { return };
        if self.seconds.len() <= at {
            self.seconds.resize(rows, None);
        }
        follow(&mut self.seconds[at], seconds);
    }

    /// Returns the seconds of a pass without rows and those of each row, by the straight line through the known times. If only one is
    /// known, all of it is the rows'.
    fn line(&self) -> Option<[f64; 2]> {
        let known = || {
            let numbered = (1..).zip(&self.seconds);
            numbered.filter_map(|(rows, seconds): (u32, _)| Some((f64::from(rows), (*seconds)?)))
        };
        let count = known().count() as f64;
        let mean = |of: fn((f64, f64)) -> f64| known().map(of).sum::<f64>() / count;
        let (rows, seconds) = (mean(|of| of.0), mean(|of| of.1));
        if count < 2.0 {
            return (count > 0.0).then(|| [0.0, seconds / rows]);
        }
        let spread: f64 = known().map(|of| (of.0 - rows).powi(2)).sum();
        let each = known().map(|of| (of.0 - rows) * (of.1 - seconds)).sum::<f64>() / spread;
        let each = each.clamp(0.0, seconds / rows);
        Some([seconds - each * rows, each])
    }

    /// Returns the most rows of a pass that takes less than `callers` times as long as one with `own` rows, so that the wait for its
    /// begin has room in that time, too. They are at least `own` for each.
    pub fn rows_max(&self, own: usize, callers: usize) -> usize {
        let least = callers * own;
        let Some([fixed, each]) = self.line() else { return least };
        let seconds = PASS_SHARE * callers as f64 * (fixed + each * own as f64);
        least.max(((seconds - fixed) / each.max(1e-12)) as usize)
    }

    /// Returns the number of rows that hardly make a pass with `own` rows longer.
    pub fn nearly_free(&self, own: usize) -> usize {
        let Some([fixed, each]) = self.line() else { return 0 };
        (LONGER * (fixed + each * own as f64) / each.max(1e-12)) as usize
    }
}

impl Engine<'_> {
    /// Returns the limits of the next pass. `pauses` says whether passes of prompts pause for others.
    pub(super) fn limits_now(&mut self, pauses: bool) -> Limits {
        let callers = self.shares.present(Instant::now());
        let prompt_rows = match pauses {
            true => self.limits.prompt_rows,
            false => self.pace.prompt_rows_of(callers),
        };
        let limits = Limits { prompt_rows, ..self.limits };
        let share = callers > 1 && self.pace.is_bounded();
        self.shares.passes_are_short = share && !pauses;
        self.shares.ahead.clear();
        if !share {
            return limits;
        }
        // Another caller that comes waits for the pass that runs.
        let prompt_rows_alone = if pauses { limits.prompt_rows_alone } else { prompt_rows };
        let shared_rows = self.shared_rows(callers);
        let rows_of_ahead = self.rows_of_ahead();
        Limits { prompt_rows_alone, shared_rows, rows_of_ahead, ..limits }
    }

    /// Finds the callers that are ahead, and returns the most rows that they have in the next pass.
    fn rows_of_ahead(&mut self) -> usize {
        let Engine { shares, running, session, .. } = self;
        let could_run = running.iter().filter(|of| !session.runner.is_arriving(of.sequence));
        shares.find_ahead(could_run.map(|of| of.share));
        let own = running.iter().filter(|of| !of.reads() && !shares.is_ahead(of.share)).count();
        shares.costs.nearly_free(own.max(1))
    }

    /// Gives callers their part of the time of a pass.
    pub(super) fn note_use(&mut self, parts: &[Part], seconds: f64) {
        let Engine { shares, running, .. } = self;
        let rows = parts.iter().map(|part| (running[part.index].share, part.count));
        shares.note_use(rows, seconds, Instant::now());
    }

    /// Returns the most rows of a pass that generate, because there are so many callers. A caller whose prompt is read is one,
    /// too: it gets its first token from that pass.
    fn shared_rows(&self, callers: usize) -> usize {
        let generating = |active: &Active| {
            let same = self.running.iter().filter(|of| of.share == active.share && !of.reads());
            same.count().max(1)
        };
        let all_run = count_callers(0..self.running.len(), |at| self.running[at].share) >= callers;
        let own = match all_run {
            true => self.running.iter().map(generating).min().unwrap_or(1),
            false => 1,
        };
        self.shares.costs.rows_max(own, callers)
    }

    /// Returns true if so many places are free that a request of this caller may begin, of `most`.
    pub(super) fn has_place(&self, share: u64, most: usize) -> bool {
        let kept_free = match self.pace.is_bounded() {
            true => self.shares.kept_free(share, Instant::now()),
            false => 0,
        };
        self.running.len() + kept_free < most
    }

    /// Takes note of the requests that generate in the next pass.
    pub(super) fn note_turns(&mut self, parts: &[Part]) {
        self.running.iter_mut().for_each(|active| active.had_turn = false);
        for part in parts.iter().filter(|part| !part.reads) {
            self.running[part.index].had_turn = true;
        }
        self.shares.left_out = self.running.iter().any(|of| !of.reads() && !of.had_turn);
    }

    /// Lets other requests generate if some wait for it and those that generate now have had their share of the time.
    pub(super) fn take_turns(&mut self) {
        let generates = |active: &Active| !active.reads();
        let generating = self.running.iter().filter(|active| generates(active)).count();
        let turns = generating.div_ceil(self.limits.decode_rows);
        let turns = turns.max(1 + usize::from(self.shares.left_out));
        if !self.pace.ends_turn(turns) {
            return;
        }
        let waits = |active: &&Active| generates(active) && !active.had_turn;
        let wait: Vec<u64> = self.running.iter().filter(waits).map(|of| of.share).collect();
        let had_turn = |active: &mut Active| {
            active.had_turn && generates(active) && wait.contains(&active.share)
        };
        let had: Vec<Active> = self.running.extract_if(.., had_turn).collect();
        self.running.extend(had);
    }

    /// Counts the requests of each caller.
    pub(super) fn count_shares(&mut self) {
        let running = self.running.iter().map(|active| active.share);
        let waiting = self.waiting.iter().map(Waiting::share);
        self.shares.count(running, waiting, Instant::now());
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

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(times: &[(usize, f64)]) -> PassCosts {
        let mut costs = PassCosts::default();
        times.iter().for_each(|(rows, seconds)| costs.note(*rows, *seconds));
        costs
    }

    #[test]
    fn rows_of_others_make_a_pass_as_much_longer_as_there_are_callers() {
        assert_eq!(costs(&[]).rows_max(1, 2), 2);
        // Of one time nothing follows about others.
        assert_eq!(costs(&[(8, 8e-3)]).rows_max(1, 2), 2);
        // Every row takes as long as the first one.
        assert_eq!(costs(&[(1, 1e-3), (8, 8e-3)]).rows_max(2, 2), 4);
        assert_eq!(costs(&[(1, 1e-3), (8, 8e-3)]).rows_max(2, 3), 6);
        // A pass of 4 ms and 0.1 ms for each row may take 1.6 times 4.1 ms.
        let most = costs(&[(1, 4.1e-3), (4, 4.4e-3), (16, 5.6e-3)]).rows_max(1, 2);
        assert!((25..=26).contains(&most), "{most}");
        // More rows are no slower.
        assert!(costs(&[(1, 5e-3), (8, 5e-3)]).rows_max(1, 2) > 1_000_000);
        assert!(costs(&[(1, 5e-3), (8, 4e-3)]).rows_max(1, 2) > 1_000_000);
        // Times that grow faster than rows.
        assert_eq!(costs(&[(2, 1e-3), (8, 9e-3)]).rows_max(1, 2), 2);
    }

    /// Counts the requests of callers, so many milliseconds after the start.
    fn count(shares: &mut Shares, at: (Instant, u64), running: &[u64], waiting: &[u64]) {
        let now = at.0 + Duration::from_millis(at.1);
        shares.count(running.iter().copied(), waiting.iter().copied(), now);
    }

    #[test]
    fn a_caller_counts_for_a_moment_after_its_last_request() {
        let start = Instant::now();
        let later = |millis| start + Duration::from_millis(millis);
        let mut shares = Shares::new(Duration::from_secs(1));
        assert_eq!(shares.present(start), 0);
        count(&mut shares, (start, 0), &[1, 1, 2], &[3]);
        assert_eq!(shares.present(start), 3);
        // None of these is absent.
        assert_eq!([1, 2, 3].map(|share| shares.kept_free(share, start)), [0, 0, 0]);
        count(&mut shares, (start, 500), &[1, 1], &[3]);
        assert_eq!(shares.present(later(500)), 3);
        assert_eq!(shares.kept_free(1, later(500)), 1, "for the second caller");
        assert_eq!(shares.kept_free(3, later(500)), 0, "its first request");
        assert_eq!(shares.kept_free(2, later(500)), 0);
        count(&mut shares, (start, 600), &[1], &[]);
        assert_eq!(shares.kept_free(1, later(600)), 2, "for the second and the third caller");
        assert_eq!(shares.kept_free(1, later(1100)), 1);
        assert_eq!([1100, 1550, 1700].map(|at| shares.present(later(at))), [2, 1, 1]);
        count(&mut shares, (start, 1700), &[], &[]);
        assert_eq!(shares.present(later(1700)), 0, "its last request was seen longer ago");
    }

    #[test]
    fn a_caller_that_had_less_time_has_two_of_three_passes() {
        let mut shares = Shares::new(Duration::from_secs(1));
        let start = shares.noted;
        count(&mut shares, (start, 0), &[1, 1, 2], &[]);
        let mut millis = 0;
        let mut pass = |shares: &mut Shares, callers: &[u64]| {
            shares.find_ahead(callers.iter().copied());
            let (first, second) =
                (!shares.is_ahead(1), callers.contains(&2) && !shares.is_ahead(2));
            let rows = [(1, usize::from(first)), (2, usize::from(second))];
            millis += 10;
            let now = start + Duration::from_millis(millis);
            shares.note_use(rows.into_iter(), 10e-3, now);
            (first, second)
        };
        // Only the first caller, for a second.
        assert!((0..100).all(|_| pass(&mut shares, &[1, 1]) == (true, false)));
        // The other one has had nothing.
        let both: Vec<_> = (0..6).map(|_| pass(&mut shares, &[1, 1, 2])).collect();
        let alone = (false, true);
        assert_eq!(both, [alone, alone, (true, true), alone, alone, (true, true)]);
        // It asks for half of the time, and has nearly all passes of its own until both have had as much.
        (0..500).for_each(|at| {
            let callers: &[u64] = if at % 2 == 0 { &[1, 1, 2] } else { &[1, 1] };
            pass(&mut shares, callers);
        });
        assert_eq!(pass(&mut shares, &[1, 1, 2]), alone);
        // With as many passes as the other one, it is no longer behind.
        for _ in 0..200 {
            pass(&mut shares, &[1, 1, 2]);
        }
        assert!((0..20).all(|_| pass(&mut shares, &[1, 1, 2]) == (true, true)));
    }

    #[test]
    fn long_passes_of_callers_that_are_ahead_leave_more_passes_to_others() {
        let mut shares = Shares::new(Duration::from_secs(1));
        let mut now = shares.noted;
        count(&mut shares, (now, 0), &[1, 2], &[]);
        let mut pass = |callers: &[u64]| {
            shares.find_ahead(callers.iter().copied());
            let alone = shares.is_ahead(1);
            let millis = if alone { 2 } else { 10 };
            now += Duration::from_millis(millis);
            let rows = [(1, usize::from(!alone)), (2, callers.len() - 1)];
            shares.note_use(rows.into_iter(), millis as f64 / 1e3, now);
            alone
        };
        assert!((0..100).all(|_| !pass(&[1])));
        // Of 30 ms, 20 are for the caller that had nothing.
        let alone: Vec<bool> = (0..22).map(|_| pass(&[1, 2])).collect();
        assert!(alone.iter().enumerate().all(|(at, alone)| *alone == (at % 11 < 10)), "{alone:?}");
    }

    #[test]
    fn callers_do_not_take_turns_with_long_passes() {
        let mut shares = Shares::new(Duration::from_secs(1));
        let start = shares.noted;
        count(&mut shares, (start, 0), &[1, 2], &[]);
        let rows =
            |shares: &Shares| [1, 2].map(|share| (share, usize::from(!shares.is_ahead(share))));
        let mut times = (1..).map(|pass| start + Duration::from_millis(300 * pass));
        // One has all passes, then both ask.
        (0..10).for_each(|_| shares.note_use([(1, 1)].into_iter(), 0.3, times.next().unwrap()));
        let mut together = 0;
        for _ in 0..20 {
            shares.find_ahead([1, 2].into_iter());
            let rows = rows(&shares);
            together += rows[0].1 * rows[1].1;
            shares.note_use(rows.into_iter(), 0.3, times.next().unwrap());
        }
        assert!(together >= 18, "{together} of 20");
    }

    #[test]
    fn rows_are_nearly_free_where_passes_of_many_take_hardly_longer() {
        assert_eq!(costs(&[]).nearly_free(1), 0);
        assert_eq!(costs(&[(1, 1e-3), (8, 8e-3)]).nearly_free(1), 0);
        let free = costs(&[(1, 100.1e-3), (8, 100.8e-3)]).nearly_free(1);
        assert!((99..=101).contains(&free), "{free}");
    }

    #[test]
    fn callers_that_are_gone_are_forgotten_but_not_those_that_have_requests() {
        let start = Instant::now();
        let mut shares = Shares::new(Duration::from_secs(1));
        let all: Vec<u64> = (0..2 * REMEMBERED_MAX as u64).collect();
        count(&mut shares, (start, 0), &all, &[]);
        assert_eq!(shares.callers.len(), all.len());
        count(&mut shares, (start, 1), &all[..1], &all[5..6]);
        assert!(shares.callers.len() <= REMEMBERED_MAX / 2 + 2);
        assert_eq!((shares.of(0), shares.callers.iter().filter(|of| of.waits).count()), (1, 1));
    }

    #[test]
    fn newer_times_count_more() {
        let mut of = costs(&[(1, 1e-3), (8, 1e-3)]);
        (0..50).for_each(|_| of.note(8, 8e-3));
        assert_eq!(of.rows_max(1, 2), 2);
    }
}
