//! The choice of the keys that a token attends to.

use forebay_compute::RopeLayout;

use super::architecture::{Architecture, Attention, AttentionBias, Layer, Rope};
use super::check::{check, check_size};
use super::shapes::{Indexer, IndexerRule};
use crate::ModelError;

/// Epsilon of the layer norm of an indexer's keys.
pub(crate) const INDEXER_NORM_EPSILON: f32 = 1e-6;

/// Sizes of the indexers of a file, and the layout of their rotation.
pub(super) struct IndexerShape {
    pub heads: usize,
    pub head_dim: usize,
    pub top_k: usize,
    pub layout: RopeLayout,
    pub rule: IndexerRule,
}

/// Adds an indexer to the description of attention, and its rotation to the ropes if there is one. `indexed` says which layers have
/// one. If some layers have none, the shapes with an indexer follow those without, and the layers with an indexer get them.
pub(super) fn with_indexer(
    mut attentions: Vec<Attention>,
    mut ropes: Vec<Rope>,
    shape: Option<IndexerShape>,
    layers: &mut [Layer],
    indexed: &[bool],
) -> (Vec<Attention>, Vec<Rope>) {
    let attends = |layer: &Layer| layer.mixer.attends();
    let of_attention = || layers.iter().zip(indexed).filter(|(layer, _)| attends(layer));
    let (some, all) = (of_attention().any(|(_, has)| *has), of_attention().all(|(_, has)| *has));
    let Some(shape) = shape.filter(|_| some) else { return (attentions, ropes) };
    let IndexerShape { heads, head_dim, top_k, layout, rule } = shape;
    let rope = ropes.first().cloned().map(|rope| {
        ropes.push(Rope { layout, ..rope });
        ropes.len() - 1
    });
    let indexer = Some(Indexer { heads, head_dim, top_k, rope, rule });
    let with = |attention: &Attention| Attention { indexer, ..attention.clone() };
    let with_indexer: Vec<Attention> = attentions.iter().map(with).collect();
    if all {
        return (with_indexer, ropes);
    }
    for (layer, has) in layers.iter_mut().zip(indexed) {
        layer.attention += if *has && attends(layer) { attentions.len() } else { 0 };
    }
    attentions.extend(with_indexer);
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
        let mut with =
            self.attentions.iter().filter_map(|of| of.indexer.map(|indexer| (of, indexer)));
        with.try_for_each(|(of, indexer)| self.validate_indexer(of, &indexer))
    }

    fn validate_indexer(&self, of: &Attention, indexer: &Indexer) -> Result<(), ModelError> {
        check_size("indexer heads", indexer.heads)?;
        check_size("length of the indexer's heads", indexer.head_dim)?;
        check_size("keys that the indexer chooses", indexer.top_k)?;
        let rotary_dim = indexer.rope.map_or(0, |rope| self.ropes[rope].rotary_dim);
        check(
            "length of the indexer's heads",
            indexer.head_dim,
            rotary_dim <= indexer.head_dim,
            &format!("{rotary_dim} elements of it rotate"),
        )?;
        match indexer.rule {
            IndexerRule::Keys => {}
            IndexerRule::Blocks { length, before } => {
                let fits = length.is_power_of_two() && length <= 128;
                let expected = "forebay knows powers of two up to 128";
                check("length of the indexer's blocks", length, fits, expected)?;
                let fits = indexer.top_k > before + 1;
                let expected = "it must be more than the blocks that are always chosen";
                check("blocks that the indexer chooses", indexer.top_k, fits, expected)?;
                let fits = indexer.heads == of.kv_heads && of.latent.is_none();
                let expected = "forebay knows one for each key/value head";
                check("indexer heads", indexer.heads, fits, expected)?;
            }
            IndexerRule::GatedPools { length } | IndexerRule::MeanPools { length } => {
                let fits = (1..=64).contains(&length);
                check("length of the indexer's pools", length, fits, "forebay knows 1 to 64")?;
                let fits = indexer.head_dim.is_multiple_of(8);
                let expected = "it must be a multiple of 8";
                check("length of the indexer's heads", indexer.head_dim, fits, expected)?;
            }
        }
        let pools = indexer.pools();
        check_size("keys that the indexer chooses", pools.positions_max())?;
        check_size("lists of chosen keys", pools.most.saturating_mul(indexer.lists()))?;
        let low_rank = of.latent.is_some_and(|latent| latent.query_rank.is_some());
        let of_queries = matches!(indexer.rule, IndexerRule::Keys | IndexerRule::GatedPools { .. });
        let plain = of.latent.is_none() && of.bias == AttentionBias::None;
        check(
            "indexer",
            "set",
            if of_queries { low_rank } else { plain },
            "forebay knows indexers of latent attention with low-rank queries, and those of blocks and means of other attention",
        )
    }
}
