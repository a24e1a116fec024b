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
    /// The stream that layers compute, the output of the branch beside attention, and one stream of every row, `[batch, hidden]`
    /// each, if layers compute one stream.
    pub active: u64,
    pub branch: u64,
    pub row: u64,
    /// Low-rank projection of the branch `[batch, rank]`, and all streams behind the last layer `[batch, streams, hidden]`.
    pub branch_low: u64,
    pub wide: u64,
}

impl StreamLayout {
    pub fn new(
        architecture: &Architecture,
        batch: usize,
        words: &mut impl FnMut(usize) -> u64,
    ) -> StreamLayout {
        let [coefficients, wide, rank] = architecture.stream_widths();
        let [hidden, branch_rank, all] = architecture.predicted_widths();
        StreamLayout {
            coefficients: words(batch * coefficients),
            normed: words(batch * wide),
            gates: words(batch * wide),
            low: words(batch * rank),
            active: words(batch * hidden),
            branch: words(batch * hidden),
            row: words(batch * hidden),
            branch_low: words(batch * branch_rank),
            wide: words(batch * all),
        }
    }

    /// Returns the layout for a lane whose first row is `first`.
    pub fn second_lane(&self, architecture: &Architecture, first: usize) -> StreamLayout {
        let [coefficients, wide, rank] = architecture.stream_widths();
        let [hidden, branch_rank, all] = architecture.predicted_widths();
        let behind = |at: u64, width: usize| at + 4 * (first * width) as u64;
        StreamLayout {
            coefficients: behind(self.coefficients, coefficients),
            normed: behind(self.normed, wide),
            gates: behind(self.gates, wide),
            low: behind(self.low, rank),
            active: behind(self.active, hidden),
            branch: behind(self.branch, hidden),
            row: behind(self.row, hidden),
            branch_low: behind(self.branch_low, branch_rank),
            wide: behind(self.wide, all),
        }
    }
}
