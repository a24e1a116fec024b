//! How many requests generate in one pass.
//!
//! Rows of a pass share the weights that it reads, so a pass of many rows gives more tokens per second while the weights
//! are in memory. Experts that are not in memory may turn this around: unrelated requests use different experts, push
//! each other's experts out of memory, and a pass of many rows may wait longer for them than the same rows one after the
//! other. No model of this is good enough to decide, because it depends on what the requests have in common. So the engine
//! measures: it begins with the size that the planner predicts to be best for unrelated requests, runs some passes, tries the
//! next smaller and the next larger size, and keeps the one that generates most. A size that lost is tried again ever more
//! seldom.

/// Tokens after a change whose time does not count, because the cache has to adapt, and the least number of passes for
/// them.
const SKIPPED: (usize, usize) = (32, 8);

/// Tokens whose rate is compared, and the least number of passes for them.
const MEASURED: (usize, usize) = (64, 16);

/// A size replaces another if its rate is higher by this factor.
const BETTER: f64 = 1.03;

/// Seconds of passes until a size that lost is tried again: after the first time, and at most. They double every time.
const PAUSE_FIRST: f64 = 2.0;
const PAUSE_MAX: f64 = 60.0;

/// A pause is at least so many times as long as the measurement that was lost.
const PAUSE_PER_MEASUREMENT: f64 = 20.0;

/// The choice of the number of requests that generate in one pass.
#[derive(Debug, Clone)]
pub struct BatchSize {
    /// Sizes to choose from, ascending: powers of two, and the most that can run.
    sizes: Vec<Size>,
    /// Index of the size that passes have now.
    now: usize,
    /// Index of the size that it is compared with, if `now` is tried.
    tried_against: Option<usize>,
    /// True if the size has just changed, so that the first passes do not count.
    changed: bool,
    /// Number of passes of this measurement, their seconds, and the tokens and seconds of those that count.
    passes: usize,
    all_seconds: f64,
    tokens: usize,
    seconds: f64,
    /// Seconds of all passes so far.
    now_seconds: f64,
}

#[derive(Debug, Clone, Copy)]
struct Size {
    rows: usize,
    /// Tokens per second when it was measured last.
    rate: f64,
    /// Value of [`BatchSize::now_seconds`] from which on it is tried again.
    due: f64,
    pause: f64,
}

/// Measurement of a pass of generated tokens.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub rows: usize,
    /// Number of requests that could have had a row.
    pub available: usize,
    pub seconds: f64,
}

impl BatchSize {
    /// Starts with the size of the highest rate that `predict` returns for a number of rows, or with `most`, the most rows
    /// that can run, if it returns `None`.
    pub fn new(most: usize, predict: impl Fn(usize) -> Option<f64>) -> BatchSize {
        let powers = (0..usize::BITS - 1).map(|power| 1 << power).take_while(|rows| *rows < most);
        let size = |rows| Size { rows, rate: 0.0, due: 0.0, pause: PAUSE_FIRST };
        let sizes: Vec<Size> = powers.chain([most.max(1)]).map(size).collect();
        let predicted: Option<Vec<f64>> = sizes.iter().map(|size| predict(size.rows)).collect();
        let best = predicted.and_then(|rates| {
            let best = rates.into_iter().enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
            best.map(|(index, _)| index)
        });
        let now = best.unwrap_or(sizes.len() - 1);
        BatchSize {
            sizes,
            now,
            tried_against: None,
            changed: true,
            passes: 0,
            all_seconds: 0.0,
            tokens: 0,
            seconds: 0.0,
            now_seconds: 0.0,
        }
    }

    /// Returns the most requests that generate in the next pass.
    pub fn rows(&self) -> usize {
        self.sizes[self.now].rows
    }

    /// Notes what a pass of generated tokens took. `misses` returns true if passes since its last call waited for experts.
    pub fn note(&mut self, pass: Measured, misses: impl FnOnce() -> bool) {
        let passes = |(tokens, least): (usize, usize)| least.max(tokens / self.rows());
        let skipped = if self.changed { passes(SKIPPED) } else { 0 };
        let all = skipped + passes(MEASURED);
        self.passes += 1;
        self.all_seconds += pass.seconds;
        self.now_seconds += pass.seconds;
        if self.passes > skipped {
            self.tokens += pass.rows;
            self.seconds += pass.seconds;
        }
        if self.passes == all {
            let before = self.now;
            self.sizes[before].rate = self.tokens as f64 / self.seconds.max(f64::MIN_POSITIVE);
            self.decide(pass.available, misses());
            self.changed = self.now != before;
            (self.passes, self.all_seconds, self.tokens, self.seconds) = (0, 0.0, 0, 0.0);
        }
    }

    /// Chooses the next size after the current one was measured.
    fn decide(&mut self, available: usize, misses: bool) {
        if let Some(other) = self.tried_against.take() {
            let lost = if self.sizes[self.now].rate < BETTER * self.sizes[other].rate {
                std::mem::replace(&mut self.now, other)
            } else {
                other
            };
            let least = PAUSE_PER_MEASUREMENT * self.all_seconds;
            let size = &mut self.sizes[lost];
            size.due = self.now_seconds + size.pause.max(least);
            size.pause = (2.0 * size.pause).min(PAUSE_MAX);
            self.sizes[self.now].pause = PAUSE_FIRST;
            if lost != other {
                return;
            }
        }
        let more = (self.sizes[self.now].rows < available && self.now + 1 < self.sizes.len())
            .then_some(self.now + 1);
        // Without misses, more rows share what a pass reads, so fewer cannot be better.
        let fewer = self.now.checked_sub(1).filter(|_| misses);
        let is_due = |index: &usize| self.sizes[*index].due <= self.now_seconds;
        if let Some(next) = fewer.filter(is_due).or(more.filter(is_due)) {
            self.tried_against = Some(self.now);
            self.now = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs passes whose seconds depend on their rows. Returns the tokens per second and the size at the end.
    fn run(
        sizes: &mut BatchSize,
        available: usize,
        passes: usize,
        misses: bool,
        seconds: impl Fn(usize) -> f64,
    ) -> (f64, usize) {
        let (mut tokens, mut time) = (0, 0.0);
        for _ in 0..passes {
            let rows = sizes.rows().min(available);
            let seconds = seconds(rows);
            tokens += rows;
            time += seconds;
            sizes.note(Measured { rows, available, seconds }, || misses);
        }
        (tokens as f64 / time, sizes.rows())
    }

    #[test]
    fn unrelated_requests_run_one_by_one_and_related_ones_together() {
        // Milliseconds of passes on an H200 with recorded routing, renumbered for each sequence and not.
        let by_rows = |of: [f64; 4]| move |rows: usize| of[rows.ilog2() as usize] * 1e-3;
        let unrelated = by_rows([4.0, 9.6, 25.0, 56.0]);
        let related = by_rows([4.0, 5.6, 8.7, 13.2]);
        for first in [1, 2, 8] {
            let start = |rows| Some(if rows == first { 2.0 } else { 1.0 });
            let mut sizes = BatchSize::new(8, start);
            assert_eq!(sizes.rows(), first);
            run(&mut sizes, 8, 200, true, unrelated);
            let (rate, _) = run(&mut sizes, 8, 4000, true, unrelated);
            assert!(rate > 0.95 * 250.0, "from {first}: {rate}");
            // Other requests come. It takes a while until the larger sizes are tried again.
            run(&mut sizes, 8, 30_000, true, related);
            let (rate, last) = run(&mut sizes, 8, 4000, true, related);
            assert!(last >= 4 && rate > 0.95 * 606.0, "from {first}: {rate}, {last}");
        }
    }

    #[test]
    fn the_first_measurements_cost_little() {
        let related = |rows: usize| [4.0, 5.6, 8.7, 13.2][rows.ilog2() as usize] * 1e-3;
        let mut sizes = BatchSize::new(8, |rows| Some(1.0 / rows as f64));
        let (rate, last) = run(&mut sizes, 8, 300, true, related);
        assert!(last == 8 && rate > 0.8 * 606.0, "{rate}, {last}");
    }

    #[test]
    fn without_misses_all_run_together() {
        let mut sizes = BatchSize::new(6, |rows| Some(-(rows as f64)));
        assert_eq!(sizes.rows(), 1);
        let seconds = |rows: usize| 1e-3 + 1e-4 * rows as f64;
        let (_, last) = run(&mut sizes, 6, 200, false, seconds);
        assert_eq!(last, 6);
        // A busy machine makes one measurement slow. Fewer rows are not tried all the same.
        let (_, last) = run(&mut sizes, 6, 24, false, |_| 1.0);
        assert_eq!(last, 6);
    }

    #[test]
    fn sizes_are_powers_of_two_and_what_can_run() {
        let rows = |most: usize| {
            let sizes = BatchSize::new(most, |_| None).sizes;
            sizes.iter().map(|size| size.rows).collect::<Vec<_>>()
        };
        assert_eq!((rows(1), rows(2), rows(4)), (vec![1], vec![1, 2], vec![1, 2, 4]));
        assert_eq!(rows(12), [1, 2, 4, 8, 12]);
        assert_eq!(BatchSize::new(12, |_| None).rows(), 12);
    }

    #[test]
    fn fewer_requests_than_the_size_are_measured_too() {
        let mut sizes = BatchSize::new(4, |_| None);
        for rows in [4, 3].into_iter().cycle().take(SKIPPED.1 + MEASURED.1) {
            sizes.note(Measured { rows, available: rows, seconds: 0.5 }, || false);
        }
        assert_eq!((sizes.rows(), sizes.sizes[2].rate), (4, 7.0));
    }
}
