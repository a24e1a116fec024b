//! The input of the predicting layer.

use super::backend::CpuBackend;
use super::embedding_rows::read_rows;
use super::products::{both_kinds, matmul_beside_reads, matrix};
use super::scratch::Scratch;
use crate::ModelError;
use crate::backend::{Batch, End, Step};

impl CpuBackend {
    /// Joins the embeddings of the tokens with the states of the tokens before them ([`crate::Backend::begin_prediction`]).
    pub(super) fn join(
        &mut self,
        step: &Step<'_>,
        batch: &Batch<'_>,
        hidden: &[f32],
    ) -> Result<(), ModelError> {
        self.note_rows(step, batch);
        let mtp = step.prediction(false).expect("the caller looked at the description");
        let CpuBackend { cpu, files, residency, scratch, early, .. } = self;
        early.clear();
        let cycle = match batch.end {
            End::Nothing => step.layer + 1,
            _ => {
                let (head, first) = Step { layer: step.layer + 1, ..*step }.head();
                first + head.len()
            }
        };
        residency.set_dense_cycle(cycle);
        let (width, epsilon) = (step.architecture.hidden, step.architecture.norm_epsilon);
        let streams = step.architecture.predicted_from();
        let Scratch { x, joined, block_out, normed, input, embedding_row, rows, .. } = scratch;
        let table = mtp.embedding.as_ref().unwrap_or(&step.weights.embedding);
        let embedded = &mut block_out[..step.count * width];
        let into = embedded.chunks_exact_mut(width);
        read_rows(files, table, batch.tokens, 1.0, embedding_row, into)?;
        let count = step.count * streams;
        let joined = &mut joined[..count * 2 * width];
        let normed = &mut normed[..step.count * width];
        cpu.rms_norm(embedded, &mtp.embedding_norm, epsilon, normed);
        for (row, to) in joined.chunks_exact_mut(2 * width).enumerate() {
            let token = row / streams;
            to[..width].copy_from_slice(&normed[token * width..(token + 1) * width]);
        }
        let some = step.count * width;
        for (states, to) in hidden.chunks_exact(some).zip(joined.chunks_exact_mut(2 * some)) {
            cpu.rms_norm(states, &mtp.hidden_norm, epsilon, normed);
            let rows = to.chunks_exact_mut(2 * width).zip(normed.chunks_exact(width));
            rows.for_each(|(to, from)| to[width..].copy_from_slice(from));
        }
        input.prepare(cpu, joined, count, 2 * width, &[mtp.join.ty]);
        let lease = residency.dense(step.layer as u32)?;
        let w = matrix(residency, &lease, &mtp.join);
        let rows = rows.split(step.decode * streams, count);
        let out = &mut x[..count * width];
        matmul_beside_reads(cpu, residency, &mut both_kinds(w, input, rows, out))
    }
}
