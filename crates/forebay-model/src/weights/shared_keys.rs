//! Weights of attention whose heads share keys, with compressed entries.

use forebay_format::Block;

use super::layer::LayerBuilder;
use super::parts::{
    CompressorWeights, EntryIndexerWeights, EntryWeights, HeadMatrices, PartMatrix,
    SharedKeyWeights,
};
use super::tensors::Tensors;
use crate::ModelError;
use crate::arch::EntryShape;

impl LayerBuilder<'_> {
    pub(super) fn shared_keys(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
    ) -> Result<SharedKeyWeights, ModelError> {
        let shape = self.architecture.attention_of(self.index);
        let shared = shape.shared.expect("the layer has shared keys");
        let (hidden, head_dim, rank) =
            (self.architecture.hidden, shape.head_dim, shared.query_rank);
        let (width, groups) = (shape.heads * head_dim, shared.output_groups);
        let q_a = self.matrix(tensors, dense, "q_a", rank, hidden)?;
        let q_b = self.matrix(tensors, dense, "q_b", width, rank)?;
        let key = self.matrix(tensors, dense, "shared_key", head_dim, hidden)?;
        let o_a =
            self.output_groups(tensors, dense, groups, (shared.output_rank, width / groups))?;
        let entries = match shared.entries {
            Some(entries) => Some(self.entries(tensors, dense, &entries, rank)?),
            None => None,
        };
        let vector = |tensors: &mut Tensors<'_>, role: &str, length: usize| {
            tensors.norm(&self.name(role), length)
        };
        Ok(SharedKeyWeights {
            q_a,
            q_a_norm: vector(tensors, "q_a_norm", rank)?,
            q_b,
            // This norm has no weight in the files.
            q_norm: tensors.ones(head_dim),
            key,
            key_norm: vector(tensors, "shared_key_norm", head_dim)?,
            o_a,
            entries,
        })
    }

    /// Appends the first output projection. The matrices of all groups are the rows of one tensor.
    fn output_groups(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        groups: usize,
        (rows, cols): (usize, usize),
    ) -> Result<HeadMatrices, ModelError> {
        let all = self.matrix(tensors, dense, "o_a", groups * rows, cols)?;
        let row = all.ty.row_bytes(cols as u64).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = row.and_then(|bytes| bytes.checked_mul(rows));
        let bytes = bytes.ok_or_else(|| ModelError::TensorType {
            name: self.name("o_a"),
            found: all.ty.name(),
        })?;
        Ok(HeadMatrices { matrix: PartMatrix { rows, ..all }, bytes, heads: groups })
    }

    fn entries(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
        of: &EntryShape,
        query_rank: usize,
    ) -> Result<EntryWeights, ModelError> {
        let (head_dim, hidden) =
            (self.architecture.attention_of(self.index).head_dim, self.architecture.hidden);
        let own = self.compressor(tensors, dense, "entry", (of, head_dim))?;
        let Some(indexer) = of.indexer else { return Ok(EntryWeights { own, indexer: None }) };
        let rows = indexer.heads * indexer.head_dim;
        let indexer = EntryIndexerWeights {
            q: self.matrix(tensors, dense, "indexer_q", rows, query_rank)?,
            weights: self.matrix(tensors, dense, "indexer_weights", indexer.heads, hidden)?,
            keys: self.compressor(tensors, dense, "indexer", (of, indexer.head_dim))?,
        };
        Ok(EntryWeights { own, indexer: Some(indexer) })
    }

    /// Returns what computes entries of `dim` elements. `of` is the beginning of the roles.
    fn compressor(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
        of: &str,
        (shape, dim): (&EntryShape, usize),
    ) -> Result<CompressorWeights, ModelError> {
        let (width, hidden) = (shape.parts() * dim, self.architecture.hidden);
        Ok(CompressorWeights {
            values: self.matrix(tensors, dense, &format!("{of}_values"), width, hidden)?,
            gates: self.matrix(tensors, dense, &format!("{of}_gates"), width, hidden)?,
            bias: tensors.rows(&self.name(&format!("{of}_bias")), shape.ratio, width)?,
            norm: tensors.norm(&self.name(&format!("{of}_norm")), dim)?,
        })
    }
}
