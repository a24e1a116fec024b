//! Models in which some layers have no rotation.

use forebay_compute::{Growth, Temperature};
use serde_json::Value;

use super::architecture::{FeedForward, Layer};
use super::config::{Config, short};
use super::rope_parameters::Parameters;
use crate::ModelError;

/// The layers without rotation. What the configuration says comes first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Unrotated {
    /// The last one of every so many layers (SmolLM3).
    Every(usize),
    /// The layers without a window, in models in which other layers have one (Trinity, EXAONE).
    WithoutWindow,
    /// The layers whose entry of a list of bases is 0, or without such a list the last layer and every so many before it. In
    /// GGUF files, those without a window (Muse).
    ByBase(Bases),
    /// The layers that the configuration names, or none (Granite with windows).
    AsSaid,
    /// The last one of every so many layers. The others see a chunk of the positions (Llama 4).
    BesideChunks(Chunks),
}

/// Bases of the rotation by layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bases {
    /// Every so many layers, counted back from the last one, a layer has no rotation if there is no list.
    pub period: usize,
    /// The base if the configuration gives none.
    pub usual: f64,
}

/// Key of a list with the base of the rotation of each layer. Layers with 0 are not rotated.
pub(super) const LAYER_THETA: &str = "layer_rope_theta";

/// Chunks of positions: what holds if the configuration does not say otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chunks {
    /// Every so many layers, the last one has no rotation and sees all positions.
    pub period: usize,
    /// Length of the chunks.
    pub length: usize,
    /// Factor of queries in layers without rotation.
    pub temperature: Temperature,
}

/// Returns true for the last layer of every so many.
pub(super) fn is_last(index: usize, period: usize) -> bool {
    (index + 1).is_multiple_of(period.max(1))
}

impl Unrotated {
    pub const LLAMA_4: Unrotated = Unrotated::BesideChunks(Chunks {
        period: 4,
        length: 8192,
        temperature: Temperature { rate: 0.1, step: 8192.0, first: 1, growth: Growth::WholeSteps },
    });

    /// Returns the chunks of the other layers, if they see such.
    pub(super) fn chunks(self) -> Option<Chunks> {
        match self {
            Unrotated::BesideChunks(chunks) => Some(chunks),
            Unrotated::Every(_)
            | Unrotated::WithoutWindow
            | Unrotated::AsSaid
            | Unrotated::ByBase(_) => None,
        }
    }

    /// Returns layer `index` of a `config.json` without its rotation, or with its chunks. `windows` are those of all layers.
    ///
    /// # Errors
    /// Returns an error if the configuration has a value that no such model can have.
    pub(super) fn of_config(
        self,
        config: &Config<'_>,
        layer: Layer,
        (index, windows): (usize, &[Option<usize>]),
    ) -> Result<Layer, ModelError> {
        let period = match self {
            Unrotated::WithoutWindow => {
                // Such dense layers of Command A+ rotate.
                let pattern = config.optional_count("prefix_dense_sliding_window_pattern")?;
                return Ok(match layer.feed_forward {
                    FeedForward::Dense { .. } if pattern == Some(1) => layer,
                    _ => without_window(layer, windows),
                });
            }
            Unrotated::ByBase(bases) => {
                let rotates = bases.rotates(config, (index, windows.len()))?;
                return Ok(Layer { rope: layer.rope.filter(|_| rotates), ..layer });
            }
            Unrotated::Every(period) => Some(period),
            Unrotated::AsSaid => None,
            Unrotated::BesideChunks(chunks) => Some(chunks.period),
        };
        config.note(&["no_rope_layer_interval", LAYER_THETA]);
        // The numbers are 1 for layers with rotation, whatever the name says.
        let theta = config.list(LAYER_THETA)?.and_then(|list| list.get(index)?.as_f64());
        let rotates = match (config.flag_of_layer("no_rope_layers", index)?, theta) {
            (Some(rotates), _) => rotates,
            (None, Some(theta)) => theta != 0.0,
            (None, None) => {
                let said = config.optional_count("no_rope_layer_interval")?;
                said.or(period).is_none_or(|period| !is_last(index, period))
            }
        };
        let rope = layer.rope.filter(|_| rotates);
        match self {
            Unrotated::BesideChunks(chunks) => {
                let chunk = chunks.of_config(config, index, rotates)?;
                Ok(Layer { window: chunk, chunked: chunk.is_some(), rope, ..layer })
            }
            _ => Ok(Layer { rope, ..layer }),
        }
    }
}

/// Returns a layer without its rotation if it has no window and others have one.
pub(super) fn without_window(layer: Layer, windows: &[Option<usize>]) -> Layer {
    let beside_windows = windows.iter().any(Option::is_some);
    let rope = layer.rope.filter(|_| layer.window.is_some() || !beside_windows);
    Layer { rope, ..layer }
}

impl Bases {
    /// Returns true if layer `index` of `count` has a rotation.
    ///
    /// # Errors
    /// Returns an error if the list has no number for the layer, or another base than the model has.
    fn rotates(
        &self,
        config: &Config<'_>,
        (index, count): (usize, usize),
    ) -> Result<bool, ModelError> {
        const KEY: &str = LAYER_THETA;
        let Some(list) = config.list(KEY)? else {
            return Ok(!count.abs_diff(index + 1).is_multiple_of(self.period));
        };
        let theta = Parameters::of(config, None)?.float("rope_theta")?.unwrap_or(self.usual);
        match list.get(index).and_then(Value::as_f64) {
            Some(0.0) => Ok(false),
            Some(base) if base == theta => Ok(true),
            _ => Err(ModelError::BadValue {
                key: format!("{KEY} of layer {index}"),
                value: list.get(index).map_or("none".into(), short),
                expected: format!("forebay knows 0 and the base of the rotation, {theta}"),
            }),
        }
    }
}

impl Chunks {
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
            ..self.temperature
        };
        Ok((!denied).then_some(temperature))
    }

    /// Returns the length of layer `index`'s chunks, if it does not see all positions.
    fn of_config(
        &self,
        config: &Config<'_>,
        index: usize,
        rotates: bool,
    ) -> Result<Option<usize>, ModelError> {
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
        let length = config.optional_count("attention_chunk_size")?.unwrap_or(self.length);
        Ok(is_chunked.then_some(length))
    }
}
