//! Factors of activations that `config.json` gives beside the weights (Falcon-H1). Converters of GGUF files multiply weights by them.

use super::architecture::{Attention, AttentionBias, Layer, Mixer, QkNorm};
use super::check::check;
use super::config::{Config, short};
use crate::ModelError;

/// Factors of attention and of feed-forwards.
#[derive(Debug, Clone, Copy)]
pub(super) struct Multipliers {
    /// Factors of the input of attention, of its output, and of keys.
    attention_in: f32,
    attention_out: f32,
    key: f32,
    /// Factors of the gate of feed-forwards, before its activation, and of their output.
    gate: f32,
    down: f32,
}

/// Returns a list of `N` numbers, if the configuration has it.
///
/// # Errors
/// Returns an error if the value is anything else.
pub(super) fn numbers<const N: usize>(
    config: &Config<'_>,
    key: &str,
) -> Result<Option<[f32; N]>, ModelError> {
    let Some(list) = config.list(key)? else { return Ok(None) };
    let found: Vec<f32> = list.iter().filter_map(|item| item.as_f64()).map(|x| x as f32).collect();
    let wrong = || ModelError::BadValue {
        key: key.into(),
        value: config.get(key).map_or_else(String::new, short),
        expected: format!("it must be a list of {N} numbers"),
    };
    let all = found.try_into().map_err(|_| wrong())?;
    if list.len() == N { Ok(Some(all)) } else { Err(wrong()) }
}

impl Multipliers {
    pub fn of(config: &Config<'_>) -> Result<Multipliers, ModelError> {
        let factor = |key: &str| {
            let factor = config.float(key)?.map_or(1.0, |factor| factor as f32);
            check(key, factor, factor.is_finite() && factor > 0.0, "it must be positive")?;
            Ok::<_, ModelError>(factor)
        };
        let key = "mlp_multipliers";
        let [gate, down] = numbers(config, key)?.unwrap_or([1.0; 2]);
        let fits = [gate, down].iter().all(|factor| factor.is_finite() && *factor > 0.0);
        check(key, format!("{gate}, {down}"), fits, "they must be positive")?;
        Ok(Multipliers {
            attention_in: factor("attention_in_multiplier")?,
            attention_out: factor("attention_out_multiplier")?,
            key: factor("key_multiplier")?,
            gate,
            down,
        })
    }

    /// Returns the factor of the inputs of feed-forwards. It gives gates their factor, and `up` the same one.
    pub fn feed_forward_input(&self) -> f32 {
        self.gate
    }

    /// Returns the factor of the outputs of feed-forwards, whose inputs have [`Multipliers::feed_forward_input`]. The residual stream
    /// is divided by it, so other outputs must be, too.
    pub fn residual(&self) -> f32 {
        self.down / self.gate
    }

    /// Puts the factors of attention into its scale and into that of values, which commute with everything between.
    ///
    /// # Errors
    /// Returns an error if something does not commute with a factor, or if an output cannot be divided.
    pub fn apply(&self, attentions: &mut [Attention], layers: &[Layer]) -> Result<(), ModelError> {
        let values = self.attention_in * self.attention_out / self.residual();
        let scores = self.attention_in * self.attention_in * self.key;
        if (values, scores) == (1.0, 1.0) {
            return Ok(());
        }
        for attention in attentions {
            let plain = attention.latent.is_none()
                && attention.shared.is_none()
                && attention.indexer.is_none()
                && (attention.qk_norm, attention.bias) == (QkNorm::None, AttentionBias::None);
            let expected = "forebay knows them with plain attention without biases";
            check("multipliers of attention", values, plain, expected)?;
            attention.scale *= scores;
            attention.values.scale *= values;
        }
        let fits = layers.iter().all(|layer| layer.mixer != Mixer::Recurrent);
        let expected = "forebay knows them if every layer has attention";
        check(
            "multipliers of feed-forwards",
            self.residual(),
            self.residual() == 1.0 || fits,
            expected,
        )
    }
}
