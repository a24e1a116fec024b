//! Residual streams beside each other: inputs of blocks, and sums with their outputs.

use forebay_cuda::{
    Added, BankRows, DevicePtr, MixedProducts, Norm, Normed, StreamCoefficients, StreamFactors,
    StreamRows,
};
use forebay_format::TensorType;

use super::backend::CudaBackend;
use super::products::{Product, Rows};
use super::vectors::{StreamVectors, optional};
use crate::ModelError;
use crate::arch::{StreamRule, Streams};
use crate::backend::{NextBlock, Step};
use crate::weights::{PartMatrix, StreamWeights};

impl CudaBackend {
    /// Returns the rows of a step with their streams.
    fn stream_rows(&self, step: &Step<'_>) -> StreamRows {
        let (x, width) = (self.float(self.at().x), step.architecture.hidden);
        StreamRows { x, rows: step.count, width }
    }

    /// Returns the rows of a step with their bank of earlier states.
    fn bank_rows(&self, step: &Step<'_>) -> BankRows {
        let StreamRows { x, rows, width } = self.stream_rows(step);
        BankRows { x, rows, streams: step.architecture.stream_width() / width, width }
    }

    /// Queues the embeddings of the rows' tokens for all streams.
    pub(super) fn embed_streams(&self, step: &Step<'_>) -> Result<(), ModelError> {
        // Nothing has been computed yet, so the buffer for outputs of blocks is free.
        let at = self.at().block_out;
        self.embed(step, at)?;
        self.products().changed(self.float(at));
        self.products().changed(self.float(self.at().x));
        if step.architecture.has_bank() {
            return Ok(self.gpu.begin_bank(self.float(at), &self.bank_rows(step))?);
        }
        if step.architecture.active_stream().is_some() {
            return self.begin_predicted(step);
        }
        Ok(self.gpu.spread_streams(self.float(at), &self.stream_rows(step))?)
    }

    /// Queues the norm before a block, for the rows of a lane with several streams.
    pub(super) fn norm_streams(
        &mut self,
        step: &Step<'_>,
        streams: &Streams,
        block: NextBlock,
        add: bool,
    ) -> Result<(), ModelError> {
        if step.architecture.active_stream().is_some() {
            return self.norm_predicted(step, block, add);
        }
        if add {
            self.add_to_streams(step, streams, block)?;
        }
        let at = self.at();
        let to = self.float(at.normed);
        let weight = match block {
            NextBlock::Attention => {
                let of = step.layer_weights().attention_streams.as_ref();
                let vectors = self.layer_vectors(step).attention_streams;
                self.collapse_for_block(step, block, of, vectors)?;
                self.layer_vectors(step).attention_norm
            }
            NextBlock::FeedForward => {
                let of = step.layer_weights().feed_forward_streams.as_ref();
                let vectors = self.layer_vectors(step).feed_forward_streams;
                self.collapse_for_block(step, block, of, vectors)?;
                self.layer_vectors(step).feed_forward_norm
            }
            NextBlock::Head => {
                self.collapse_at_end(step)?;
                self.head_norm(step)
            }
            // The streams themselves are what follows.
            NextBlock::NGrams | NextBlock::Embeddings => return Ok(()),
        };
        // Without a weight, rows are converted, but not normed.
        let norm = Norm {
            weight: optional(self.vectors(), weight),
            width: step.architecture.hidden,
            epsilon: step.architecture.norm_epsilon,
        };
        let also = self.products().converted_too(to, Rows::of(step), norm.width);
        if norm.weight.is_null() && also.is_none() {
            return Ok(());
        }
        let out = Normed { rows: to, also };
        Ok(self.gpu.rms_norm(to, Added::Nothing, &norm, out, step.count, None)?)
    }

    /// Queues the sum of the streams and the output of the block whose input was collapsed last.
    fn add_to_streams(
        &mut self,
        step: &Step<'_>,
        streams: &Streams,
        block: NextBlock,
    ) -> Result<(), ModelError> {
        let usual = Added::Rows(self.float(self.at().block_out));
        let added = self.lanes.current_mut().outputs.take().unwrap_or(usual);
        let (layer, is_mixer) = step.added(block);
        let flag = self.finite_flag(2 * layer + usize::from(!is_mixer), 0);
        let rows = self.stream_rows(step);
        self.products().changed(rows.x);
        let coefficients = self.float(self.at().streams.coefficients);
        let coefficients = match streams.rule {
            StreamRule::Mixed { .. } => StreamCoefficients::Mixed(coefficients),
            StreamRule::Gated { .. } => StreamCoefficients::Gated(coefficients),
            StreamRule::Independent { .. } => StreamCoefficients::Independent(coefficients),
            StreamRule::Bank { .. } => {
                let (rows, place) = (self.bank_rows(step), step.banked_stream(block));
                return Ok(self.gpu.add_to_bank(&rows, added, place, Some(flag))?);
            }
            StreamRule::Predicted { .. } => unreachable!("such streams have a sum of their own"),
        };
        Ok(self.gpu.add_to_streams(&rows, added, coefficients, Some(flag))?)
    }

    fn collapse_for_block(
        &self,
        step: &Step<'_>,
        block: NextBlock,
        weights: Option<&StreamWeights<PartMatrix>>,
        vectors: Option<StreamVectors>,
    ) -> Result<(), ModelError> {
        let weights = weights.expect("every block collapses the streams");
        let vectors = vectors.expect("every block collapses the streams");
        let filled = step.filled_streams(step.layer, block == NextBlock::FeedForward);
        let of = (&vectors, filled);
        self.collapse(step, weights, of, |matrix, _, out| self.product(step, *matrix, out))
    }

    /// Queues the sum of the streams behind the last layer.
    fn collapse_at_end(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let weights = step.weights.streams_end.as_ref().expect("there are several streams");
        let vectors = self.plan.vectors.streams_end.expect("there are several streams");
        let filled = step.filled_streams(step.architecture.main_layers(), false);
        self.collapse(step, weights, (&vectors, filled), |matrix, number, out| {
            let (rows, cols) = (matrix.rows, matrix.cols);
            let matrix = PartMatrix { part: 0, ty: TensorType::F32, rows, cols };
            let data = self.vectors().offset(vectors.matrices[number]).cast();
            Product { matrix, data, out: self.float(out) }
        })
    }

    /// Queues the input of a block, without its norm, from the streams that hold something, of which there are `filled`. `product`
    /// returns the product with a matrix, given with its number among those of the weights.
    fn collapse<M>(
        &self,
        step: &Step<'_>,
        weights: &StreamWeights<M>,
        (vectors, filled): (&StreamVectors, usize),
        product: impl Fn(&M, usize, u64) -> Product,
    ) -> Result<(), ModelError> {
        let (gpu, at, products, of_step) = (&self.gpu, self.at(), self.products(), Rows::of(step));
        let (rows, to) = (self.stream_rows(step), self.float(at.normed));
        let vector = |at: Option<usize>| -> DevicePtr<f32> { optional(self.vectors(), at) };
        products.changed(to);
        match weights {
            StreamWeights::Projected(_) => {
                unreachable!("such streams have a collapse of their own")
            }
            StreamWeights::Mean => gpu.collapse_streams(&rows, StreamFactors::Mean, to)?,
            StreamWeights::Bank { .. } => {
                let rule = (vector(vectors.scores), step.architecture.norm_epsilon);
                gpu.mix_bank(&self.bank_rows(step), filled, rule, to)?;
            }
            StreamWeights::Mixed { mix, .. } => {
                let mix = product(mix, 0, at.streams.coefficients);
                products.dense(gpu, rows.x, of_step, &[mix])?;
                let streams = step.architecture.streams.as_ref().expect("there are several");
                let factors = StreamFactors::Mixed(MixedProducts {
                    products: mix.out,
                    count: mix.matrix.rows,
                    mixing: streams.mixing(
                        vector(vectors.scales),
                        vector(vectors.base),
                        step.architecture.norm_epsilon,
                    ),
                });
                gpu.collapse_streams(&rows, factors, to)?;
            }
            StreamWeights::Gated { down, up, inject, .. } => {
                let normed = StreamRows { x: self.float(at.streams.normed), ..rows };
                let norm = (vector(vectors.norm), step.architecture.norm_epsilon);
                gpu.norm_streams(&rows, norm, normed.x)?;
                products.changed(normed.x);
                let down = product(down, 0, at.streams.low);
                let inject =
                    inject.as_ref().map(|inject| product(inject, 2, at.streams.coefficients));
                match inject {
                    Some(inject) => products.dense(gpu, normed.x, of_step, &[down, inject])?,
                    None => products.dense(gpu, normed.x, of_step, &[down])?,
                }
                let low = (down.out, step.count * down.matrix.rows);
                gpu.activate_streams(low, inject.map(|inject| inject.out), step.count)?;
                products.changed(down.out);
                let up = product(up, 1, at.streams.gates);
                products.dense(gpu, down.out, of_step, &[up])?;
                gpu.collapse_gated_streams(&normed, up.out, to)?;
            }
        }
        Ok(())
    }
}
