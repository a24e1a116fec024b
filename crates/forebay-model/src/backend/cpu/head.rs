//! Logits, and the residual stream behind the last layer.

use std::ops::Range;

use super::backend::CpuBackend;
use super::products::{add_bias, both_kinds, matmul_beside_reads, matrix, norm_or_copy};
use super::scratch::Scratch;
use super::streams::collapse_at_end;
use crate::ModelError;
use crate::backend::{NextBlock, Step};

impl CpuBackend {
    /// Computes the logits in chunks of the vocabulary.
    pub(super) fn append_logits(
        &mut self,
        step: &Step<'_>,
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        self.add(step, NextBlock::Head)?;
        self.lease = None;
        let CpuBackend { cpu, residency, scratch, .. } = self;
        let (hidden, vocabulary) = (step.architecture.hidden, step.architecture.vocabulary);
        let rows = step.outputs.len();
        let block_out = &mut scratch.block_out[..rows * hidden];
        let mut first = 0;
        // Rows that follow each other are collapsed together.
        for rows in step.outputs.chunk_by(|row, next| *next == row + 1) {
            let to = &mut block_out[first * hidden..(first + rows.len()) * hidden];
            first += rows.len();
            let from = rows[0] as usize;
            let of = (&scratch.x[..], &mut scratch.streams, &mut scratch.predicted, &scratch.rows);
            collapse_at_end(cpu, of, step, from, to);
        }
        let normed = &mut scratch.normed[..rows * hidden];
        let epsilon = step.architecture.stream_epsilon();
        let form = step.head_norm_form();
        norm_or_copy(cpu, form, block_out, step.head_norm(), epsilon, normed);
        let (head, first_block) = step.head();
        let ty = head[0].matrix.ty;
        scratch.input.prepare(cpu, normed, rows, hidden, &[ty]);
        let decode = step.outputs.partition_point(|row| (*row as usize) < step.decode);
        let selected = scratch.rows.split(decode, rows);
        let base = logits.len();
        logits.resize(base + rows * vocabulary, 0.0);
        for (index, chunk) in head.iter().enumerate() {
            let lease = residency.dense((first_block + index) as u32)?;
            let w = matrix(residency, &lease, &chunk.matrix);
            let chunk_rows = chunk.matrix.rows;
            let x = &scratch.input;
            if rows == 1 {
                // For a single row of logits, a chunk's part is contiguous, so it is written in place.
                let start = base + chunk.first_row;
                let out = &mut logits[start..start + chunk_rows];
                matmul_beside_reads(cpu, residency, &mut both_kinds(w, x, selected, out))?;
                continue;
            }
            scratch.chunk_logits.resize(rows * chunk_rows, 0.0);
            let out = &mut scratch.chunk_logits[..];
            matmul_beside_reads(cpu, residency, &mut both_kinds(w, x, selected, out))?;
            for (row, values) in scratch.chunk_logits.chunks_exact(chunk_rows).enumerate() {
                let start = base + row * vocabulary + chunk.first_row;
                logits[start..start + chunk_rows].copy_from_slice(values);
            }
        }
        add_bias(cpu, &mut logits[base..], step.weights.head_bias.as_deref());
        if let Some(cap) = step.architecture.logit_softcap {
            cpu.softcap_in_place(&mut logits[base..], cap);
        }
        match logits[base..].iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(index) => {
                let token = step.position_of(step.outputs[index / vocabulary] as usize);
                Err(ModelError::NumericFailure { layer: step.layer, token })
            }
        }
    }

    /// Appends the residual stream behind the last layer of some rows: normed, or all its streams as they are.
    pub(super) fn append_final_rows(
        &mut self,
        step: &Step<'_>,
        rows: Range<usize>,
        out: &mut Vec<f32>,
    ) {
        if step.keeps_raw_states() {
            let width = step.architecture.stream_width();
            out.extend_from_slice(&self.scratch.x[rows.start * width..rows.end * width]);
            return;
        }
        let (hidden, base) = (step.architecture.hidden, out.len());
        out.resize(base + rows.len() * hidden, 0.0);
        let (weight, epsilon) = (&step.weights.final_norm, step.architecture.stream_epsilon());
        let Scratch { x, streams, predicted, rows: numbers, .. } = &mut self.scratch;
        let out = &mut out[base..];
        collapse_at_end(&self.cpu, (x, streams, predicted, numbers), step, rows.start, out);
        if let Some(weight) = weight {
            self.cpu.norm_in_place(step.architecture.norm_form, out, weight, epsilon);
        }
    }
}
