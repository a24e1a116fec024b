//! Models in which some layers have no rotation.

use forebay_compute::Temperature;
use serde_json::Value;

use super::architecture::{FeedForward, Layer};
use super::config::Config;
use super::gguf_keys::Keys;
use super::gguf_windows::{WINDOW, pattern};
use crate::ModelError;

/// The layers without rotation. What the configuration says comes first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Unrotated {
    /// The last one of every so many layers (SmolLM3).
    Every(usize),
    /// The layers without a window, in models in which other layers have one (Trinity, EXAONE).
    WithoutWindow,
    /// The last one of every so many layers. The others see a chunk of the positions (Llama 4).
    BesideChunks(Chunks),
}

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

fn is_last(index: usize, period: usize) -> bool {
    (index + 1).is_multiple_of(period.max(1))
}

impl Unrotated {
    pub const LLAMA_4: Unrotated = Unrotated::BesideChunks(Chunks {
        period: 4,
        length: 8192,
        temperature: Temperature { rate: 0.1, step: 8192.0, first: 1 },
    });

    /// Returns the chunks of the other layers, if they see such.
    pub(super) fn chunks(self) -> Option<Chunks> {
        match self {
            Unrotated::BesideChunks(chunks) => Some(chunks),
            Unrotated::Every(_) | Unrotated::WithoutWindow => None,
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
            Unrotated::Every(period) => period,
            Unrotated::BesideChunks(chunks) => chunks.period,
        };
        config.note(&["no_rope_layer_interval"]);
        // The numbers are 1 for layers with rotation, whatever the name says.
        let rotates = match config.flag_of_layer("no_rope_layers", index)? {
            Some(rotates) => rotates,
            None => {
                let said = config.optional_count("no_rope_layer_interval")?;
                !is_last(index, said.unwrap_or(period))
            }
        };
        let rope = layer.rope.filter(|_| rotates);
        match self {
            Unrotated::BesideChunks(chunks) => {
                let chunk = chunks.of_config(config, index, rotates)?;
                Ok(Layer { window: chunk, chunked: chunk.is_some(), rope, ..layer })
            }
            Unrotated::Every(_) | Unrotated::WithoutWindow => Ok(Layer { rope, ..layer }),
        }
    }

    /// Returns layer `index` of a GGUF file without its rotation, or with its chunks. GGUF files give no period and no length.
    ///
    /// # Errors
    /// Returns an error if the metadata gives another length of chunks than the usual one.
    pub(super) fn of_gguf(
        self,
        keys: &Keys<'_>,
        layer: Layer,
        (index, windows): (usize, &[Option<usize>]),
    ) -> Result<Layer, ModelError> {
        match self {
            Unrotated::WithoutWindow => Ok(without_window(layer, windows)),
            Unrotated::Every(period) => {
                Ok(Layer { rope: layer.rope.filter(|_| !is_last(index, period)), ..layer })
            }
            Unrotated::BesideChunks(Chunks { period, length, .. }) => {
                match keys.optional_count(WINDOW)? {
                    // Such models have no chunks.
                    Some(0) => return Ok(Layer { window: None, ..layer }),
                    Some(other) if other != length => {
                        let expected = format!("forebay knows chunks of {length} positions");
                        return Err(keys.wrong(WINDOW, other, &expected));
                    }
                    _ => {}
                }
                let is_chunked = match pattern(keys, windows.len())? {
                    Some(flags) => flags[index],
                    None => !is_last(index, period),
                };
                let chunk = is_chunked.then_some(length);
                let rope = layer.rope.filter(|_| chunk.is_some());
                Ok(Layer { window: chunk, chunked: chunk.is_some(), rope, ..layer })
            }
        }
    }
}

fn without_window(layer: Layer, windows: &[Option<usize>]) -> Layer {
    let beside_windows = windows.iter().any(Option::is_some);
    let rope = layer.rope.filter(|_| layer.window.is_some() || !beside_windows);
    Layer { rope, ..layer }
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
