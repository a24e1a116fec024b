//! The width of a dense feed-forward in `config.json`, and how sparse its gates are.

use serde_json::Value;

use super::config::{Config, short};
use super::family::Family;
use crate::ModelError;

/// Returns the width of feed-forwards under the first of `keys` that is present, adjusted if the configuration says so (LFM2).
pub(super) fn feed_forward_width(
    config: &Config<'_>,
    family: &Family,
    keys: &[&str],
) -> Result<usize, ModelError> {
    config.note(&["block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim"]);
    if !family.feed_forward.adjusted_width {
        config.note(&["block_ff_dim"]);
        return config.first_count(keys);
    }
    config.note(keys);
    let width = match config.optional_count("block_ff_dim")? {
        Some(width) => width,
        None => config.first_count(keys)?,
    };
    let adjusts = config.flag("block_auto_adjust_ff_dim")?;
    if !adjusts.unwrap_or(true) {
        return Ok(width);
    }
    // A feed-forward with a gate has three matrices instead of two.
    let width = width.saturating_mul(2) / 3;
    const MULTIPLIER: &str = "block_ffn_dim_multiplier";
    let multiplier = match config.get(MULTIPLIER) {
        None => 1.0,
        Some(Value::Null) => return Ok(width),
        Some(value) => match value.as_f64() {
            Some(multiplier) if multiplier > 0.0 && multiplier < 1e6 => multiplier,
            _ => {
                return Err(ModelError::BadValue {
                    key: MULTIPLIER.into(),
                    value: short(value),
                    expected: "it must be a positive number".into(),
                });
            }
        },
    };
    let multiple = config.optional_count("block_multiple_of")?.unwrap_or(256);
    let width = (multiplier * width as f64) as usize;
    width.checked_next_multiple_of(multiple).ok_or_else(|| ModelError::BadValue {
        key: "block_multiple_of".into(),
        value: multiple.to_string(),
        expected: "a multiple of it must be the width of feed-forwards".into(),
    })
}

/// Key of the shares of gates that are 0, one for each layer or one for all.
const SPARSITY: &str = "activation_sparsity_pattern";

/// Returns what is subtracted from the gates of layer `index`, in standard deviations above their mean, if they are sparse.
pub(super) fn cut(
    config: &Config<'_>,
    family: &Family,
    index: usize,
) -> Result<Option<f32>, ModelError> {
    let share = match config.set(SPARSITY) {
        None => {
            let Some(of) = family.feed_forward.sparse_layers else { return Ok(None) };
            let is_sparse = index < of.layers && config.count("num_hidden_layers")? > of.layers;
            if is_sparse { of.share } else { 0.0 }
        }
        Some(value) => {
            let said = value.as_array().map_or(Some(value), |list| list.get(index));
            let share = said.and_then(Value::as_f64).filter(|share| (0.0..1.0).contains(share));
            share.ok_or_else(|| ModelError::BadValue {
                key: format!("{SPARSITY} of layer {index}"),
                value: said.map_or("none".into(), short),
                expected: "it must be a number from 0 to less than 1".into(),
            })?
        }
    };
    Ok((share > 0.0).then(|| deviations(share) as f32))
}

/// Returns the number below which a normally distributed number with mean 0 and variance 1 is with this probability.
fn deviations(probability: f64) -> f64 {
    // Halves of the interval: beyond 9, the distribution differs from 0 and 1 by less than an f64 shows.
    let (mut low, mut high) = (-9.0, 9.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if normal_distribution(middle) < probability {
            low = middle;
        } else {
            high = middle;
        }
    }
    f64::midpoint(low, high)
}

/// Returns the distribution function of the normal distribution, by the series of its density times odd powers.
fn normal_distribution(x: f64) -> f64 {
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term.abs() > 1e-18 * sum.abs() {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    0.5 + density * sum
}

#[cfg(test)]
mod tests {
    use super::super::families::by_name;
    use super::*;
    use serde_json::json;

    fn width(family: &str, json: Value) -> Result<usize, ModelError> {
        let config = Config::new(&json, "lfm2");
        feed_forward_width(&config, by_name(family).unwrap(), &["intermediate_size"])
    }

    #[test]
    fn widths_are_adjusted_as_published() {
        // LFM2-1.2B, LFM2-350M and LFM2-2.6B, whose matrices are 8192, 4608 and 10752 wide.
        assert_eq!(width("lfm2", json!({ "block_ff_dim": 12288 })).unwrap(), 8192);
        let small = json!({ "block_ff_dim": 6656, "intermediate_size": 9 });
        assert_eq!(width("lfm2", small).unwrap(), 4608);
        let plain = json!({ "intermediate_size": 10752, "block_auto_adjust_ff_dim": false });
        assert_eq!(width("lfm2", plain).unwrap(), 10752);
        let more = json!({
            "intermediate_size": 150, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 32
        });
        assert_eq!(width("lfm2", more).unwrap(), 160);
        let exact = json!({ "intermediate_size": 150, "block_ffn_dim_multiplier": null });
        assert_eq!(width("lfm2", exact).unwrap(), 100);
        assert_eq!(width("lfm2moe", json!({ "intermediate_size": 150 })).unwrap(), 150);
    }

    #[test]
    fn shares_become_standard_deviations() {
        // Published tables of the normal distribution.
        for (share, expected) in
            [(0.5, 0.0), (0.9, 1.281_551_565_5), (0.95, 1.644_853_627), (0.001, -3.090_232_306)]
        {
            assert!((deviations(share) - expected).abs() < 1e-8, "{share}");
        }
        for share in [1e-12, 1.0 - 1e-12] {
            assert!((deviations(share).abs() - 7.034).abs() < 1e-3, "{share}");
        }
    }

    #[test]
    fn sparsity_is_by_layer_or_the_same_for_all() {
        let of = |json: Value, index: usize| {
            let config = Config::new(&json, "gemma3n");
            cut(&config, by_name("gemma3n").unwrap(), index)
        };
        let by_layer = json!({ "activation_sparsity_pattern": [0.9, 0.0] });
        assert!((of(by_layer.clone(), 0).unwrap().unwrap() - 1.281_551_6).abs() < 1e-6);
        assert_eq!(of(by_layer.clone(), 1).unwrap(), None);
        for json in [by_layer, json!({ "activation_sparsity_pattern": 1.0 })] {
            let said = of(json, 2).unwrap_err().to_string();
            assert!(said.contains("activation_sparsity_pattern of layer 2"), "{said}");
        }
        for (layers, index, expected) in [(35, 9, true), (35, 10, false), (10, 9, false)] {
            let usual = json!({ "num_hidden_layers": layers, "activation_sparsity_pattern": null });
            assert_eq!(of(usual, index).unwrap().is_some(), expected, "{layers} {index}");
        }
    }

    #[test]
    fn hostile_factors_are_refused() {
        for (key, value) in [
            ("block_multiple_of", json!(0)),
            ("block_multiple_of", json!(-1)),
            ("block_ffn_dim_multiplier", json!(-1.0)),
            ("block_ffn_dim_multiplier", json!("2")),
            ("block_ffn_dim_multiplier", json!(1e300)),
        ] {
            let mut config = json!({ "intermediate_size": 150 });
            config[key] = value;
            let said = width("lfm2", config).unwrap_err().to_string();
            assert!(said.contains(key), "{said}");
        }
        let huge = json!({ "intermediate_size": u64::MAX, "block_multiple_of": u64::MAX });
        assert!(width("lfm2", huge).is_ok_and(|width| width > 1 << 40));
    }
}
