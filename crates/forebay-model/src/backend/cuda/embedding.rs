//! Rows of an embedding table for which VRAM has no room.

use forebay_cuda::{CudaError, Gpu, HostWords};
use forebay_store::FileSet;

use super::layout::EmbeddingLocation;
use super::memory::DevicePlan;
use crate::ModelError;
use crate::weights::{Embedding, Weights};

/// Rows of an embedding table, read from a file.
///
/// They are not part of the weight source. If a dense model does not fit, its table leaves VRAM first. The layers are then
/// resident or go through the ring. In both cases a pass reads the rows before it begins, because its tokens are known.
pub struct EmbeddingRows {
    files: FileSet,
    pub(super) table: Embedding,
    /// Contiguous rows in the format of the file.
    rows: Vec<u8>,
    /// Copy of `rows` in pinned memory, where a kernel reads each row once.
    pub(super) words: HostWords,
    /// 0, 1, 2 ...: indices of the rows of a batch's tokens.
    pub(super) ids: Vec<u32>,
}

impl EmbeddingRows {
    /// Creates the buffers for the usual embeddings, unless their table is in VRAM, for those for layers, and for those of a predicting
    /// layer with a table of its own, if there are any.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn new(
        gpu: &Gpu,
        plan: &DevicePlan,
        weights: &Weights,
        files: &FileSet,
    ) -> Result<[Option<EmbeddingRows>; 3], CudaError> {
        let stays = plan.weights.embedding == EmbeddingLocation::Rows;
        let own = weights.mtp.as_ref().and_then(|of| of.embedding);
        let tables = [Some(weights.embedding).filter(|_| stays), weights.layer_embeddings, own];
        let [usual, of_layers, own] = tables.map(|table| {
            let Some(table) = table else { return Ok(None) };
            let batch = plan.activations.batch;
            let bytes = (batch * table.row_bytes).next_multiple_of(4);
            Ok(Some(EmbeddingRows {
                files: files.clone(),
                table,
                rows: vec![0; bytes],
                words: gpu.host_words(bytes / 4)?,
                ids: (0..batch as u32).collect(),
            }))
        });
        Ok([usual?, of_layers?, own?])
    }

    /// Reads the rows of `tokens`. No queued work may still read the previous rows.
    ///
    /// # Errors
    /// Returns an error if a read fails.
    pub fn read(&mut self, tokens: &[u32]) -> Result<(), ModelError> {
        let embedding = &self.table;
        let rows = self.rows.chunks_exact_mut(embedding.row_bytes);
        for (token, row) in tokens.iter().zip(rows) {
            self.files.read_exact(embedding.row(*token), row)?;
        }
        let bytes = (tokens.len() * embedding.row_bytes).next_multiple_of(4);
        self.words.write(0, &self.rows[..bytes]);
        Ok(())
    }
}
