//! Embeddings of n-grams.

use forebay_compute::NGramShape;
use forebay_format::{Array, Value};

use super::architecture::Architecture;
use super::config::Config;
use super::gguf_keys::Keys;
use super::shapes::{HashConstants, NGrams};
use crate::ModelError;

impl Architecture {
    /// Returns the shape of what layers add to the residual streams for n-grams, if there are any.
    pub fn ngram_shape(&self) -> Option<NGramShape> {
        self.ngrams.as_ref().map(|of| NGramShape {
            streams: self.streams.map_or(1, |of| of.count),
            hidden: self.hidden,
            taps: of.taps,
            gap: of.size,
        })
    }

    /// Returns true if `layer` adds embeddings of n-grams.
    pub fn has_ngrams(&self, layer: usize) -> bool {
        self.ngrams.as_ref().is_some_and(|of| of.layers.contains(&layer))
    }
}

/// Key of GGUF metadata: the number of elements of a row of the table of n-grams, or of a token's row for one layer.
pub(super) const ROW_WIDTH: &str = "embedding_length_per_layer_input";

/// Returns the embeddings of n-grams that GGUF metadata describes, if there are any. It also has the numbers of the hashes.
pub(super) fn of_gguf(keys: &Keys<'_>) -> Result<Option<NGrams>, ModelError> {
    let list = |key: &str| {
        let value = keys.get(key).and_then(Value::as_array).and_then(Array::to_i64s);
        value.ok_or_else(|| keys.missing(key))
    };
    if keys.get("ple.layers").is_none() {
        return Ok(None);
    }
    let layers = list("ple.layers")?;
    if layers.is_empty() {
        return Ok(None);
    }
    // Images are left out, and no text has their token.
    keys.note(&["ple.image_token_id"]);
    let (size, hashes) = (keys.count("ple.ngram_size")?, keys.count("ple.heads_per_ngram")?);
    let rows = size.saturating_sub(1).saturating_mul(hashes);
    let separator = keys.count("ple.eos_token_id")?;
    Ok(Some(NGrams {
        size,
        hashes,
        width: keys.count(ROW_WIDTH)?.saturating_mul(rows),
        taps: keys.count("ple.conv_kernel")?,
        separator: u32::try_from(separator).unwrap_or(u32::MAX),
        layers: layers
            .into_iter()
            .map(|layer| usize::try_from(layer).unwrap_or(usize::MAX))
            .collect(),
        constants: Some(HashConstants {
            multipliers: list("ple.layer_multipliers")?,
            firsts: list("ple.head_offsets")?,
            counts: list("ple.head_vocab_sizes")?,
        }),
    }))
}

/// Returns the embeddings of n-grams that `config.json` describes, if there are any.
pub(super) fn ngrams(config: &Config<'_>) -> Result<Option<NGrams>, ModelError> {
    // The layers are counted from 1.
    let numbers = config.counts("ple_layer_ids")?;
    if numbers.is_empty() {
        return Ok(None);
    }
    let bad = || ModelError::BadValue {
        key: "ple_layer_ids".into(),
        value: format!("{numbers:?}"),
        expected: "layers are counted from 1".into(),
    };
    let layers: Option<Vec<usize>> = numbers.iter().map(|number| number.checked_sub(1)).collect();
    let separator =
        config.first_of("eos_token_id")?.ok_or_else(|| config.missing("eos_token_id"))?;
    Ok(Some(NGrams {
        size: config.count("ngram_size")?,
        hashes: config.count("heads_per_ngram")?,
        width: config.count("ple_embed_dim")?,
        taps: config.count("ple_conv_kernel_size")?,
        separator: u32::try_from(separator).unwrap_or(u32::MAX),
        layers: layers.ok_or_else(bad)?,
        constants: None,
    }))
}
