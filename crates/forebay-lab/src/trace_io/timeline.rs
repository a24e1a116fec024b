//! Cuts a recording into slices of time.

use forebay_store::{ReadRecord, Recording, Why};

use super::report::Timeline;

/// Number of slices of a [`Timeline`].
pub(super) const SLICES: usize = 240;
/// Window in seconds whose best rate is the limit if none was measured.
const BEST_WINDOW: f64 = 0.1;
const BEST_STEP: f64 = 0.01;
const STEPS_MAX: usize = 1 << 20;

/// Amounts spread evenly over intervals of time, in equal bins.
struct Bins {
    width: f64,
    edges: Vec<f64>,
    /// Change of the amount per whole bin.
    steps: Vec<f64>,
}

impl Bins {
    fn new(count: usize, width: f64) -> Bins {
        Bins { width, edges: vec![0.0; count], steps: vec![0.0; count + 1] }
    }

    fn add(&mut self, start: f64, end: f64, amount: f64) {
        let last = self.edges.len() - 1;
        let bin = |time: f64| ((time / self.width) as usize).min(last);
        let (first_bin, last_bin) = (bin(start), bin(end));
        if first_bin == last_bin || end <= start {
            self.edges[first_bin] += amount;
            return;
        }
        let rate = amount / (end - start);
        self.edges[first_bin] += rate * ((first_bin + 1) as f64 * self.width - start);
        self.edges[last_bin] += rate * (end - last_bin as f64 * self.width);
        self.steps[first_bin + 1] += rate * self.width;
        self.steps[last_bin] -= rate * self.width;
    }

    fn amounts(self) -> Vec<f64> {
        let mut level = 0.0;
        let whole = self.steps.iter().map(|step| {
            level += step;
            level
        });
        // Differences of large sums leave rounding errors below zero.
        self.edges.iter().zip(whole).map(|(edge, whole)| (edge + whole).max(0.0)).collect()
    }
}

pub(super) fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 * 1e-9
}

/// Returns start and end of a record in seconds.
pub(super) fn span(start_nanoseconds: u64, duration_nanoseconds: u64) -> (f64, f64) {
    let end = start_nanoseconds.saturating_add(duration_nanoseconds);
    (seconds(start_nanoseconds), seconds(end))
}

fn read_span(read: &ReadRecord) -> (f64, f64) {
    span(read.start_nanoseconds, read.duration_nanoseconds)
}

/// Returns the requests that go through the read engine. Small reads do not.
pub(super) fn at_engine(recording: &Recording) -> impl Iterator<Item = &ReadRecord> {
    recording.reads.iter().filter(|read| read.why != Why::Small)
}

/// Returns the time from the start of the recording to its end, or to the end of a record that is
/// later.
pub(super) fn duration(recording: &Recording) -> f64 {
    let reads = recording.reads.iter().map(|read| read_span(read).1);
    let waits = recording.waits.iter().map(|w| span(w.start_nanoseconds, w.duration_nanoseconds).1);
    reads.chain(waits).fold(seconds(recording.nanoseconds), f64::max)
}

/// Overlap of the requests.
#[derive(Default)]
pub(super) struct Depth {
    /// Disjoint intervals with at least one request.
    pub busy: Vec<(f64, f64)>,
    pub busy_seconds: f64,
    /// Sum of all durations.
    pub request_seconds: f64,
    pub max: u32,
}

pub(super) fn depth(recording: &Recording) -> Depth {
    let mut changes: Vec<(u64, i8)> = Vec::new();
    let mut found = Depth::default();
    for read in at_engine(recording) {
        let start = read.start_nanoseconds;
        changes.push((start, 1));
        changes.push((start.saturating_add(read.duration_nanoseconds), -1));
        found.request_seconds += seconds(read.duration_nanoseconds);
    }
    // At equal times the ends come first, so a request that directly follows another does not count
    // as depth two.
    changes.sort_unstable();
    let (mut level, mut since) = (0_i64, 0);
    for (time, change) in changes {
        if level <= 0 && change > 0 {
            since = time;
        }
        level += i64::from(change);
        found.max = found.max.max(level.max(0) as u32);
        if level == 0 && change < 0 && time > since {
            match found.busy.last_mut() {
                Some(last) if last.1 == seconds(since) => last.1 = seconds(time),
                _ => found.busy.push((seconds(since), seconds(time))),
            }
            found.busy_seconds += seconds(time - since);
        }
    }
    found
}

pub(super) fn timeline(recording: &Recording, depth: &Depth) -> Timeline {
    let total = duration(recording);
    if total <= 0.0 {
        return Timeline::default();
    }
    let width = total / SLICES as f64;
    let bins = || Bins::new(SLICES, width);
    let mut bytes = Why::ALL.map(|_| bins());
    let (mut busy, mut waiting, mut at_disk) = (bins(), bins(), bins());
    for read in &recording.reads {
        let (start, end) = read_span(read);
        bytes[read.why as usize].add(start, end, f64::from(read.bytes));
        if read.why != Why::Small {
            at_disk.add(start, end, end - start);
        }
    }
    depth.busy.iter().for_each(|&(start, end)| busy.add(start, end, end - start));
    for wait in &recording.waits {
        let (start, end) = span(wait.start_nanoseconds, wait.duration_nanoseconds);
        waiting.add(start, end, end - start);
    }
    let share = |bins: Bins| bins.amounts().into_iter().map(|s| (s / width).min(1.0)).collect();
    Timeline {
        slice_seconds: width,
        bytes: bytes.map(Bins::amounts),
        busy: share(busy),
        waiting: share(waiting),
        depth: at_disk.amounts().into_iter().map(|seconds| seconds / width).collect(),
    }
}

/// Returns the highest rate over 100 ms, in bytes per second. A shorter busy time gives the rate
/// over the busy time.
pub(super) fn best_rate(recording: &Recording, busy_seconds: f64) -> f64 {
    let bytes: f64 = at_engine(recording).map(|read| f64::from(read.bytes)).sum();
    if busy_seconds <= BEST_WINDOW {
        return if busy_seconds > 0.0 { bytes / busy_seconds } else { 0.0 };
    }
    let total = duration(recording);
    let step = BEST_STEP.max(total / STEPS_MAX as f64);
    let mut bins = Bins::new((total / step).ceil().max(1.0) as usize, step);
    for read in at_engine(recording) {
        let (start, end) = read_span(read);
        bins.add(start, end, f64::from(read.bytes));
    }
    let amounts = bins.amounts();
    let window = ((BEST_WINDOW / step).round() as usize).clamp(1, amounts.len());
    let sums = amounts.windows(window).map(|bins| bins.iter().sum::<f64>());
    sums.fold(0.0, f64::max) / (window as f64 * step)
}
