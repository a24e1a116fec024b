//! Memory of a GPU for embeddings of n-grams.

use crate::arch::Architecture;

/// Offsets of activations that only layers with n-grams need.
#[derive(Debug, Clone, Copy, Default)]
pub struct NGramLayout {
    /// Embeddings of the rows, for each layer that adds some.
    embeddings: u64,
    /// Bytes of the embeddings for one layer.
    layer_bytes: u64,
    /// Keys, then gated values `[batch, streams, hidden]`.
    pub keys: u64,
    /// `[batch, hidden]`
    pub values: u64,
    /// Inputs of the convolution `[batch, streams, hidden]`.
    pub inputs: u64,
}

impl NGramLayout {
    pub fn new(
        architecture: &Architecture,
        batch: usize,
        words: &mut impl FnMut(usize) -> u64,
    ) -> NGramLayout {
        let (Some(of), Some(shape)) = (&architecture.ngrams, architecture.ngram_shape()) else {
            return NGramLayout::default();
        };
        NGramLayout {
            embeddings: words(of.layers.len() * batch * of.width),
            layer_bytes: 4 * (batch * of.width) as u64,
            keys: words(batch * shape.channels()),
            values: words(batch * shape.hidden),
            inputs: words(batch * shape.channels()),
        }
    }

    /// Returns the offset of the embeddings `[batch, width]` for a layer, by its number among those with n-grams.
    pub fn embeddings(&self, index: usize) -> u64 {
        self.embeddings + index as u64 * self.layer_bytes
    }

    /// Returns the layout for the rows from number `row` on.
    pub fn behind(&self, architecture: &Architecture, row: usize) -> NGramLayout {
        let (Some(of), Some(shape)) = (&architecture.ngrams, architecture.ngram_shape()) else {
            return *self;
        };
        let behind = |at: u64, width: usize| at + 4 * (row * width) as u64;
        NGramLayout {
            embeddings: behind(self.embeddings, of.width),
            layer_bytes: self.layer_bytes,
            keys: behind(self.keys, shape.channels()),
            values: behind(self.values, shape.hidden),
            inputs: behind(self.inputs, shape.channels()),
        }
    }
}
