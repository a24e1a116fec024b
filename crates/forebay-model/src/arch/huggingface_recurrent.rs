//! Reads the recurrent layers of a Hugging Face `config.json`.

use serde_json::Value;

use super::huggingface::Config;
use super::recurrent::{HeadOrder, Recurrent, StateRule};
use crate::ModelError;

/// Object of Kimi Linear's configurations that describes its recurrent layers.
const KIMI: &str = "linear_attn_config";

/// Returns true if layer `index` is recurrent. `layer_types` decides if it is present, then Kimi's lists of layers.
pub(super) fn is_recurrent(config: &Config<'_>, index: usize) -> Result<bool, ModelError> {
    if let Some(types) = config.json.get("layer_types").and_then(Value::as_array) {
        return match types.get(index).and_then(Value::as_str) {
            Some("linear_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            other => Err(ModelError::BadValue {
                key: format!("layer_types of layer {index}"),
                value: other.unwrap_or("none").into(),
                expected: "forebay knows linear_attention and full_attention for this family"
                    .into(),
            }),
        };
    }
    if let Some(lists) = config.json.get(KIMI) {
        // These lists count from 1.
        let is_in = |key: &str| {
            let list = lists.get(key).and_then(Value::as_array);
            list.is_some_and(|list| list.iter().any(|item| item.as_u64() == Some(index as u64 + 1)))
        };
        return match (is_in("kda_layers"), is_in("full_attn_layers")) {
            (true, false) => Ok(true),
            (false, true) => Ok(false),
            (in_both, _) => Err(ModelError::BadValue {
                key: format!("kda_layers and full_attn_layers of {KIMI}"),
                value: format!(
                    "{} with layer {}",
                    if in_both { "both" } else { "none" },
                    index + 1
                ),
                expected: "every layer must be in one of them".into(),
            }),
        };
    }
    let period = config.optional_count("full_attention_interval")?.unwrap_or(4).max(1);
    Ok(!(index + 1).is_multiple_of(period))
}

/// Returns the shape of the recurrent layers.
pub(super) fn recurrent(config: &Config<'_>, rule: StateRule) -> Result<Recurrent, ModelError> {
    match rule {
        StateRule::GatedDelta => {
            let value_dim = config.count("linear_value_head_dim")?;
            Ok(Recurrent {
                rule,
                convolution: config.count("linear_conv_kernel_dim")?,
                key_heads: config.count("linear_num_key_heads")?,
                value_heads: config.count("linear_num_value_heads")?,
                key_dim: config.count("linear_key_head_dim")?,
                value_dim,
                head_order: HeadOrder::Consecutive,
                low_rank: 0,
                norm_width: value_dim,
            })
        }
        StateRule::KimiDelta => kimi(config),
    }
}

fn kimi(config: &Config<'_>) -> Result<Recurrent, ModelError> {
    let (heads, dim, convolution) = match config.json.get(KIMI) {
        Some(json) => {
            let own = Config { json, family: config.family };
            let convolution = own.count("short_conv_kernel_size")?;
            (own.count("num_heads")?, own.count("head_dim")?, convolution)
        }
        // Transformers 5 may write the numbers beside the other keys.
        None => {
            let convolution = config.count("linear_conv_kernel_dim")?;
            (config.count("linear_num_heads")?, config.count("linear_head_dim")?, convolution)
        }
    };
    Ok(Recurrent::kimi(heads, dim, convolution))
}

impl Recurrent {
    /// Returns the shape of Kimi Delta Attention, which has as many elements of a key as of a value.
    pub(super) fn kimi(heads: usize, dim: usize, convolution: usize) -> Recurrent {
        Recurrent {
            rule: StateRule::KimiDelta,
            convolution,
            key_heads: heads,
            value_heads: heads,
            key_dim: dim,
            value_dim: dim,
            head_order: HeadOrder::Consecutive,
            low_rank: dim,
            norm_width: dim,
        }
    }
}
