//! Embeddings of tokens for each layer.
//!
//! A token has a row of a table for all layers, which may be larger than VRAM. The table stays on the disk. The rows of a pass's
//! tokens are read before it, and a kernel decodes them from pinned memory.

use forebay_cuda::{EmbeddingTable, RowEmbeddings};

use super::backend::CudaBackend;
use super::products::Rows;
use crate::ModelError;
use crate::backend::{NextBlock, Step};

impl CudaBackend {
    /// Queues the embeddings of the rows for all layers, and a copy of the usual ones, if the model has embeddings for layers.
    pub(super) fn embed_for_layers(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let (Some(rows), Some(of)) = (&self.layer_rows, step.architecture.layer_embeddings) else {
            return Ok(());
        };
        let at = &self.at().embeddings;
        let table = EmbeddingTable {
            ty: rows.table.ty,
            data: rows.words.device(0).cast(),
            vocabulary: step.count,
            hidden: of.width * step.architecture.layers.len(),
        };
        let (ids, all) = (self.arena.activation(at.ids), self.float(at.all));
        self.gpu.embed(&table, ids, all, step.count, of.scale())?;
        self.embed(step, at.usual)?;
        self.products().changed(self.float(at.usual));
        Ok(())
    }

    /// Adds the feed-forward's output to the residual stream, and queues what the embeddings for the layer add.
    pub(super) fn multiply_embeddings(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.norm_rows(step, NextBlock::Embeddings, true)?;
        let weights = step.layer_weights().embeddings.as_ref().expect("the caller looked");
        let vectors = self.layer_vectors(step).embeddings.expect("they have norms");
        let (gpu, at, rows) = (&self.gpu, self.at(), Rows::of(step));
        let project = self.product(step, weights.project, at.embeddings.projected);
        self.products().dense(gpu, self.float(at.embeddings.usual), rows, &[project])?;
        let gate = self.product(step, weights.gate, at.embeddings.gate);
        let from = match step.architecture.active_stream() {
            Some(_) => at.streams.row,
            None => at.x,
        };
        self.products().dense(gpu, self.float(from), rows, &[gate])?;
        let width = weights.gate.rows;
        let embeddings = RowEmbeddings {
            embeddings: self.float(at.embeddings.all),
            stride: width * step.architecture.layers.len(),
            first: width * step.layer,
            width,
            projected: project.out,
            weight: self.vectors().offset(vectors.norm),
            epsilon: step.architecture.layer_norm_epsilon(),
        };
        let gating = step.architecture.gating;
        gpu.gate_layer_embeddings(gate.out, &embeddings, gating, step.count)?;
        self.products().changed(gate.out);
        let out = self.product(step, weights.out, at.block_out);
        self.products().dense(gpu, gate.out, rows, &[out])
    }
}
