//! Activations of the predicting layer in GPU memory.

use crate::arch::Architecture;

/// Offsets of activations that only a predicting layer needs.
#[derive(Debug, Clone, Copy, Default)]
pub struct PredictionLayout {
    /// Normed embeddings `[batch, hidden]`, then normed states `[batch, streams, hidden]`.
    pub parts: u64,
    /// Both beside each other `[batch, streams, 2 * hidden]`.
    pub joined: u64,
    /// For each half of each joined row, its row in `parts`.
    pub ids: u64,
    /// Rows of the largest pass; 0 without a predicting layer.
    pub batch: usize,
    /// Number of vectors of a state that are joined with the embedding.
    pub streams: usize,
}

impl PredictionLayout {
    pub fn new(
        architecture: &Architecture,
        batch: usize,
        words: &mut impl FnMut(usize) -> u64,
    ) -> PredictionLayout {
        let batch = if architecture.mtp.is_some() { batch } else { 0 };
        let streams = architecture.predicted_from();
        PredictionLayout {
            parts: words((1 + streams) * batch * architecture.hidden),
            joined: words(2 * streams * batch * architecture.hidden),
            ids: words(2 * streams * batch),
            batch,
            streams,
        }
    }

    /// Returns the content of [`PredictionLayout::ids`].
    pub fn rows(&self) -> Vec<u32> {
        let (batch, streams) = (self.batch as u32, self.streams as u32);
        (0..batch * streams).flat_map(|row| [row / streams, batch + row]).collect()
    }
}
