//! Memory of a GPU for residual streams beside each other.

use crate::arch::Architecture;

/// Offsets of activations that only residual streams beside each other need.
#[derive(Debug, Clone, Copy, Default)]
pub struct StreamLayout {
    /// Coefficients of the block whose output is added next `[batch, coefficients]`.
    pub coefficients: u64,
    /// Normed streams and their gates `[batch, streams, hidden]`, if they are gated.
    pub normed: u64,
    pub gates: u64,
    /// Low-rank projection for the gates `[batch, rank]`.
    pub low: u64,
}

impl StreamLayout {
    pub fn new(
        architecture: &Architecture,
        batch: usize,
        words: &mut impl FnMut(usize) -> u64,
    ) -> StreamLayout {
        let [coefficients, wide, rank] = architecture.stream_widths();
        StreamLayout {
            coefficients: words(batch * coefficients),
            normed: words(batch * wide),
            gates: words(batch * wide),
            low: words(batch * rank),
        }
    }

    /// Returns the layout for a lane whose first row is `first`.
    pub fn second_lane(&self, architecture: &Architecture, first: usize) -> StreamLayout {
        let [coefficients, wide, rank] = architecture.stream_widths();
        let behind = |at: u64, width: usize| at + 4 * (first * width) as u64;
        StreamLayout {
            coefficients: behind(self.coefficients, coefficients),
            normed: behind(self.normed, wide),
            gates: behind(self.gates, wide),
            low: behind(self.low, rank),
        }
    }
}
