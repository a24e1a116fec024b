//! Rows of an embedding table that a GPU has no room for.

use forebay_cuda::{CudaError, Gpu, HostWords};
use forebay_store::FileSet;

use super::layout::EmbeddingLocation;
use super::memory::DevicePlan;
use crate::ModelError;
use crate::backend::Step;
use crate::weights::Weights;

/// Rows of the embedding table, read from a file.
pub struct EmbeddingRows {
    files: FileSet,
    /// As on the disk, one behind the other.
    rows: Vec<u8>,
    /// The same in pinned memory, where a kernel reads each of them once.
    pub(super) words: HostWords,
    /// 0, 1, 2 ...: the rows of a batch's tokens.
    pub(super) ids: Vec<u32>,
}

impl EmbeddingRows {
    /// If the table is not on the GPU.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn new(
        gpu: &Gpu,
        plan: &DevicePlan,
        weights: &Weights,
        files: &FileSet,
    ) -> Result<Option<EmbeddingRows>, CudaError> {
        if plan.weights.embedding != EmbeddingLocation::Rows {
            return Ok(None);
        }
        let batch = plan.activations.batch;
        let bytes = (batch * weights.embedding.row_bytes).next_multiple_of(4);
        Ok(Some(EmbeddingRows {
            files: files.clone(),
            rows: vec![0; bytes],
            words: gpu.host_words(bytes / 4)?,
            ids: (0..batch as u32).collect(),
        }))
    }

    /// Reads the rows of `tokens`. Nothing that is queued may still read those before.
    pub fn read(&mut self, step: &Step<'_>, tokens: &[u32]) -> Result<(), ModelError> {
        let embedding = &step.weights.embedding;
        let rows = self.rows.chunks_exact_mut(embedding.row_bytes);
        for (token, row) in tokens.iter().zip(rows) {
            let mut extent = embedding.extent;
            extent.offset += u64::from(*token) * embedding.row_bytes as u64;
            extent.length = embedding.row_bytes as u64;
            self.files.read_exact(extent, row)?;
        }
        let bytes = (tokens.len() * embedding.row_bytes).next_multiple_of(4);
        self.words.write(0, &self.rows[..bytes]);
        Ok(())
    }
}
