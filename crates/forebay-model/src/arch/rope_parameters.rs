//! Parameters of rotations in a Hugging Face `config.json`.

use forebay_compute::RopeScaling;
use serde_json::Value;

use super::architecture::RopeFactors;
use super::config::Config;
use crate::ModelError;

/// Key of the number of positions that a model was first trained for, before its rotation was scaled.
const ORIGINAL_CONTEXT: &str = "original_max_position_embeddings";

/// Parameters of a rotation. They are in an object of their own, possibly with one object for each kind of layer
/// (transformers 5), or beside the other keys.
pub(super) struct Parameters<'a> {
    own: Option<&'a Value>,
    beside: &'a Value,
}

impl<'a> Parameters<'a> {
    /// Returns the parameters for layers of kind `scope`, if each kind has its own.
    pub fn of(config: &Config<'a>, scope: Option<&str>) -> Parameters<'a> {
        let objects = ["rope_scaling", "rope_parameters"];
        let mut found = objects.iter().filter_map(|key| config.json.get(*key));
        let own = found.find(|value| value.is_object());
        let own = own.map(|own| scope.and_then(|scope| own.get(scope)).unwrap_or(own));
        Parameters { own, beside: config.json }
    }

    /// Returns the kind of scaling, if it is given.
    fn kind(&self) -> Option<&'a str> {
        let own = self.own?;
        own.get("rope_type").or_else(|| own.get("type")).and_then(Value::as_str)
    }

    /// Returns true if a share of the pairs of each head rotates, with the frequencies that these would have if all did.
    pub fn is_proportional(&self) -> bool {
        self.kind() == Some("proportional")
    }

    pub fn float(&self, key: &str) -> Option<f64> {
        let of = |value: &Value| value.get(key).and_then(Value::as_f64);
        self.own.and_then(of).or_else(|| of(self.beside))
    }

    fn needed(&self, key: &str) -> Result<f64, ModelError> {
        self.float(key).ok_or_else(|| ModelError::MissingKey {
            source_name: "config.json (rope scaling)".into(),
            key: key.into(),
            family: "a",
        })
    }

    /// Returns the factor that stretches the base of the rotation once for all lengths, with a fixed `alpha` (Hunyuan).
    pub fn base_factor(&self, rotary_dim: usize) -> f64 {
        let dim = rotary_dim as f64;
        self.alpha().map_or(1.0, |alpha| alpha.powf(dim / (dim - 2.0)))
    }

    fn alpha(&self) -> Option<f64> {
        let own = self.own.filter(|_| self.kind() == Some("dynamic"))?;
        own.get("alpha").and_then(Value::as_f64)
    }

    pub fn scaling(&self) -> Result<RopeScaling, ModelError> {
        let Some(own) = self.own else { return Ok(RopeScaling::None) };
        match self.kind().unwrap_or("default") {
            "default" => Ok(RopeScaling::None),
            // The base is stretched instead.
            "dynamic" if self.alpha().is_some() => Ok(RopeScaling::None),
            "proportional" => Ok(match self.own.and_then(|own| own.get("factor")) {
                Some(_) => RopeScaling::Linear { factor: self.needed("factor")? },
                None => RopeScaling::None,
            }),
            "linear" => Ok(RopeScaling::Linear { factor: self.needed("factor")? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: self.needed("factor")?,
                low_freq_factor: self.needed("low_freq_factor")?,
                high_freq_factor: self.needed("high_freq_factor")?,
                original_context: self.needed(ORIGINAL_CONTEXT)?,
            }),
            "yarn" => {
                let factor = self.needed("factor")?;
                let magnitudes = (self.float("mscale"), self.float("mscale_all_dim"));
                let magnitude = match magnitudes {
                    (Some(own), Some(all)) if own != 0.0 && all != 0.0 => {
                        Some(RopeScaling::yarn_magnitude(factor, own, all))
                    }
                    _ => self.float("attention_factor"),
                };
                Ok(RopeScaling::Yarn {
                    factor,
                    original_context: self.needed(ORIGINAL_CONTEXT)?,
                    beta_fast: self.float("beta_fast").unwrap_or(32.0),
                    beta_slow: self.float("beta_slow").unwrap_or(1.0),
                    truncate: own.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                    magnitude,
                })
            }
            "longrope" | "su" => self.long_rope(),
            other => Err(ModelError::BadValue {
                key: "rope_type".into(),
                value: other.into(),
                expected:
                    "forebay knows default, linear, llama3, yarn, longrope, proportional and dynamic with alpha"
                        .into(),
            }),
        }
    }

    /// Returns LongRoPE's scaling. The context of such a model is `factor` times the original one. Configurations have
    /// the original context in one of two places; otherwise it is the whole context.
    fn long_rope(&self) -> Result<RopeScaling, ModelError> {
        let whole = self.needed("max_position_embeddings")?;
        let beside = self.beside.get(ORIGINAL_CONTEXT).and_then(Value::as_f64);
        let original = self.float(ORIGINAL_CONTEXT).unwrap_or(whole);
        let stretched = whole / original;
        let factor = match beside {
            Some(_) => stretched,
            None => self.float("factor").unwrap_or(stretched),
        };
        let said = self.float("attention_factor");
        let usual = said.unwrap_or_else(|| RopeScaling::long_rope_magnitude(factor, original));
        Ok(RopeScaling::LongRope {
            original_context: original,
            short_magnitude: self.float("short_mscale").unwrap_or(usual),
            long_magnitude: self.float("long_mscale").unwrap_or(usual),
        })
    }

    pub fn long_factors(&self, pairs: usize) -> Result<RopeFactors, ModelError> {
        let list = |key: &str| {
            let refused = |value: String| ModelError::BadValue {
                key: key.into(),
                value,
                expected: format!(
                    "it must be a list of {pairs} numbers, one for each pair that rotates"
                ),
            };
            let list = self.own.and_then(|own| own.get(key)).and_then(Value::as_array);
            let list = list.ok_or_else(|| refused("no list".into()))?;
            let numbers: Vec<f32> =
                list.iter().filter_map(Value::as_f64).map(|value| value as f32).collect();
            match numbers.len() {
                count if count == pairs && list.len() == pairs => Ok(numbers),
                count => Err(refused(format!("a list of {count} numbers"))),
            }
        };
        Ok(RopeFactors::ByContext { short: list("short_factor")?, long: list("long_factor")? })
    }
}
