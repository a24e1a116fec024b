//! Residual streams of which layers compute one (alternating updates), and the low-rank branch beside attention.

use forebay_compute::{Activations, Cpu, STREAMS_MAX, StreamPrediction, StreamShape};

use super::products::{RowsByKind, both_kinds, resident};
use crate::arch::Architecture;
use crate::backend::{NextBlock, Step};
use crate::weights::{LayerWeights, PredictedWeights, ResidentMatrix};

/// Buffers for the rows of a pass. All are empty for models without such streams.
pub struct PredictedScratch {
    /// What layers compute: the predicted stream, to which the output of attention and of the feed-forward is added
    /// `[rows, hidden]`.
    active: Vec<f32>,
    /// Output of the branch `[rows, hidden]`, and its low-rank projection `[rows, rank]`.
    pub(super) branch: Vec<f32>,
    pub(super) low: Vec<f32>,
    /// One stream of every row `[rows, hidden]`, and all streams behind the last layer `[rows, streams, hidden]`.
    row: Vec<f32>,
    wide: Vec<f32>,
    pub(super) input: Activations,
}

impl PredictedScratch {
    pub fn reserve(architecture: &Architecture, batch: usize) -> PredictedScratch {
        let [hidden, rank, row] = architecture.predicted_widths();
        let floats = |width: usize| vec![0.0; batch * width];
        PredictedScratch {
            active: floats(hidden),
            branch: floats(hidden),
            low: floats(rank),
            // It also takes a factor of each stream.
            row: floats(if hidden > 0 { hidden.max(STREAMS_MAX) } else { 0 }),
            wide: floats(row),
            input: Activations::new(),
        }
    }

    /// Returns the number of floats for one token of a batch, with copies of inputs of products.
    pub fn floats_per_token(architecture: &Architecture) -> usize {
        let [hidden, rank, row] = architecture.predicted_widths();
        let factors = if hidden > 0 { STREAMS_MAX } else { 0 };
        4 * hidden + factors + rank + row
    }

    /// Writes the other streams of rows whose first stream is the usual embedding.
    pub fn begin(
        &mut self,
        cpu: &Cpu,
        matrices: &[ResidentMatrix],
        x: &mut [f32],
        shape: StreamShape,
        rows: RowsByKind<'_>,
    ) {
        let PredictedScratch { row, input, .. } = self;
        let row = &mut row[..x.len() / shape.count];
        cpu.take_stream(x, shape, 0, None, row);
        for (stream, matrix) in (1..).zip(matrices) {
            project(cpu, (matrix, stream), input, (x, shape), rows, row);
            // The other products take the same embeddings.
            cpu.take_stream(x, shape, 0, None, row);
        }
        cpu.match_streams(x, shape);
    }

    /// Adds the normed output of the last block before `block`. In the middle of a layer, it is added to the computed stream, and
    /// behind the feed-forward the streams are corrected by that. At the end of a layer, it is what the embeddings for the layer gave.
    pub fn add(
        &mut self,
        cpu: &Cpu,
        step: &Step<'_>,
        block: NextBlock,
        x: &mut [f32],
        out: &[f32],
    ) {
        let shape = step.architecture.stream_shape().expect("there are several streams");
        let active = &mut self.active[..out.len()];
        match block {
            NextBlock::FeedForward => {
                cpu.add_assign(active, out);
                cpu.add_assign(active, &self.branch[..out.len()]);
                cpu.scale_in_place(active, std::f32::consts::FRAC_1_SQRT_2);
            }
            NextBlock::Embeddings => {
                cpu.add_assign(active, out);
                let weights = predicted(step.layer_weights());
                let of = prediction(step.architecture, weights, &weights.correction);
                cpu.correct_streams(x, shape, active, &of);
            }
            NextBlock::NGrams | NextBlock::Attention | NextBlock::Head => {
                cpu.add_to_other_streams(x, shape, out);
            }
        }
    }

    /// Returns the rows that are normed as the input of a block. Before attention, the streams are predicted first.
    pub fn input(&mut self, cpu: &Cpu, step: &Step<'_>, block: NextBlock, x: &mut [f32]) -> &[f32] {
        let shape = step.architecture.stream_shape().expect("there are several streams");
        let active = &mut self.active[..x.len() / shape.count];
        if block == NextBlock::Attention {
            let weights = predicted(step.layer_weights());
            let of = prediction(step.architecture, weights, &weights.prediction);
            cpu.predict_streams(x, shape, &of);
            cpu.take_stream(x, shape, of.active, None, active);
        }
        active
    }

    /// Returns the rows from which the gates of the embeddings for the layer are projected.
    pub fn gate_input(&mut self, cpu: &Cpu, step: &Step<'_>, x: &[f32]) -> &[f32] {
        let shape = step.architecture.stream_shape().expect("there are several streams");
        let weights = predicted(step.layer_weights());
        let stream = step.architecture.active_stream().expect("layers compute one stream");
        let row = &mut self.row[..x.len() / shape.count];
        cpu.take_stream(x, shape, stream, weights.output_scale.as_deref(), row);
        row
    }

    /// Writes the mean of the first stream and the projections of the others to `out`.
    pub fn collapse(
        &mut self,
        cpu: &Cpu,
        matrices: &[ResidentMatrix],
        (x, shape): (&[f32], StreamShape),
        rows: RowsByKind<'_>,
        out: &mut [f32],
    ) {
        let PredictedScratch { row, wide, input, .. } = self;
        let wide = &mut wide[..x.len()];
        wide.copy_from_slice(x);
        for (stream, matrix) in (1..).zip(matrices) {
            let row = &mut row[..out.len()];
            cpu.take_stream(x, shape, stream, None, row);
            project(cpu, (matrix, stream), input, (wide, shape), rows, row);
        }
        cpu.match_streams(wide, shape);
        let factors = &mut row[..x.len() / shape.row() * shape.count];
        factors.fill(1.0 / shape.count as f32);
        cpu.collapse_streams(wide, shape, factors, out);
    }
}

/// Writes the product of a matrix with `row` `[rows, hidden]` to stream `stream` of the rows of `x`. `row` then holds the product.
fn project(
    cpu: &Cpu,
    (of, stream): (&ResidentMatrix, usize),
    input: &mut Activations,
    (x, shape): (&mut [f32], StreamShape),
    rows: RowsByKind<'_>,
    row: &mut [f32],
) {
    let matrix = resident(of);
    input.prepare(cpu, row, row.len() / shape.width, shape.width, &[matrix.ty]);
    cpu.matmul(&mut both_kinds(matrix, input, rows, row));
    for (to, from) in x.chunks_exact_mut(shape.row()).zip(row.chunks_exact(shape.width)) {
        to[stream * shape.width..][..shape.width].copy_from_slice(from);
    }
}

fn predicted(layer: &LayerWeights) -> &PredictedWeights {
    layer.predicted.as_deref().expect("layers compute one stream")
}

fn prediction<'a>(
    architecture: &Architecture,
    weights: &'a PredictedWeights,
    coefficients: &'a [f32],
) -> StreamPrediction<'a> {
    StreamPrediction {
        active: architecture.active_stream().expect("layers compute one stream"),
        router: &weights.router,
        coefficients,
        epsilon: architecture.norm_epsilon,
    }
}
