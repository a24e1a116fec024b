//! Results of the comparison of cuFile with the ring, as stored in a machine profile.

use serde::{Deserialize, Serialize};

use crate::load::CuFileRequests;

/// Factor by which cuFile must be faster than the ring to be used. The ring has advantages: it uses the page cache and
/// verifies checksums.
const WORTH_IT: f64 = 1.05;

/// Requests to cuFile and their rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CuFileCase {
    #[serde(flatten)]
    pub requests: CuFileRequests,
    /// Rate from file to device: the best of several measurements.
    pub bytes_per_second: f64,
}

/// Measured rates of cuFile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CuFileRates {
    /// Version of the library. `None` if it does not report one.
    pub version: Option<String>,
    /// Mode in which cuFile works here, in words.
    pub mode: String,
    /// True if the disk writes directly to device memory. False if data passes through host memory first.
    pub straight: bool,
    /// True if device memory is registered with cuFile, which saves a copy there.
    pub memory_is_registered: bool,
    /// Bytes loaded by each measurement.
    pub sample_bytes: u64,
    pub cases: Vec<CuFileCase>,
    pub best: CuFileCase,
    /// Rate of forebay's own ring for the same bytes, measured between these measurements.
    pub ring_bytes_per_second: f64,
}

impl CuFileRates {
    /// Returns true if loads to the GPU use cuFile when they may.
    pub fn wins(&self) -> bool {
        self.best.bytes_per_second >= WORTH_IT * self.ring_bytes_per_second
    }
}

/// The part of [`CuFileRates`] that loads need.
#[derive(Debug, Clone, PartialEq)]
pub struct CuFileChoice {
    /// Name of the GPU that was measured.
    pub gpu: String,
    pub requests: CuFileRequests,
    pub bytes_per_second: f64,
    pub ring_bytes_per_second: f64,
    /// True if loads use cuFile when they may.
    pub wins: bool,
}

impl CuFileChoice {
    /// Returns the choice from a profile's rates, or `None` if no load could use these values.
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

    /// Returns cuFile's rate divided by the ring's rate.
    pub fn gain(&self) -> f64 {
        self.bytes_per_second / self.ring_bytes_per_second
    }
}
