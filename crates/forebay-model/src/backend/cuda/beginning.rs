//! How a batch begins on a GPU, also one that has no room for the embedding table: the tokens' rows then come from the file.

use forebay_cuda::{CudaError, EmbeddingTable, Gpu, HostWords, MATVEC_TOKENS};
use forebay_store::FileSet;

use super::super::{Batch, Begun, End, Step};
use super::CudaBackend;
use super::memory::DevicePlan;
use super::places::EmbeddingPlace;
use super::recording::Way;
use super::streamed::Streamed;
use crate::ModelError;
use crate::weights::Weights;

/// Rows of the embedding table, read from a file.
pub struct EmbeddingRows {
    files: FileSet,
    /// As on the disk, one behind the other.
    rows: Vec<u8>,
    /// The same in pinned memory, where a kernel reads each of them once.
    words: HostWords,
    /// 0, 1, 2 ...: the rows of a batch's tokens.
    ids: Vec<u32>,
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
        if plan.weights.embedding != EmbeddingPlace::Rows {
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
    fn read(&mut self, step: &Step<'_>, tokens: &[u32]) -> Result<(), ModelError> {
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

impl CudaBackend {
    /// Makes the embedding of the batch's tokens the residual stream, unless that is recorded.
    pub fn begin_batch(&mut self, step: &Step<'_>, batch: &Batch<'_>) -> Result<Begun, ModelError> {
        // A batch that failed may have left what its next step would have taken.
        (self.inputs, self.outputs) = (None, None);
        self.written = self.written.max(step.position + step.count);
        // It waits for what an earlier batch may have left behind, so that whatever is pinned is free afterwards.
        let ids = self.embedding_rows.as_ref().map_or(batch.tokens, |rows| &rows.ids[..step.count]);
        self.exchange.take(&self.gpu, ids, step.position)?;
        if let Some(rows) = &mut self.embedding_rows {
            rows.read(step, batch.tokens)?;
        }
        if let Some(units) = &mut self.units {
            units.begin(&self.gpu, step.count <= MATVEC_TOKENS, batch.end != End::Nothing)?;
        }
        self.served = false;
        let mut one = step.count == 1 && batch.end != End::Nothing;
        // Only work that asks the host tells it the experts and can be told which to take.
        one &= self.streamed.is_some() || !batch.routing && batch.chosen.is_none();
        let cpu_helps = self.streamed.as_mut().is_some_and(Streamed::decide_help);
        let way = Way { splits: self.attention_splits(step), end: batch.end, cpu_helps };
        let is_recorded = self.recordings.begin(&self.gpu, one.then_some(way))?;
        let asks = is_recorded || self.recordings.is_recording();
        let streamed = self.streamed.as_mut().filter(|_| asks);
        if let Some(streamed) = streamed {
            streamed.begin_token(batch.chosen);
            if !is_recorded {
                streamed.queue_token(&self.gpu, &self.plan, &self.arena)?;
            }
        }
        if is_recorded {
            return Ok(Begun::Recorded);
        }
        self.exchange.queue_up(&self.gpu)?;
        self.embed(step)?;
        Ok(Begun::Layers)
    }

    fn embed(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let embedding = &step.weights.embedding;
        let (data, vocabulary) = match (self.plan.weights.embedding, &self.embedding_rows) {
            (_, Some(rows)) => (rows.words.device(0).cast(), step.count),
            (EmbeddingPlace::Table(at), None) => {
                (self.arena.dense(at), step.architecture.vocabulary)
            }
            (_, None) => (self.arena.dense(self.plan.weights.head), step.architecture.vocabulary),
        };
        let hidden = step.architecture.hidden;
        let table = EmbeddingTable { ty: embedding.ty, data, vocabulary, hidden };
        let (ids, x) = (self.exchange.tokens(), self.float(self.at().x));
        self.gpu.embed(&table, ids, x, step.count, step.architecture.embedding_scale)?;
        Ok(())
    }
}
