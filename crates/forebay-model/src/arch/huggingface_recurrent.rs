//! Reads the recurrent layers of a Hugging Face `config.json`.

use forebay_ops::DeltaRule;
use serde_json::Value;

use super::check::check;
use super::config::{Config, short};
use super::family::Family;
use super::huggingface_variants::has_number;
use super::multipliers::{Multipliers, numbers};
use super::recurrent::{HeadOrder, Recurrent, RecurrentFactors};
use crate::ModelError;

/// Object of Kimi Linear's configurations that describes its recurrent layers.
const KIMI: &str = "linear_attn_config";

/// Returns true if layer `index` is recurrent. `layer_types` decides if it is present, then LFM2's list of layers with attention, then
/// Kimi's lists of layers.
pub(super) fn is_recurrent(config: &Config<'_>, index: usize) -> Result<bool, ModelError> {
    config.note(&["full_attention_interval", "layer_group_size"]);
    let full = config.list("full_attn_idxs")?;
    let lists = config.object(KIMI)?;
    // These lists count from 1.
    let is_in = |lists: &Config<'_>, key: &str| {
        Ok::<_, ModelError>(lists.list(key)?.is_some_and(|list| has_number(list, index + 1)))
    };
    let in_lists = match &lists {
        Some(lists) => Some((is_in(lists, "kda_layers")?, is_in(lists, "full_attn_layers")?)),
        None => None,
    };
    match config.text_of_layer("layer_types", index)? {
        None => {}
        Some("linear_attention" | "mamba" | "conv") => return Ok(true),
        Some("full_attention" | "attention" | "indexed_attention") => return Ok(false),
        Some(other) => {
            return Err(ModelError::BadValue {
                key: format!("layer_types of layer {index}"),
                value: other.into(),
                expected: "forebay knows linear_attention and full_attention for this family"
                    .into(),
            });
        }
    }
    if let Some(full) = full {
        return Ok(!has_number(full, index));
    }
    // Published configurations of MiniMax-01 have 0 for lightning attention, and 1 for attention.
    if let Some(types) = config.list("attn_type_list")? {
        return match types.get(index).and_then(Value::as_u64) {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(ModelError::BadValue {
                key: format!("attn_type_list of layer {index}"),
                value: types.get(index).map_or("none".into(), short),
                expected: "forebay knows 0 and 1".into(),
            }),
        };
    }
    if let Some(in_lists) = in_lists {
        return match in_lists {
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
    if let Some(group) = config.optional_count("layer_group_size")? {
        // Layers behind the last whole group have attention, too.
        let whole = config.count("num_hidden_layers")?.checked_div(group).unwrap_or(0) * group;
        return Ok(!(index + 1).is_multiple_of(group.max(1)) && index < whole);
    }
    let period = config.optional_count("full_attention_interval")?.unwrap_or(4).max(1);
    Ok(!(index + 1).is_multiple_of(period))
}

/// Returns the shape of the recurrent layers.
pub(super) fn recurrent(
    config: &Config<'_>,
    family: &Family,
    rule: DeltaRule,
    multipliers: &Multipliers,
) -> Result<Recurrent, ModelError> {
    match rule {
        DeltaRule::GatedDelta => {
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
                gate_rank: 0,
                norm_width: value_dim,
                factors: RecurrentFactors::ONE,
                sigmoid_gate: has_sigmoid_gate(config, family)?,
                decay_bound: 0.0,
                share_scale: share_scale(config, family)?,
                norm_epsilon: family.recurrence.norm_epsilon,
                norms: family.recurrence.norms,
            })
        }
        DeltaRule::KimiDelta => kimi(config, family),
        DeltaRule::Mamba2 => mamba2(config, family, multipliers),
        DeltaRule::Mamba => Err(ModelError::BadValue {
            key: "model_type".into(),
            value: family.name.into(),
            expected: "forebay knows Mamba from GGUF files only".into(),
        }),
        DeltaRule::Lightning => {
            // In how large blocks others compute it.
            config.note(&["block_size"]);
            let heads = config.count("num_attention_heads")?;
            let dim = match config.optional_count("head_dim")? {
                Some(dim) => dim,
                None => config.count("hidden_size")?.checked_div(heads).unwrap_or(0),
            };
            // It has no key for the norm of outputs.
            Ok(Recurrent::lightning(heads, dim, Some(1e-6)))
        }
        DeltaRule::ShortConvolution => {
            let channels = config.count("hidden_size")?;
            Ok(Recurrent::short_convolution(channels, config.count("conv_L_cache")?))
        }
    }
}

/// Returns the factor of the share of replacement. Configurations of OLMo Hybrid say whether eigenvalues may be negative.
fn share_scale(config: &Config<'_>, family: &Family) -> Result<f32, ModelError> {
    let said = config.flag("linear_allow_neg_eigval")?;
    Ok(said.map_or(family.recurrence.share_scale, |negative| if negative { 2.0 } else { 1.0 }))
}

/// Returns true if the sigmoid of the gate gates the output, and not its SiLU.
fn has_sigmoid_gate(config: &Config<'_>, family: &Family) -> Result<bool, ModelError> {
    match config.text("output_gate_type")? {
        None => Ok(family.recurrence.sigmoid_gate),
        Some("sigmoid") => Ok(true),
        Some("silu" | "swish") => Ok(false),
        Some(other) => Err(ModelError::BadValue {
            key: "output_gate_type".into(),
            value: other.into(),
            expected: "forebay knows sigmoid and silu".into(),
        }),
    }
}

/// The one block of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) enum OneBlock {
    Recurrent,
    Attention,
    Dense,
    Experts,
}

/// Returns the block of every layer: by a letter each of `hybrid_override_pattern`, or from the list that transformers 5 writes.
pub(super) fn one_blocks(config: &Config<'_>) -> Result<Vec<OneBlock>, ModelError> {
    let unknown = |key: &str, value: String| ModelError::BadValue {
        key: key.into(),
        value,
        expected: "forebay knows Mamba-2 (M), attention (*), feed-forwards (-) and experts (E)"
            .into(),
    };
    let [own, usual] = ["layers_block_type", "layer_types"].map(|key| config.list(key));
    let list = own?.or(usual?);
    let key = "hybrid_override_pattern";
    let pattern = config.text(key)?;
    let blocks: Vec<OneBlock> = if let Some(list) = list {
        let block = |value: &Value| match value.as_str() {
            Some("linear_attention" | "mamba") => Ok(OneBlock::Recurrent),
            Some("full_attention" | "attention") => Ok(OneBlock::Attention),
            Some("mlp") => Ok(OneBlock::Dense),
            Some("moe") => Ok(OneBlock::Experts),
            _ => Err(unknown("layers_block_type", short(value))),
        };
        list.iter().map(block).collect::<Result<_, _>>()?
    } else {
        let block = |letter: char| match letter {
            'M' => Ok(OneBlock::Recurrent),
            '*' => Ok(OneBlock::Attention),
            '-' => Ok(OneBlock::Dense),
            'E' => Ok(OneBlock::Experts),
            other => Err(unknown(key, other.to_string())),
        };
        let pattern = pattern.ok_or_else(|| config.missing(key))?;
        pattern.chars().map(block).collect::<Result<_, _>>()?
    };
    match config.optional_count("num_hidden_layers")? {
        Some(count) if count != blocks.len() => Err(ModelError::BadValue {
            key: "num_hidden_layers".into(),
            value: count.to_string(),
            expected: format!("the configuration describes {} layers", blocks.len()),
        }),
        _ => Ok(blocks),
    }
}

/// Reads the shape of Mamba-2, under the keys of Nemotron-H, Granite or Falcon-H1.
fn mamba2(
    config: &Config<'_>,
    family: &Family,
    multipliers: &Multipliers,
) -> Result<Recurrent, ModelError> {
    check_step_limit(config)?;
    let heads = config.first_count(&["mamba_num_heads", "mamba_n_heads"])?;
    config.note(&["mamba_expand"]);
    let inner = config.optional_count("mamba_d_ssm")?;
    let value_dim = match config.set("mamba_d_head") {
        // The default is "auto".
        Some(Value::String(_)) => {
            let width = match inner {
                Some(inner) => inner,
                None => config.count("hidden_size")?.saturating_mul(config.count("mamba_expand")?),
            };
            width.checked_div(heads).unwrap_or(0)
        }
        _ => config.first_count(&["mamba_head_dim", "mamba_d_head"])?,
    };
    if let Some(inner) = inner {
        let fits = heads.checked_mul(value_dim) == Some(inner);
        check("mamba_d_ssm", inner, fits, "it must be the width of all heads")?;
    }
    let groups = config.first_count(&["n_groups", "mamba_n_groups"])?;
    Ok(Recurrent {
        rule: DeltaRule::Mamba2,
        convolution: config.first_count(&["conv_kernel", "mamba_d_conv"])?,
        key_heads: groups,
        value_heads: heads,
        key_dim: config.first_count(&["ssm_state_size", "mamba_d_state"])?,
        value_dim,
        head_order: HeadOrder::Consecutive,
        low_rank: 0,
        gate_rank: 0,
        norm_width: match has_norm(config, family)? {
            true => heads.saturating_mul(value_dim).checked_div(groups).unwrap_or(0),
            false => 0,
        },
        factors: factors(config, multipliers)?,
        sigmoid_gate: false,
        decay_bound: 0.0,
        share_scale: 1.0,
        norm_epsilon: None,
        norms: None,
    })
}

/// Returns true if the outputs of Mamba-2 are normed. Falcon-H1's configurations say it, and if so, on which side of the gate.
fn has_norm(config: &Config<'_>, family: &Family) -> Result<bool, ModelError> {
    let optional = family.recurrence.beside_attention;
    let has_norm = config.flag("mamba_rms_norm")?.unwrap_or(!optional);
    check("mamba_rms_norm", has_norm, has_norm || optional, "forebay knows true for this family")?;
    let key = "mamba_norm_before_gate";
    let before = config.flag(key)?.unwrap_or(optional);
    check(key, before, !(has_norm && before), "forebay knows norms behind the gate")?;
    Ok(has_norm)
}

/// Returns the factors of Mamba-2 (Falcon-H1).
fn factors(config: &Config<'_>, multipliers: &Multipliers) -> Result<RecurrentFactors, ModelError> {
    let factor =
        |key: &str| Ok::<_, ModelError>(config.float(key)?.map_or(1.0, |factor| factor as f32));
    let input = factor("ssm_in_multiplier")?;
    let parts = numbers(config, "ssm_multipliers")?.unwrap_or([1.0; 5]);
    Ok(RecurrentFactors {
        inputs: parts.map(|part| part * input),
        output: factor("ssm_out_multiplier")? / multipliers.residual(),
    })
}

/// Refuses limits of the steps other than 0 and infinity.
fn check_step_limit(config: &Config<'_>) -> Result<(), ModelError> {
    let key = "time_step_limit";
    let Some(limit) = config.set(key) else { return Ok(()) };
    // Transformers 5 writes an object for what JSON does not have.
    let is_infinite = |value: &Value| {
        let number = value.as_f64().is_some_and(|number| number as f32 == f32::INFINITY);
        number || value["__float__"].as_str() == Some("Infinity")
    };
    match limit.as_array().map(Vec::as_slice) {
        Some([least, most]) if least.as_f64() == Some(0.0) && is_infinite(most) => Ok(()),
        _ => Err(ModelError::BadValue {
            key: key.into(),
            value: short(limit),
            expected: "forebay knows steps without limit, [0.0, Infinity]".into(),
        }),
    }
}

fn kimi(config: &Config<'_>, family: &Family) -> Result<Recurrent, ModelError> {
    config.note(&["linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim"]);
    // Ling has as many heads as in attention, and no low rank.
    let is_whole = config.is_set("no_kda_lora")?;
    config.note(&["short_conv_kernel_size", "head_dim"]);
    let published = is_whole && config.set("linear_num_heads").is_none();
    let (heads, dim, convolution) = match config.object(KIMI)? {
        None if published => (
            config.count("num_attention_heads")?,
            config.count("head_dim")?,
            config.count("short_conv_kernel_size")?,
        ),
        Some(own) => {
            let convolution = own.count("short_conv_kernel_size")?;
            (own.count("num_heads")?, own.count("head_dim")?, convolution)
        }
        // Transformers 5 may write the numbers beside the other keys.
        None => {
            let convolution = config.count("linear_conv_kernel_dim")?;
            (config.count("linear_num_heads")?, config.count("linear_head_dim")?, convolution)
        }
    };
    let decay_bound = decay_bound(config, family)?;
    let low_rank = if is_whole { 0 } else { dim };
    Ok(Recurrent { decay_bound, ..Recurrent::kimi(heads, dim, convolution, [low_rank; 2]) })
}

/// Returns the logarithm of the fastest decay, or 0 if there is none. `null` means the family's usual one, unless the configuration
/// says that gates have none.
fn decay_bound(config: &Config<'_>, family: &Family) -> Result<f32, ModelError> {
    let own = config.object(KIMI)?;
    config.note(&["linear_lower_bound", "kda_lower_bound"]);
    let beside = config.get("linear_lower_bound").or(config.get("kda_lower_bound"));
    let said = own.as_ref().and_then(|own| own.get("gate_lower_bound")).or(beside);
    let is_safe = match &own {
        Some(own) => own.flag("safe_gate")?.unwrap_or(true),
        None => config.flag("kda_safe_gate")?.unwrap_or(true),
    };
    match said.filter(|said| !said.is_null()) {
        Some(said) => said.as_f64().map(|bound| bound as f32).ok_or_else(|| ModelError::BadValue {
            key: "gate_lower_bound".into(),
            value: short(said),
            expected: "it must be a number".into(),
        }),
        None if said.is_some() && !is_safe => Ok(0.0),
        None => Ok(family.recurrence.decay_bound),
    }
}
