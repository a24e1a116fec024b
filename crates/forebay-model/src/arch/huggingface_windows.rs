//! The windows of layers, as `config.json` describes them.

use super::config::{Config, WINDOWED};
use super::family::{Family, Windows};
use super::huggingface_variants::has_number;
use super::unrotated::Unrotated;
use crate::ModelError;

/// Returns the sliding window of layer `index`, if it has one.
///
/// If `layer_types` is present, it decides. Otherwise the qwen families have a window only with `use_sliding_window`,
/// from layer `max_window_layers` on. Other families have it in all layers or by their pattern.
pub(super) fn window(
    config: &Config<'_>,
    family: &Family,
    index: usize,
) -> Result<Option<usize>, ModelError> {
    config.note(&WINDOW_KEYS);
    let window = match WINDOWS.iter().find(|key| config.get(key).is_some()) {
        Some(key) => config.optional_count(key)?,
        None => family.attention.window,
    };
    let chunked = family.rotation.unrotated.and_then(Unrotated::chunks).is_some();
    let kind = if chunked || family.layers.one_block {
        None
    } else {
        config.text_of_layer("layer_types", index)?
    };
    expect_kind(kind, family, index)?;
    let flag = config.flag_of_layer("hybrid_layer_pattern", index)?;
    let listed = config.list("local_layer_ids")?.map(|layers| has_number(layers, index));
    let slides = match (kind, flag.or(listed)) {
        (Some(kind), _) => kind == WINDOWED || kind == HYBRID_WINDOWED,
        (None, Some(flag)) => flag,
        (None, None) => slides(config, family, index)? && window.is_some(),
    };
    match (slides, window) {
        (true, Some(window)) => Ok(Some(window)),
        (true, None) => Err(config.missing(WINDOWS[0])),
        (false, _) => Ok(None),
    }
}

/// Kinds of layers that Inkling's configurations name because of their convolutions.
const HYBRID: &str = "hybrid";
const HYBRID_WINDOWED: &str = "hybrid_sliding";

/// Keys of the length of windows.
const WINDOWS: [&str; 2] = ["sliding_window", "sliding_window_size"];

/// Keys of the layers that have a window, of which one decides.
const WINDOW_KEYS: [&str; 7] = [
    "global_attn_every_n_layers",
    "sliding_window",
    "sliding_window_size",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "max_window_layers",
    "use_sliding_window",
];

/// Returns true if a layer has a window according to the pattern of the configuration or the family.
fn slides(config: &Config<'_>, family: &Family, index: usize) -> Result<bool, ModelError> {
    let period = config.optional_first_count(&[
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "global_attn_every_n_layers",
    ])?;
    Ok(match (family.attention.windows, period) {
        (Windows::ButEvery(_), Some(period)) if period > 0 => !(index + 1).is_multiple_of(period),
        (Windows::AsSaid, _) => {
            let first = config.optional_count("max_window_layers")?.unwrap_or(0);
            config.is_set("use_sliding_window")? && index >= first
        }
        _ => {
            let count = config.optional_count("num_hidden_layers")?.unwrap_or(0);
            family.attention.windows.slides(index, count)
        }
    })
}

/// Refuses kinds of layers that no part of the reader knows. Those of families with other attention have checks of their own.
fn expect_kind(kind: Option<&str>, family: &Family, index: usize) -> Result<(), ModelError> {
    let is_other = family.recurrence.rule.is_some()
        || family.attention.indexer.is_some()
        || family.attention.compressed;
    match kind {
        None | Some("full_attention" | "sliding_attention" | "attention") => Ok(()),
        Some(_) if is_other => Ok(()),
        Some(HYBRID | HYBRID_WINDOWED) if family.layers.convolutions => Ok(()),
        Some(other) => Err(ModelError::BadValue {
            key: format!("layer_types of layer {index}"),
            value: other.into(),
            expected: "forebay knows full_attention and sliding_attention for this family".into(),
        }),
    }
}
