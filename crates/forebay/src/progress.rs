//! Shows progress on standard error, for terminals only.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_engine::Session;
use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressStyle};

use crate::{size, unfinished};

/// Time after which a bar appears. Shorter work needs none.
const PATIENCE: Duration = Duration::from_millis(500);
/// Time before the first rate is shown. The first steps do not predict the rate.
const FIRST_RATE: Duration = Duration::from_millis(250);
/// Interval between measurements of the rate, and between updates of the line.
const STEP: Duration = Duration::from_millis(100);
/// Approximate time over which the rate is averaged, in seconds.
const SMOOTH_SECONDS: f64 = 3.0;

/// Unit that is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    Bytes,
    Tokens,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Bytes => "bytes",
            Unit::Tokens => "tokens",
        }
    }
}

/// Rate at which a count grows, averaged so that it neither jumps nor lags by much.
#[derive(Default)]
struct Rate {
    /// Time and value of the first count. `last` has those of the latest count that was used.
    first: Option<(Duration, u64)>,
    last: (Duration, u64),
    per_second: Option<f64>,
}

impl Rate {
    /// Adds the count `done` at time `now`, measured from any fixed moment.
    fn take(&mut self, now: Duration, done: u64) {
        let Some((began, before)) = self.first else {
            self.first = Some((now, done));
            self.last = (now, done);
            return;
        };
        if done < self.last.1 {
            // The work restarted, as in the next of several runs.
            *self = Rate::default();
            return self.take(now, done);
        }
        let spent = now.saturating_sub(self.last.0);
        let since_first = now.saturating_sub(began);
        if since_first < FIRST_RATE || spent < STEP {
            return;
        }
        let measured = (done - self.last.1) as f64 / spent.as_secs_f64();
        self.per_second = Some(match self.per_second {
            None => (done - before) as f64 / since_first.as_secs_f64(),
            Some(rate) => {
                let weight = 1.0 - (-spent.as_secs_f64() / SMOOTH_SECONDS).exp();
                rate + weight * (measured - rate)
            }
        });
        self.last = (now, done);
    }

    /// Returns the counts per second, once they are known.
    fn per_second(&self) -> Option<f64> {
        self.per_second.filter(|rate| *rate > 0.0)
    }
}

/// A progress bar over a known amount of work. It appears once the work takes a while.
struct Progress {
    what: String,
    unit: Unit,
    started: Instant,
    told: Option<Instant>,
    rate: Rate,
    /// Buffer that is reused from line to line.
    line: String,
    bar: Option<ProgressBar>,
}

impl Progress {
    fn new(what: String, unit: Unit) -> Progress {
        let line = String::with_capacity(80);
        let (started, rate) = (Instant::now(), Rate::default());
        Progress { what, unit, started, told: None, rate, line, bar: None }
    }

    fn update(&mut self, done: u64, total: u64) {
        let now = Instant::now();
        self.rate.take(now - self.started, done);
        if self.told.is_some_and(|told| now - told < STEP) && done < total {
            return;
        }
        self.told = Some(now);
        unfinished::note(unfinished::Progress { unit: self.unit.name(), done, total });
        if self.bar.is_none() && now - self.started < PATIENCE {
            return;
        }
        let done = done.min(total);
        self.describe(done, total);
        // The text is set first, because each of these calls may draw.
        let bar = self.bar.get_or_insert_with(|| new_bar(&self.what, &self.line, total));
        bar.set_prefix(self.line.clone());
        bar.set_length(total);
        bar.set_position(done);
    }

    /// Writes the text after the bar.
    fn describe(&mut self, done: u64, total: u64) {
        self.line.clear();
        let _ = match self.unit {
            Unit::Bytes => {
                write!(self.line, "{} of {}", size::format(done), size::format(total))
            }
            Unit::Tokens => {
                write!(self.line, "{} of {} tokens", HumanCount(done), HumanCount(total))
            }
        };
        let Some(rate) = self.rate.per_second() else { return };
        let _ = match self.unit {
            Unit::Bytes => write!(self.line, ", {}/s", size::format_rate(rate)),
            Unit::Tokens if rate < 10.0 => write!(self.line, ", {rate:.1} tokens/s"),
            Unit::Tokens => write!(self.line, ", {rate:.0} tokens/s"),
        };
        if done < total {
            let left = Duration::from_secs_f64(((total - done) as f64 / rate).min(1e9));
            let _ = write!(self.line, ", {} left", HumanDuration(left));
        }
    }

    /// Erases the bar.
    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

fn new_bar(what: &str, line: &str, total: u64) -> ProgressBar {
    // The bar draws nothing if standard error is not a terminal.
    let bar = ProgressBar::new(total).with_message(what.to_owned()).with_prefix(line.to_owned());
    // The bar is as wide as the terminal leaves room for. A line that wraps cannot be erased in one piece.
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {prefix}") {
        bar.set_style(style);
    }
    bar
}

/// Progress in bytes.
pub struct BytesProgress(Progress);

impl BytesProgress {
    pub fn new(what: &str) -> BytesProgress {
        BytesProgress(Progress::new(what.to_owned(), Unit::Bytes))
    }

    pub fn update(&mut self, done_bytes: u64, total_bytes: u64) {
        self.0.update(done_bytes, total_bytes);
    }
}

/// Progress in tokens.
pub struct TokensProgress(Progress);

impl TokensProgress {
    pub fn new(what: String) -> TokensProgress {
        TokensProgress(Progress::new(what, Unit::Tokens))
    }

    pub fn update(&mut self, done: usize, total: usize) {
        self.0.update(done as u64, total as u64);
    }
}

/// Progress of the prompts of a session, from [`PromptProgress::watch`] until it is dropped.
pub struct PromptProgress(Arc<Mutex<Option<Progress>>>);

impl PromptProgress {
    /// Shows the progress of every prompt that `session` processes, until the prompt is done.
    pub fn watch(session: &mut Session) -> PromptProgress {
        let shown = Arc::new(Mutex::new(None));
        let watched = Arc::clone(&shown);
        session.watch_prompts(Some(Box::new(move |done, total| {
            let mut shown = watched.lock().unwrap_or_else(PoisonError::into_inner);
            if done >= total {
                // The answer follows.
                *shown = None;
                return;
            }
            let progress = shown
                .get_or_insert_with(|| Progress::new("reading the prompt".into(), Unit::Tokens));
            progress.update(done as u64, total as u64);
        })));
        PromptProgress(shown)
    }
}

impl Drop for PromptProgress {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Progress in steps that take seconds each.
pub struct StepProgress {
    bar: ProgressBar,
    steps: u64,
}

impl StepProgress {
    pub fn new(what: &'static str, steps: u64) -> StepProgress {
        let bar = ProgressBar::new(steps).with_message(what);
        if let Ok(style) = ProgressStyle::with_template("{msg} {human_pos} of {human_len} {bar:32}")
        {
            bar.set_style(style);
        }
        bar.tick();
        StepProgress { bar, steps }
    }

    /// Counts one more completed step.
    pub fn step(&self) {
        self.bar.inc(1);
        let done = self.bar.position();
        unfinished::note(unfinished::Progress { unit: "steps", done, total: self.steps });
    }
}

impl Drop for StepProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn no_rate_is_shown_before_there_is_one() {
        let mut rate = Rate::default();
        // The page cache can deliver a gigabyte at once, which does not predict the rate of the disk.
        rate.take(at(0), 0);
        rate.take(at(1), 1 << 30);
        rate.take(at(249), 1 << 30);
        assert_eq!(rate.per_second(), None);
        rate.take(at(500), 1 << 30);
        assert_eq!(rate.per_second(), Some((1_u64 << 31) as f64));
    }

    #[test]
    fn rates_follow_slowly_and_start_anew_with_the_work() {
        let mut rate = Rate::default();
        (0..=20).for_each(|step| rate.take(at(step * 100), step * 100));
        let steady = rate.per_second().unwrap();
        assert!((steady - 1000.0).abs() < 1.0, "{steady}");
        // A burst changes the rate only a little, and a standstill lowers it.
        rate.take(at(2100), 4000);
        let burst = rate.per_second().unwrap();
        assert!(burst > steady && burst < 2.0 * steady, "{burst}");
        (22..=100).for_each(|step| rate.take(at(step * 100), 4000));
        assert!(rate.per_second().unwrap() < 0.2 * steady);
        rate.take(at(10_100), 0);
        assert_eq!(rate.per_second(), None);
    }

    #[test]
    fn the_line_says_what_is_done_how_fast_and_what_is_left() {
        let mut progress = Progress::new("reading the prompt".into(), Unit::Tokens);
        progress.describe(1024, 20_000);
        assert_eq!(progress.line, "1,024 of 20,000 tokens");
        (0..=10).for_each(|step| progress.rate.take(at(step * 100), step * 10));
        progress.describe(1024, 20_000);
        assert_eq!(progress.line, "1,024 of 20,000 tokens, 100 tokens/s, 3 minutes left");
        let mut progress = Progress::new("reading weights".into(), Unit::Bytes);
        (0..=10).for_each(|step| progress.rate.take(at(step * 100), step << 20));
        progress.describe(10 << 20, 10 << 20);
        assert_eq!(progress.line, "10.0 MiB of 10.0 MiB, 10.0 MiB/s");
    }
}
