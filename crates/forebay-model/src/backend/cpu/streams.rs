//! Residual streams beside each other: inputs of blocks, and sums with their outputs.

use forebay_compute::{Activations, Cpu, Matrix};
use forebay_stream::{Lease, Residency};

use super::predicted::PredictedScratch;
use super::products::{
    RowNumbers, RowsByKind, both_kinds, matrix, norm_in_place, norm_or_copy, resident,
};
use crate::arch::Architecture;
use crate::backend::Step;
use crate::weights::{PartMatrix, StreamWeights};

/// Buffers for the streams of the rows of a pass. All are empty for models with one stream.
pub struct StreamScratch {
    /// Coefficients of the block whose output is added next, `[rows, coefficients]`.
    coefficients: Vec<f32>,
    /// Coefficients of inputs after which no output follows.
    others: Vec<f32>,
    /// Normed streams and their gates `[rows, streams, hidden]`, and the low-rank projection `[rows, rank]`.
    normed: Vec<f32>,
    gates: Vec<f32>,
    low: Vec<f32>,
    input: Activations,
    low_input: Activations,
}

/// The rows whose streams are collapsed.
#[derive(Clone, Copy)]
pub struct StreamRows<'a> {
    pub architecture: &'a Architecture,
    pub rows: RowsByKind<'a>,
    /// True if the output of a block is added to the rows later, and false if they are collapsed for a prediction or behind the
    /// last layer.
    pub have_output: bool,
    /// Number of streams that hold something ([`crate::arch::Streams::filled`]); 1 if there is one stream.
    pub filled: usize,
}

impl StreamScratch {
    pub fn reserve(architecture: &Architecture, batch: usize) -> StreamScratch {
        let [coefficients, wide, rank] = architecture.stream_widths();
        let floats = |width: usize| vec![0.0; batch * width];
        StreamScratch {
            coefficients: floats(coefficients),
            others: floats(coefficients),
            normed: floats(wide),
            gates: floats(wide),
            low: floats(rank),
            input: Activations::new(),
            low_input: Activations::new(),
        }
    }

    /// Returns the number of floats for one token of a batch, beside the streams themselves.
    pub fn floats_per_token(architecture: &Architecture) -> usize {
        let [coefficients, wide, rank] = architecture.stream_widths();
        // Products take copies of their inputs.
        let copied = architecture.streams.map_or(0, |_| architecture.stream_width());
        2 * coefficients + 2 * wide + 2 * rank + copied
    }

    /// Writes the input of a block, without its norm, to `out` `[rows, hidden]`.
    pub fn collapse<'a, M>(
        &mut self,
        cpu: &Cpu,
        weights: &'a StreamWeights<M>,
        matrix: impl Fn(&'a M) -> Matrix<'a>,
        x: &[f32],
        of: &StreamRows<'_>,
        out: &mut [f32],
    ) {
        let (architecture, rows) = (of.architecture, of.rows);
        let streams = architecture.streams.as_ref().expect("there are several streams");
        let shape = architecture.stream_shape().expect("there are several streams");
        let count = x.len() / shape.row();
        let StreamScratch { coefficients, others, normed, gates, low, input, low_input } = self;
        let kept = if of.have_output { coefficients } else { others };
        match weights {
            StreamWeights::Projected(_) => unreachable!("such streams have buffers of their own"),
            StreamWeights::Mean => {
                let factors = &mut kept[..count * shape.count];
                factors.fill(1.0 / shape.count as f32);
                cpu.collapse_streams(x, shape, factors, out);
            }
            StreamWeights::Bank { scores } => {
                let rule = (&scores[..], architecture.norm_epsilon);
                cpu.mix_bank(x, shape, of.filled, rule, out);
            }
            StreamWeights::Mixed { mix, base, scales } => {
                let mix = matrix(mix);
                input.prepare(cpu, x, count, shape.row(), &[mix.ty]);
                let products = &mut kept[..count * mix.rows];
                cpu.matmul(&mut both_kinds(mix, input, rows, &mut *products));
                let mixing = streams.mixing(&scales[..], &base[..], architecture.norm_epsilon);
                cpu.stream_coefficients(x, shape, &mixing, products);
                cpu.collapse_streams(x, shape, products, out);
            }
            StreamWeights::Gated { norm, down, up, inject } => {
                let (down, up, inject) = (matrix(down), matrix(up), inject.as_ref().map(&matrix));
                let normed = &mut normed[..x.len()];
                cpu.norm_streams(x, shape, norm, architecture.norm_epsilon, normed);
                let inject_type = inject.as_ref().map_or(down.ty, |inject| inject.ty);
                input.prepare(cpu, normed, count, shape.row(), &[down.ty, inject_type]);
                let rank = down.rows;
                let low = &mut low[..count * rank];
                let [a, b] = both_kinds(down, input, rows, &mut *low);
                match inject {
                    None => cpu.matmul(&mut [a, b]),
                    Some(inject) => {
                        let factors = &mut kept[..count * shape.count];
                        let [c, d] = both_kinds(inject, input, rows, &mut *factors);
                        cpu.matmul(&mut [a, b, c, d]);
                        cpu.stream_injections(factors, shape.count);
                    }
                }
                cpu.activate_stream_gates(low, shape.count);
                low_input.prepare(cpu, low, count, rank, &[up.ty]);
                let gates = &mut gates[..x.len()];
                cpu.matmul(&mut both_kinds(up, low_input, rows, &mut *gates));
                cpu.collapse_gated_streams(normed, shape, gates, out);
            }
        }
    }

    /// Adds the output of the block whose input was collapsed last to the residual stream `x`. In a bank, the state before moves to
    /// the stream `banked`, if it moves.
    pub fn add(
        &self,
        cpu: &Cpu,
        architecture: &Architecture,
        banked: Option<usize>,
        x: &mut [f32],
        out: &[f32],
    ) {
        let Some(shape) = architecture.stream_shape() else { return cpu.add_assign(x, out) };
        if architecture.has_bank() {
            return cpu.add_to_bank(x, shape, banked, out);
        }
        let [of_row, ..] = architecture.stream_widths();
        let coefficients = &self.coefficients[..x.len() / shape.row() * of_row];
        cpu.add_to_streams(x, shape, coefficients, out);
    }
}

/// A norm before a block: the weights that collapse the streams, if there are several, and those of the norm, if there is one.
#[derive(Clone, Copy)]
pub struct BlockInput<'a> {
    pub streams: Option<&'a StreamWeights<PartMatrix>>,
    pub norm: Option<&'a [f32]>,
    /// The block in memory whose parts are the matrices.
    pub block: (&'a Residency, &'a Lease),
}

impl BlockInput<'_> {
    /// Writes the input of a block for rows of the residual stream `x` to `out` `[rows, hidden]`.
    pub fn write(
        &self,
        cpu: &Cpu,
        scratch: &mut StreamScratch,
        x: &[f32],
        of: &StreamRows<'_>,
        out: &mut [f32],
    ) {
        let epsilon = of.architecture.stream_epsilon();
        let Some(weights) = self.streams else {
            return norm_or_copy(cpu, of.architecture.norm_form, x, self.norm, epsilon, out);
        };
        let (residency, lease) = self.block;
        scratch.collapse(cpu, weights, |part| matrix(residency, lease, part), x, of, out);
        norm_in_place(cpu, out, self.norm, epsilon);
    }
}

/// The residual stream of all rows, and buffers of both kinds of streams.
pub type EndScratch<'a> =
    (&'a [f32], &'a mut StreamScratch, &'a mut PredictedScratch, &'a RowNumbers);

/// Writes rows `from..from + out.len() / hidden` of the residual stream behind the last layer to `out`, collapsed but not
/// normed.
pub fn collapse_at_end(
    cpu: &Cpu,
    (x, streams, predicted, numbers): EndScratch<'_>,
    step: &Step<'_>,
    from: usize,
    out: &mut [f32],
) {
    let (hidden, width) = (step.architecture.hidden, step.architecture.stream_width());
    let count = out.len() / hidden;
    let x = &x[from * width..(from + count) * width];
    let Some(weights) = &step.weights.streams_end else { return out.copy_from_slice(x) };
    let decode = step.decode.saturating_sub(from).min(count);
    let rows = numbers.split(decode, count);
    if let (StreamWeights::Projected(matrices), Some(shape)) =
        (weights, step.architecture.stream_shape())
    {
        return predicted.collapse(cpu, matrices, (x, shape), rows, out);
    }
    let filled = step.filled_streams(step.architecture.main_layers(), false);
    let of = StreamRows { architecture: step.architecture, rows, have_output: false, filled };
    streams.collapse(cpu, weights, resident, x, &of, out);
}
