//! How many requests generate in one pass.
//!
//! Rows of a pass share the weights that it reads, so a pass of many rows gives more tokens per second while the weights
//! are in memory. Experts that are not in memory may turn this around: unrelated requests use different experts, push
//! each other's experts out of memory, and a pass of many rows may wait longer for them than the same rows one after the
//! other. No model of this is good enough to decide, because it depends on what the requests have in common. So the engine
//! measures: it runs some passes of a size, tries the next smaller and the next larger size, and keeps the one that
//! generates most. A size that lost is tried again ever more seldom.

/// Passes after a change whose time does not count, because the cache has to adapt.
const SKIPPED_PASSES: usize = 8;

/// Passes whose rate is compared.
const MEASURED_PASSES: usize = 16;

/// A size replaces another if its rate is higher by this factor.
const BETTER: f64 = 1.03;

/// Measurements until a size that lost is tried again: after the first time, and at most. The pause doubles every time.
const PAUSE_FIRST: u32 = 4;
const PAUSE_MOST: u32 = 64;

/// The choice of the number of requests that generate in one pass.
#[derive(Debug, Clone)]
pub struct BatchSize {
    /// Sizes to choose from, ascending: powers of two, and the most that can run.
    sizes: Vec<Size>,
    /// Index of the size that passes have now.
    now: usize,
    /// Index of the size that it is compared with, if `now` is tried.
    tried_against: Option<usize>,
    /// Number of passes at the start of this measurement that do not count.
    skipped: usize,
    /// Number of passes of this measurement, and the tokens and seconds of those that count.
    passes: usize,
    tokens: usize,
    seconds: f64,
    /// Number of measurements so far.
    measured: u32,
}

#[derive(Debug, Clone, Copy)]
struct Size {
    rows: usize,
    /// Tokens per second when it was measured last.
    rate: f64,
    /// Number of the measurement from which on it is tried again.
    due: u32,
    pause: u32,
}

/// What a pass of generated tokens took.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub rows: usize,
    /// Number of requests that could have had a row.
    pub available: usize,
    pub seconds: f64,
}

impl BatchSize {
    /// Starts with `first` rows; at most `most` can run.
    pub fn new(first: usize, most: usize) -> BatchSize {
        let powers = (0..usize::BITS - 1).map(|power| 1 << power).take_while(|rows| *rows < most);
        let size = |rows| Size { rows, rate: 0.0, due: 0, pause: PAUSE_FIRST };
        let sizes: Vec<Size> = powers.chain([most.max(1)]).map(size).collect();
        let now = sizes.partition_point(|size| size.rows < first).min(sizes.len() - 1);
        BatchSize {
            sizes,
            now,
            tried_against: None,
            skipped: SKIPPED_PASSES,
            passes: 0,
            tokens: 0,
            seconds: 0.0,
            measured: 0,
        }
    }

    /// Returns the most requests that generate in the next pass.
    pub fn rows(&self) -> usize {
        self.sizes[self.now].rows
    }

    /// Notes what a pass of generated tokens took. `misses` returns true if passes since its last call waited for experts.
    pub fn note(&mut self, pass: Measured, misses: impl FnOnce() -> bool) {
        self.passes += 1;
        if self.passes > self.skipped {
            self.tokens += pass.rows;
            self.seconds += pass.seconds;
        }
        if self.passes == self.skipped + MEASURED_PASSES {
            let before = self.now;
            self.measured += 1;
            self.sizes[before].rate = self.tokens as f64 / self.seconds.max(f64::MIN_POSITIVE);
            self.decide(pass.available, misses());
            self.skipped = if self.now == before { 0 } else { SKIPPED_PASSES };
            (self.passes, self.tokens, self.seconds) = (0, 0, 0.0);
        }
    }

    /// Chooses the next size after the current one was measured.
    fn decide(&mut self, available: usize, misses: bool) {
        if let Some(other) = self.tried_against.take() {
            let (tried, measured) = (self.sizes[self.now], self.measured);
            if tried.rate < BETTER * self.sizes[other].rate {
                let size = &mut self.sizes[self.now];
                size.due = measured + size.pause;
                size.pause = (2 * size.pause).min(PAUSE_MOST);
                self.now = other;
                return;
            }
            self.sizes[self.now].pause = PAUSE_FIRST;
            // The other one has just been measured.
            self.sizes[other].due = measured + self.sizes[other].pause;
        }
        let more = (self.sizes[self.now].rows < available && self.now + 1 < self.sizes.len())
            .then_some(self.now + 1);
        // Without misses, more rows share what a pass reads, so fewer cannot be better.
        let fewer = self.now.checked_sub(1).filter(|_| misses);
        let is_due = |index: &usize| self.sizes[*index].due <= self.measured;
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
        // Seconds that were measured on an H200 with recorded routing, one renumbered for each sequence.
        let unrelated = |rows: usize| [0.0, 4.0, 9.6, 0.0, 25.0, 0.0, 0.0, 0.0, 56.0][rows] * 1e-3;
        let related = |rows: usize| [0.0, 4.0, 5.8, 0.0, 8.9, 0.0, 0.0, 0.0, 15.0][rows] * 1e-3;
        for first in [1, 2, 8] {
            let mut sizes = BatchSize::new(first, 8);
            run(&mut sizes, 8, 300, true, unrelated);
            let (rate, last) = run(&mut sizes, 8, 4000, true, unrelated);
            assert!(last <= 2 && rate > 0.9 * 250.0, "from {first}: {rate}, {last}");
            // Other requests come.
            run(&mut sizes, 8, 4000, true, related);
            let (rate, last) = run(&mut sizes, 8, 4000, true, related);
            assert!(last >= 4 && rate > 0.93 * 533.0, "from {first}: {rate}, {last}");
        }
    }

    #[test]
    fn without_misses_all_run_together() {
        let mut sizes = BatchSize::new(1, 6);
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
        let rows = |first, most| BatchSize::new(first, most).rows();
        assert_eq!(
            (rows(1, 1), rows(3, 8), rows(9, 12), rows(99, 12), rows(0, 4)),
            (1, 4, 12, 12, 1)
        );
    }

    #[test]
    fn fewer_requests_than_the_size_are_measured_too() {
        let mut sizes = BatchSize::new(4, 4);
        for rows in [4, 3].into_iter().cycle().take(SKIPPED_PASSES + MEASURED_PASSES) {
            sizes.note(Measured { rows, available: rows, seconds: 0.5 }, || false);
        }
        assert_eq!((sizes.measured, sizes.rows(), sizes.sizes[2].rate), (1, 4, 7.0));
    }
}
