//! cuFile against the ring, as a machine profile has it.

use serde::{Deserialize, Serialize};

use crate::load::CuFileRequests;

/// cuFile must be better than the ring by this factor to be used: the ring's way uses the page cache and compares checksums.
const WORTH_IT: f64 = 1.05;

/// One way of asking cuFile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CuFileCase {
    #[serde(flatten)]
    pub requests: CuFileRequests,
    /// From file to device; the best of several measurements.
    pub bytes_per_second: f64,
}

/// cuFile, measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CuFileRates {
    /// The library's; `None` for one that does not say.
    pub version: Option<String>,
    /// How it works here, in words.
    pub mode: String,
    /// Whether the disk writes to device memory, and not to host memory first.
    pub straight: bool,
    /// Whether it has taken device memory as its own, which saves a copy there.
    pub memory_is_registered: bool,
    /// Bytes that each measurement loads.
    pub sample_bytes: u64,
    pub cases: Vec<CuFileCase>,
    pub best: CuFileCase,
    /// What our own ring does with the same bytes, between these measurements.
    pub ring_bytes_per_second: f64,
}

impl CuFileRates {
    /// Whether loads to the GPU use it where they may.
    pub fn wins(&self) -> bool {
        self.best.bytes_per_second >= WORTH_IT * self.ring_bytes_per_second
    }
}

/// What of this loads have to know.
#[derive(Debug, Clone, PartialEq)]
pub struct CuFileChoice {
    /// The GPU that was measured.
    pub gpu: String,
    pub requests: CuFileRequests,
    pub bytes_per_second: f64,
    pub ring_bytes_per_second: f64,
    /// Whether loads shall use it where they may.
    pub wins: bool,
}

impl CuFileChoice {
    /// What is to be used of a profile; `None` for what no load could do.
    pub(super) fn of(gpu: &str, rates: &CuFileRates) -> Option<CuFileChoice> {
        let CuFileCase { requests, bytes_per_second } = rates.best;
        let ring_bytes_per_second = rates.ring_bytes_per_second;
        let good = requests.request_bytes.is_multiple_of(4096)
            && (4096..=64 << 20).contains(&requests.request_bytes)
            && (1..=256).contains(&requests.threads)
            && bytes_per_second > 0.0
            && ring_bytes_per_second > 0.0;
        let gpu = gpu.to_owned();
        let wins = rates.wins();
        let found = CuFileChoice { gpu, requests, bytes_per_second, ring_bytes_per_second, wins };
        good.then_some(found)
    }

    /// How often the ring's rate its rate is.
    pub fn gain(&self) -> f64 {
        self.bytes_per_second / self.ring_bytes_per_second
    }
}
