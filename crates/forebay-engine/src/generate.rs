//! Generation of tokens from a prompt.

use std::ops::ControlFlow;
use std::time::Instant;

use forebay_model::ModelError;
use forebay_model::sampling::Sampling;
use forebay_store::process_seconds;
use serde::{Deserialize, Serialize};

use crate::engine::Asked;
use crate::mtp::{MtpStatistics, Proposals};
use crate::{EngineError, Session};

/// Limits and sampling of one generation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GenerateOptions {
    /// Largest number of tokens to generate. `None` continues until the model ends or the context is full.
    pub max_tokens: Option<usize>,
    pub sampling: Sampling,
    /// Ids that end the answer in addition to the tokenizer's own. They are not returned.
    pub stop_ids: Vec<u32>,
    /// True to continue after tokens that end an answer.
    pub ignore_end: bool,
    /// Number of tokens before which no token that ends an answer may come. A grammar says itself when an answer may end.
    #[serde(default)]
    pub min_tokens: usize,
}

impl GenerateOptions {
    /// Returns options that generate exactly `count` tokens, whatever they are. There are fewer only if the context is
    /// full. Measurements and comparisons use this because they need texts of known lengths.
    pub fn exactly(count: usize, sampling: Sampling) -> GenerateOptions {
        GenerateOptions {
            max_tokens: Some(count),
            sampling,
            ignore_end: true,
            ..GenerateOptions::default()
        }
    }
}

/// Reason why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The model chose an end token or a stop id.
    End,
    MaxTokens,
    ContextFull,
    /// The caller's `on_token` asked to stop.
    Stopped,
    /// The session was interrupted, in the prompt or between two tokens.
    Interrupted,
}

/// Tokens of an answer, and the time they took.
#[derive(Debug, Clone, Serialize)]
pub struct Generation {
    pub tokens: Vec<u32>,
    pub stop_reason: StopReason,
    pub prompt_tokens: usize,
    /// Seconds from the call to the logits of the prompt's last token, or to the interrupt.
    pub prompt_seconds: f64,
    /// Seconds for all tokens after the first.
    pub generate_seconds: f64,
}

impl Generation {
    /// Returns the prompt speed in tokens per second. It is 0 if no time passed or if the prompt was interrupted.
    pub fn prompt_tokens_per_second(&self) -> f64 {
        // The first token exists once the whole prompt is processed.
        if self.stop_reason == StopReason::Interrupted && self.tokens.is_empty() {
            return 0.0;
        }
        rate(self.prompt_tokens, self.prompt_seconds)
    }

    /// Returns the generation speed in tokens per second. The first token comes from the prompt and does not count.
    pub fn generate_tokens_per_second(&self) -> f64 {
        rate(self.tokens.len().saturating_sub(1), self.generate_seconds)
    }
}

/// Measurements of one benchmark run.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct BenchRun {
    pub prompt_tokens: usize,
    pub generate_tokens: usize,
    /// Number of tokens in the context before either part.
    pub depth: usize,
    pub prompt_seconds: f64,
    pub generate_seconds: f64,
    pub prompt_tokens_per_second: f64,
    pub generate_tokens_per_second: f64,
    /// Processor time of this process, user and system, as a share of wall time times compute threads. It includes
    /// threads that spin for some microseconds while they wait for work.
    pub prompt_processors_busy: f64,
    pub generate_processors_busy: f64,
    /// Proposals of the predicting layer in the generated tokens, if it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtp: Option<MtpStatistics>,
}

/// Wall-clock time and processor time at the start of a measurement.
struct Clocks {
    wall: Instant,
    processor_seconds: f64,
}

impl Clocks {
    fn start() -> Clocks {
        Clocks { wall: Instant::now(), processor_seconds: process_seconds() }
    }

    /// Returns the seconds since the start, and the share of `threads` processors that were busy meanwhile.
    fn read(&self, threads: usize) -> (f64, f64) {
        let seconds = self.wall.elapsed().as_secs_f64();
        let busy = process_seconds() - self.processor_seconds;
        (seconds, if seconds > 0.0 { busy / (seconds * threads as f64) } else { 0.0 })
    }
}

fn rate(count: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

impl Session {
    /// Returns true if the token ends an answer.
    pub(crate) fn ends_with(&self, id: u32, options: &GenerateOptions) -> bool {
        if options.ignore_end {
            return false;
        }
        let by_model = self.tokenizer().is_ok_and(|tokenizer| tokenizer.is_end_of_generation(id));
        by_model || options.stop_ids.contains(&id)
    }

    /// Measures the time of a prompt of `prompt_tokens`, then of `generate_tokens` single tokens. Both start after `depth` tokens that are not
    /// timed, of which the second part has at least one. Ids are pseudo-random, as in the usual benchmarks, so that routing does not settle on one
    /// repeated token. With the predicting layer, the generated tokens are the likeliest ones behind the prompt instead, because no layer can predict
    /// random ids.
    ///
    /// # Errors
    /// Returns an error if the tokens do not fit the context or if a read fails.
    pub fn bench(
        &mut self,
        prompt_tokens: usize,
        generate_tokens: usize,
        depth: usize,
        seed: u64,
    ) -> Result<BenchRun, EngineError> {
        let mut random = fastrand::Rng::with_seed(seed);
        let ids = self.random_ids(depth + prompt_tokens + generate_tokens, &mut random);
        let (before, ids) = ids.split_at(depth);
        let (prompt, generated) = ids.split_at(prompt_tokens);
        let (used, context) = (depth + prompt_tokens.max(generate_tokens), self.context());
        if used > context {
            return Err(ModelError::ContextFull { used: 0, context, wanted: used }.into());
        }
        self.reset();
        self.read(before)?;
        let mut run = BenchRun { prompt_tokens, generate_tokens, depth, ..BenchRun::default() };
        let threads = self.runner.decoder.backend().info().threads;
        let clocks = Clocks::start();
        self.read(prompt)?;
        (run.prompt_seconds, run.prompt_processors_busy) = clocks.read(threads);
        run.prompt_tokens_per_second = rate(prompt_tokens, run.prompt_seconds);
        if generate_tokens == 0 {
            return Ok(run);
        }
        let proposals = self.mtp.as_ref().map(Proposals::statistics);
        // The answer begins behind a token that is read again, and whose pass is not timed.
        let behind = [before, if proposals.is_some() { prompt } else { &[] }].concat();
        let kept = self.truncate(behind.len().saturating_sub(1));
        let (first, instead) = match behind.is_empty() {
            true => generated.split_at(1),
            false => (&behind[kept..], generated),
        };
        let passes = generate_tokens.min(context - kept - first.len());
        let options = GenerateOptions::exactly(passes + 1, Sampling::greedy());
        let instead = if proposals.is_some() { &[] } else { instead };
        let mut clocks = None;
        let asked = Asked { prompt: first, options: &options, instead };
        let (generation, _) = self.generate_timed(&asked, &mut |_| {
            clocks.get_or_insert_with(Clocks::start);
            ControlFlow::Continue(())
        })?;
        let clocks = clocks.ok_or(EngineError::Interrupted)?;
        if generation.stop_reason == StopReason::Interrupted {
            return Err(EngineError::Interrupted);
        }
        (run.generate_seconds, run.generate_processors_busy) = clocks.read(threads);
        run.generate_tokens_per_second = rate(passes, run.generate_seconds);
        run.mtp = proposals.and_then(|before| Some(self.mtp.as_ref()?.statistics().since(&before)));
        Ok(run)
    }

    /// Reads tokens behind the cached ones.
    fn read(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        if tokens.is_empty() {
            return Ok(());
        }
        let options = GenerateOptions::exactly(0, Sampling::greedy());
        let read = self.generate(tokens, &options, &mut |_| ControlFlow::Continue(()))?;
        match read.stop_reason {
            StopReason::Interrupted => Err(EngineError::Interrupted),
            _ => Ok(()),
        }
    }
}
