//! Embeddings of n-grams that layers add to the residual streams.

use forebay_compute::{NGramNorms, StateRun};
use forebay_format::dequantize;

use super::backend::CpuBackend;
use super::products::{both_kinds, matmul_beside_reads, matrix};
use crate::ModelError;
use crate::backend::{Batch, NextBlock, Step};

impl CpuBackend {
    /// Finds the rows of the batch's n-grams, and begins to read them.
    pub(super) fn begin_ngrams(&mut self, step: &Step<'_>, batch: &Batch<'_>) {
        let Some(of) = &step.architecture.ngrams else { return };
        let readers = &mut self.scratch.ngrams.readers;
        for (layer, reader) in step.weights.ngram_layers().zip(readers) {
            let runs = step.runs.iter().map(|run| run.count);
            reader.ask(of, &layer.hashes, runs, batch.tokens, batch.tokens_before);
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
        let floats = shape.state_floats();
        let states = self.states_of(architecture.ngram_part(step.layer));
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let at = &mut scratch.ngrams;
        let raw = at.readers[architecture.ngram_index(step.layer)].read(&mut at.raw)?;
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
