//! The input of the predicting layer on a GPU.

use forebay_cuda::{Added, EmbeddingTable, Norm, Normed};
use forebay_format::TensorType;
use forebay_ops::RowKind;

use super::backend::CudaBackend;
use super::beginning::places;
use super::products::Rows;
use super::source::WeightSource;
use crate::ModelError;
use crate::backend::{Batch, Step};

impl CudaBackend {
    /// Returns true if the source of the weights can leave the order of the layers.
    pub(super) fn can_predict(&self) -> bool {
        !matches!(self.source, WeightSource::LayerRing(_))
    }

    /// Joins the embeddings of the tokens with the states of the tokens before them
    /// ([`crate::Backend::begin_prediction`]). The kernels of such a pass are queued one by one.
    pub(super) fn join(
        &mut self,
        step: &Step<'_>,
        batch: &Batch<'_>,
        hidden: &[f32],
    ) -> Result<(), ModelError> {
        let mtp = step.prediction(false).expect("the caller looked at the description");
        self.graphs.abandon(&self.gpu);
        self.lanes.begin(&self.gpu);
        let rows = self.mtp_rows.as_ref().or(self.embedding_rows.as_ref());
        let ids = rows.map_or(batch.tokens, |rows| &rows.ids[..step.count]);
        // This waits for earlier work, so all pinned memory is free afterwards.
        self.exchange.take(&self.gpu, ids, places(step.runs))?;
        if step.kind() == RowKind::Prompt {
            self.take_prompts(step);
        }
        self.tables.queue(&self.gpu, &self.plan.kv, self.arena.kv(0))?;
        if let Some(rows) = self.mtp_rows.as_mut().or(self.embedding_rows.as_mut()) {
            rows.read(batch.tokens)?;
        }
        self.source.begin(&self.gpu, step, batch)?;
        self.cut_contexts(step);
        self.exchange.queue_up(&self.gpu)?;
        let at = self.at().prediction;
        let (width, count) = (step.architecture.hidden, step.count);
        let states = at.parts + 4 * (at.batch * width) as u64;
        self.embed_own(step, at.parts)?;
        self.gpu.upload(hidden, self.float(states))?;
        let vectors = self.plan.vectors.mtp.expect("the model has a predicting layer");
        let of_all = count * at.streams;
        for (part, weight, count) in
            [(at.parts, vectors.embedding_norm, count), (states, vectors.hidden_norm, of_all)]
        {
            let norm = Norm {
                weight: self.vectors().offset(weight),
                width,
                epsilon: step.architecture.norm_epsilon,
            };
            let rows = self.float(part);
            self.gpu.rms_norm(rows, Added::Nothing, &norm, Normed::plain(rows), count, None)?;
        }
        let (data, vocabulary) = (self.float(at.parts).cast(), (1 + at.streams) * at.batch);
        let parts = EmbeddingTable { ty: TensorType::F32, data, vocabulary, hidden: width };
        let (ids, joined) = (self.arena.activation(at.ids), self.float(at.joined));
        self.gpu.embed(&parts, ids, joined, 2 * of_all, 1.0)?;
        self.products().changed(joined);
        let product = self.product(step, mtp.join, self.at().x);
        let rows = Rows { kind: step.kind(), count: of_all };
        self.products().dense(&self.gpu, joined, rows, &[product])
    }

    /// Writes the embeddings of the tokens, from the layer's own table if it has one.
    fn embed_own(&self, step: &Step<'_>, to: u64) -> Result<(), ModelError> {
        let Some(rows) = &self.mtp_rows else { return self.embed(step, to) };
        let table = EmbeddingTable {
            ty: rows.table.ty,
            data: rows.words.device(0).cast(),
            vocabulary: step.count,
            hidden: step.architecture.hidden,
        };
        self.gpu.embed(&table, self.exchange.tokens(), self.float(to), step.count, 1.0)?;
        Ok(())
    }
}
