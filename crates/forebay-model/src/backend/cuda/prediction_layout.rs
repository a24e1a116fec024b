//! Activations of the predicting layer in GPU memory.

use crate::arch::Architecture;

/// Offsets of activations that only a predicting layer needs.
#[derive(Debug, Clone, Copy, Default)]
pub struct PredictionLayout {
    /// Normed embeddings `[batch, hidden]`, then normed states `[batch, hidden]`.
    pub parts: u64,
    /// Both beside each other `[batch, 2 * hidden]`.
    pub joined: u64,
    /// For each half of each joined row, its row in `parts`.
    pub ids: u64,
    /// Rows of the largest pass; 0 without a predicting layer.
    pub batch: usize,
}

impl PredictionLayout {
    pub fn new(
        architecture: &Architecture,
        batch: usize,
        words: &mut impl FnMut(usize) -> u64,
    ) -> PredictionLayout {
        let batch = if architecture.mtp.is_some() { batch } else { 0 };
        PredictionLayout {
            parts: words(2 * batch * architecture.hidden),
            joined: words(2 * batch * architecture.hidden),
            ids: words(2 * batch),
            batch,
        }
    }

    /// Returns the content of [`PredictionLayout::ids`].
    pub fn rows(&self) -> Vec<u32> {
        let batch = self.batch as u32;
        (0..batch).flat_map(|row| [row, batch + row]).collect()
    }
}
