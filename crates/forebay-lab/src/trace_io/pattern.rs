//! Classifies reads as sequential, random, or a mixture.

use std::collections::VecDeque;

use forebay_store::ReadRecord;
use serde::Serialize;

/// Number of earlier requests that a request may continue. A request is sequential if it begins
/// where one of this many earlier requests of its component ended, so several streams at a time
/// also count as sequential.
pub const WINDOW: usize = 64;
/// Aligned reads overlap their neighbours by less than this many bytes. Smaller reads overlap by
/// less than their own length.
const OVERLAP_BYTES: u64 = 4096;
/// Smallest share of sequential requests for which a component is called sequential.
pub const SEQUENTIAL_MIN: f64 = 0.8;
/// Largest share of sequential requests for which a component is called random.
pub const RANDOM_MAX: f64 = 0.2;

/// Access pattern of the requests of a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    Sequential,
    Hybrid,
    Random,
    /// Fewer than two requests.
    Single,
}

impl Pattern {
    /// Returns the name for display.
    pub fn name(self) -> &'static str {
        match self {
            Pattern::Sequential => "sequential",
            Pattern::Hybrid => "hybrid",
            Pattern::Random => "random",
            Pattern::Single => "single",
        }
    }
}

/// Counts the requests that continue an earlier one.
#[derive(Default)]
pub(super) struct Follower {
    /// File and end of the latest requests.
    ends: VecDeque<(u32, u64)>,
    requests: u64,
    sequential: u64,
}

impl Follower {
    /// Adds the next request. Requests must come in the order of their start.
    pub(super) fn add(&mut self, read: &ReadRecord) {
        let (file, start) = (read.file.0, read.offset);
        let overlap = OVERLAP_BYTES.min(read.length.into());
        let continues =
            |&(of, end): &(u32, u64)| of == file && start <= end && end - start < overlap;
        self.sequential += u64::from(self.ends.iter().any(continues));
        self.requests += 1;
        if self.ends.len() == WINDOW {
            self.ends.pop_front();
        }
        self.ends.push_back((file, start.saturating_add(u64::from(read.length))));
    }

    /// Returns the share of the requests after the first one that continue another; 0 with fewer
    /// than two requests.
    pub(super) fn share(&self) -> f64 {
        match self.requests {
            0 | 1 => 0.0,
            requests => self.sequential as f64 / (requests - 1) as f64,
        }
    }

    pub(super) fn pattern(&self) -> Pattern {
        match self.share() {
            _ if self.requests < 2 => Pattern::Single,
            share if share >= SEQUENTIAL_MIN => Pattern::Sequential,
            share if share <= RANDOM_MAX => Pattern::Random,
            _ => Pattern::Hybrid,
        }
    }
}
