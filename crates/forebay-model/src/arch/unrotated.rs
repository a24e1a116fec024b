//! Models in which some layers have no rotation. These see all positions, and the others see a chunk of them (Llama 4).

use forebay_compute::Temperature;
use serde_json::Value;

use super::config::Config;
use crate::ModelError;

/// Layers without rotation: what holds if the configuration does not say otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Unrotated {
    /// Every so many layers, the last one has no rotation.
    pub period: usize,
    /// Length of the chunks of layers with rotation.
    pub chunk: usize,
    pub temperature: Temperature,
}

/// What the configuration says about a layer.
pub(super) struct Seen {
    pub rotates: bool,
    /// Length of the layer's chunks, if it does not see all positions.
    pub chunk: Option<usize>,
}

impl Unrotated {
    pub const LLAMA_4: Unrotated =
        Unrotated { period: 4, chunk: 8192, temperature: Temperature { rate: 0.1, step: 8192.0 } };

    /// Returns the factor of queries in layers without rotation, unless the configuration denies it. Some configurations have
    /// a number as the flag.
    ///
    /// # Errors
    /// Returns an error if the configuration gives something else than numbers.
    pub(super) fn temperature(
        &self,
        config: &Config<'_>,
    ) -> Result<Option<Temperature>, ModelError> {
        let denied = match config.set("attn_temperature_tuning") {
            Some(Value::Bool(wanted)) => !wanted,
            Some(Value::Number(number)) => number.as_f64() == Some(0.0),
            _ => false,
        };
        let number = |key: &str, usual: f32| {
            Ok::<_, ModelError>(config.float(key)?.map_or(usual, |value| value as f32))
        };
        let temperature = Temperature {
            rate: number("attn_scale", self.temperature.rate)?,
            step: number("floor_scale", self.temperature.step)?,
        };
        Ok((!denied).then_some(temperature))
    }

    /// Returns what layer `index` sees.
    pub(super) fn layer(&self, config: &Config<'_>, index: usize) -> Result<Seen, ModelError> {
        config.note(&["no_rope_layer_interval"]);
        // The numbers are 1 for layers with rotation, whatever the name says.
        let rotates = match config.flag_of_layer("no_rope_layers", index)? {
            Some(rotates) => rotates,
            None => {
                let period = config.optional_count("no_rope_layer_interval")?;
                !(index + 1).is_multiple_of(period.unwrap_or(self.period).max(1))
            }
        };
        let is_chunked = match config.text_of_layer("layer_types", index)? {
            Some("chunked_attention") => true,
            Some("full_attention") => false,
            None => rotates,
            Some(other) => {
                return Err(ModelError::BadValue {
                    key: format!("layer_types of layer {index}"),
                    value: other.into(),
                    expected: "forebay knows chunked_attention and full_attention".into(),
                });
            }
        };
        let chunk = config.optional_count("attention_chunk_size")?.unwrap_or(self.chunk);
        Ok(Seen { rotates, chunk: is_chunked.then_some(chunk) })
    }
}
