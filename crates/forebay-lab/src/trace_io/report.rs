//! What a trace says, in figures. Raw units.

use serde::Serialize;

use super::blocks::Component;
use super::pattern::Pattern;

/// Everything that `forebay trace-io` reports.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub model: String,
    pub architecture: String,
    pub command: String,
    pub engine: String,
    pub direct: bool,
    pub engine_why: String,
    /// From the start of the recording to its end.
    pub seconds: f64,
    pub requests: u64,
    /// Bytes that came.
    pub bytes: u64,
    /// Requests that repeat another one or read what a short one left.
    pub repeated: u64,
    pub failed: u64,
    /// Requests without an answer.
    pub lost: u64,
    pub dropped_requests: u64,
    pub dropped_bytes: u64,
    pub sizes: Vec<SizeClass>,
    pub components: Vec<ComponentReport>,
    pub reasons: Vec<ReasonReport>,
    pub utilisation: Utilisation,
    pub stalls: Stalls,
    /// Of memory maps only.
    pub pages: Option<PageReport>,
    pub experts: Option<ExpertReads>,
    pub timeline: Timeline,
}

/// Latencies in seconds; all 0 without requests. Quantiles are the smallest value that at least
/// that share does not exceed (nearest rank).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    pub p50_seconds: f64,
    pub p90_seconds: f64,
    pub p99_seconds: f64,
    pub max_seconds: f64,
}

/// Requests of at least `from_bytes` and less than twice that.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SizeClass {
    pub from_bytes: u64,
    pub requests: u64,
    pub bytes: u64,
    pub latency: Quantiles,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComponentReport {
    pub component: Component,
    pub requests: u64,
    pub bytes: u64,
    pub mean_request_bytes: f64,
    /// Share of the requests that begin where an earlier one ended.
    pub sequential_share: f64,
    pub pattern: Pattern,
    pub latency: Quantiles,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReasonReport {
    /// "demand", "ahead", "load" or "small".
    pub why: &'static str,
    pub requests: u64,
    pub bytes: u64,
    pub latency: Quantiles,
    /// The latencies by size class.
    pub sizes: Vec<SizeClass>,
    /// Requests by latency: entry `i` counts those from 2^(i/4) to 2^((i+1)/4) microseconds, the
    /// first one also what is shorter.
    pub latency_histogram: Vec<u64>,
}

/// The rate that the reads are compared with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Limit {
    pub bytes_per_second: f64,
    /// Where the figure comes from, in words.
    pub source: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Utilisation {
    pub limit: Limit,
    /// Time with at least one request at the disk.
    pub busy_seconds: f64,
    /// Over the whole recording.
    pub bytes_per_second: f64,
    /// Over the busy time.
    pub busy_bytes_per_second: f64,
    /// The rate while busy, as a share of the limit.
    pub busy_share_of_limit: f64,
    /// Requests at the disk, averaged over the busy time.
    pub depth_mean: f64,
    pub depth_max: u32,
}

/// Times in which the computation stood still because a block was not there.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stalls {
    pub count: u64,
    pub seconds: f64,
    /// Of the whole recording.
    pub share: f64,
    /// Of these, waits for a demand read.
    pub demand_count: u64,
    pub demand_seconds: f64,
    pub length: Quantiles,
    pub dropped: u64,
}

/// What copying out of a memory map met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PageReport {
    pub pages: u64,
    /// Not in the page cache right before the copy.
    pub absent_pages: u64,
    /// Faults that waited for the disk.
    pub major_faults: u64,
}

/// What was read of each expert, layer by layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertReads {
    pub layers: u32,
    pub experts: u32,
    /// `[layers, experts]`, row by row.
    pub requests: Vec<u32>,
    pub bytes: Vec<u64>,
}

/// The recording in equal slices of time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Timeline {
    pub slice_seconds: f64,
    /// Bytes of each slice, by why: demand, ahead, load, small.
    pub bytes: [Vec<f64>; 4],
    /// Share of the slice with a request at the disk.
    pub busy: Vec<f64>,
    /// Share of the slice in which the computation waited.
    pub waiting: Vec<f64>,
    /// Mean requests at the disk.
    pub depth: Vec<f64>,
}
