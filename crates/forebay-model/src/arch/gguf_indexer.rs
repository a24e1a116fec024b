//! Reads the indexers of GGUF metadata.

use forebay_compute::RopeLayout;
use forebay_format::{Array, Catalog, Value};

use super::check::check;
use super::family::{Family, Indexers};
use super::gguf_keys::Keys;
use super::indexer::IndexerShape;
use super::shapes::IndexerRule;
use crate::ModelError;

const TYPES: &str = "attention.indexer.types";
const RATIOS: &str = "attention.compress_ratios";

/// Returns the indexer of a family that has them. It may be in some layers or in none ([`indexed_layers`]).
pub(super) fn indexer(
    keys: &Keys<'_>,
    family: &Family,
) -> Result<Option<IndexerShape>, ModelError> {
    let Some(of) = family.attention.indexer else { return Ok(None) };
    let top_k = keys.count("attention.indexer.top_k")?;
    let pools = |length: usize| top_k.checked_div(length).unwrap_or(0);
    let own = family.rotation.gguf;
    let (top_k, layout, rule) = match of {
        Indexers::Keys(layout) => {
            expect_in_all_layers(keys)?;
            (top_k, layout, IndexerRule::Keys)
        }
        Indexers::Blocks => {
            let local = keys.count("attention.indexer.local_blocks")?;
            let key = keys.path("attention.indexer.local_blocks");
            check(&key, local, local > 0, "forebay knows 1 and more")?;
            let length = keys.count("attention.indexer.block_size")?;
            (top_k, RopeLayout::Neox, IndexerRule::Blocks { length, before: local - 1 })
        }
        Indexers::GatedPools => {
            expect_in_all_layers(keys)?;
            let key = "attention.indexer.kpool_select_tail";
            if keys.flag(key)? == Some(false) {
                return Err(keys.wrong(key, false, "forebay knows true"));
            }
            let length = keys.count("attention.indexer.kpool")?;
            (pools(length), own, IndexerRule::GatedPools { length })
        }
        Indexers::MeanPools => {
            let ratios = keys.by_layer(RATIOS).unwrap_or_default();
            let mut ratios = ratios.into_iter().filter(|ratio| *ratio > 0);
            // No layer has an indexer without a ratio.
            let first = ratios.next().unwrap_or(1);
            if let Some(other) = ratios.find(|ratio| *ratio != first) {
                let expected = format!("forebay knows one ratio beside 0, and there is {first}");
                return Err(keys.wrong(RATIOS, other, &expected));
            }
            let length = usize::try_from(first).unwrap_or(usize::MAX);
            (pools(length), own, IndexerRule::MeanPools { length })
        }
    };
    Ok(Some(IndexerShape {
        heads: keys.count("attention.indexer.head_count")?,
        head_dim: keys.count("attention.indexer.key_length")?,
        top_k,
        layout,
        rule,
    }))
}

/// Returns for each layer if its attention has an indexer.
pub(super) fn indexed_layers(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    count: usize,
) -> Result<Vec<bool>, ModelError> {
    let has = |layer: usize| match family.attention.indexer {
        None => Ok(false),
        Some(Indexers::Keys(_) | Indexers::GatedPools) => Ok(true),
        Some(Indexers::Blocks) => {
            Ok(catalog.tensor(&format!("blk.{layer}.indexer.k_proj.weight")).is_some())
        }
        // A ratio of 0 means attention to all keys, whatever the other keys of the indexer say.
        Some(Indexers::MeanPools) => {
            Ok(keys.count_of_layer(RATIOS, layer)?.is_some_and(|ratio| ratio > 0))
        }
    };
    (0..count).map(has).collect()
}

/// Checks that every layer has an indexer of its own.
fn expect_in_all_layers(keys: &Keys<'_>) -> Result<(), ModelError> {
    let of_layers = keys.by_layer(TYPES);
    let types = keys.get(TYPES);
    let all = match types.and_then(Value::as_array) {
        Some(Array::Bool(flags)) => flags.iter().all(|flag| *flag),
        _ => types.is_none() || of_layers.is_some_and(|flags| !flags.contains(&0)),
    };
    if all {
        return Ok(());
    }
    let expected = "forebay knows models in which every layer has an indexer";
    Err(keys.wrong(TYPES, "not the same in all layers", expected))
}
