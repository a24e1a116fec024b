//! Progress on standard error, for terminals only.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Work that is done sooner needs no bar.
const PATIENCE: Duration = Duration::from_millis(300);

/// A bar over a known number of bytes that appears when the work takes a while.
pub struct BytesProgress {
    what: &'static str,
    started: Instant,
    bar: Option<ProgressBar>,
}

impl BytesProgress {
    pub fn new(what: &'static str) -> BytesProgress {
        BytesProgress { what, started: Instant::now(), bar: None }
    }

    pub fn update(&mut self, done_bytes: u64, total_bytes: u64) {
        if self.bar.is_none() {
            if self.started.elapsed() < PATIENCE {
                return;
            }
            self.bar = Some(new_bar(self.what, total_bytes));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done_bytes.min(total_bytes));
        }
    }
}

impl Drop for BytesProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn new_bar(what: &'static str, total_bytes: u64) -> ProgressBar {
    // Draws nothing when standard error is no terminal.
    let bar = ProgressBar::new(total_bytes).with_message(what);
    let template = "{msg} {bar:32} {binary_bytes} of {binary_total_bytes}, \
                    {binary_bytes_per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// A count of steps that take seconds each.
pub struct StepProgress {
    bar: ProgressBar,
}

impl StepProgress {
    pub fn new(what: &'static str, steps: u64) -> StepProgress {
        let bar = ProgressBar::new(steps).with_message(what);
        if let Ok(style) = ProgressStyle::with_template("{msg} {human_pos} of {human_len} {bar:32}")
        {
            bar.set_style(style);
        }
        bar.tick();
        StepProgress { bar }
    }

    /// One more step is done.
    pub fn step(&self) {
        self.bar.inc(1);
    }
}

impl Drop for StepProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Many small steps with the time that is left.
pub struct TokensProgress {
    bar: ProgressBar,
}

impl TokensProgress {
    pub fn new(what: String) -> TokensProgress {
        let bar = ProgressBar::new(0).with_message(what);
        let template = "{msg} {bar:32} {human_pos} of {human_len} tokens, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        TokensProgress { bar }
    }

    pub fn update(&self, done: usize, total: usize) {
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
    }
}

impl Drop for TokensProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
