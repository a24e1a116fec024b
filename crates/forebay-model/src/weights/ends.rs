//! The matrices at both ends of a model: the table of embeddings, and the output projection.

use forebay_format::pack::head_rows;
use forebay_format::{Block, Extent, TensorType};
use forebay_stream::ModelBlocks;

use super::parts::{HeadChunk, PartMatrix};
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

/// Splits the output projection into chunks of whole rows, and appends them to the dense blocks.
pub(super) fn head(
    architecture: &Architecture,
    name: &str,
    tensors: &Tensors<'_>,
    blocks: &mut ModelBlocks,
) -> Result<Vec<HeadChunk>, ModelError> {
    let (matrix, extent) = tensors.matrix(name, architecture.vocabulary, architecture.hidden)?;
    let row_bytes = extent.length / matrix.rows as u64;
    let rows_per_chunk = head_rows(row_bytes) as usize;
    let mut chunks = Vec::new();
    for first_row in (0..matrix.rows).step_by(rows_per_chunk) {
        let rows = rows_per_chunk.min(matrix.rows - first_row);
        let slice = Extent {
            file: extent.file,
            offset: extent.offset + first_row as u64 * row_bytes,
            length: rows as u64 * row_bytes,
        };
        blocks.dense.push(Block::from(vec![slice]));
        chunks.push(HeadChunk { first_row, matrix: PartMatrix { rows, ..matrix } });
    }
    Ok(chunks)
}
