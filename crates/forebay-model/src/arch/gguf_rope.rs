//! Reads the rotations of GGUF metadata.
//!
//! llama.cpp gives the keys their meaning: without a type, a factor is linear; a factor of 0 means none; the factor has an old key.

use forebay_compute::RopeScaling;
use forebay_format::Catalog;

use super::architecture::{Attention, LONG_FACTORS, Layer, Rope, RopeFactors};
use super::family::{Family, WindowTheta};
use super::gguf_keys::Keys;
use super::gguf_layers::rotates;
use crate::ModelError;

/// Keys that mean nothing without a rotation.
const ALL: [&str; 10] = [
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_log_multiplier",
];

/// Returns the rotation of the layers, followed by that of windowed layers if it differs.
pub(super) fn ropes(
    keys: &Keys<'_>,
    family: &Family,
    layers: &[Layer],
    attentions: &[Attention],
    catalog: &Catalog,
) -> Result<Vec<Rope>, ModelError> {
    if !rotates(keys, family)? {
        keys.note(&ALL);
        return Ok(Vec::new());
    }
    let dim_of = |rope: usize| {
        let of = |layer: &&Layer| layer.mixer.attends() && layer.rope == Some(rope);
        let attention = attentions.get(layers.iter().find(of)?.attention)?;
        Some(attention.latent.map_or(attention.head_dim, |latent| latent.rotary))
    };
    let usual = dim_of(0).or(dim_of(1)).unwrap_or(0);
    let whole = keys.optional_count("rope.dimension_count")?.unwrap_or(usual);
    let rotary_dim = if family.rotation.half_in_gguf { whole / 2 } else { whole };
    let scaling = scaling(keys, family, catalog)?;
    // Ollama's converter has other names for both bases of Gemma 3.
    let base = |keys: &Keys<'_>, names: [&str; 2]| {
        let [own, other] = names.map(|name| keys.optional_float(name));
        Ok::<_, ModelError>(own?.or(other?).map(f64::from))
    };
    let theta = base(keys, ["rope.freq_base", "rope.global.freq_base"])?.unwrap_or(10_000.0);
    let theta = theta * base_factor(keys, usual)?;
    let of_windows = base(keys, ["rope.freq_base_swa", "rope.local.freq_base"])?;
    let dim_of_windows = keys.optional_count("rope.dimension_count_swa")?;
    let layout = family.rotation.gguf;
    let rope = Rope { theta, rotary_dim, from: 0, layout, scaling, factors: None };
    let (usual, of_others) = match family.rotation.of_windows {
        None => {
            let is_same = of_windows.is_none_or(|of| of == theta)
                && dim_of_windows.is_none_or(|dim| dim == rotary_dim);
            if !is_same && layers.iter().any(|layer| layer.window.is_some()) {
                let expected = "forebay knows one rotation for all layers of this family";
                return Err(keys.wrong("rope.freq_base_swa", "set", expected));
            }
            return Ok(vec![rope]);
        }
        Some(WindowTheta::Same) => (theta, None),
        Some(WindowTheta::SameScaled) => (theta, Some(scaling)),
        Some(WindowTheta::Of(theta)) => (theta, None),
    };
    let scaling = of_others.unwrap_or(RopeScaling::None);
    let theta = of_windows.unwrap_or(usual);
    let rotary_dim = dim_of_windows.unwrap_or(whole);
    // Factors of the file are for the other layers if those have heads of another length.
    let is_other = dim_of(1).is_some_and(|dim| Some(dim) != dim_of(0));
    let factors = is_other.then_some(RopeFactors::None);
    let windows = Rope { theta, rotary_dim, scaling, factors, ..rope.clone() };
    Ok(vec![rope, windows])
}

/// Key of the number with which the base of the rotation is stretched once for all lengths.
const ALPHA: &str = "rope.scaling.alpha";

/// Returns true if [`ALPHA`] stretches the base. Converters of other Hunyuan models write the stretched base.
fn has_alpha(keys: &Keys<'_>) -> bool {
    keys.architecture == "hunyuan_vl"
}

/// Returns the factor that stretches the base for heads of this length.
fn base_factor(keys: &Keys<'_>, head_dim: usize) -> Result<f64, ModelError> {
    let said = if has_alpha(keys) { keys.said_float(ALPHA)? } else { None };
    let dim = head_dim as f64;
    Ok(said.map_or(1.0, |alpha| f64::from(alpha).powf(dim / (dim - 2.0))))
}

/// What the metadata say about the scaling of a rotation.
struct Said<'a> {
    kind: Option<&'a str>,
    /// 1 if there is no scaling.
    factor: f32,
    original_context: usize,
    /// Factor of the usual magnitude of YaRN, or the magnitude of LongRoPE.
    attention: Option<f32>,
    /// Magnitude of YaRN as Hugging Face's configurations give it.
    magnitude: Option<f32>,
    beta_fast: Option<f32>,
    beta_slow: Option<f32>,
}

/// Returns the number of positions that the model was first trained for.
pub(super) fn original_context(keys: &Keys<'_>) -> Result<usize, ModelError> {
    let said = keys.optional_count("rope.scaling.original_context_length")?;
    said.filter(|positions| *positions > 0).map_or_else(|| keys.count("context_length"), Ok)
}

impl<'a> Said<'a> {
    fn read(keys: &Keys<'a>) -> Result<Said<'a>, ModelError> {
        let new = keys.optional_float("rope.scaling.factor")?;
        let old = keys.optional_float("rope.scale_linear")?;
        let factor = new.or(old).filter(|factor| *factor != 0.0).unwrap_or(1.0);
        let kind = keys.text("rope.scaling.type")?;
        if !has_alpha(keys) {
            keys.only(ALPHA, &[0.0], "forebay knows 0 for this family")?;
        }
        // A negative number means that the type decides, which is 1 for YaRN and 0 for others.
        let mix = keys.optional_float("rope.scaling.yarn_ext_factor")?;
        let usual = if kind == Some("yarn") { 1.0 } else { 0.0 };
        if let Some(mix) = mix.filter(|mix| *mix >= 0.0 && *mix != usual) {
            let expected = format!("forebay knows {usual} for this type of scaling");
            return Err(keys.wrong("rope.scaling.yarn_ext_factor", mix, &expected));
        }
        Ok(Said {
            kind,
            factor,
            original_context: original_context(keys)?,
            attention: keys.said_float("rope.scaling.attn_factor")?,
            magnitude: keys.said_float("rope.scaling.yarn_attn_factor")?,
            beta_fast: keys.said_float("rope.scaling.yarn_beta_fast")?,
            beta_slow: keys.said_float("rope.scaling.yarn_beta_slow")?,
        })
    }
}

/// Returns how the rotation of layers without a window is stretched. Factors in a tensor of the file come on top.
pub(super) fn scaling(
    keys: &Keys<'_>,
    family: &Family,
    catalog: &Catalog,
) -> Result<RopeScaling, ModelError> {
    let said = Said::read(keys)?;
    let log_multiplier = log_multiplier(keys)?;
    let has_factors = catalog.tensor(LONG_FACTORS).is_some();
    let scaling = match said.kind {
        // Some files have the factors, but do not name the scaling type.
        Some("longrope") => return long_rope(keys, family, catalog, &said),
        None if has_factors => return long_rope(keys, family, catalog, &said),
        Some("none") => RopeScaling::None,
        None | Some("linear") if said.factor == 1.0 => RopeScaling::None,
        None | Some("linear") => RopeScaling::Linear { factor: said.factor.into() },
        Some("yarn") if said.factor == 1.0 => RopeScaling::None,
        Some("yarn") => return yarn(keys, family, &said, log_multiplier),
        Some(other) => {
            let expected = "forebay knows none, linear, yarn and longrope";
            return Err(keys.wrong("rope.scaling.type", other, expected));
        }
    };
    let known = "forebay knows 1 without YaRN and LongRoPE";
    keys.only("rope.scaling.attn_factor", &[0.0, 1.0], known)?;
    keys.only("rope.scaling.yarn_attn_factor", &[0.0, 1.0], known)?;
    if said.factor != 1.0 && scaling != RopeScaling::None {
        keys.only("rope.scaling.yarn_log_multiplier", &[0.0], "forebay knows it with yarn")?;
    }
    Ok(scaling)
}

/// Returns the value `mscale_all_dim / 10`, unless it is 0.
fn log_multiplier(keys: &Keys<'_>) -> Result<Option<f32>, ModelError> {
    keys.said_float("rope.scaling.yarn_log_multiplier")
}

/// Returns the factor of queries and keys of latent attention. If the file gives YaRN's magnitude, it applies to queries and keys
/// together. The rotation then does not include it.
pub(super) fn latent_magnitude(keys: &Keys<'_>, scaling: RopeScaling) -> Result<f32, ModelError> {
    Ok(match (log_multiplier(keys)?, scaling) {
        (Some(multiplier), RopeScaling::Yarn { factor, .. }) if factor > 1.0 => {
            1.0 + multiplier * (factor as f32).ln()
        }
        _ => 1.0,
    })
}

fn yarn(
    keys: &Keys<'_>,
    family: &Family,
    said: &Said<'_>,
    log_multiplier: Option<f32>,
) -> Result<RopeScaling, ModelError> {
    let factor = f64::from(said.factor);
    let usual = RopeScaling::yarn_magnitude(factor, 1.0, 0.0);
    let is = |given: f32, of: f64| (f64::from(given) - of).abs() < 1e-4 * of;
    // llama.cpp takes no notice of it, so that only files in which it changes nothing mean the same everywhere.
    if let Some(given) = said.magnitude.filter(|given| *given != 1.0 && !is(*given, usual)) {
        let expected = format!("forebay knows 1 and {usual:.4}, the usual magnitude of YaRN");
        return Err(keys.wrong("rope.scaling.yarn_attn_factor", given, &expected));
    }
    // Converters of Phi-3 write the magnitude itself, which is usual. Otherwise it is a factor of the usual one.
    let changed = said.attention.filter(|given| *given != 1.0 && !is(*given, usual));
    let magnitude = match (log_multiplier, changed) {
        (None, None) => None,
        // There, the scale of attention or the family has the magnitude.
        (multiplier, Some(changed))
            if multiplier.is_some() || family.attention.latent || family.attention.compressed =>
        {
            let expected = "forebay knows 1 for this attention";
            return Err(keys.wrong("rope.scaling.attn_factor", changed, expected));
        }
        (_, Some(changed)) => Some(usual * f64::from(changed)),
        // Without latent attention, the key is `mscale_all_dim` itself.
        (Some(all), None) if family.rotation.tempered && !family.attention.latent => {
            Some(RopeScaling::yarn_magnitude(factor, 1.0, f64::from(all)))
        }
        (Some(_), None) if !family.attention.latent => {
            let expected = "forebay knows it for latent attention only";
            return Err(keys.wrong("rope.scaling.yarn_log_multiplier", "set", expected));
        }
        // The scale of attention already includes the magnitude, so the rotation must not. Only DeepSeek-V2 has other values of
        // `mscale` than 1: that of `mscale_all_dim`.
        (Some(multiplier), None) if family.name != "deepseek2" => {
            let all = f64::from(multiplier * 10.0);
            let is_one = (all - 1.0).abs() < 1e-4;
            Some(if is_one { 1.0 } else { RopeScaling::yarn_magnitude(factor, 1.0, all) })
        }
        (Some(_), None) => Some(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_context: said.original_context as f64,
        beta_fast: said.beta_fast.map_or(32.0, f64::from),
        beta_slow: said.beta_slow.map_or(1.0, f64::from),
        truncate: true,
        magnitude,
    })
}

/// Returns LongRoPE's scaling. Converters write one magnitude for the whole context.
fn long_rope(
    keys: &Keys<'_>,
    family: &Family,
    catalog: &Catalog,
    said: &Said<'_>,
) -> Result<RopeScaling, ModelError> {
    if catalog.tensor(LONG_FACTORS).is_none() {
        return Err(ModelError::MissingTensor { name: LONG_FACTORS.into(), family: family.name });
    }
    if said.factor != 1.0 {
        let expected = "forebay knows LongRoPE without a further factor";
        return Err(keys.wrong("rope.scaling.factor", said.factor, expected));
    }
    let magnitude = said.attention.map_or(1.0, f64::from);
    Ok(RopeScaling::LongRope {
        original_context: said.original_context as f64,
        short_magnitude: magnitude,
        long_magnitude: magnitude,
    })
}
