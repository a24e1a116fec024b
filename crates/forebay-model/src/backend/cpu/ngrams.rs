//! Embeddings of n-grams that layers add to the residual streams.

use forebay_compute::{NGramNorms, StateRun};
use forebay_format::dequantize;
use forebay_store::FileSet;

use super::backend::CpuBackend;
use super::products::{both_kinds, matmul_beside_reads, matrix};
use crate::ModelError;
use crate::arch::Architecture;
use crate::backend::{Batch, NextBlock, Step};
use crate::rows::RowReader;
use crate::weights::{NGramWeights, Weights};

/// Activations for n-grams, for one batch.
#[derive(Default)]
pub struct NGramScratch {
    /// The tables of the layers with n-grams, ascending.
    readers: Vec<RowReader>,
    /// For each of these layers, the rows of the batch's tokens `[tokens, rows_per_token]`.
    rows: Vec<Vec<u32>>,
    /// Rows as they are in the files.
    raw: Vec<u8>,
    /// Embeddings `[tokens, width]`.
    embeddings: Vec<f32>,
    /// Keys, then gated values `[tokens, streams, hidden]`.
    keys: Vec<f32>,
    /// Values `[tokens, hidden]`.
    values: Vec<f32>,
    /// What the convolution reads `[tokens, streams, hidden]`.
    inputs: Vec<f32>,
    /// Always empty between calls; kept for its memory.
    runs: Vec<StateRun>,
}

impl NGramScratch {
    pub fn reserve(
        architecture: &Architecture,
        weights: &Weights,
        files: &FileSet,
        batch: usize,
    ) -> NGramScratch {
        let Some(shape) = architecture.ngram_shape() else { return NGramScratch::default() };
        let of = architecture.ngrams.as_ref().expect("it has a shape");
        let layers: Vec<_> = with_ngrams(weights).collect();
        let row_bytes = layers.iter().map(|layer| layer.table.row_bytes).max().unwrap_or(0);
        let floats = |width: usize| vec![0.0; batch * width];
        NGramScratch {
            readers: layers.iter().map(|layer| RowReader::new(&layer.table, files)).collect(),
            rows: vec![Vec::with_capacity(batch * of.rows_per_token()); layers.len()],
            raw: vec![0; batch * of.rows_per_token() * row_bytes],
            embeddings: floats(of.width),
            keys: floats(shape.channels()),
            values: floats(shape.hidden),
            inputs: floats(shape.channels()),
            runs: Vec::with_capacity(batch),
        }
    }

    /// Returns the number of floats for one token of a batch.
    pub fn floats_per_token(architecture: &Architecture) -> usize {
        let Some(shape) = architecture.ngram_shape() else { return 0 };
        let of = architecture.ngrams.as_ref().expect("it has a shape");
        // A row is at most as long as floats are.
        2 * of.width + of.rows_per_token() + 2 * shape.channels() + shape.hidden
    }
}

/// Returns what layers add for n-grams, for the layers that do.
fn with_ngrams(weights: &Weights) -> impl Iterator<Item = &NGramWeights> {
    weights.layers.iter().filter_map(|layer| layer.ngrams.as_deref())
}

impl CpuBackend {
    /// Finds the rows of the batch's n-grams, and begins to read them.
    pub(super) fn begin_ngrams(&mut self, step: &Step<'_>, batch: &Batch<'_>) {
        let Some(of) = &step.architecture.ngrams else { return };
        let NGramScratch { readers, rows, .. } = &mut self.scratch.ngrams;
        for ((layer, reader), rows) in with_ngrams(step.weights).zip(readers).zip(rows) {
            rows.clear();
            layer.hashes.append_rows(of, step.runs, batch.tokens, batch.tokens_before, rows);
            reader.ask(rows);
        }
    }

    /// Adds the last block's output to the residual streams if `add` is set, then what the layer makes of the n-grams.
    pub(super) fn add_ngrams_of_layer(
        &mut self,
        step: &Step<'_>,
        add: bool,
    ) -> Result<(), ModelError> {
        if add {
            self.add(step, NextBlock::NGrams)?;
        }
        let (architecture, count) = (step.architecture, step.count);
        let of = architecture.ngrams.as_ref().expect("the caller looked");
        let shape = architecture.ngram_shape().expect("the caller looked");
        let weights = step.layer_weights().ngrams.as_deref().expect("the caller looked");
        let part = architecture.ngram_part(step.layer);
        let floats = shape.state_floats();
        let states = self.states_of(part);
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let at = &mut scratch.ngrams;
        let index = part - architecture.recurrent_layers();
        let (reader, rows) = (&mut at.readers[index], &at.rows[index]);
        let raw = &mut at.raw[..rows.len() * weights.table.row_bytes];
        reader.read(rows, raw)?;
        let embeddings = &mut at.embeddings[..count * of.width];
        dequantize(weights.ty, raw, embeddings)?;
        let lease = lease.as_ref().expect("the layer was entered");
        let types = [weights.key.ty, weights.value.ty];
        scratch.input.prepare(cpu, embeddings, count, of.width, &types);
        let keys = &mut at.keys[..count * shape.channels()];
        let values = &mut at.values[..count * shape.hidden];
        let (x, rows) = (&scratch.input, scratch.rows.of(step));
        let [a, b] = both_kinds(matrix(residency, lease, &weights.key), x, rows, keys);
        let [c, d] = both_kinds(matrix(residency, lease, &weights.value), x, rows, values);
        matmul_beside_reads(cpu, residency, &mut [a, b, c, d])?;
        let norms = NGramNorms {
            keys: &weights.key_norm,
            streams: &weights.stream_norm,
            convolution: &weights.convolution_norm,
            epsilon: architecture.norm_epsilon,
        };
        let x = &mut scratch.x[..count * shape.channels()];
        let inputs = &mut at.inputs[..count * shape.channels()];
        cpu.gate_ngrams(&shape, &norms, x, values, keys, inputs);
        let mut runs = std::mem::take(&mut at.runs);
        runs.extend(step.runs.iter().zip(step.states).map(|(run, places)| StateRun {
            tokens: run.count,
            from: places.from.map(|from| from * floats),
            to: places.to * floats,
        }));
        let states = &mut self.states[states];
        cpu.add_ngrams(&shape, &weights.convolution, keys, inputs, &runs, states, x);
        runs.clear();
        at.runs = runs;
        Ok(())
    }
}
