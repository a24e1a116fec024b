//! Tables of n-grams, of which the rows of a pass are read before it.

use forebay_cuda::{CudaError, Gpu, HostWords};
use forebay_store::FileSet;

use crate::arch::Architecture;
use crate::ngrams::NGramReader;
use crate::weights::{NGramWeights, Weights};

/// The table of a layer, and the rows of a pass.
pub struct NGramTable {
    pub(super) reader: NGramReader,
    /// The rows as they are in the file. Together, those of a token are a row of the embedding's length.
    pub(super) raw: Vec<u8>,
    /// Copy of `raw` in pinned memory, where a kernel reads each row once.
    pub(super) words: HostWords,
}

impl NGramTable {
    /// Creates the tables of all layers that have some, ascending.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn of_layers(
        gpu: &Gpu,
        architecture: &Architecture,
        weights: &Weights,
        files: &FileSet,
        batch: usize,
    ) -> Result<Vec<NGramTable>, CudaError> {
        let Some(of) = &architecture.ngrams else { return Ok(Vec::new()) };
        let table = |layer: &NGramWeights| {
            let rows = batch * of.rows_per_token();
            let bytes = (rows * layer.table.row_bytes).next_multiple_of(4);
            Ok(NGramTable {
                reader: NGramReader::new(of, &layer.table, files, batch),
                raw: vec![0; bytes],
                words: gpu.host_words(bytes / 4)?,
            })
        };
        weights.ngram_layers().map(table).collect()
    }
}
