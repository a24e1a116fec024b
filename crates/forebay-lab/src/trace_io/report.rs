//! The statistics of a trace, in bytes and seconds.

use forebay_store::Why;
use serde::Serialize;

use super::blocks::Component;
use super::pattern::Pattern;

/// All statistics that `forebay trace-io` reports.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub model: String,
    pub architecture: String,
    pub command: String,
    pub engine: String,
    pub direct: bool,
    pub engine_why: String,
    /// Time from the start of the recording to its end.
    pub seconds: f64,
    /// Reads of weights.
    pub requests: u64,
    /// Bytes that the reads of weights returned.
    pub bytes: u64,
    /// Bytes of keys and values that were read back, and written.
    pub kv_read_bytes: u64,
    pub kv_written_bytes: u64,
    /// Number of requests that repeat another one or read the rest of a short one.
    pub repeated: u64,
    pub failed: u64,
    /// Number of requests without an answer.
    pub lost: u64,
    pub dropped_requests: u64,
    pub dropped_bytes: u64,
    pub sizes: Vec<SizeClass>,
    pub components: Vec<ComponentReport>,
    pub reasons: Vec<ReasonReport>,
    pub utilisation: Utilisation,
    pub stalls: Stalls,
    /// Page faults; only for reads through memory maps.
    pub pages: Option<PageReport>,
    pub experts: Option<ExpertReads>,
    pub timeline: Timeline,
}

/// Latencies in seconds; all are 0 without requests. A quantile is the smallest latency that at
/// least this share of the requests does not exceed (nearest rank).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    pub p50_seconds: f64,
    pub p90_seconds: f64,
    pub p99_seconds: f64,
    pub max_seconds: f64,
}

/// Requests of at least `from_bytes` and less than twice as many bytes.
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
    /// Reason: "demand", "ahead", "load" or "small", or "kv-read" or "kv-write".
    pub why: &'static str,
    pub requests: u64,
    pub bytes: u64,
    pub latency: Quantiles,
    /// Latencies by size class.
    pub sizes: Vec<SizeClass>,
    /// Number of requests by latency. Entry `i` counts latencies from 2^(i/4) to 2^((i+1)/4)
    /// microseconds. The first and the last entry also count shorter and longer ones.
    pub latency_histogram: Vec<u64>,
}

/// The rate that the reads are compared with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Limit {
    pub bytes_per_second: f64,
    /// Source of the rate, in words.
    pub source: String,
    /// True if the caller asked for this rate. Another one is a limit only as long as no part of the trace is faster.
    #[serde(skip)]
    pub is_given: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Utilisation {
    pub limit: Limit,
    /// Time with at least one request at the disk.
    pub busy_seconds: f64,
    /// Rate over the whole recording.
    pub bytes_per_second: f64,
    /// Rate over the busy time.
    pub busy_bytes_per_second: f64,
    /// Rate over the busy time as a share of the limit.
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
    /// Share of the whole recording.
    pub share: f64,
    /// Number of waits for a demand read.
    pub demand_count: u64,
    pub demand_seconds: f64,
    pub length: Quantiles,
    pub dropped: u64,
}

/// Page faults of copies out of a memory map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PageReport {
    pub pages: u64,
    /// Pages that were not in the page cache right before the copy.
    pub absent_pages: u64,
    /// Faults that waited for the disk.
    pub major_faults: u64,
}

/// Reads of each expert.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertReads {
    pub layers: u32,
    pub experts: u32,
    /// Numbers of requests, `[layers, experts]`, row by row.
    pub requests: Vec<u32>,
    pub bytes: Vec<u64>,
}

/// The recording in equal slices of time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Timeline {
    pub slice_seconds: f64,
    /// Bytes of each slice by reason: demand, ahead, load, small, kv-read, kv-write.
    pub bytes: [Vec<f64>; Why::ALL.len()],
    /// Share of each slice with a request at the disk.
    pub busy: Vec<f64>,
    /// Share of each slice in which the computation waited.
    pub waiting: Vec<f64>,
    /// Mean number of requests at the disk in each slice.
    pub depth: Vec<f64>,
}
