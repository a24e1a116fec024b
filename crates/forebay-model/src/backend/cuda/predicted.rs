//! Residual streams of which layers compute one (alternating updates), and the low-rank branch beside attention.

use forebay_cuda::{Added, DevicePtr, Norm, Normed, StreamFactors, StreamPrediction, StreamRows};
use forebay_format::TensorType;

use super::backend::CudaBackend;
use super::products::{Product, Rows};
use super::vectors::{PredictedVectors, optional};
use crate::ModelError;
use crate::backend::{NextBlock, Step};
use crate::weights::PartMatrix;

impl CudaBackend {
    /// Returns rows of all streams at an offset.
    fn streams_at(&self, step: &Step<'_>, at: u64) -> StreamRows {
        StreamRows { x: self.float(at), rows: step.count, width: step.architecture.hidden }
    }

    fn prediction(&self, step: &Step<'_>, coefficients: usize) -> StreamPrediction {
        let of = self.predicted_vectors(step);
        StreamPrediction {
            active: step.architecture.active_stream().expect("layers compute one stream"),
            router: self.vectors().offset(of.router),
            coefficients: self.vectors().offset(coefficients),
            epsilon: step.architecture.norm_epsilon,
        }
    }

    fn predicted_vectors(&self, step: &Step<'_>) -> PredictedVectors {
        self.layer_vectors(step).predicted.expect("layers compute one stream")
    }

    /// Returns the product with a matrix `[hidden, hidden]` that is among the vectors.
    fn resident_product(&self, step: &Step<'_>, matrix: usize, out: u64) -> Product {
        let hidden = step.architecture.hidden;
        let ty = TensorType::F32;
        Product {
            matrix: PartMatrix { part: 0, ty, rows: hidden, cols: hidden },
            data: self.vectors().offset(matrix).cast(),
            out: self.float(out),
        }
    }

    /// Queues all streams of rows whose usual embeddings are in the buffer for outputs of blocks.
    pub(super) fn begin_predicted(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let (at, rows) = (self.at(), self.streams_at(step, self.at().x));
        let embedded = self.float(at.block_out);
        self.gpu.put_stream(embedded, &rows, 0)?;
        for (stream, matrix) in (1..).zip(self.plan.vectors.streams_begin) {
            let product = self.resident_product(step, matrix, at.streams.row);
            self.products().dense(&self.gpu, embedded, Rows::of(step), &[product])?;
            self.gpu.put_stream(product.out, &rows, stream)?;
        }
        Ok(self.gpu.match_streams(&rows)?)
    }

    /// Queues the norm before a block, for the rows of a lane: adds the output of the last block, then predicts or corrects the streams
    /// where the block does so.
    pub(super) fn norm_predicted(
        &self,
        step: &Step<'_>,
        block: NextBlock,
        add: bool,
    ) -> Result<(), ModelError> {
        let (active, out) = (self.float(self.at().streams.active), self.at().block_out);
        let out = self.float(out);
        let (layer, is_mixer) = step.added(block);
        let flag = self.finite_flag(2 * layer + usize::from(!is_mixer), 0);
        if add {
            self.post_norm(step, block, Added::Rows(out))?;
        }
        let sum = |added: Added, rows: DevicePtr<f32>, factor: f32| {
            let norm = Norm {
                weight: DevicePtr::null(),
                width: step.architecture.hidden,
                epsilon: step.architecture.norm_epsilon,
            };
            let nothing = Normed::plain(DevicePtr::null());
            let flag = Some(flag);
            self.gpu.rms_norm_of_scaled(rows, (added, factor), &norm, nothing, step.count, flag)
        };
        match block {
            NextBlock::NGrams | NextBlock::Attention | NextBlock::Head => {
                let rows = self.streams_at(step, self.at().x);
                if add {
                    self.gpu.add_to_other_streams(&rows, out, flag)?;
                }
                match block {
                    NextBlock::Head => return self.collapse_predicted(step),
                    // The streams themselves are what follows.
                    NextBlock::NGrams => return Ok(()),
                    _ => {}
                }
                let of = self.predicted_vectors(step);
                self.gpu.predict_streams(&rows, &self.prediction(step, of.prediction), active)?;
            }
            NextBlock::FeedForward => {
                let branch = self.float(self.at().streams.branch);
                sum(Added::Rows(branch), out, 1.0)?;
                sum(Added::Rows(out), active, std::f32::consts::FRAC_1_SQRT_2)?;
            }
            NextBlock::Embeddings => {
                sum(Added::Rows(out), active, 1.0)?;
                return self.correct_predicted(step, active);
            }
        }
        let weight = match block {
            NextBlock::Attention => self.layer_vectors(step).attention_norm,
            _ => self.layer_vectors(step).feed_forward_norm,
        };
        self.norm_into_input(step, active, weight)
    }

    /// Queues the norm of rows as the input of a block.
    fn norm_into_input(
        &self,
        step: &Step<'_>,
        from: DevicePtr<f32>,
        weight: Option<usize>,
    ) -> Result<(), ModelError> {
        let norm = Norm {
            weight: optional(self.vectors(), weight),
            width: step.architecture.hidden,
            epsilon: step.architecture.norm_epsilon,
        };
        let to = self.float(self.at().normed);
        let also = self.products().converted_too(to, Rows::of(step), norm.width);
        let out = Normed { rows: to, also };
        Ok(self.gpu.rms_norm(from, Added::Nothing, &norm, out, step.count, None)?)
    }

    /// Queues the correction of the streams by the computed one, and the rows from which gates of the embeddings for the layer are
    /// projected.
    fn correct_predicted(
        &self,
        step: &Step<'_>,
        activated: DevicePtr<f32>,
    ) -> Result<(), ModelError> {
        let of = self.predicted_vectors(step);
        let rows = self.streams_at(step, self.at().x);
        let row = self.float(self.at().streams.row);
        self.products().changed(row);
        let scale = optional(self.vectors(), of.output_scale);
        let prediction = self.prediction(step, of.correction);
        Ok(self.gpu.correct_streams(&rows, activated, &prediction, (scale, row))?)
    }

    /// Queues the low-rank branch from attention's normed input.
    pub(super) fn project_branch(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let Some(weights) = &step.layer_weights().predicted else { return Ok(()) };
        let (gpu, at, rows) = (&self.gpu, self.at(), Rows::of(step));
        let normed = self.float(at.normed);
        let left = self.product(step, weights.left, at.streams.branch_low);
        self.products().dense(gpu, normed, rows, &[left])?;
        self.products().changed(left.out);
        let right = self.product(step, weights.right, at.streams.branch);
        self.products().dense(gpu, left.out, rows, &[right])?;
        let norm = |weight: DevicePtr<f32>| Norm {
            weight,
            width: step.architecture.hidden,
            epsilon: step.architecture.norm_epsilon,
        };
        let (branch, count) = (right.out, step.count);
        let weight = self.vectors().offset(self.predicted_vectors(step).branch_norm);
        let out = Normed::plain(branch);
        gpu.rms_norm(branch, Added::Nothing, &norm(weight), out, count, None)?;
        // The branch ends with the sum of its input and its output.
        let (sum, out) = (norm(DevicePtr::null()), Normed::plain(DevicePtr::null()));
        Ok(gpu.rms_norm(branch, Added::Rows(normed), &sum, out, count, None)?)
    }

    /// Queues the mean of the first stream and the projections of the others, and its norm.
    fn collapse_predicted(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let (gpu, at) = (&self.gpu, self.at());
        let (rows, wide) = (self.streams_at(step, at.x), self.streams_at(step, at.streams.wide));
        // Layers compute nothing more, so the buffer of their stream takes the products.
        let row = self.float(at.streams.row);
        let matrices = self.plan.vectors.streams_end.expect("there are several streams").matrices;
        gpu.take_stream(&rows, 0, row)?;
        gpu.put_stream(row, &wide, 0)?;
        for (stream, matrix) in (1..).zip(matrices) {
            gpu.take_stream(&rows, stream, row)?;
            self.products().changed(row);
            let product = self.resident_product(step, matrix, at.streams.active);
            self.products().dense(gpu, row, Rows::of(step), &[product])?;
            gpu.put_stream(product.out, &wide, stream)?;
        }
        gpu.match_streams(&wide)?;
        gpu.collapse_streams(&wide, StreamFactors::Mean, row)?;
        self.products().changed(row);
        self.norm_into_input(step, row, self.plan.vectors.final_norm)
    }
}
