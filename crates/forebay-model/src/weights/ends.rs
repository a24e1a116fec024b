//! The matrices at both ends of a model: the table of embeddings, and the output projection.

use forebay_format::pack::head_rows;
use forebay_format::{Block, Extent, TensorType};
use forebay_stream::ModelBlocks;

use super::parts::HeadChunk;
use super::tensors::Tensors;
use crate::ModelError;
use crate::arch::Architecture;

/// The embedding table. Rows are read on demand, because a token needs one row of a table that can be hundreds of
/// megabytes.
#[derive(Debug, Clone, Copy)]
pub struct Embedding {
    pub extent: Extent,
    pub ty: TensorType,
    pub row_bytes: usize,
}

impl Embedding {
    /// Returns where the row of a token is. Tokens behind the last row have the first one ([`crate::arch::LayerEmbeddings::tokens`]).
    pub fn row(&self, token: u32) -> Extent {
        let (row, bytes) = (u64::from(token), self.row_bytes as u64);
        let row = if (row + 1) * bytes <= self.extent.length { row } else { 0 };
        let mut extent = self.extent;
        extent.offset += row * bytes;
        extent.length = bytes;
        extent
    }
}

pub(super) fn embedding(
    vocabulary: usize,
    name: &str,
    width: usize,
    tensors: &Tensors<'_>,
) -> Result<Embedding, ModelError> {
    let (matrix, extent) = tensors.matrix(name, vocabulary, width)?;
    let row_bytes = extent.length as usize / matrix.rows;
    Ok(Embedding { extent, ty: matrix.ty, row_bytes })
}

/// Returns the embedding table of a model without the rows behind the vocabulary, for which there are no logits.
pub(super) fn padded_embedding(
    architecture: &Architecture,
    name: &str,
    tensors: &Tensors<'_>,
) -> Result<Embedding, ModelError> {
    let whole = embedding(architecture.embedding_rows, name, architecture.hidden, tensors)?;
    let bytes = architecture.vocabulary as u64 * whole.row_bytes as u64;
    let extent = whole.extent.slice(0, bytes).expect("rows of the table");
    Ok(Embedding { extent, ..whole })
}

/// Splits the output projection into chunks of whole rows, and appends them to the dense blocks. If tensors hold the rows
/// in several pieces, as those of GPTQ do, the only chunk is the whole projection.
pub(super) fn head(
    architecture: &Architecture,
    name: &str,
    tensors: &Tensors<'_>,
    blocks: &mut ModelBlocks,
) -> Result<Vec<HeadChunk>, ModelError> {
    let source = tensors.source(name, architecture.vocabulary, architecture.hidden)?;
    let rows = source.matrix.rows;
    let rows_per_chunk = match source.rows_apart() {
        None => rows,
        Some(apart) => {
            let unit = if apart.is_multiple_of(16) { apart } else { 16 * apart };
            let row_bytes = source.extents[0].length / rows as u64;
            (head_rows(row_bytes) as usize).next_multiple_of(unit)
        }
    };
    let mut chunks = Vec::new();
    for first_row in (0..rows).step_by(rows_per_chunk) {
        let of = first_row..(first_row + rows_per_chunk).min(rows);
        let mut block = Block::default();
        let matrix = source.of_rows(of).push(&mut block);
        blocks.dense.push(block);
        chunks.push(HeadChunk { first_row, matrix });
    }
    Ok(chunks)
}

/// Reads the bias of the logits, if the file has one for the output projection `name`.
///
/// # Errors
/// Returns an error if the model has a predicting layer too, or if the bias has another length or cannot be read.
pub(super) fn head_bias(
    architecture: &Architecture,
    name: &str,
    tensors: &mut Tensors<'_>,
) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(mut bias) = tensors.optional_bias(name, architecture.vocabulary)? else {
        return Ok(None);
    };
    if architecture.mtp.is_some() {
        return Err(ModelError::BadValue {
            key: name.into(),
            value: "with a bias".into(),
            expected: "forebay knows predicting layers of models without a bias of logits".into(),
        });
    }
    bias.iter_mut().for_each(|bias| *bias *= architecture.logit_scale);
    Ok(Some(bias))
}
