//! Start of a batch on a GPU. If VRAM has no room for the embedding table, the tokens' rows are read from the file.

use forebay_cuda::{EmbeddingTable, MATVEC_TOKENS};

use super::backend::CudaBackend;
use super::graphs::GraphKey;
use super::layout::EmbeddingLocation;
use super::streamed::Streamed;
use crate::ModelError;
use crate::backend::{Batch, Begun, End, Step};

impl CudaBackend {
    /// Writes the embeddings of the batch's tokens to the residual stream, unless a CUDA graph does so.
    pub fn begin_batch(&mut self, step: &Step<'_>, batch: &Batch<'_>) -> Result<Begun, ModelError> {
        // A failed batch may have left values for steps that it did not reach.
        (self.inputs, self.outputs) = (None, None);
        self.written = self.written.max(step.position + step.count);
        // `take` waits for work of an earlier batch, so all pinned memory is free afterwards.
        let ids = self.embedding_rows.as_ref().map_or(batch.tokens, |rows| &rows.ids[..step.count]);
        self.exchange.take(&self.gpu, ids, step.position)?;
        if let Some(rows) = &mut self.embedding_rows {
            rows.read(step, batch.tokens)?;
        }
        if let Some(sub_layers) = &mut self.sub_layers {
            sub_layers.begin(&self.gpu, step.count <= MATVEC_TOKENS, batch.end != End::Nothing)?;
        }
        (self.served, self.resuming) = (false, false);
        let mut one = step.count == 1 && batch.end != End::Nothing;
        // Without streamed experts, a graph neither reports the chosen ids nor accepts ids chosen by the caller.
        one &= self.streamed.is_some() || !batch.routing && batch.chosen.is_none();
        let cpu_offloads = self.streamed.as_mut().is_some_and(Streamed::decide_cpu_offload);
        let key = GraphKey { splits: self.attention_splits(step), end: batch.end, cpu_offloads };
        let is_replayed = self.graphs.begin(&self.gpu, one.then_some(key))?;
        let asks = is_replayed || self.graphs.is_capturing();
        let streamed = self.streamed.as_mut().filter(|_| asks);
        if let Some(streamed) = streamed {
            streamed.begin_token(&self.gpu, batch.chosen);
            if !is_replayed {
                streamed.queue_token(&self.gpu, &self.plan, &self.arena)?;
            }
        }
        if is_replayed {
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
            (EmbeddingLocation::Table(at), None) => {
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
