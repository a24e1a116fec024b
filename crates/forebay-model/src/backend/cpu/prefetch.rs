//! Experts that are read before their layer asks for them.

use forebay_compute::MatmulJob;
use forebay_ops::RowKind;

use super::backend::CpuBackend;
use super::products::{add_bias, matrix};
use super::streams::{BlockInput, StreamRows};
use crate::ModelError;
use crate::backend::Step;
use crate::weights::FeedForwardWeights;

impl CpuBackend {
    /// Returns true if experts of the pass are read ahead: those of a single token.
    pub(super) fn reads_ahead(&self, step: &Step<'_>) -> bool {
        self.prefetch && step.count == 1 && step.decode == 1
    }

    /// Reads the experts of the step's layer ahead, if a table gives them.
    pub(super) fn prefetch_experts_of(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let FeedForwardWeights::Experts { vectors, .. } = &step.layer_weights().feed_forward else {
            return Ok(());
        };
        let Some(known) = vectors.experts_of(&self.tokens) else { return Ok(()) };
        let experts = known.of(0, step.experts().used);
        self.scratch.moe.prefetch_known(step.layer, experts, &mut self.residency)
    }

    /// Predicts which experts the next layer's router would choose for the token's current state, while this layer's
    /// experts are being read. Reads them ahead with the disk bandwidth that demanded reads leave.
    pub(super) fn prefetch_next(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let next = Step { layer: step.layer + 1, ..*step };
        if next.layer >= step.architecture.main_layers() {
            return Ok(());
        }
        let Some(layer) = step.weights.layers.get(next.layer) else { return Ok(()) };
        let FeedForwardWeights::Experts { router, vectors, .. } = &layer.feed_forward else {
            return Ok(());
        };
        if vectors.by_token.is_some() {
            return self.prefetch_experts_of(&next);
        }
        let experts = next.experts();
        let CpuBackend { cpu, residency, scratch, .. } = self;
        let Some(lease) = residency.dense_if_present(next.layer as u32) else { return Ok(()) };
        let hidden = step.architecture.hidden;
        // This layer's products have already taken their input from `normed`, but `block_out` may hold a shared
        // expert's output.
        let normed = &mut scratch.normed[..hidden];
        let input = BlockInput {
            streams: layer.feed_forward_streams.as_ref(),
            norm: layer.router_norm(),
            block: (residency, &lease),
        };
        let of = StreamRows {
            architecture: step.architecture,
            rows: scratch.rows.of(step),
            have_output: false,
            filled: step.filled_streams(next.layer, false),
        };
        let x = &scratch.x[..step.architecture.stream_width()];
        input.write(cpu, &mut scratch.streams, x, &of, normed);
        scratch.inner.prepare(cpu, normed, 1, hidden, &[router.ty]);
        let out = &mut scratch.moe.prediction_scores[..experts.count];
        let (w, kind) = (matrix(residency, &lease, router), RowKind::Decode);
        cpu.matmul(&mut [MatmulJob { w, x: &scratch.inner, tokens: None, kind, out: &mut *out }]);
        add_bias(cpu, out, vectors.router_bias.as_deref());
        drop(lease);
        let rule = vectors.rule(experts);
        scratch.moe.prefetch(cpu, next.layer, experts, &rule, residency)
    }
}
