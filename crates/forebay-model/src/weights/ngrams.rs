//! Weights of layers that add embeddings of n-grams.

use std::ops::Range;

use forebay_format::{Block, TensorType};

use super::layer::LayerBuilder;
use super::parts::NGramWeights;
use super::tensors::Tensors;
use crate::ModelError;
use crate::arch::{HashConstants, NGrams};
use crate::ngrams::NGramHashes;
use crate::rows::RowTable;

impl LayerBuilder<'_> {
    /// Returns what the layer adds for n-grams, if it does. The matrices are parts of the dense block, before those of attention.
    pub(super) fn ngrams(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
    ) -> Result<Option<Box<NGramWeights>>, ModelError> {
        let architecture = self.architecture;
        let Some(shape) = architecture.ngram_shape() else { return Ok(None) };
        let Some(of) = architecture.ngrams.as_ref().filter(|_| architecture.has_ngrams(self.index))
        else {
            return Ok(None);
        };
        let channels = shape.channels();
        let (ty, table) = self.ngram_table(tensors, of)?;
        let hashes = self.ngram_hashes(tensors, of, table.rows())?;
        let stored = tensors.convolution(&self.name("ngram_convolution"), channels, of.taps)?;
        let weight = |index: usize| stored[index % channels * of.taps + index / channels];
        Ok(Some(Box::new(NGramWeights {
            hashes,
            table,
            ty,
            key: self.matrix(tensors, dense, "ngram_key", channels, of.width)?,
            value: self.matrix(tensors, dense, "ngram_value", architecture.hidden, of.width)?,
            key_norm: tensors.norm(&self.name("ngram_key_norm"), channels)?,
            stream_norm: tensors.norm(&self.name("ngram_stream_norm"), channels)?,
            convolution_norm: tensors.norm(&self.name("ngram_convolution_norm"), channels)?,
            convolution: (0..stored.len()).map(weight).collect(),
        })))
    }

    /// Returns the table of embeddings, which is one tensor or several with as many rows each.
    fn ngram_table(
        &self,
        tensors: &Tensors<'_>,
        of: &NGrams,
    ) -> Result<(TensorType, RowTable), ModelError> {
        let whole = self.names.ngram_table(self.index);
        let part =
            |index: usize| self.name("ngram_table_part").replace("{part}", &index.to_string());
        let names: Vec<String> = match tensors.optional(&whole) {
            Some(_) => vec![whole.clone()],
            None => (0..).map(part).take_while(|name| tensors.optional(name).is_some()).collect(),
        };
        let first = tensors.find(names.first().unwrap_or(&whole))?;
        let rows = first.shape.first().map_or(0, |rows| *rows as usize);
        let name_of = |index: usize| names[index].clone();
        let (matrix, parts) = tensors.alike(&name_of, names.len(), rows, of.row_width())?;
        let row_bytes = parts[0].length as usize / rows.max(1);
        Ok((matrix.ty, RowTable { parts, rows_per_part: rows, row_bytes }))
    }

    fn ngram_hashes(
        &self,
        tensors: &mut Tensors<'_>,
        of: &NGrams,
        table_rows: usize,
    ) -> Result<NGramHashes, ModelError> {
        let HashConstants { multipliers, firsts, counts } = match &of.constants {
            Some(known) => known.clone(),
            None => self.hash_constants(tensors, of)?,
        };
        let name = self.name("ngram_rows");
        let wrong = |found: usize, expected: usize| ModelError::BadValue {
            key: "numbers of the hashes of n-grams".into(),
            value: found.to_string(),
            expected: format!("the shape of the n-grams needs {expected}"),
        };
        for (found, expected) in [
            (multipliers.len(), of.size),
            (firsts.len(), of.rows_per_token()),
            (counts.len(), of.rows_per_token()),
        ] {
            if found != expected {
                return Err(wrong(found, expected));
            }
        }
        let rows = firsts.into_iter().zip(counts).map(|(first, count)| {
            let end = first.checked_add(count).and_then(|end| u32::try_from(end).ok());
            let first = u32::try_from(first).ok();
            let rows = first.zip(end).map(|(first, end)| first..end);
            let inside = |rows: &Range<u32>| {
                !rows.is_empty() && rows.end as usize <= table_rows && rows.end < u32::MAX
            };
            rows.filter(inside).ok_or_else(|| ModelError::BadValue {
                key: name.clone(),
                value: count.to_string(),
                expected: format!("the hash must have rows within the {table_rows} of the table"),
            })
        });
        let rows: Vec<Range<u32>> = rows.collect::<Result<_, _>>()?;
        tensors.count_bytes((size_of_val(&multipliers[..]) + size_of_val(&rows[..])) as u64);
        Ok(NGramHashes { multipliers, rows })
    }

    /// Reads the numbers of the hashes from the layer's tensors.
    fn hash_constants(
        &self,
        tensors: &Tensors<'_>,
        of: &NGrams,
    ) -> Result<HashConstants, ModelError> {
        let integers = |role: &str, length: usize| {
            tensors.integers(&self.name(role), &[length], &[TensorType::I64])
        };
        Ok(HashConstants {
            multipliers: integers("ngram_multipliers", of.size)?,
            firsts: integers("ngram_firsts", of.rows_per_token())?,
            counts: integers("ngram_rows", of.rows_per_token())?,
        })
    }
}
