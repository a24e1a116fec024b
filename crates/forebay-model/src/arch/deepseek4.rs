//! DeepSeek-V4: its entry in the table of families, and what `config.json` and GGUF metadata say of its attention.

use forebay_compute::{Gating, RopeLayout, RopeScaling};
use serde_json::Value;

use super::architecture::{Layer, Rope};
use super::compressed::{Beside, CompressedShape};
use super::config::{Config, short};
use super::gguf_keys::Keys;
use super::rope_parameters::Parameters;
use crate::ModelError;

/// Names of the kinds of layers in `layer_types` and `compress_rates`.
const CHOSEN: &str = "compressed_sparse_attention";
const ALL: &str = "heavily_compressed_attention";

fn bad(key: &str, value: String, expected: &str) -> ModelError {
    ModelError::BadValue { key: key.into(), value, expected: expected.into() }
}

/// Returns what `config.json` says of attention.
pub(super) fn of_config(
    config: &Config<'_>,
    layers: &[Layer],
) -> Result<CompressedShape, ModelError> {
    let head_dim = config.count("head_dim")?;
    if config.optional_count("num_key_value_heads")?.is_some_and(|heads| heads != 1) {
        let value = config.count("num_key_value_heads")?.to_string();
        return Err(bad("num_key_value_heads", value, "forebay knows 1 for this family"));
    }
    if config.flag("attention_bias") {
        return Err(bad("attention_bias", "true".into(), "forebay knows no such biases"));
    }
    let rotary = match config.optional_count("qk_rope_head_dim")? {
        Some(rotary) => rotary,
        None => {
            let share = config.float("partial_rotary_factor").unwrap_or(0.125);
            (share * head_dim as f64) as usize
        }
    };
    let rope = |theta: f64, scaling: RopeScaling| Rope {
        theta,
        rotary_dim: rotary,
        from: head_dim.saturating_sub(rotary),
        layout: RopeLayout::Interleaved,
        scaling,
        factors: None,
    };
    let [main, compress] = ["main", "compress"].map(|scope| Parameters::of(config, Some(scope)));
    // Parameters without scopes are those of the layers with entries.
    let theta = config.float("rope_theta").or(main.float("rope_theta")).unwrap_or(10_000.0);
    let compressed = config.float("compress_rope_theta").or(compress.float("rope_theta"));
    let scaling = match compress.scaling()? {
        // The magnitude is left out.
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
            let magnitude = Some(compress.float("attention_factor").unwrap_or(1.0));
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                truncate,
                magnitude,
            }
        }
        other => other,
    };
    Ok(CompressedShape {
        heads: config.count("num_attention_heads")?,
        head_dim,
        query_rank: config.count("q_lora_rank")?,
        output_groups: config.count("o_groups")?,
        output_rank: config.count("o_lora_rank")?,
        window: config.count("sliding_window")?,
        indexer: [
            config.count("index_n_heads")?,
            config.count("index_head_dim")?,
            config.count("index_topk")?,
        ],
        beside: beside(config, layers.len())?,
        ropes: [rope(theta, RopeScaling::None), rope(compressed.unwrap_or(160_000.0), scaling)],
    })
}

/// Returns what each layer sees beside its window: `layer_types` with `compress_rates`, or `compress_ratios`.
fn beside(config: &Config<'_>, count: usize) -> Result<Vec<Beside>, ModelError> {
    let list = |key: &str| config.json.get(key).and_then(Value::as_array);
    let rate = |kind: &str, own: &str, usual: usize| {
        let rates = config.json.get("compress_rates").and_then(|rates| rates.get(kind));
        let rate = rates.or(config.json.get(own)).map_or(Some(usual as u64), Value::as_u64);
        let rate = rate.and_then(|rate| usize::try_from(rate).ok());
        rate.ok_or_else(|| bad(own, "no whole number".into(), "positions of an entry"))
    };
    if let Some(types) = list("layer_types") {
        let chosen = rate(CHOSEN, "compress_rate_csa", 4)?;
        let all = rate(ALL, "compress_rate_hca", 128)?;
        let kind = |layer: usize| match types.get(layer).and_then(Value::as_str) {
            Some("sliding_attention") => Ok(Beside::Nothing),
            Some(CHOSEN) => Ok(Beside::Chosen(chosen)),
            Some(ALL) => Ok(Beside::All(all)),
            other => {
                let key = format!("layer_types of layer {layer}");
                let expected = format!("forebay knows sliding_attention, {CHOSEN} and {ALL}");
                Err(bad(&key, other.unwrap_or("none").into(), &expected))
            }
        };
        return (0..count).map(kind).collect();
    }
    let Some(ratios) = list("compress_ratios") else {
        return Err(config.missing("compress_ratios"));
    };
    let ratio = |layer: usize| {
        let key = format!("compress_ratios of layer {layer}");
        match ratios.get(layer).map(|ratio| (ratio, ratio.as_u64())) {
            Some((_, Some(ratio))) => Beside::of_ratio(&key, ratio),
            Some((value, None)) => Err(bad(&key, short(value), "it must be a whole number")),
            None => Err(bad(&key, "none".into(), "every layer has a ratio")),
        }
    };
    (0..count).map(ratio).collect()
}

/// Returns the gating that GGUF metadata describes. Limits are given for each layer, for experts and for shared experts.
pub(super) fn gating_of_gguf(keys: &Keys<'_>, usual: Gating) -> Result<Gating, ModelError> {
    let Gating::ClampedSilu { limit: usual } = usual else { return Ok(usual) };
    let mut found = None;
    for key in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
        let path = keys.path(key);
        let Some(value) = keys.metadata.get(&path) else { continue };
        let limits = match value.as_f32() {
            Some(limit) => Some(vec![limit]),
            None => value.as_array().and_then(|array| array.to_f32s()),
        };
        for limit in limits.ok_or_else(|| bad(&path, value.describe(), "it must be numbers"))? {
            if found.is_some_and(|found: f32| found != limit) {
                return Err(bad(
                    &path,
                    limit.to_string(),
                    "forebay knows one limit for all layers",
                ));
            }
            found = Some(limit);
        }
    }
    Ok(Gating::ClampedSilu { limit: found.unwrap_or(usual) })
}

/// Returns what GGUF metadata says of attention. `scaling` is that of the layers with entries.
pub(super) fn of_gguf(
    keys: &Keys<'_>,
    layers: &[Layer],
    scaling: RopeScaling,
) -> Result<CompressedShape, ModelError> {
    let head_dim = keys.count("attention.key_length")?;
    let kv_heads = keys.count("attention.head_count_kv")?;
    if kv_heads != 1 {
        let expected = "forebay knows 1 for this family";
        return Err(bad(&keys.path("attention.head_count_kv"), kv_heads.to_string(), expected));
    }
    let rotary = keys.count("rope.dimension_count")?;
    let rope = |key: &str, usual: f64, scaling: RopeScaling| Rope {
        theta: keys.optional_float(key).map_or(usual, f64::from),
        rotary_dim: rotary,
        from: head_dim.saturating_sub(rotary),
        layout: RopeLayout::Interleaved,
        scaling,
        factors: None,
    };
    let scaling = match scaling {
        // The magnitude is left out.
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
            let magnitude = Some(1.0);
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                truncate,
                magnitude,
            }
        }
        other => other,
    };
    let key = "attention.compress_ratios";
    let beside = |layer: usize| {
        let ratio = keys.count_of_layer(key, layer)?.ok_or_else(|| keys.missing(key))?;
        Beside::of_ratio(&keys.path(key), ratio as u64)
    };
    Ok(CompressedShape {
        heads: keys.count("attention.head_count")?,
        head_dim,
        query_rank: keys.count("attention.q_lora_rank")?,
        output_groups: keys.count("attention.output_group_count")?,
        output_rank: keys.count("attention.output_lora_rank")?,
        window: keys.count("attention.sliding_window")?,
        indexer: [
            keys.count("attention.indexer.head_count")?,
            keys.count("attention.indexer.key_length")?,
            keys.count("attention.indexer.top_k")?,
        ],
        beside: (0..layers.len()).map(beside).collect::<Result<_, _>>()?,
        ropes: [
            rope("rope.freq_base", 10_000.0, RopeScaling::None),
            rope("attention.compress_rope_freq_base", 160_000.0, scaling),
        ],
    })
}
