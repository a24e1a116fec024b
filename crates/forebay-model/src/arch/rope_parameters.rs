//! Parameters of rotations in a Hugging Face `config.json`.

use forebay_compute::{Growth, RopeScaling, Temperature};
use serde_json::Value;

use super::architecture::RopeFactors;
use super::config::{Config, FULL, INDEXED, ROTATIONS, short};
use crate::ModelError;

/// Key of the number of positions that a model was first trained for, before its rotation was scaled.
const ORIGINAL_CONTEXT: &str = "original_max_position_embeddings";

/// All parameters that some kind of rotation has. A kind takes no notice of those of others.
const KNOWN: [&str; 22] = [
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    ORIGINAL_CONTEXT,
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "alpha",
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
    "attn_factor",
    "extrapolation_factor",
    "llama_4_scaling_beta",
];

/// Parameters of a rotation. They are in an object of their own, possibly with one object for each kind of layer
/// (transformers 5), or beside the other keys.
pub(super) struct Parameters<'c, 'a> {
    /// Objects with parameters. The first one that has a key decides.
    own: Vec<Config<'a>>,
    beside: &'c Config<'a>,
}

impl<'c, 'a> Parameters<'c, 'a> {
    /// Returns the parameters for layers of kind `scope`, if each kind has its own.
    ///
    /// # Errors
    /// Returns an error if the parameters are no objects, or if two objects contradict each other.
    pub fn of(
        config: &'c Config<'a>,
        scope: Option<&str>,
    ) -> Result<Parameters<'c, 'a>, ModelError> {
        let mut own = Vec::new();
        for key in ROTATIONS {
            let Some(object) = config.object(key)? else { continue };
            let mut scoped = match scope {
                Some(scope) => object.object(scope)?,
                None => None,
            };
            // Layers without a window may have indexers.
            if scope == Some(FULL) && scoped.is_none() {
                scoped = object.object(INDEXED)?;
            }
            own.push(scoped.unwrap_or(object));
        }
        own.iter().for_each(|own| own.note(&KNOWN));
        // The parameters' own objects decide about these.
        config.note(&["rope_theta", "partial_rotary_factor", ORIGINAL_CONTEXT]);
        let parameters = Parameters { own, beside: config };
        parameters.expect_agreement()?;
        Ok(parameters)
    }

    fn expect_agreement(&self) -> Result<(), ModelError> {
        let [first, second] = &self.own[..] else { return Ok(()) };
        for key in KNOWN.into_iter().filter(|key| *key != "type") {
            let (Some(one), Some(other)) = (first.set(key), second.set(key)) else { continue };
            if one != other && one.as_f64().is_none_or(|number| other.as_f64() != Some(number)) {
                return Err(ModelError::BadValue {
                    key: format!("{key} of {}", ROTATIONS[0]),
                    value: short(one),
                    expected: format!("{} says {}", ROTATIONS[1], short(other)),
                });
            }
        }
        Ok(())
    }

    /// Returns a value of the parameters' own objects.
    fn own(&self, key: &str) -> Option<&'a Value> {
        self.own.iter().find_map(|own| own.set(key))
    }

    /// Returns the kind of scaling, if it is given.
    fn kind(&self) -> Result<Option<&'a str>, ModelError> {
        for own in &self.own {
            let [new, old] = ["rope_type", "type"].map(|key| own.text(key));
            if let Some(kind) = new?.or(old?) {
                return Ok(Some(kind));
            }
        }
        Ok(None)
    }

    /// Returns true if a share of the pairs of each head rotates, with the frequencies that these would have if all did.
    pub fn is_proportional(&self) -> Result<bool, ModelError> {
        Ok(self.kind()? == Some("proportional"))
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let own = self.own.iter().find(|own| own.set(key).is_some());
        own.unwrap_or(self.beside).float(key)
    }

    fn needed(&self, key: &str) -> Result<f64, ModelError> {
        self.float(key)?.ok_or_else(|| ModelError::MissingKey {
            source_name: "config.json (rope scaling)".into(),
            key: key.into(),
            family: "a",
        })
    }

    /// Returns the number of positions that the model was first trained for. Configurations that do not say it mean all positions.
    fn original_context(&self) -> Result<f64, ModelError> {
        match self.float(ORIGINAL_CONTEXT)? {
            Some(positions) => Ok(positions),
            None => self.needed("max_position_embeddings"),
        }
    }

    /// Returns the factor that stretches the base of the rotation once for all lengths, with a fixed `alpha` (Hunyuan).
    pub fn base_factor(&self, rotary_dim: usize) -> Result<f64, ModelError> {
        let dim = rotary_dim as f64;
        Ok(self.alpha()?.map_or(1.0, |alpha| alpha.powf(dim / (dim - 2.0))))
    }

    fn alpha(&self) -> Result<Option<f64>, ModelError> {
        match self.own("alpha") {
            Some(_) if matches!(self.kind()?, Some("dynamic" | "xdrope")) => self.float("alpha"),
            _ => Ok(None),
        }
    }

    /// Refuses parameters that have an effect and that no known rotation has.
    fn expect_known(&self) -> Result<(), ModelError> {
        for (key, neutral) in [("attn_factor", 1.0), ("extrapolation_factor", 1.0)] {
            let said = match self.own(key) {
                Some(_) => self.float(key)?,
                None => None,
            };
            if let Some(value) = said.filter(|value| *value != neutral) {
                return Err(ModelError::BadValue {
                    key: format!("{key} of the rotation"),
                    value: value.to_string(),
                    expected: format!("forebay knows {neutral}"),
                });
            }
        }
        Ok(())
    }

    /// Returns the factor of queries that grows with the position, if there is one. Its steps are as long as the context that the
    /// model was first trained for.
    pub fn temperature(&self) -> Result<Option<Temperature>, ModelError> {
        let rate = match self.own("llama_4_scaling_beta") {
            Some(_) => self.float("llama_4_scaling_beta")?.filter(|rate| *rate != 0.0),
            None => None,
        };
        let Some(rate) = rate else { return Ok(None) };
        let step = self.original_context()? as f32;
        Ok(Some(Temperature { rate: rate as f32, step, first: 0, growth: Growth::WholeSteps }))
    }

    pub fn scaling(&self) -> Result<RopeScaling, ModelError> {
        self.expect_known()?;
        let has_factor = self.own("factor").is_some();
        let Some(kind) = self.kind()? else {
            let factor = if has_factor { self.float("factor")? } else { None };
            return match factor.filter(|factor| *factor != 1.0) {
                None => Ok(RopeScaling::None),
                Some(factor) => Err(ModelError::BadValue {
                    key: "factor of the rotation".into(),
                    value: factor.to_string(),
                    expected: "rope_type must say what it scales, such as linear".into(),
                }),
            };
        };
        match kind {
            // Positions of text are the same in all sections of `mrope`.
            "default" | "mrope" => Ok(RopeScaling::None),
            // With a fixed `alpha`, the base is stretched instead. Without it, the base is stretched for positions beyond those that
            // the model was trained for, and no context has such.
            "dynamic" | "xdrope" => Ok(RopeScaling::None),
            "proportional" => Ok(match has_factor {
                true => RopeScaling::Linear { factor: self.needed("factor")? },
                false => RopeScaling::None,
            }),
            "linear" => Ok(RopeScaling::Linear { factor: self.needed("factor")? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: self.needed("factor")?,
                low_freq_factor: self.needed("low_freq_factor")?,
                high_freq_factor: self.needed("high_freq_factor")?,
                original_context: self.original_context()?,
            }),
            "yarn" => self.yarn(),
            "longrope" | "su" => self.long_rope(),
            other => Err(ModelError::BadValue {
                key: "rope_type".into(),
                value: other.into(),
                expected:
                    "forebay knows default, linear, llama3, yarn, longrope, proportional and dynamic"
                        .into(),
            }),
        }
    }

    fn yarn(&self) -> Result<RopeScaling, ModelError> {
        let original_context = self.original_context()?;
        let factor = match self.float("factor")? {
            Some(factor) => factor,
            None if self.float(ORIGINAL_CONTEXT)?.is_some() => {
                self.needed("max_position_embeddings")? / original_context
            }
            None => self.needed("factor")?,
        };
        let magnitudes = (self.float("mscale")?, self.float("mscale_all_dim")?);
        let magnitude = match (self.float("attention_factor")?, magnitudes) {
            (Some(said), _) => Some(said),
            (None, (Some(own), Some(all))) if own != 0.0 && all != 0.0 => {
                Some(RopeScaling::yarn_magnitude(factor, own, all))
            }
            _ => None,
        };
        let truncate = match self.own.iter().find(|own| own.set("truncate").is_some()) {
            Some(own) => own.flag("truncate")?,
            None => None,
        };
        // 0 stands for the usual numbers, as in transformers.
        let beta = |key: &str, usual: f64| {
            let said = self.float(key)?.filter(|beta| *beta != 0.0);
            Ok::<_, ModelError>(said.unwrap_or(usual))
        };
        Ok(RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast: beta("beta_fast", 32.0)?,
            beta_slow: beta("beta_slow", 1.0)?,
            truncate: truncate.unwrap_or(true),
            magnitude,
        })
    }

    /// Returns LongRoPE's scaling. The context of such a model is `factor` times the original one. Configurations have
    /// the original context in one of two places; otherwise it is the whole context.
    fn long_rope(&self) -> Result<RopeScaling, ModelError> {
        let whole = self.needed("max_position_embeddings")?;
        let beside = self.beside.float(ORIGINAL_CONTEXT)?;
        let original = self.original_context()?;
        let stretched = whole / original;
        let factor = match beside {
            Some(_) => stretched,
            None => self.float("factor")?.unwrap_or(stretched),
        };
        let said = self.float("attention_factor")?;
        let usual = said.unwrap_or_else(|| RopeScaling::long_rope_magnitude(factor, original));
        Ok(RopeScaling::LongRope {
            original_context: original,
            short_magnitude: self.float("short_mscale")?.unwrap_or(usual),
            long_magnitude: self.float("long_mscale")?.unwrap_or(usual),
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
            let list = self.own(key).and_then(Value::as_array);
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
