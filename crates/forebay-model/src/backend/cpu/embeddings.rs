//! Embeddings of tokens: the usual ones, and those for each layer.

use super::backend::CpuBackend;
use super::embedding_rows::read_rows;
use super::products::{both_kinds, matmul_beside_reads, matrix, multiply};
use super::scratch::Scratch;
use crate::ModelError;
use crate::backend::{NextBlock, Step};

impl CpuBackend {
    /// Reads the embeddings of the rows' tokens for all layers, and keeps a copy of the usual ones, if the model has embeddings for
    /// layers.
    pub(super) fn begin_layer_embeddings(
        &mut self,
        step: &Step<'_>,
        tokens: &[u32],
    ) -> Result<(), ModelError> {
        let (Some(of), Some(table)) =
            (step.architecture.layer_embeddings, &step.weights.layer_embeddings)
        else {
            return Ok(());
        };
        let Scratch { x, embedded, layer_rows, embedding_row, .. } = &mut self.scratch;
        // Every row begins with the usual embedding.
        let hidden = step.architecture.hidden;
        let embedded = embedded[..step.count * hidden].chunks_exact_mut(hidden);
        for (to, from) in embedded.zip(x.chunks_exact(step.architecture.stream_width())) {
            to.copy_from_slice(&from[..hidden]);
        }
        let rows = layer_rows.chunks_exact_mut(of.width * step.architecture.layers.len());
        read_rows(&self.files, table, tokens, of.scale(), embedding_row, rows)
    }

    /// Adds the feed-forward's output to the residual stream. Computes from the sum what the tokens' embeddings for the layer add.
    pub(super) fn add_layer_embeddings(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.add(step, NextBlock::Embeddings)?;
        let weights = step.layer_weights().embeddings.as_ref().expect("the caller looked");
        let CpuBackend { cpu, residency, lease, scratch, .. } = self;
        let lease = lease.as_ref().expect("the layer was entered");
        let (count, hidden, width) = (step.count, step.architecture.hidden, weights.gate.rows);
        let x = &scratch.x[..count * step.architecture.stream_width()];
        let gate_input = match step.architecture.active_stream() {
            Some(_) => scratch.predicted.gate_input(cpu, step, x),
            None => x,
        };
        let Scratch { embedded, layer_rows, gate, up, input, inner, block_out, rows, .. } = scratch;
        inner.prepare(cpu, gate_input, count, hidden, &[weights.gate.ty]);
        let rows = rows.of(step);
        let (gate, own) = (&mut gate[..count * width], &mut up[..count * width]);
        input.prepare(cpu, &embedded[..count * hidden], count, hidden, &[weights.project.ty]);
        let [a, b] = both_kinds(matrix(residency, lease, &weights.project), input, rows, own);
        let [c, d] = both_kinds(matrix(residency, lease, &weights.gate), inner, rows, gate);
        matmul_beside_reads(cpu, residency, &mut [a, b, c, d])?;
        let epsilon = step.architecture.layer_norm_epsilon();
        cpu.rms_norm_in_place(own, &weights.norm, epsilon);
        let all = width * step.architecture.layers.len();
        for (own, row) in own.chunks_exact_mut(width).zip(layer_rows.chunks_exact(all)) {
            let row = &row[step.layer * width..][..width];
            own.iter_mut().zip(row).for_each(|(own, row)| *own += row);
        }
        cpu.gate_in_place(step.architecture.gating, gate, own);
        input.prepare(cpu, gate, count, width, &[weights.out.ty]);
        let out = &mut block_out[..count * hidden];
        multiply(cpu, residency, lease, &weights.out, input, rows, out)
    }
}
