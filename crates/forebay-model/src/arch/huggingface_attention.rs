//! The shapes of attention and their rotations, as `config.json` describes them.

use forebay_compute::RopeScaling;
use forebay_format::Catalog;

use super::architecture::{
    Attention, AttentionBias, Latent, Naming, OutputGate, QkNorm, Rope, Values,
};
use super::check::check;
use super::config::{Config, FULL, WINDOWED, short};
use super::family::Family;
use super::huggingface_rotation::{note_no_rotation, rotates, rotation, rotations};
use super::huggingface_variants::CLAMP;
use super::huggingface_windows::window;
use super::names::Names;
use super::rope_parameters::Parameters;
use super::shapes::RelativeBias;
use crate::ModelError;

/// Returns the shapes of attention and the rotations: those of layers without a window, then those of layers with one if they
/// differ.
pub(super) fn attention(
    catalog: &Catalog,
    config: &Config<'_>,
    family: &'static Family,
    naming: Naming,
) -> Result<(Vec<Attention>, Vec<Rope>), ModelError> {
    if family.attention.latent {
        return latent(config, family);
    }
    let (hidden, heads) = (config.count("hidden_size")?, config.count("num_attention_heads")?);
    let head_dim = match config.optional_first_count(&["head_dim", "attention_head_dim"])? {
        Some(dim) => dim,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    let sinks =
        |key: &str| Ok::<_, ModelError>(config.flag(key)?.unwrap_or(family.attention.sinks));
    let usual = Attention {
        heads,
        kv_heads: config
            .optional_first_count(&["num_key_value_heads", "num_attention_groups"])?
            .unwrap_or(heads)
            .max(1),
        head_dim,
        value_dim: config.optional_count("v_head_dim")?.unwrap_or(head_dim),
        scale: scale(config, family, head_dim)?,
        softcap: config.float_or("attn_logit_softcapping", family.attention.softcap)?,
        sinks: sinks("add_full_attention_sink_bias")?,
        output_norm: family.attention.output_norm,
        output_gate: output_gate(config, family)?,
        bias: bias(catalog, config, family, naming)?,
        clamp: config.float(CLAMP)?.map(|limit| limit as f32),
        qk_norm: match (config.flag("use_qk_norm")?, config.flag("qk_norm")?) {
            (Some(false), _) | (_, Some(false)) => QkNorm::None,
            _ => family.attention.qk_norm,
        },
        values: Values {
            of_keys: false,
            normed: family.attention.normed_values,
            scale: config.float("attention_value_scale")?.map_or(1.0, |scale| scale as f32),
        },
        relative: relative(config, family, false)?,
        latent: None,
        indexer: None,
        shared: None,
    };
    // Keys of one kind of layers are named if they differ from those of the other kind.
    let [of_full, of_windows] = heads_by_layer(config, family)?;
    let usual = Attention { heads: of_full.unwrap_or(usual.heads), ..usual };
    let said =
        config.optional_first_count(&["swa_num_attention_heads", "num_sliding_attention_heads"])?;
    let of_windows = said.or(of_windows);
    let heads = of_windows.unwrap_or(heads);
    let of_window = config.optional_count("swa_head_dim")?.unwrap_or(head_dim);
    let windowed = Attention {
        heads,
        kv_heads: config
            .optional_count("swa_num_key_value_heads")?
            .unwrap_or(usual.kv_heads)
            .max(1),
        head_dim: of_window,
        value_dim: config.optional_count("swa_v_head_dim")?.unwrap_or(usual.value_dim),
        scale: scale(config, family, of_window)?,
        sinks: sinks("add_swa_attention_sink_bias")?,
        relative: relative(config, family, true)?,
        ..usual.clone()
    };
    let full = match family.attention.keys_as_values {
        false => usual,
        true => with_keys_as_values(config, family, usual)?,
    };
    let attentions = if windowed == full { vec![full] } else { vec![full, windowed] };
    let dims = [attentions[0].head_dim, of_window];
    let ropes = rotations(config, family, dims)?;
    Ok((attentions, ropes))
}

/// Returns the gate of attention's output. Configurations of Laguna and Ling say if it is one for each head.
fn output_gate(config: &Config<'_>, family: &Family) -> Result<OutputGate, ModelError> {
    let usual = family.attention.output_gate;
    let keys = ["gating", "gated_attention_proj_granularity_type", "attention_gate_type"];
    config.note(&keys);
    let Some(key) = keys.into_iter().find(|key| config.set(key).is_some()) else {
        return Ok(usual);
    };
    match (usual, config.text(key)?.unwrap_or("")) {
        (OutputGate::ByHead(_), "per-head" | "head_wise" | "headwise") => Ok(usual),
        (OutputGate::ByHead(function), "per-element" | "element_wise") => {
            Ok(OutputGate::ByElement(function))
        }
        (_, other) => Err(ModelError::BadValue {
            key: key.into(),
            value: other.into(),
            expected: "forebay does not know this gate of attention's output".into(),
        }),
    }
}

/// Returns the numbers of heads of layers without a window and of those with one, if there is a list with one for each layer.
fn heads_by_layer(config: &Config<'_>, family: &Family) -> Result<[Option<usize>; 2], ModelError> {
    const KEY: &str = "num_attention_heads_per_layer";
    if let Some(other) = config.object("attention_other_setting")? {
        return heads_of_windows(config, &other);
    }
    let mut found = [None; 2];
    let mut all: Vec<(usize, usize)> = config.counts(KEY)?.into_iter().enumerate().collect();
    if let (false, Some(own)) =
        (family.attention.keys_as_values, config.object("per_layer_config")?)
    {
        for (layer, _) in own.members() {
            let (number, own) = (layer.parse().ok(), own.object(layer)?);
            let heads = own.map_or(Ok(None), |own| own.optional_count("num_attention_heads"))?;
            all.extend(number.zip(heads));
        }
    }
    for (index, heads) in all {
        let kind = usize::from(window(config, family, index)?.is_some());
        let first = *found[kind].get_or_insert(heads);
        let expected = format!("layer {index} has another number than those before it");
        check(KEY, heads, heads == first, &expected)?;
    }
    Ok(found)
}

/// Returns the number of heads that Step's configurations give layers with a window.
fn heads_of_windows(
    config: &Config<'_>,
    other: &Config<'_>,
) -> Result<[Option<usize>; 2], ModelError> {
    let kind = other.text("attention_type")?.unwrap_or(WINDOWED);
    let key = "attention_other_setting.attention_type";
    check(key, kind, kind == WINDOWED, "forebay knows sliding_attention")?;
    for key in ["num_attention_groups", "head_dim", "true_head_dim"] {
        let usual = if key == "true_head_dim" { "head_dim" } else { key };
        let (own, usual) = (other.optional_count(key)?, config.optional_count(usual)?);
        let fits = own.is_none() || own == usual;
        let given = own.map_or("none".into(), |own| own.to_string());
        let expected = "forebay knows the number of the other layers";
        check(&format!("attention_other_setting.{key}"), given, fits, expected)?;
    }
    Ok([None, other.optional_count("num_attention_heads")?])
}

/// Lengths of the layers with a window, or of the others. Configurations give those of windows under keys of their own, or layer
/// by layer (transformers 5).
struct Lengths<'c, 'a> {
    config: &'c Config<'a>,
    are_of_windows: bool,
    /// What the configuration says of each of these layers.
    by_layer: Option<Config<'a>>,
}

impl Lengths<'_, '_> {
    fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let said = match self.are_of_windows {
            true => self.config.optional_count(&format!("swa_{key}"))?,
            false => None,
        };
        let by_layer = self.by_layer.as_ref().map_or(Ok(None), |own| own.optional_count(key))?;
        said.or(by_layer).map_or_else(|| self.config.optional_count(key), |own| Ok(Some(own)))
    }

    fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_count(key)?.ok_or_else(|| self.config.missing(key))
    }

    /// Returns the shape of latent attention, and its number of heads.
    fn latent(&self, family: &Family) -> Result<(Latent, usize), ModelError> {
        let heads = self.count("num_attention_heads")?;
        let latent = Latent {
            query_rank: self.optional_count("q_lora_rank")?,
            rank: self.count("kv_lora_rank")?,
            plain: self.count("qk_nope_head_dim")?,
            rotary: self.count("qk_rope_head_dim")?,
            value: match self.optional_count("v_head_dim")? {
                Some(value) => value,
                // MiniCPM 3 says it only if it differs.
                None => self.config.count("hidden_size")?.checked_div(heads).unwrap_or(0),
            },
            key_norm: family.attention.normed_rotary,
            rescaled: match family.attention.normed_rotary {
                true => self.config.flag("apply_mla_qkv_lora_rescale")?.unwrap_or(true),
                false => false,
            },
        };
        Ok((latent, heads))
    }
}

/// Returns the lengths of the layers with a window, if there are such.
fn lengths_of_windows<'c, 'a>(
    config: &'c Config<'a>,
    family: &Family,
) -> Result<Option<Lengths<'c, 'a>>, ModelError> {
    for layer in 0..config.count("num_hidden_layers")? {
        if window(config, family, layer)?.is_some() {
            let by_layer = of_layers(config, family, true)?;
            return Ok(Some(Lengths { config, are_of_windows: true, by_layer }));
        }
    }
    Ok(None)
}

/// Returns the shapes of multi-head latent attention, and their rotations.
fn latent(config: &Config<'_>, family: &Family) -> Result<(Vec<Attention>, Vec<Rope>), ModelError> {
    let (latent, heads) =
        Lengths { config, are_of_windows: false, by_layer: None }.latent(family)?;
    // The lengths of heads follow from those of their parts, and the latent vector serves all heads.
    config.note(&["head_dim", "num_key_value_heads", "partial_rotary_factor"]);
    for key in ["attention_bias", "qkv_bias"] {
        if config.is_set(key)? {
            return Err(ModelError::BadValue {
                key: key.into(),
                value: "true".into(),
                expected: "forebay knows latent attention without biases".into(),
            });
        }
    }
    let nope = config.flag("mla_use_nope")?;
    if !rotates(config, family)? {
        note_no_rotation(config)?;
        if nope == Some(false) {
            return Err(ModelError::BadValue {
                key: "mla_use_nope".into(),
                value: "false".into(),
                expected: "forebay knows this family without rotation only".into(),
            });
        }
        let (output_gate, sinks) = (output_gate(config, family)?, family.attention.sinks);
        let attention = Attention { output_gate, sinks, ..latent.attention(heads, 1.0) };
        return Ok((vec![attention], Vec::new()));
    }
    let of_windows = match lengths_of_windows(config, family)? {
        None => None,
        Some(lengths) => Some(lengths.latent(family)?),
    };
    let scope = of_windows.map(|_| FULL);
    let rope = rotation(config, family, scope, latent.rotary)?;
    let all = Parameters::of(config, None)?.float("mscale_all_dim")?.filter(|all| *all != 0.0);
    let magnitude = match (rope.scaling, all) {
        // The quotient of a magnitude and that of 0 is the magnitude itself.
        (RopeScaling::Yarn { factor, .. }, Some(all)) => {
            RopeScaling::yarn_magnitude(factor, all, 0.0)
        }
        _ => 1.0,
    };
    let (output_gate, sinks) = (output_gate(config, family)?, family.attention.sinks);
    let shape = |(latent, heads): (Latent, usize), magnitude: f32| Attention {
        output_gate,
        sinks,
        ..latent.attention(heads, magnitude)
    };
    let mut attentions = vec![shape((latent, heads), magnitude as f32)];
    let mut ropes = vec![rope];
    if let Some(of_windows) = of_windows {
        // The rotation of windows is not scaled.
        ropes.push(rotation(config, family, Some(WINDOWED), of_windows.0.rotary)?);
        let windowed = shape(of_windows, 1.0);
        attentions.extend(Some(windowed).filter(|of| *of != attentions[0]));
    }
    Ok((attentions, ropes))
}

/// Returns the shape of layers without a window in models that use keys as values there. The others have the `usual` shape.
fn with_keys_as_values(
    config: &Config<'_>,
    family: &Family,
    usual: Attention,
) -> Result<Attention, ModelError> {
    let of_keys = config.is_set("attention_k_eq_v")?;
    // Transformers 5 gives the differences layer by layer.
    let own = of_layers(config, family, false)?;
    let said = |key: &str| own.as_ref().map_or(Ok(None), |own| own.optional_count(key));
    let head_dim = config.optional_count("global_head_dim")?.or(said("head_dim")?);
    let head_dim = head_dim.unwrap_or(512);
    let kv_heads = config.optional_count("num_global_key_value_heads")?;
    let kv_heads = kv_heads.or(said("num_key_value_heads")?);
    Ok(Attention {
        kv_heads: kv_heads.filter(|_| of_keys).unwrap_or(usual.kv_heads).max(1),
        head_dim,
        value_dim: head_dim,
        scale: scale(config, family, head_dim)?,
        values: Values { of_keys, ..usual.values },
        ..usual
    })
}

fn scale(config: &Config<'_>, family: &Family, head_dim: usize) -> Result<f32, ModelError> {
    let said = config.float("attention_multiplier")?.map(|scale| scale as f32);
    let scalar = config.float("query_pre_attn_scalar")?.unwrap_or(head_dim as f64);
    if family.attention.relative {
        return Ok(1.0 / head_dim as f32);
    }
    let of_queries = config.float_or("qk_scale_factor", Some(family.attention.query_scale))?;
    let scale = said.or(family.attention.scale).unwrap_or(1.0 / (scalar as f32).sqrt());
    Ok(scale * of_queries.unwrap_or(1.0))
}

/// Returns the biases by distance. Those of layers with a window reach as far as the window.
fn relative(
    config: &Config<'_>,
    family: &Family,
    is_windowed: bool,
) -> Result<Option<RelativeBias>, ModelError> {
    if !family.attention.relative {
        return Ok(None);
    }
    let window = if is_windowed { first_window(config, family)? } else { None };
    let (rank, extent) = (config.count("d_rel")?, config.count("rel_extent")?);
    Ok(Some(RelativeBias { rank, extent: window.unwrap_or(extent) }))
}

/// Returns the window of the first layer that has one.
fn first_window(config: &Config<'_>, family: &Family) -> Result<Option<usize>, ModelError> {
    let windows =
        (0..config.count("num_hidden_layers")?).map(|layer| window(config, family, layer));
    Ok(windows.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().next())
}

/// Keys that say which projections have biases. The tensors say it too.
const BIASES: [&str; 4] = ["attention_bias", "use_bias", "use_qkv_bias", "bias"];

/// Returns which projections have biases.
fn bias(
    catalog: &Catalog,
    config: &Config<'_>,
    family: &'static Family,
    naming: Naming,
) -> Result<AttentionBias, ModelError> {
    let has = |role: &str| catalog.tensor(&Names::new(naming, family).layer(0, role));
    if family.attention.bias_by_tensors {
        config.note(&BIASES);
        return Ok(match (has("o_bias"), has("q_bias").or(has("qkv_bias"))) {
            (Some(_), _) => AttentionBias::All,
            (None, Some(_)) => AttentionBias::Qkv,
            (None, None) => AttentionBias::None,
        });
    }
    let qkv_bias = match config.flag("qkv_bias")? {
        Some(said) if family.attention.qkv_bias => said,
        Some(true) => {
            return Err(ModelError::BadValue {
                key: "qkv_bias".into(),
                value: "true".into(),
                expected: "forebay knows this family without such biases".into(),
            });
        }
        _ => family.attention.qkv_bias,
    };
    // The tensors say it too.
    config.flag("attention_out_bias")?;
    Ok(match (qkv_bias, config.is_set("attention_bias")?) {
        (_, true) if has("o_bias").is_some() => AttentionBias::All,
        (false, false) => AttentionBias::None,
        _ => AttentionBias::Qkv,
    })
}

/// Returns what `per_layer_config` says of the layers with a window, or of the others, if there is such a key. It must say the same
/// of all of them, and nothing of the rest.
fn of_layers<'a>(
    config: &Config<'a>,
    family: &Family,
    windowed: bool,
) -> Result<Option<Config<'a>>, ModelError> {
    let Some(all) = config.object("per_layer_config")? else { return Ok(None) };
    let count = config.count("num_hidden_layers")?;
    let (first, kind) = (all.members().next(), if windowed { "with" } else { "without" });
    for (layer, own) in all.members() {
        let number = layer.parse().ok().filter(|number| *number < count);
        let fits = match number {
            Some(number) => window(config, family, number)?.is_some() == windowed,
            None => false,
        };
        if !fits || first.is_none_or(|(_, first)| own != first) {
            return Err(ModelError::BadValue {
                key: format!("per_layer_config of layer {layer}"),
                value: short(own),
                expected: format!("forebay knows the same values for all layers {kind} a window"),
            });
        }
    }
    // Checks the keys of one of them, because all are the same.
    let Some((layer, _)) = first else { return Ok(None) };
    all.object(layer)
}
