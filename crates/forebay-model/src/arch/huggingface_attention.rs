//! The shapes of attention and their rotations, as `config.json` describes them.

use forebay_compute::{RopeLayout, RopeScaling};
use forebay_format::Catalog;
use serde_json::Value;

use super::architecture::{
    Attention, AttentionBias, Latent, Naming, QkNorm, Rope, RopeFactors, Values,
};
use super::check::check;
use super::config::{Config, short};
use super::families::{Family, WindowTheta, Windows};
use super::names::Names;
use super::rope_parameters::Parameters;
use crate::ModelError;

/// Scope of the parameters of layers with a window.
const WINDOWED: &str = "sliding_attention";

/// Returns the shapes of attention and the rotations: those of layers without a window, then those of layers with one if they
/// differ.
pub(super) fn attention(
    catalog: &Catalog,
    config: &Config<'_>,
    family: &'static Family,
    naming: Naming,
) -> Result<(Vec<Attention>, Vec<Rope>), ModelError> {
    if family.latent {
        return latent(config, family);
    }
    let (hidden, heads) = (config.count("hidden_size")?, config.count("num_attention_heads")?);
    let head_dim = match config.optional_first_count(&["head_dim", "attention_head_dim"])? {
        Some(dim) => dim,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    let sinks = |key: &str| config.json.get(key).and_then(Value::as_bool).unwrap_or(family.sinks);
    let usual = Attention {
        heads,
        kv_heads: config.optional_count("num_key_value_heads")?.unwrap_or(heads).max(1),
        head_dim,
        value_dim: config.optional_count("v_head_dim")?.unwrap_or(head_dim),
        scale: scale(config, family, head_dim),
        softcap: config.float("attn_logit_softcapping").map(|cap| cap as f32),
        sinks: sinks("add_full_attention_sink_bias"),
        output_gate: family.output_gate,
        bias: bias(catalog, config, family, naming),
        qk_norm: match config.json.get("use_qk_norm").and_then(Value::as_bool) {
            Some(false) => QkNorm::None,
            _ => family.qk_norm,
        },
        values: Values {
            of_keys: false,
            normed: family.normed_values,
            scale: config.float("attention_value_scale").map_or(1.0, |scale| scale as f32),
        },
        latent: None,
        indexer: None,
        shared: None,
    };
    // Keys of one kind of layers are named if they differ from those of the other kind.
    let heads = config.optional_count("swa_num_attention_heads")?.unwrap_or(heads);
    let of_window = config.optional_count("swa_head_dim")?.unwrap_or(head_dim);
    let windowed = Attention {
        heads,
        kv_heads: config
            .optional_count("swa_num_key_value_heads")?
            .unwrap_or(usual.kv_heads)
            .max(1),
        head_dim: of_window,
        value_dim: config.optional_count("swa_v_head_dim")?.unwrap_or(usual.value_dim),
        scale: scale(config, family, of_window),
        sinks: sinks("add_swa_attention_sink_bias"),
        ..usual.clone()
    };
    let full = match family.keys_as_values {
        false => usual,
        true => with_keys_as_values(config, family, usual)?,
    };
    let attentions = if windowed == full { vec![full] } else { vec![full, windowed] };
    if !rotates(config, family) {
        return Ok((attentions, Vec::new()));
    }
    let rotary_dim = |scope: &str, head_dim: usize| {
        let parameters = Parameters::of(config, Some(scope));
        let partial = config.float("partial_rotary_factor");
        let partial = partial.or(parameters.float("partial_rotary_factor"));
        Ok::<_, ModelError>(match (partial, config.optional_count("rotary_dim")?) {
            _ if parameters.is_proportional() => head_dim,
            (None, Some(rotary_dim)) => rotary_dim,
            _ => (partial.unwrap_or(1.0) * head_dim as f64) as usize,
        })
    };
    let scopes = ["full_attention", WINDOWED];
    let all =
        rotation(config, family, Some(scopes[0]), rotary_dim(scopes[0], attentions[0].head_dim)?)?;
    let of_windows = match family.window_theta {
        Some(_) => {
            Some(rotation(config, family, Some(scopes[1]), rotary_dim(scopes[1], of_window)?)?)
        }
        None => None,
    };
    Ok((attentions, std::iter::once(all).chain(of_windows).collect()))
}

/// Returns the shape of multi-head latent attention, and its rotation.
fn latent(config: &Config<'_>, family: &Family) -> Result<(Vec<Attention>, Vec<Rope>), ModelError> {
    let heads = config.count("num_attention_heads")?;
    let latent = Latent {
        query_rank: config.optional_count("q_lora_rank")?,
        rank: config.count("kv_lora_rank")?,
        plain: config.count("qk_nope_head_dim")?,
        rotary: config.count("qk_rope_head_dim")?,
        value: config.count("v_head_dim")?,
    };
    if !rotates(config, family) {
        let nope = config.json.get("mla_use_nope").and_then(Value::as_bool);
        if nope == Some(false) {
            return Err(ModelError::BadValue {
                key: "mla_use_nope".into(),
                value: "false".into(),
                expected: "forebay knows this family without rotation only".into(),
            });
        }
        return Ok((vec![latent.attention(heads, 1.0)], Vec::new()));
    }
    let rope = rotation(config, family, None, latent.rotary)?;
    let parameters = Parameters::of(config, None);
    let factor = parameters.float("factor").unwrap_or(1.0);
    let all = parameters.float("mscale_all_dim").filter(|all| *all != 0.0);
    let magnitude = match (rope.scaling, all) {
        // The quotient of a magnitude and that of 0 is the magnitude itself.
        (RopeScaling::Yarn { .. }, Some(all)) => RopeScaling::yarn_magnitude(factor, all, 0.0),
        _ => 1.0,
    };
    Ok((vec![latent.attention(heads, magnitude as f32)], vec![rope]))
}

/// Returns the shape of layers without a window in models that use keys as values there. The others have the `usual` shape.
fn with_keys_as_values(
    config: &Config<'_>,
    family: &Family,
    usual: Attention,
) -> Result<Attention, ModelError> {
    let of_keys = config.flag("attention_k_eq_v");
    // Transformers 5 gives the differences layer by layer.
    let own = of_full_layers(config, family)?;
    let said = |key: &str| own.as_ref().map_or(Ok(None), |own| own.optional_count(key));
    let head_dim = config.optional_count("global_head_dim")?.or(said("head_dim")?);
    let head_dim = head_dim.unwrap_or(512);
    let kv_heads = config.optional_count("num_global_key_value_heads")?;
    let kv_heads = kv_heads.or(said("num_key_value_heads")?);
    Ok(Attention {
        kv_heads: kv_heads.filter(|_| of_keys).unwrap_or(usual.kv_heads).max(1),
        head_dim,
        value_dim: head_dim,
        scale: scale(config, family, head_dim),
        values: Values { of_keys, ..usual.values },
        ..usual
    })
}

fn scale(config: &Config<'_>, family: &Family, head_dim: usize) -> f32 {
    let said = config.float("attention_multiplier").map(|scale| scale as f32);
    let scalar = config.float("query_pre_attn_scalar").unwrap_or(head_dim as f64);
    said.or(family.attention_scale).unwrap_or(1.0 / (scalar as f32).sqrt())
}

/// Returns which projections have biases.
fn bias(
    catalog: &Catalog,
    config: &Config<'_>,
    family: &'static Family,
    naming: Naming,
) -> AttentionBias {
    let has = |role: &str| catalog.tensor(&Names::new(naming, family).layer(0, role));
    let qkv_bias = match config.json.get("qkv_bias").and_then(Value::as_bool) {
        Some(said) if family.qkv_bias => said,
        _ => family.qkv_bias,
    };
    match (qkv_bias, config.flag("attention_bias")) {
        (_, true) if has("o_bias").is_some() => AttentionBias::All,
        (false, false) => AttentionBias::None,
        _ => AttentionBias::Qkv,
    }
}

/// Returns the rotation of layers for which the parameters of `scope` hold.
fn rotation(
    config: &Config<'_>,
    family: &Family,
    scope: Option<&str>,
    rotary_dim: usize,
) -> Result<Rope, ModelError> {
    let windowed = scope == Some(WINDOWED);
    let parameters = Parameters::of(config, scope);
    let scaling = if windowed { RopeScaling::None } else { parameters.scaling()? };
    let usual = match family.window_theta {
        Some(WindowTheta::Of(theta)) if windowed => Some(theta),
        _ => None,
    };
    let local = config.float("rope_local_base_freq").or(config.float("swa_rope_theta"));
    let local = local.filter(|_| windowed);
    let theta = local
        .or(parameters.float("rope_theta"))
        .or(config.float("theta"))
        .or(usual)
        .unwrap_or(10_000.0);
    let theta = if windowed { theta } else { theta * parameters.base_factor(rotary_dim) };
    let layout = match config.json.get("rope_interleave").and_then(Value::as_bool) {
        Some(false) if family.latent => RopeLayout::Neox,
        _ => family.hf_rope,
    };
    let factors = match scaling {
        RopeScaling::LongRope { .. } => Some(parameters.long_factors(rotary_dim / 2)?),
        _ if parameters.is_proportional() && !windowed => {
            let fits = (1..=1 << 16).contains(&rotary_dim);
            check("rotary dimension", rotary_dim, fits, "it must be from 1 to 65536")?;
            let share = parameters.float("partial_rotary_factor").unwrap_or(1.0);
            Some(proportional_factors(share, rotary_dim / 2))
        }
        _ => None,
    };
    Ok(Rope { theta, rotary_dim, from: 0, layout, scaling, factors })
}

/// Returns what `per_layer_config` says of the layers without a window, if there is such a key. It must say the same of all of
/// them, and nothing of others.
fn of_full_layers<'a>(
    config: &Config<'a>,
    family: &Family,
) -> Result<Option<Config<'a>>, ModelError> {
    let Some(all) = config.json.get("per_layer_config").and_then(Value::as_object) else {
        return Ok(None);
    };
    let count = config.count("num_hidden_layers")?;
    let first = all.values().next();
    for (layer, own) in all {
        let number = layer.parse().ok().filter(|number| *number < count);
        let is_full = match number {
            Some(number) => window(config, family, number)?.is_none(),
            None => false,
        };
        if !is_full || Some(own) != first {
            return Err(ModelError::BadValue {
                key: format!("per_layer_config of layer {layer}"),
                value: short(own),
                expected: "forebay knows the same values for all layers without a window".into(),
            });
        }
    }
    Ok(first.map(|json| Config { json, family: config.family }))
}

/// Returns the divisors of the frequencies of pairs of which only this share rotates: the first ones. The others stay where they
/// are, whatever the position.
fn proportional_factors(share: f64, pairs: usize) -> RopeFactors {
    let rotating = (share * pairs as f64) as usize;
    let factor = |pair: usize| if pair < rotating { 1.0 } else { 1e30 };
    RopeFactors::Always((0..pairs).map(factor).collect())
}

/// Returns true if queries and keys are rotated.
pub(super) fn rotates(config: &Config<'_>, family: &Family) -> bool {
    let said = config.json.get("position_embedding_type").and_then(Value::as_str);
    family.rotates || said == Some("rope")
}

/// Returns the sliding window of layer `index`, if it has one.
///
/// If `layer_types` is present, it decides. Otherwise the qwen families have a window only with `use_sliding_window`,
/// from layer `max_window_layers` on. Other families have it in all layers or by their pattern.
pub(super) fn window(
    config: &Config<'_>,
    family: &Family,
    index: usize,
) -> Result<Option<usize>, ModelError> {
    let window = config.optional_first_count(&["sliding_window", "sliding_window_size"])?;
    let Some(window) = window else { return Ok(None) };
    if let Some(types) = config.json.get("layer_types").and_then(Value::as_array) {
        let slides = types.get(index).and_then(Value::as_str) == Some("sliding_attention");
        return Ok(slides.then_some(window));
    }
    if let Some(slides) = config.flag_of_layer("hybrid_layer_pattern", index)? {
        return Ok(slides.then_some(window));
    }
    let slides = match (family.windows, config.optional_count("sliding_window_pattern")?) {
        (Windows::ButEvery(_), Some(period)) if period > 0 => !(index + 1).is_multiple_of(period),
        (Windows::AsSaid, _) => {
            let first = config.optional_count("max_window_layers")?.unwrap_or(0);
            config.flag("use_sliding_window") && index >= first
        }
        _ => family.windows.slides(index),
    };
    Ok(slides.then_some(window))
}
