//! Reads a description from a Hugging Face `config.json`, in the form that published models have
//! and in the one that transformers 5 writes (`rope_parameters` in place of `rope_scaling`).

use forebay_compute::{RopeLayout, RopeScaling};
use forebay_format::{Catalog, HfMetadata};
use serde_json::Value;

use super::families::{self, Family};
use super::{Architecture, Attention, AttentionBias, Experts, FeedForward, Layer, Naming, Rope};
use crate::ModelError;

struct Config<'a> {
    json: &'a Value,
    family: &'static str,
}

impl Config<'_> {
    fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey {
            source_name: "config.json".into(),
            key: key.into(),
            family: self.family,
        }
    }

    /// A whole number; `null` is the same as absent.
    fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        match self.json.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_u64().map(|count| Some(count as usize)).ok_or_else(|| {
                ModelError::BadValue {
                    key: key.into(),
                    value: format!("{value:.60}"),
                    expected: "it must be a whole number".into(),
                }
            }),
        }
    }

    fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_count(key)?.ok_or_else(|| self.missing(key))
    }

    fn first_count(&self, keys: &[&str]) -> Result<usize, ModelError> {
        for key in keys {
            if let Some(count) = self.optional_count(key)? {
                return Ok(count);
            }
        }
        Err(self.missing(keys[0]))
    }

    fn flag(&self, key: &str) -> bool {
        self.json.get(key).and_then(Value::as_bool).unwrap_or(false)
    }
}

/// Describes the model of a Hugging Face folder.
pub fn describe(catalog: &Catalog, metadata: &HfMetadata) -> Result<Architecture, ModelError> {
    let json = &metadata.config;
    let model_type = json.get("model_type").and_then(Value::as_str).unwrap_or("");
    let family = families::from_huggingface(model_type).ok_or_else(|| {
        let name =
            if model_type.is_empty() { "(config.json has no model_type)" } else { model_type };
        ModelError::UnknownArchitecture { name: name.into(), known: families::known_list() }
    })?;
    let config = Config { json, family: family.name };
    refuse_unknown_variants(&config)?;
    let hidden = config.count("hidden_size")?;
    let heads = config.count("num_attention_heads")?;
    let head_dim = match config.optional_count("head_dim")? {
        Some(dim) => dim,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    let rotary_dim = head_dim;
    let bias = match (family.qkv_bias, config.flag("attention_bias")) {
        (_, true) => AttentionBias::All,
        (true, false) => AttentionBias::Qkv,
        (false, false) => AttentionBias::None,
    };
    Ok(Architecture {
        family: family.name,
        name: json.get("_name_or_path").and_then(Value::as_str).map(str::to_owned),
        hidden,
        vocabulary: config.count("vocab_size")?,
        context_trained: config.count("max_position_embeddings")?,
        norm_epsilon: json
            .get("rms_norm_eps")
            .and_then(Value::as_f64)
            .map_or(1e-6, |epsilon| epsilon as f32),
        attention: Attention {
            heads,
            kv_heads: config.optional_count("num_key_value_heads")?.unwrap_or(heads).max(1),
            head_dim,
            bias,
            qk_norm: family.qk_norm,
        },
        rope: Rope {
            theta: theta(json),
            rotary_dim,
            layout: RopeLayout::Neox,
            scaling: scaling(json)?,
        },
        layers: layers(catalog, &config, family)?,
        tied_embeddings: config.flag("tie_word_embeddings"),
        naming: Naming::HuggingFace(family.hf_experts),
    })
}

/// Variants of known families that would run but give wrong text.
fn refuse_unknown_variants(config: &Config<'_>) -> Result<(), ModelError> {
    let activation = config.json.get("hidden_act").and_then(Value::as_str).unwrap_or("silu");
    if activation != "silu" {
        return Err(ModelError::BadValue {
            key: "hidden_act".into(),
            value: activation.into(),
            expected: "forebay knows silu for this family".into(),
        });
    }
    for key in ["clip_qkv", "quantization_config"] {
        if config.json.get(key).is_some_and(|value| !value.is_null()) {
            return Err(ModelError::BadValue {
                key: key.into(),
                value: "set".into(),
                expected: "forebay does not know this variant; convert the model to GGUF".into(),
            });
        }
    }
    if config.flag("mlp_bias") {
        return Err(ModelError::BadValue {
            key: "mlp_bias".into(),
            value: "true".into(),
            expected: "forebay does not know feed-forward biases yet".into(),
        });
    }
    Ok(())
}

fn theta(json: &Value) -> f64 {
    json.get("rope_theta")
        .or_else(|| json.get("rope_parameters").and_then(|rope| rope.get("rope_theta")))
        .and_then(Value::as_f64)
        .unwrap_or(10_000.0)
}

fn scaling(json: &Value) -> Result<RopeScaling, ModelError> {
    let object = ["rope_scaling", "rope_parameters"]
        .iter()
        .find_map(|key| json.get(*key).filter(|value| value.is_object()));
    let Some(rope) = object else { return Ok(RopeScaling::None) };
    let kind = rope.get("rope_type").or_else(|| rope.get("type")).and_then(Value::as_str);
    let number = |key: &str| {
        rope.get(key).and_then(Value::as_f64).ok_or_else(|| ModelError::MissingKey {
            source_name: "config.json (rope scaling)".into(),
            key: key.into(),
            family: "a",
        })
    };
    match kind.unwrap_or("default") {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: number("factor")? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_context: number("original_max_position_embeddings")?,
        }),
        other => Err(ModelError::BadValue {
            key: "rope_type".into(),
            value: other.into(),
            expected: "forebay knows default, linear and llama3".into(),
        }),
    }
}

fn layers(
    catalog: &Catalog,
    config: &Config<'_>,
    family: &'static Family,
) -> Result<Vec<Layer>, ModelError> {
    let count = config.count("num_hidden_layers")?;
    if count > catalog.tensors().len() {
        return Err(ModelError::BadValue {
            key: "num_hidden_layers".into(),
            value: count.to_string(),
            expected: format!("the folder has only {} tensors", catalog.tensors().len()),
        });
    }
    (0..count)
        .map(|index| {
            let feed_forward = if family.experts && is_sparse(config, index)? {
                FeedForward::Experts(experts(config, family)?)
            } else {
                FeedForward::Dense { width: config.count("intermediate_size")? }
            };
            Ok(Layer { window: window(config, family, index)?, feed_forward })
        })
        .collect()
}

/// Whether layer `index` has experts (qwen3_moe: `decoder_sparse_step`, `mlp_only_layers`).
fn is_sparse(config: &Config<'_>, index: usize) -> Result<bool, ModelError> {
    let dense_only = config
        .json
        .get("mlp_only_layers")
        .and_then(Value::as_array)
        .is_some_and(|list| list.iter().any(|item| item.as_u64() == Some(index as u64)));
    let step = config.optional_count("decoder_sparse_step")?.unwrap_or(1).max(1);
    Ok(!dense_only && (index + 1).is_multiple_of(step))
}

fn experts(config: &Config<'_>, family: &Family) -> Result<Experts, ModelError> {
    let renormalise =
        config.json.get("norm_topk_prob").and_then(Value::as_bool).unwrap_or(family.renormalise);
    Ok(Experts {
        count: config.first_count(&["num_experts", "num_local_experts"])?,
        used: config.count("num_experts_per_tok")?,
        width: config.first_count(&["moe_intermediate_size", "intermediate_size"])?,
        renormalise,
        scale: 1.0,
    })
}

/// The sliding window of layer `index`.
///
/// `layer_types` rules where it is given; else mistral windows every layer and the qwen families
/// only with `use_sliding_window`, from `max_window_layers` on.
fn window(config: &Config<'_>, family: &Family, index: usize) -> Result<Option<usize>, ModelError> {
    let Some(window) = config.optional_count("sliding_window")? else { return Ok(None) };
    if let Some(types) = config.json.get("layer_types").and_then(Value::as_array) {
        let slides = types.get(index).and_then(Value::as_str) == Some("sliding_attention");
        return Ok(slides.then_some(window));
    }
    let slides = match family.name {
        "mistral" | "mixtral" => true,
        _ if config.flag("use_sliding_window") => {
            index >= config.optional_count("max_window_layers")?.unwrap_or(0)
        }
        _ => false,
    };
    Ok(slides.then_some(window))
}
