//! The choice of the keys that a token attends to.

use forebay_compute::RopeLayout;

use super::architecture::{Architecture, Attention, Indexer, Rope};
use super::check::{check, check_size};
use crate::ModelError;

/// Epsilon of the layer norm of an indexer's keys.
pub(crate) const INDEXER_NORM_EPSILON: f32 = 1e-6;

/// Sizes of the indexers of a file, and the layout of their rotation.
pub(super) struct IndexerShape {
    pub heads: usize,
    pub head_dim: usize,
    pub top_k: usize,
    pub layout: RopeLayout,
}

/// Adds an indexer to the description of attention, and its rotation to the ropes.
pub(super) fn with_indexer(
    mut attentions: Vec<Attention>,
    mut ropes: Vec<Rope>,
    shape: Option<IndexerShape>,
) -> (Vec<Attention>, Vec<Rope>) {
    let (Some(shape), Some(rope)) = (shape, ropes.first().cloned()) else {
        return (attentions, ropes);
    };
    let IndexerShape { heads, head_dim, top_k, layout } = shape;
    let indexer = Some(Indexer { heads, head_dim, top_k, rope: ropes.len() });
    ropes.push(Rope { layout, ..rope });
    attentions.iter_mut().for_each(|attention| attention.indexer = indexer);
    (attentions, ropes)
}

impl Architecture {
    /// Returns the shape of the indexers, if there are any. It is the same in all layers.
    pub fn indexer(&self) -> Option<&Indexer> {
        self.attentions.iter().find_map(|attention| attention.indexer.as_ref())
    }

    /// Checks the numbers of indexers, and that the layers with indexers are of a known kind.
    pub(super) fn validate_indexers(&self) -> Result<(), ModelError> {
        for layer in self.attention_layers() {
            let windowed = self.layers[layer].window.is_some();
            let chosen = self.attention_of(layer).indexer.is_some();
            check("indexer of layer", layer, !(windowed && chosen), "it has a window too")?;
        }
        let Some(indexer) = self.indexer() else { return Ok(()) };
        check_size("indexer heads", indexer.heads)?;
        check_size("length of the indexer's heads", indexer.head_dim)?;
        check_size("keys that the indexer chooses", indexer.top_k)?;
        let rotary_dim = self.ropes[indexer.rope].rotary_dim;
        check(
            "length of the indexer's heads",
            indexer.head_dim,
            rotary_dim <= indexer.head_dim,
            &format!("{rotary_dim} elements of it rotate"),
        )?;
        let low_rank = |of: &Attention| of.latent.is_some_and(|latent| latent.query_rank.is_some());
        let all = self.attentions.iter().all(|of| of.indexer.is_none() || low_rank(of));
        check(
            "indexer",
            "set",
            all,
            "forebay knows indexers of latent attention with low-rank queries",
        )
    }
}
