//! Embeddings of n-grams.

use forebay_compute::NGramShape;
use serde::Serialize;

use super::architecture::Architecture;
use super::check::{check, check_size};
use super::config::Config;
use crate::ModelError;

/// Embeddings of the n-grams that end at a token (Qwen4-Exp). Before their attention, some layers add what they make of them to the
/// residual streams ([`NGramShape`]).
///
/// An n-gram has 2 to `size` tokens. Several hashes of it choose rows of a table, whose elements together are the embedding.
#[derive(Debug, Clone, Serialize)]
pub struct NGrams {
    /// Number of tokens of the longest n-grams.
    pub size: usize,
    /// Number of hashes of each n-gram.
    pub hashes: usize,
    /// Number of elements of a token's embedding.
    pub width: usize,
    /// Number of tokens that the convolution sees, [`NGrams::size`] tokens apart.
    pub taps: usize,
    /// The token between texts. It stands for the tokens before it.
    pub separator: u32,
    /// The layers that add embeddings, ascending. Each has a table of its own.
    pub layers: Vec<usize>,
}

impl NGrams {
    /// Returns the number of rows of a table that make the embedding of a token.
    pub fn rows_per_token(&self) -> usize {
        (self.size - 1) * self.hashes
    }

    /// Returns the number of elements of a row.
    pub fn row_width(&self) -> usize {
        self.width / self.rows_per_token()
    }

    /// Returns the number of tokens before a row that its n-grams may have.
    pub fn before(&self) -> usize {
        self.size - 1
    }

    pub(super) fn validate(&self, layers: usize) -> Result<(), ModelError> {
        check(
            "tokens of n-grams",
            self.size,
            (2..=8).contains(&self.size),
            "forebay knows 2 to 8",
        )?;
        let hashes = self.hashes;
        check("hashes of n-grams", hashes, (1..=64).contains(&hashes), "forebay knows 1 to 64")?;
        check_size("width of the embeddings of n-grams", self.width)?;
        let rows = self.rows_per_token();
        let fits = self.width.is_multiple_of(rows);
        let expected = format!("it must be a multiple of the {rows} rows of a token");
        check("width of the embeddings of n-grams", self.width, fits, &expected)?;
        let taps = self.taps;
        let key = "width of the convolution of n-grams";
        check(key, taps, (2..=8).contains(&taps), "forebay knows 2 to 8")?;
        let ascending = self.layers.is_sorted_by(|a, b| a < b);
        let inside = self.layers.last().is_some_and(|last| *last < layers);
        let given = format!("{:?}", self.layers);
        check("layers with n-grams", given, ascending && inside, "each must be a layer, ascending")
    }
}

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
