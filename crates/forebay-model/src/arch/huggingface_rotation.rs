//! The rotations of layers with and without a window, as `config.json` describes them.

use forebay_compute::{RopeLayout, RopeScaling};
use serde_json::Value;

use super::architecture::{Rope, RopeFactors};
use super::check::check;
use super::config::{Config, FULL, ROTATIONS, WINDOWED, short};
use super::family::{Family, WindowTheta};
use super::huggingface_windows::window;
use super::rope_parameters::Parameters;
use super::unrotated::LAYER_THETA;
use crate::ModelError;

/// Keys of the base of the rotation in windowed layers.
const LOCAL: [&str; 2] = ["rope_local_base_freq", "swa_rope_theta"];

/// Returns the rotation of layers without a window, followed by that of layers with one if the family has two. `dims` are the lengths of
/// the heads in both kinds of layers.
pub(super) fn rotations(
    config: &Config<'_>,
    family: &Family,
    dims: [usize; 2],
) -> Result<Vec<Rope>, ModelError> {
    if !rotates(config, family)? {
        note_no_rotation(config)?;
        return Ok(Vec::new());
    }
    let [full, windowed] = dims;
    let all = rotation(config, family, Some(FULL), rotary_dim(config, family, FULL, full)?)?;
    if family.rotation.of_windows.is_none() {
        expect_one_rotation(config, all.theta)?;
        return Ok(vec![all]);
    }
    let of_windows = rotary_dim(config, family, WINDOWED, windowed)?;
    Ok(vec![all, rotation(config, family, Some(WINDOWED), of_windows)?])
}

/// Returns the number of elements of a head that rotate.
fn rotary_dim(
    config: &Config<'_>,
    family: &Family,
    scope: &str,
    head_dim: usize,
) -> Result<usize, ModelError> {
    let of_kind = of_kind(config, family, "partial_rotary_factors", scope)?;
    let parameters = Parameters::of(config, Some(scope))?;
    let partial = of_kind.or(config.float("partial_rotary_factor")?);
    let partial = partial.or(parameters.float("partial_rotary_factor")?);
    let partial = partial.or(config.float("rotary_pct")?);
    Ok(match (partial, config.optional_count("rotary_dim")?) {
        _ if parameters.is_proportional()? => head_dim,
        (None, Some(rotary_dim)) => rotary_dim,
        _ => (partial.unwrap_or(1.0) * head_dim as f64) as usize,
    })
}

/// Records the keys of a rotation that the model does not have.
pub(super) fn note_no_rotation(config: &Config<'_>) -> Result<(), ModelError> {
    config.note(&[
        "partial_rotary_factor",
        "rotary_pct",
        "rotary_emb_base",
        "rope_theta",
        "rope_interleave",
        "rotary_dim",
    ]);
    Parameters::of(config, None).map(|_| ())
}

/// Checks that layers with and without a window have the same rotation.
fn expect_one_rotation(config: &Config<'_>, theta: f64) -> Result<(), ModelError> {
    let refused = |key: &str, value: String| ModelError::BadValue {
        key: key.into(),
        value,
        expected: "forebay knows one rotation for all layers of this family".into(),
    };
    if let Some(other) = config.first_float(&LOCAL)?.filter(|other| *other != theta) {
        return Err(refused(LOCAL[0], other.to_string()));
    }
    for key in ROTATIONS {
        let Some(object) = config.object(key)? else { continue };
        let [full, windowed] = [FULL, WINDOWED].map(|scope| object.set(scope));
        if full.is_some() && windowed.is_some() && full != windowed {
            let value = windowed.map_or("none".into(), short);
            return Err(refused(&format!("{key}.{WINDOWED}"), value));
        }
        // Records the windows' parameters as read.
        Parameters::of(config, Some(WINDOWED))?;
    }
    Ok(())
}

/// Returns the rotation of layers for which the parameters of `scope` hold.
pub(super) fn rotation(
    config: &Config<'_>,
    family: &Family,
    scope: Option<&str>,
    rotary_dim: usize,
) -> Result<Rope, ModelError> {
    let windowed = scope == Some(WINDOWED);
    let parameters = Parameters::of(config, scope)?;
    let is_scaled = !windowed || family.rotation.of_windows == Some(WindowTheta::SameScaled);
    let scaling = if is_scaled { parameters.scaling()? } else { RopeScaling::None };
    let tempered = parameters.temperature()?.is_some();
    let fits = !tempered || family.rotation.tempered;
    check("llama_4_scaling_beta of the rotation", "set", fits, "forebay knows 0 for this family")?;
    let usual = match family.rotation.of_windows {
        Some(WindowTheta::Of(theta)) if windowed => Some(theta),
        _ => None,
    };
    let local = config.first_float(&LOCAL)?;
    let local = local.filter(|_| windowed);
    let beside = config.first_float(&["theta", "rotary_emb_base"])?;
    let of_layers = match theta_of_layers(config)? {
        Some(theta) => Some(theta),
        None => of_kind(config, family, "rope_theta", scope.unwrap_or(FULL))?,
    };
    let theta = match of_layers {
        Some(theta) => Some(theta),
        None => local.or(parameters.float("rope_theta")?).or(beside).or(usual),
    };
    let theta = theta.unwrap_or(family.rotation.theta);
    let theta = if windowed { theta } else { theta * parameters.base_factor(rotary_dim)? };
    let layout = match config.flag("rope_interleave")? {
        Some(false) if family.attention.latent => RopeLayout::Neox,
        _ => family.rotation.huggingface,
    };
    let factors = match scaling {
        RopeScaling::LongRope { .. } => Some(parameters.long_factors(rotary_dim / 2)?),
        _ if parameters.is_proportional()? && !windowed => {
            let fits = (1..=1 << 16).contains(&rotary_dim);
            check("rotary dimension", rotary_dim, fits, "it must be from 1 to 65536")?;
            let share = parameters.float("partial_rotary_factor")?.unwrap_or(1.0);
            Some(proportional_factors(share, rotary_dim / 2))
        }
        _ => None,
    };
    Ok(Rope { theta, rotary_dim, from: 0, layout, scaling, factors })
}

/// Returns the number of a kind of layers, if `key` has a list with one for each layer. It must be the same for all layers of a
/// kind.
fn of_kind(
    config: &Config<'_>,
    family: &Family,
    key: &str,
    scope: &str,
) -> Result<Option<f64>, ModelError> {
    let Some(list) = config.set(key).and_then(Value::as_array) else { return Ok(None) };
    let mut found = None;
    for index in 0..config.count("num_hidden_layers")? {
        if window(config, family, index)?.is_some() != (scope == WINDOWED) {
            continue;
        }
        let own = list.get(index).and_then(Value::as_f64);
        let first = *found.get_or_insert(own);
        let given = own.map_or("none".into(), |own| own.to_string());
        let expected = "it must be the same number in all layers of a kind";
        check(&format!("{key} of layer {index}"), given, own.is_some() && own == first, expected)?;
    }
    Ok(found.flatten())
}

/// Returns the base of the rotation that a list gives for all layers but those that are not rotated (Granite with windows).
///
/// # Errors
/// Returns an error if layers have different ones.
fn theta_of_layers(config: &Config<'_>) -> Result<Option<f64>, ModelError> {
    let mut found = None;
    for value in config.list(LAYER_THETA)?.unwrap_or_default() {
        let theta = value.as_f64().filter(|theta| *theta >= 0.0);
        let is_same = theta.is_some_and(|theta| found.is_none_or(|found| found == theta));
        if theta != Some(0.0) {
            let expected =
                "forebay knows one base for all layers, and 0 for those without rotation";
            check(LAYER_THETA, short(value), is_same, expected)?;
            found = theta;
        }
    }
    Ok(found)
}

/// Returns the divisors of the frequencies of pairs of which only this share rotates: the first ones. The others stay where they
/// are, whatever the position.
fn proportional_factors(share: f64, pairs: usize) -> RopeFactors {
    let rotating = (share * pairs as f64) as usize;
    let factor = |pair: usize| if pair < rotating { 1.0 } else { 1e30 };
    RopeFactors::Always((0..pairs).map(factor).collect())
}

/// Returns true if queries and keys are rotated.
pub(super) fn rotates(config: &Config<'_>, family: &Family) -> Result<bool, ModelError> {
    let said = config.text("position_embedding_type")?;
    if family.rotation.rotates || said == Some("rope") {
        return Ok(true);
    }
    let by_base = family.rotation.rotates_with_base;
    Ok(by_base && Parameters::of(config, None)?.float("rope_theta")?.is_some())
}
