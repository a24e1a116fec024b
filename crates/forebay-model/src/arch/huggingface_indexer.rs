//! The indexers that choose keys, as `config.json` describes them.

use forebay_compute::RopeLayout;
use serde_json::Value;

use super::architecture::Layer;
use super::check::check;
use super::config::{Config, INDEXED};
use super::family::{Family, Indexers};
use super::indexer::{Choice, IndexerShape};
use super::shapes::IndexerRule;
use crate::ModelError;

/// Object of MiniMax's configurations that describes its indexers.
const MINIMAX: &str = "sparse_attention_config";

/// Returns the indexer of a family that has them.
pub(super) fn indexer(
    config: &Config<'_>,
    family: &Family,
) -> Result<Option<IndexerShape>, ModelError> {
    let Some(of) = family.attention.indexer else { return Ok(None) };
    match family.attention.shares_choices && config.set("indexer_types").is_some() {
        true => config.note(&["index_topk_pattern", "index_topk_freq"]),
        false => refuse_shared_choices(config)?,
    }
    let shape = match of {
        Indexers::Keys(layout) => IndexerShape {
            heads: config.count("index_n_heads")?,
            head_dim: config.count("index_head_dim")?,
            top_k: config.count("index_topk")?,
            layout: match config.flag("indexer_rope_interleave")? {
                Some(true) => RopeLayout::Interleaved,
                Some(false) => RopeLayout::Neox,
                None => layout,
            },
            rule: IndexerRule::Keys,
        },
        Indexers::Blocks => blocks(config)?,
        Indexers::GatedPools => {
            let length = config.count("index_kpool")?;
            let tail = config.flag("index_kpool_always_select_tail")?.unwrap_or(true);
            check("index_kpool_always_select_tail", tail, tail, "forebay knows true")?;
            IndexerShape {
                heads: config.count("index_n_heads")?,
                head_dim: config.count("index_head_dim")?,
                top_k: pools(config, "index_topk", length)?,
                layout: family.rotation.huggingface,
                rule: IndexerRule::GatedPools { length },
            }
        }
        Indexers::MeanPools => {
            let length = config.count("indexer_compress_ratio")?;
            let keys = config.optional_count("indexer_kv_heads")?.unwrap_or(1);
            check("indexer_kv_heads", keys, keys == 1, "forebay knows 1")?;
            IndexerShape {
                heads: config.count("indexer_n_heads")?,
                head_dim: config.count("indexer_head_dim")?,
                top_k: pools(config, "indexer_budget", length)?,
                layout: family.rotation.huggingface,
                rule: IndexerRule::MeanPools { length },
            }
        }
    };
    Ok(Some(shape))
}

/// Returns how many whole pools the positions under this key are.
fn pools(config: &Config<'_>, key: &str, length: usize) -> Result<usize, ModelError> {
    Ok(config.count(key)?.checked_div(length).unwrap_or(0))
}

/// Returns the indexer of MiniMax-M3. Published models describe it in an object of its own, and transformers 5 does not.
fn blocks(config: &Config<'_>) -> Result<IndexerShape, ModelError> {
    let published = config.object(MINIMAX)?;
    let count = |published_key: &str, key: &str| {
        config.note(&[key]);
        match &published {
            Some(own) if own.set(published_key).is_some() => own.count(published_key),
            _ => config.count(key),
        }
    };
    let local = count("sparse_local_block", "index_local_blocks")?;
    check("index_local_blocks", local, local > 0, "forebay knows 1 and more")?;
    let length = count("sparse_block_size", "index_block_size")?;
    Ok(IndexerShape {
        heads: count("sparse_num_index_heads", "index_n_heads")?,
        head_dim: count("sparse_index_dim", "index_head_dim")?,
        top_k: count("sparse_topk_blocks", "index_topk_blocks")?,
        layout: RopeLayout::Neox,
        rule: IndexerRule::Blocks { length, before: local - 1 },
    })
}

/// Returns for each layer which keys its attention sees.
pub(super) fn choices(
    config: &Config<'_>,
    family: &Family,
    layers: &[Layer],
) -> Result<Vec<Choice>, ModelError> {
    let of = |(index, layer): (usize, &Layer)| {
        let attends = layer.mixer.attends();
        let choice = Choice::of(attends && is_indexed(config, family, index)?);
        match choice == Choice::Own && family.attention.shares_choices {
            true => shared_choice(config, index),
            false => Ok(choice),
        }
    };
    layers.iter().enumerate().map(of).collect()
}

/// Returns the choice of a layer in a family whose layers may take the choice of a layer before them.
fn shared_choice(config: &Config<'_>, index: usize) -> Result<Choice, ModelError> {
    match config.text_of_layer("indexer_types", index)? {
        None | Some("full") => Ok(Choice::Own),
        Some("shared") => Ok(Choice::Shared),
        Some(other) => Err(ModelError::BadValue {
            key: format!("indexer_types of layer {index}"),
            value: other.into(),
            expected: "forebay knows full and shared".into(),
        }),
    }
}

/// Returns true if attention of layer `index` has an indexer, in a family that has them.
fn is_indexed(config: &Config<'_>, family: &Family, index: usize) -> Result<bool, ModelError> {
    let types = config.list("layer_types")?;
    let kind = types.and_then(|types| types.get(index)).and_then(Value::as_str);
    let key = format!("layer_types of layer {index}");
    let fits = kind != Some(INDEXED) || family.attention.indexer.is_some();
    check(&key, "indexed_attention", fits, "forebay knows no indexers for this family")?;
    if family.attention.indexer != Some(Indexers::Blocks) {
        return Ok(family.attention.indexer.is_some());
    }
    let published = config.object(MINIMAX)?;
    let flag = match &published {
        Some(own) => own.flag_of_layer("sparse_attention_freq", index)?,
        None => None,
    };
    if types.is_some() {
        return match kind {
            Some("minimax_m3_sparse") => Ok(true),
            Some("full_attention") => Ok(false),
            other => Err(ModelError::BadValue {
                key,
                value: other.unwrap_or("none").into(),
                expected: "forebay knows minimax_m3_sparse and full_attention for this family"
                    .into(),
            }),
        };
    }
    Ok(flag.unwrap_or(false))
}

/// Returns an error if layers share the choice of an earlier layer's indexer, as in later models of the family.
fn refuse_shared_choices(config: &Config<'_>) -> Result<(), ModelError> {
    let refuse = |key: &str, value: String| {
        let expected = "forebay knows models in which every layer has an indexer";
        Err(ModelError::BadValue { key: key.into(), value, expected: expected.into() })
    };
    let is_full = |kind: &Value| matches!(kind.as_str(), Some("full" | "F"));
    let keys = ["indexer_types", "index_topk_pattern"];
    config.note(&keys);
    config.note(&["index_topk_freq"]);
    for key in keys {
        let all_full = match config.set(key) {
            None => continue,
            Some(Value::String(pattern)) => pattern.bytes().all(|kind| kind == b'F'),
            Some(Value::Array(types)) => types.iter().all(is_full),
            Some(_) => false,
        };
        return if all_full { Ok(()) } else { refuse(key, "not full in all layers".into()) };
    }
    match config.optional_count("index_topk_freq")? {
        None | Some(0 | 1) => Ok(()),
        Some(every) => refuse("index_topk_freq", every.to_string()),
    }
}
