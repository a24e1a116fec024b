//! Activations for embeddings of n-grams.

use forebay_compute::StateRun;
use forebay_store::FileSet;

use crate::arch::Architecture;
use crate::ngrams::NGramReader;
use crate::weights::Weights;

/// Activations for n-grams, for one batch.
#[derive(Default)]
pub struct NGramScratch {
    /// The tables of the layers with n-grams, ascending.
    pub(super) readers: Vec<NGramReader>,
    /// Rows as they are in the files.
    pub(super) raw: Vec<u8>,
    /// Embeddings `[tokens, width]`.
    pub(super) embeddings: Vec<f32>,
    /// Keys, then gated values `[tokens, streams, hidden]`.
    pub(super) keys: Vec<f32>,
    /// Values `[tokens, hidden]`.
    pub(super) values: Vec<f32>,
    /// Inputs of the convolution `[tokens, streams, hidden]`.
    pub(super) inputs: Vec<f32>,
    /// Always empty between calls; kept for its memory.
    pub(super) runs: Vec<StateRun>,
}

impl NGramScratch {
    pub fn reserve(
        architecture: &Architecture,
        weights: &Weights,
        files: &FileSet,
        batch: usize,
    ) -> NGramScratch {
        let Some(shape) = architecture.ngram_shape() else { return NGramScratch::default() };
        let of = architecture.ngrams.as_ref().expect("it has a shape");
        let layers: Vec<_> = weights.ngram_layers().collect();
        let row_bytes = layers.iter().map(|layer| layer.table.row_bytes).max().unwrap_or(0);
        let floats = |width: usize| vec![0.0; batch * width];
        NGramScratch {
            readers: layers
                .iter()
                .map(|layer| NGramReader::new(of, &layer.table, files, batch))
                .collect(),
            raw: vec![0; batch * of.rows_per_token() * row_bytes],
            embeddings: floats(of.width),
            keys: floats(shape.channels()),
            values: floats(shape.hidden),
            inputs: floats(shape.channels()),
            runs: Vec::with_capacity(batch),
        }
    }

    /// Returns the number of floats for one token of a batch.
    pub fn floats_per_token(architecture: &Architecture) -> usize {
        let Some(shape) = architecture.ngram_shape() else { return 0 };
        let of = architecture.ngrams.as_ref().expect("it has a shape");
        // A row is at most as long as floats are.
        2 * of.width + of.rows_per_token() + 2 * shape.channels() + shape.hidden
    }
}
