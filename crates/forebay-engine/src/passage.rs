//! Recording of the routing of one prompt and of its continuation.

use std::ops::ControlFlow;

use forebay_model::sampling::Sampling;
use forebay_stream::Residency;

use crate::engine::Asked;
use crate::{EngineError, GenerateOptions, Session, StopReason};

/// Routing of a prompt and of its continuation, and the time that the continuation took.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedPassage {
    /// Experts as `[tokens, layers, k]`, with -1 in layers without experts. The prompt's tokens come first.
    pub routing: Vec<i32>,
    pub generated_tokens: usize,
    pub generate_seconds: f64,
    /// Part of `generate_seconds` spent waiting for a block, with nothing to compute.
    pub wait_seconds: f64,
    /// Largest number of tokens in one batch. A longer prompt takes several batches.
    pub batch_tokens: usize,
}

impl Session {
    /// Records the routing of a prompt and of up to `count` tokens after it. This drops the session's cached tokens.
    /// `step` gets the number of tokens processed so far.
    ///
    /// # Errors
    /// Returns an error if the model has no tokenizer, a read fails, or a routing trace cannot be written.
    pub fn record_passage(
        &mut self,
        prompt: &[u32],
        count: usize,
        sampling: Sampling,
        step: &mut dyn FnMut(usize),
    ) -> Result<RecordedPassage, EngineError> {
        self.refuse_mtp("the routing of proposals is not recorded")?;
        self.tokenizer()?;
        self.reset();
        // The last token is computed, too, and an answer has at least one.
        let (max_tokens, min_tokens) = (Some(count + 1), 1);
        let options =
            GenerateOptions { max_tokens, min_tokens, sampling, ..GenerateOptions::default() };
        self.keep_routing();
        let mut done = prompt.len();
        let asked = Asked { prompt, options: &options, instead: &[] };
        let generated = self.generate_timed(&asked, &mut |_| {
            step(done);
            done += 1;
            ControlFlow::Continue(())
        });
        let routing = self.take_kept_routing();
        let (generation, wait_seconds) = generated?;
        if generation.stop_reason == StopReason::Interrupted {
            return Err(EngineError::Interrupted);
        }
        Ok(RecordedPassage {
            routing,
            generated_tokens: self.cached.len() - prompt.len(),
            generate_seconds: generation.generate_seconds,
            wait_seconds,
            batch_tokens: self.runner.decoder.backend().batch_tokens(),
        })
    }

    /// Returns the seconds for which passes have waited for weights.
    pub(crate) fn wait_seconds(&self) -> f64 {
        self.runner.decoder.residency().map_or(0.0, Residency::wait_seconds)
    }
}
