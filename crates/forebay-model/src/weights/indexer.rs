//! Builds the indexers of layers.

use forebay_format::Block;

use super::layer::LayerBuilder;
use super::parts::IndexerWeights;
use super::tensors::Tensors;
use crate::ModelError;
use crate::arch::IndexerRule;

impl LayerBuilder<'_> {
    /// Returns the layer's indexer, if it has one. Its matrices are parts of the dense block.
    pub(super) fn indexer(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
        query_rank: Option<usize>,
    ) -> Result<Option<IndexerWeights>, ModelError> {
        let of = self.architecture.attention_of(self.index).indexer.as_ref();
        let Some(of) = of.filter(|of| of.own) else { return Ok(None) };
        let hidden = self.architecture.hidden;
        let (heads, dim) = (of.heads, of.head_dim);
        let q_rows = heads * dim;
        let (q, k) = match of.rule {
            IndexerRule::MeanPools { .. } => {
                let roles = [("indexer_q", q_rows), ("indexer_k", dim)];
                let [q, k] = self.matrices(tensors, dense, "indexer_qk", roles, hidden)?;
                (q, k)
            }
            _ => {
                let rank = query_rank.unwrap_or(hidden);
                let q = self.matrix(tensors, dense, "indexer_q", q_rows, rank)?;
                (q, self.matrix(tensors, dense, "indexer_k", dim, hidden)?)
            }
        };
        let weights = match of.has_weights() {
            true => Some(self.matrix(tensors, dense, "indexer_weights", heads, hidden)?),
            false => None,
        };
        let gate = match of.rule {
            IndexerRule::GatedPools { length } => {
                let matrix = self.matrix(tensors, dense, "indexer_gate", dim, hidden)?;
                Some((matrix, tensors.rows(&self.name("indexer_gate_bias"), length, dim)?))
            }
            _ => None,
        };
        let k_norm_name = self.name("indexer_k_norm");
        // Keys have a layer norm where the heads have weights, and otherwise a norm like queries.
        let (q_norm, k_norm, k_norm_bias) = match of.has_weights() {
            true => {
                let bias = tensors.vector(&self.name("indexer_k_norm_bias"), dim)?;
                (None, tensors.vector(&k_norm_name, dim)?, Some(bias))
            }
            false => {
                let q_norm = tensors.norm(&self.name("indexer_q_norm"), dim)?;
                (Some(q_norm), tensors.norm(&k_norm_name, dim)?, None)
            }
        };
        Ok(Some(IndexerWeights { q, k, weights, gate, q_norm, k_norm, k_norm_bias }))
    }
}
