//! Reads the indexers of GGUF metadata.

use forebay_compute::RopeLayout;
use forebay_format::{Array, Catalog};

use super::architecture::Layer;
use super::check::check;
use super::family::{Family, Indexers};
use super::gguf_keys::Keys;
use super::indexer::{Choice, IndexerShape};
use super::shapes::IndexerRule;
use crate::ModelError;

const TYPES: &str = "attention.indexer.types";
const RATIOS: &str = "attention.compress_ratios";

/// Returns the indexer of a family that has them. It may be in some layers or in none ([`indexed_layers`]).
pub(super) fn indexer(
    keys: &Keys<'_>,
    family: &Family,
    layers: &[Layer],
) -> Result<Option<IndexerShape>, ModelError> {
    let Some(of) = family.attention.indexer else { return Ok(None) };
    let top_k = keys.count("attention.indexer.top_k")?;
    let pools = |length: usize| top_k.checked_div(length).unwrap_or(0);
    let own = family.rotation.gguf;
    let (top_k, layout, rule) = match of {
        Indexers::Keys(layout) => {
            expect_in_all_layers(keys, family, layers)?;
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
            expect_in_all_layers(keys, family, layers)?;
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

/// Returns for each layer which keys its attention sees.
pub(super) fn choices(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    count: usize,
) -> Result<Vec<Choice>, ModelError> {
    let types = match family.attention.shares_choices {
        true => types(keys)?,
        false => None,
    };
    let of = |layer: usize| match family.attention.indexer {
        None => Ok(Choice::All),
        Some(Indexers::Keys(_) | Indexers::GatedPools) => match types.as_deref() {
            None => Ok(Choice::Own),
            Some(types) => match types.get(layer) {
                Some(true) => Ok(Choice::Own),
                Some(false) => Ok(Choice::Shared),
                None => {
                    let expected = format!("it must have one for layer {layer}");
                    Err(keys.wrong(TYPES, format!("{} values", types.len()), &expected))
                }
            },
        },
        Some(Indexers::Blocks) => {
            Ok(Choice::of(catalog.tensor(&format!("blk.{layer}.indexer.k_proj.weight")).is_some()))
        }
        // A ratio of 0 means attention to all keys, whatever the other keys of the indexer say.
        Some(Indexers::MeanPools) => {
            let ratio = keys.count_of_layer(RATIOS, layer)?;
            Ok(Choice::of(ratio.is_some_and(|ratio| ratio > 0)))
        }
    };
    (0..count).map(of).collect()
}

/// Returns for each layer if it has an indexer of its own, if the file says so.
fn types(keys: &Keys<'_>) -> Result<Option<Vec<bool>>, ModelError> {
    let of_layers = keys.by_layer(TYPES);
    let Some(types) = keys.get(TYPES) else { return Ok(None) };
    match (types.as_array(), of_layers) {
        (Some(Array::Bool(flags)), _) => Ok(Some(flags.clone())),
        (_, Some(flags)) => Ok(Some(flags.iter().map(|flag| *flag != 0).collect())),
        _ => Err(keys.wrong(TYPES, types.describe(), "it must be a list of true and false")),
    }
}

/// Checks that every layer without a window has an indexer of its own, and that the others have none.
fn expect_in_all_layers(
    keys: &Keys<'_>,
    family: &Family,
    layers: &[Layer],
) -> Result<(), ModelError> {
    let types = if family.attention.shares_choices { None } else { types(keys)? };
    let Some(types) = types else { return Ok(()) };
    let mut own = layers.iter().zip(types).enumerate();
    let Some((index, (layer, has))) = own.find(|(_, (of, has))| *has == of.window.is_some()) else {
        return Ok(());
    };
    let expected = match layer.window {
        None => format!("forebay knows models in which layers such as {index} have an indexer"),
        Some(_) => format!("layer {index} has a window, and forebay knows indexers without one"),
    };
    Err(keys.wrong(TYPES, has, &expected))
}
