//! The width of a dense feed-forward in `config.json`.

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
