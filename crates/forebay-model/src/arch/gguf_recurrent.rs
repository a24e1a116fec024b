//! Reads the recurrent layers of GGUF metadata.

use forebay_format::{Array, Catalog, TensorInfo};
use forebay_ops::DeltaRule;

use super::family::Family;
use super::gguf_keys::Keys;
use super::recurrent::{Recurrent, RecurrentFactors};
use crate::ModelError;

/// Returns for each layer if it is recurrent. Layers without key/value heads are, if the file counts heads by layer.
pub(super) fn recurrent_layers(
    keys: &Keys<'_>,
    rule: DeltaRule,
    count: usize,
) -> Result<Vec<bool>, ModelError> {
    keys.note(&["full_attention_interval"]);
    let key = "attention.recurrent_layers";
    let bad = |key: &str, value: String| {
        keys.wrong(key, value, &format!("it must be a list of at least {count} values"))
    };
    if let Some(value) = keys.get(key) {
        let flags = match value.as_array() {
            Some(Array::Bool(flags)) => Some(flags.clone()),
            _ => keys.by_layer(key).map(|list| list.iter().map(|item| *item != 0).collect()),
        };
        return match flags.as_ref().and_then(|flags| flags.get(..count)) {
            Some(flags) => Ok(flags.to_vec()),
            None => Err(bad(key, value.describe())),
        };
    }
    if let Some(heads) = keys.by_layer("attention.head_count_kv") {
        let Some(heads) = heads.get(..count) else {
            let found = format!("a list of {}", heads.len());
            return Err(bad("attention.head_count_kv", found));
        };
        if heads.contains(&0) {
            return Ok(heads.iter().map(|heads| *heads == 0).collect());
        }
    }
    let usual = if rule == DeltaRule::Lightning { 8 } else { 4 };
    let period = keys.optional_count("full_attention_interval")?.unwrap_or(usual).max(1);
    Ok((0..count).map(|index| !(index + 1).is_multiple_of(period)).collect())
}

/// Returns the shape of the recurrent layers.
pub(super) fn recurrent(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    rule: DeltaRule,
) -> Result<Recurrent, ModelError> {
    match rule {
        DeltaRule::ShortConvolution => {
            let channels = keys.count("embedding_length")?;
            Ok(Recurrent::short_convolution(channels, keys.count("shortconv.l_cache")?))
        }
        DeltaRule::GatedDelta | DeltaRule::Mamba2 => {
            let value_heads = keys.count("ssm.time_step_rank")?;
            let inner = keys.count("ssm.inner_size")?;
            let value_dim = inner.checked_div(value_heads).unwrap_or(0);
            let groups = keys.count("ssm.group_count")?;
            let has_norm = catalog.tensor("blk.0.ssm_norm.weight").is_some();
            let norm_width = match rule {
                // Norms are optional in Falcon-H1 only.
                DeltaRule::Mamba2 if family.recurrence.beside_attention && !has_norm => 0,
                DeltaRule::Mamba2 => inner.checked_div(groups).unwrap_or(0),
                _ => value_dim,
            };
            Ok(Recurrent {
                rule,
                convolution: keys.count("ssm.conv_kernel")?,
                key_heads: groups,
                value_heads,
                key_dim: keys.count("ssm.state_size")?,
                value_dim,
                head_order: family.recurrence.gguf_heads,
                low_rank: 0,
                gate_rank: 0,
                norm_width,
                factors: RecurrentFactors::ONE,
                sigmoid_gate: family.recurrence.sigmoid_gate,
                decay_bound: 0.0,
                share_scale: family.recurrence.share_scale,
                norm_epsilon: family.recurrence.norm_epsilon,
                norms: family.recurrence.norms,
            })
        }
        DeltaRule::Mamba => Ok(Recurrent::mamba(
            keys.count("ssm.inner_size")?,
            keys.count("ssm.state_size")?,
            keys.count("ssm.time_step_rank")?,
            keys.count("ssm.conv_kernel")?,
        )),
        DeltaRule::Lightning => {
            let heads = keys.count("attention.head_count")?;
            Ok(Recurrent::lightning(heads, keys.count("attention.key_length")?, None))
        }
        DeltaRule::KimiDelta => {
            let (heads, dim) = (keys.count("attention.head_count")?, keys.count("kda.head_dim")?);
            let bound = keys.said_float("kda.gate_lower_bound")?;
            let bound = bound.unwrap_or(family.recurrence.decay_bound);
            let is_safe = keys.flag("kda.safe_gate")?.unwrap_or(true);
            let decay_bound = if is_safe { bound } else { 0.0 };
            // Projections to decays and gates are one matrix or two.
            let ranks = [".ssm_f_b.weight", ".ssm_g_b.weight"].map(|second| {
                let is_second = |tensor: &TensorInfo| tensor.name.ends_with(second);
                if catalog.tensors().iter().any(is_second) { dim } else { 0 }
            });
            let shape = Recurrent::kimi(heads, dim, keys.count("ssm.conv_kernel")?, ranks);
            Ok(Recurrent { decay_bound, ..shape })
        }
    }
}
