//! Embeddings of n-grams.

use forebay_compute::NGramShape;

use super::architecture::Architecture;
use super::config::Config;
use super::shapes::NGrams;
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
    }))
}
