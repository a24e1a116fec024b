//! DeepSeek-V4: its entry in the table of families, and what `config.json` and GGUF metadata say of its attention.

use forebay_compute::RopeScaling;

use super::architecture::Layer;
use super::check::check;
use super::compressed::{Beside, CompressedShape};
use super::config::{Config, short};
use super::gguf_keys::Keys;
use super::rope_parameters::Parameters;
use crate::ModelError;

/// Names of the kinds of layers in `layer_types` and `compress_rates`.
const CHOSEN: &str = "compressed_sparse_attention";
const ALL: &str = "heavily_compressed_attention";
/// The numbers of key/value heads that are known.
const KV_HEADS: &str = "forebay knows 1 for this family";

fn bad(key: &str, value: String, expected: &str) -> ModelError {
    ModelError::BadValue { key: key.into(), value, expected: expected.into() }
}

/// Returns what `config.json` says of attention.
pub(super) fn of_config(
    config: &Config<'_>,
    layers: &[Layer],
) -> Result<CompressedShape, ModelError> {
    let head_dim = config.count("head_dim")?;
    let kv_heads = config.optional_count("num_key_value_heads")?.unwrap_or(1);
    check("num_key_value_heads", kv_heads, kv_heads == 1, KV_HEADS)?;
    let has_biases = config.is_set("attention_bias")?;
    check("attention_bias", has_biases, !has_biases, "forebay knows no such biases")?;
    let [main, compress] = ["main", "compress"].map(|scope| Parameters::of(config, Some(scope)));
    let (main, compress) = (main?, compress?);
    let share = config.float("partial_rotary_factor")?;
    let rotary_dim = match config.optional_count("qk_rope_head_dim")? {
        Some(rotary) => rotary,
        None => (share.unwrap_or(0.125) * head_dim as f64) as usize,
    };
    // Parameters without scopes are those of the layers with entries.
    let theta = config.float("rope_theta")?.or(main.float("rope_theta")?).unwrap_or(10_000.0);
    let compressed = config.float("compress_rope_theta")?.or(compress.float("rope_theta")?);
    let magnitude = compress.float("attention_factor")?.unwrap_or(1.0);
    let scaling = with_magnitude(compress.scaling()?, magnitude);
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
        rotary_dim,
        thetas: [theta, compressed.unwrap_or(160_000.0)],
        scaling,
    })
}

/// Returns a scaling with this magnitude, if it has one. Without a magnitude, YaRN has one that these models leave out.
fn with_magnitude(mut scaling: RopeScaling, value: f64) -> RopeScaling {
    if let RopeScaling::Yarn { magnitude, .. } = &mut scaling {
        *magnitude = Some(value);
    }
    scaling
}

/// Returns what each layer sees beside its window: `layer_types` with `compress_rates`, or `compress_ratios`.
fn beside(config: &Config<'_>, count: usize) -> Result<Vec<Beside>, ModelError> {
    let rates = config.object("compress_rates")?;
    let rate = |kind: &str, own: &str, usual: usize| {
        let beside = config.set(own);
        let Some(rate) = rates.as_ref().and_then(|rates| rates.set(kind)).or(beside) else {
            return Ok(usual);
        };
        let positions = rate.as_u64().and_then(|rate| usize::try_from(rate).ok());
        positions.ok_or_else(|| bad(own, short(rate), "positions of an entry"))
    };
    let chosen = rate(CHOSEN, "compress_rate_csa", 4)?;
    let all = rate(ALL, "compress_rate_hca", 128)?;
    config.note(&["compress_ratios"]);
    if config.list("layer_types")?.is_some() {
        let kind = |layer: usize| match config.text_of_layer("layer_types", layer)? {
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
    let ratios = config.counts("compress_ratios")?;
    if ratios.is_empty() {
        return Err(config.missing("compress_ratios"));
    }
    let ratio = |layer: usize| {
        let key = format!("compress_ratios of layer {layer}");
        match ratios.get(layer) {
            Some(ratio) => Beside::of_ratio(&key, *ratio),
            None => Err(bad(&key, "none".into(), "every layer has a ratio")),
        }
    };
    (0..count).map(ratio).collect()
}

/// Returns what GGUF metadata says of attention. `scaling` is that of the layers with entries.
pub(super) fn of_gguf(
    keys: &Keys<'_>,
    layers: &[Layer],
    scaling: RopeScaling,
) -> Result<CompressedShape, ModelError> {
    let head_dim = keys.count("attention.key_length")?;
    let kv_heads = keys.count("attention.head_count_kv")?;
    check(&keys.path("attention.head_count_kv"), kv_heads, kv_heads == 1, KV_HEADS)?;
    let rotary_dim = keys.count("rope.dimension_count")?;
    // A value is its key.
    keys.note(&["attention.value_length"]);
    let theta = |key: &str, usual: f64| {
        Ok::<_, ModelError>(keys.optional_float(key)?.map_or(usual, f64::from))
    };
    let key = "attention.compress_ratios";
    let beside = |layer: usize| {
        let ratio = keys.count_of_layer(key, layer)?.ok_or_else(|| keys.missing(key))?;
        Beside::of_ratio(&keys.path(key), ratio)
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
        rotary_dim,
        thetas: [
            theta("rope.freq_base", 10_000.0)?,
            theta("attention.compress_rope_freq_base", 160_000.0)?,
        ],
        scaling: with_magnitude(scaling, 1.0),
    })
}
