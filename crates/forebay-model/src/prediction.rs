//! Passes through the predicting layer.

use crate::ModelError;
use crate::backend::{Batch, End, Run, Step};
use crate::decoder::{Decoder, Output, end_pass, layer_step};
use crate::weights::{HeadChunk, MtpWeights};
use forebay_compute::NormForm;
use forebay_ops::RowKind;

/// Rows of a pass through the predicting layer. The row at position `t` takes the state of the token at `t` behind the model's last
/// layer and the token at `t + 1`, and predicts the token at `t + 2`.
#[derive(Clone, Copy)]
pub struct Prediction<'a> {
    /// Positions of the rows. Their blocks are set, as for the model's own pass.
    pub run: Run,
    /// For each row, the token behind its position.
    pub tokens: &'a [u32],
    /// For each row, the state at its position, `[rows, streams, hidden]` ([`Decoder::final_rows`]).
    pub hidden: &'a [f32],
    /// Rows whose logits are wanted, ascending.
    pub outputs: &'a [u32],
}

impl<'a> Step<'a> {
    /// Returns what the predicting layer has beside its layer, if the step is in or behind that layer and not in the model's own
    /// pass. The end of the model's pass has the layer's number, too, so `at_end` tells the steps behind the last layer.
    pub fn prediction(&self, at_end: bool) -> Option<&'a MtpWeights> {
        let mtp = self.weights.mtp.as_deref()?;
        (self.layer == self.architecture.main_layers() + usize::from(at_end)).then_some(mtp)
    }

    /// Returns the weights of the norm before the output projection, if there is such a norm.
    pub fn head_norm(&self) -> Option<&'a [f32]> {
        match self.prediction(true) {
            Some(mtp) => Some(&mtp.norm),
            None => self.weights.final_norm.as_deref(),
        }
    }

    /// Returns the form of the norm before the output projection.
    pub fn head_norm_form(&self) -> NormForm {
        match (self.prediction(true), self.architecture.mtp) {
            (Some(_), Some(mtp)) => mtp.norm_form,
            _ => self.architecture.norm_form,
        }
    }

    /// Returns the chunks of the output projection, and the dense block of the first.
    pub fn head(&self) -> (&'a [HeadChunk], usize) {
        let (layers, head) = (self.weights.layers.len(), &self.weights.head);
        match self.prediction(true).and_then(|mtp| mtp.head.as_ref()) {
            Some(own) => (own, layers + head.len()),
            None => (head, layers),
        }
    }
}

impl Decoder {
    /// Returns true if the decoder can run a predicting layer: the model has one, and so can the backend.
    pub fn predicts(&self) -> bool {
        self.architecture().mtp.is_some() && self.backend().predicts()
    }

    /// Runs rows through the predicting layer: writes their keys and values, and the logits that the caller wants to `output`. The
    /// layer sees the rows that it has written at earlier positions.
    ///
    /// # Errors
    /// Returns an error if a token is outside the vocabulary, the positions are outside the context, a read fails, values are not
    /// finite, or the call was interrupted.
    ///
    /// # Panics
    /// Panics if the numbers of rows contradict each other or the backend's limits, or if [`Decoder::predicts`] is false.
    pub fn predict(
        &mut self,
        prediction: &Prediction<'_>,
        mut output: Output<'_>,
    ) -> Result<(), ModelError> {
        assert!(self.predicts(), "a prediction without a predicting layer");
        let Prediction { run, tokens, hidden, .. } = *prediction;
        let state = self.architecture().predicted_from() * self.architecture().hidden;
        assert_eq!(hidden.len(), tokens.len() * state, "a state for each row");
        self.check_rows(tokens, &[run])?;
        let kept = output.len();
        let span = tracing::debug_span!("predict", run.position, tokens = run.count);
        let done = span.in_scope(|| self.run_prediction(prediction, run, &mut output));
        let done = if self.backend().was_cut_short() { Err(ModelError::Interrupted) } else { done };
        if done.is_err() {
            output.truncate(kept);
        }
        done
    }

    fn run_prediction(
        &mut self,
        prediction: &Prediction<'_>,
        run: Run,
        output: &mut Output<'_>,
    ) -> Result<(), ModelError> {
        let (architecture, weights, backend, interrupt) = self.parts();
        let layer = architecture.main_layers();
        let runs = [run];
        let step = Step {
            architecture,
            weights,
            layer,
            runs: &runs,
            states: &[],
            count: run.count,
            decode: if run.kind == RowKind::Decode { run.count } else { 0 },
            outputs: prediction.outputs,
            chosen: None,
        };
        let end = if prediction.outputs.is_empty() { End::Nothing } else { output.end() };
        let batch = Batch {
            tokens: prediction.tokens,
            tokens_before: &[],
            first_layer: layer,
            end,
            routing: false,
            chosen: None,
            scores: false,
        };
        interrupt.check()?;
        backend.begin_prediction(&step, &batch, prediction.hidden)?;
        layer_step(backend, &step, false, None, interrupt)?;
        end_pass(backend, &Step { layer: layer + 1, ..step }, end, output)
    }
}
