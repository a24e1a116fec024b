//! Embeddings of n-grams that layers add to the residual streams.
//!
//! Their tables stay on the disk. The rows of a pass's tokens are read before it, and a kernel decodes them from pinned memory.

use forebay_cuda::{EmbeddingTable, NGramRows};

use super::backend::CudaBackend;
use super::ngram_layout::NGramLayout;
use super::products::Rows;
use crate::ModelError;
use crate::backend::{Batch, NextBlock, Step};

impl CudaBackend {
    /// Reads the rows of the pass's n-grams. No queued work may still read those of the pass before.
    ///
    /// # Errors
    /// Returns an error if a read fails.
    pub(super) fn read_ngrams(
        &mut self,
        step: &Step<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), ModelError> {
        let Some(of) = &step.architecture.ngrams else { return Ok(()) };
        for (layer, table) in step.weights.ngram_layers().zip(&mut self.ngram_tables) {
            let runs = step.runs.iter().map(|run| run.count);
            table.reader.ask(of, &layer.hashes, runs, batch.tokens, batch.tokens_before);
        }
        for table in &mut self.ngram_tables {
            let bytes = table.reader.read(&mut table.raw)?.len();
            table.words.write(0, &table.raw[..bytes.next_multiple_of(4)]);
        }
        Ok(())
    }

    /// Queues the embeddings of the pass's n-grams for all layers that add them.
    pub(super) fn embed_ngrams(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let Some(of) = &step.architecture.ngrams else { return Ok(()) };
        let at = self.at();
        for (index, (layer, table)) in of.layers.iter().zip(&self.ngram_tables).enumerate() {
            let weights = step.weights.layers[*layer].ngrams.as_deref();
            let table = EmbeddingTable {
                ty: weights.expect("the layer has n-grams").ty,
                data: table.words.device(0).cast(),
                vocabulary: step.count,
                hidden: of.width,
            };
            let to = self.float(at.ngrams.embeddings(index));
            self.gpu.embed(
                &table,
                self.arena.activation(at.embeddings.ids),
                to,
                step.count,
                1.0,
            )?;
        }
        Ok(())
    }

    /// Adds the last block's output to the residual streams if `add` is set. Queues what the layer adds for n-grams.
    pub(super) fn multiply_ngrams(&mut self, step: &Step<'_>, add: bool) -> Result<(), ModelError> {
        if add {
            self.norm_rows(step, NextBlock::NGrams, true)?;
        }
        let shape = step.architecture.ngram_shape().expect("the caller looked");
        let weights = step.layer_weights().ngrams.as_deref().expect("the caller looked");
        let vectors = self.layer_vectors(step).ngrams.expect("it has norms");
        let (architecture, at) = (step.architecture, self.at());
        let NGramLayout { keys, values, inputs, .. } = at.ngrams;
        let products =
            [self.product(step, weights.key, keys), self.product(step, weights.value, values)];
        let index = architecture.ngram_index(step.layer);
        let embeddings = self.float(at.ngrams.embeddings(index));
        self.products().dense(&self.gpu, embeddings, Rows::of(step), &products)?;
        let floats = self.vectors();
        let x = self.float(at.x);
        let of = NGramRows {
            streams: shape.streams,
            hidden: shape.hidden,
            taps: shape.taps,
            gap: shape.gap,
            x,
            keys: self.float(keys),
            values: self.float(values),
            inputs: self.float(inputs),
            key_norm: floats.offset(vectors.key_norm),
            stream_norm: floats.offset(vectors.stream_norm),
            convolution_norm: floats.offset(vectors.convolution_norm),
            convolution: floats.offset(vectors.convolution),
            epsilon: architecture.norm_epsilon,
            states: self.device_states(architecture.ngram_part(step.layer)),
        };
        self.gpu.add_ngrams(&of, &self.state_runs(step))?;
        self.products().changed(x);
        Ok(())
    }
}
