//! Recording of the routing of one prompt and of its continuation.

use std::time::Instant;

use forebay_model::Routing;
use forebay_model::sampling::{RowLogits, Sampler, Sampling};
use forebay_stream::Phase;

use crate::routing_log::row_kind;
use crate::runner::{Logits, Outputs};
use crate::{EngineError, Session};

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
        self.reset();
        let mut sampler = Sampler::new(sampling);
        let (mut rows, mut routing) = (self.routing_rows(), Vec::new());
        self.begin_turn(prompt)?;
        self.record_tokens(Phase::Prompt, prompt, &mut rows)?;
        routing.append(&mut rows.experts);
        self.runner.decoder.end_prompt(prompt.len());
        let (started, waited) = (Instant::now(), self.wait_seconds());
        for generated in 0..count {
            step(prompt.len() + generated);
            if self.cached.len() >= self.context() {
                break;
            }
            if generated == 0 {
                self.forbid_the_end()?;
            }
            let chosen = sampler.choose(RowLogits::All(&self.logits), &self.cached, None);
            let Some(id) = chosen else { return Err(EngineError::NoChoice) };
            if self.tokenizer()?.is_end_of_generation(id) {
                break;
            }
            self.record_tokens(Phase::Generate, &[id], &mut rows)?;
            routing.append(&mut rows.experts);
            self.runner.decoder.end_token();
        }
        Ok(RecordedPassage {
            routing,
            generated_tokens: self.cached.len() - prompt.len(),
            generate_seconds: started.elapsed().as_secs_f64(),
            wait_seconds: self.wait_seconds() - waited,
            batch_tokens: self.runner.decoder.backend().batch_tokens(),
        })
    }

    /// Makes the tokens that end a text impossible, so that an answer has at least one token.
    fn forbid_the_end(&mut self) -> Result<(), EngineError> {
        let tokenizer = self.shared_tokenizer()?;
        for &id in tokenizer.eog_ids() {
            if let Some(logit) = self.logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn wait_seconds(&self) -> f64 {
        self.runner.decoder.residency().map_or(0.0, |residency| residency.statistics().wait_seconds)
    }

    /// Runs tokens and replaces `rows` with their routing.
    fn record_tokens(
        &mut self,
        phase: Phase,
        ids: &[u32],
        rows: &mut Routing,
    ) -> Result<(), EngineError> {
        rows.clear();
        let mut logits = std::mem::take(&mut self.logits);
        logits.clear();
        let output = &mut Outputs::Logits(&mut logits);
        let ran = self.run_tokens(row_kind(phase), ids, Logits::Last, output, Some(rows));
        self.logits = logits;
        ran?;
        Ok(self.record(phase, rows)?)
    }
}
