//! Rows of embedding tables.

use forebay_format::dequantize;
use forebay_store::FileSet;

use crate::ModelError;
use crate::weights::Embedding;

/// Reads the rows of `tokens` of a table, multiplied by `scale`, to `rows`. `memory` takes one row as it is in the file.
///
/// # Errors
/// Returns an error if a read fails.
pub(super) fn read_rows<'a>(
    files: &FileSet,
    table: &Embedding,
    tokens: &[u32],
    scale: f32,
    memory: &mut Vec<u8>,
    rows: impl Iterator<Item = &'a mut [f32]>,
) -> Result<(), ModelError> {
    memory.resize(table.row_bytes, 0);
    for (token, row) in tokens.iter().zip(rows) {
        files.read_exact(table.row(*token), memory)?;
        dequantize(table.ty, memory, row)?;
        if scale != 1.0 {
            row.iter_mut().for_each(|value| *value *= scale);
        }
    }
    Ok(())
}
