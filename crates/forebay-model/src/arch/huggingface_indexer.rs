//! The indexers that choose keys, as `config.json` describes them.

use forebay_compute::RopeLayout;
use serde_json::Value;

use super::config::Config;
use super::families::Family;
use super::indexer::IndexerShape;
use crate::ModelError;

/// Returns the indexer of a family that has them.
pub(super) fn indexer(
    config: &Config<'_>,
    family: &Family,
) -> Result<Option<IndexerShape>, ModelError> {
    let Some(layout) = family.indexer else { return Ok(None) };
    refuse_shared_choices(config)?;
    let layout = match config.json.get("indexer_rope_interleave").and_then(Value::as_bool) {
        Some(true) => RopeLayout::Interleaved,
        Some(false) => RopeLayout::Neox,
        None => layout,
    };
    Ok(Some(IndexerShape {
        heads: config.count("index_n_heads")?,
        head_dim: config.count("index_head_dim")?,
        top_k: config.count("index_topk")?,
        layout,
    }))
}

/// Returns an error if layers share the choice of an earlier layer's indexer, as in later models of the family.
fn refuse_shared_choices(config: &Config<'_>) -> Result<(), ModelError> {
    let refuse = |key: &str, value: String| {
        let expected = "forebay knows models in which every layer has an indexer";
        Err(ModelError::BadValue { key: key.into(), value, expected: expected.into() })
    };
    let is_full = |kind: &Value| matches!(kind.as_str(), Some("full" | "F"));
    for key in ["indexer_types", "index_topk_pattern"] {
        let all_full = match config.json.get(key) {
            None | Some(Value::Null) => continue,
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
