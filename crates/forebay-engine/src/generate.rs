//! Generation of tokens from a prompt.

use std::ops::ControlFlow;
use std::time::Instant;

use forebay_model::sampling::{Sampling, argmax};
use forebay_store::process_seconds;
use forebay_stream::Phase;
use serde::{Deserialize, Serialize};

use crate::mtp::{MtpStatistics, Proposals};
use crate::runner::{Logits, Outputs};
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
#[derive(Debug, Clone, Copy, Serialize)]
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

    /// Runs tokens and keeps the logits of the last one.
    fn feed(&mut self, phase: Phase, tokens: &[u32]) -> Result<(), EngineError> {
        let mut logits = std::mem::take(&mut self.logits);
        logits.clear();
        let fed = self.forward(phase, tokens, Logits::Last, &mut Outputs::Logits(&mut logits));
        self.logits = logits;
        fed
    }

    /// Measures the time of a prompt of `prompt_tokens`, then of `generate_tokens` single tokens. Both start after
    /// `depth` tokens that are not timed. Ids are pseudo-random, as in the usual benchmarks, so that routing does not
    /// settle on one repeated token. With the predicting layer, the generated tokens are the likeliest ones behind the prompt
    /// instead, because no layer can predict random ids.
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
        let count = depth + prompt_tokens + generate_tokens;
        let mut random = fastrand::Rng::with_seed(seed);
        let ids = self.random_ids(count, &mut random);
        let (before, ids) = ids.split_at(depth);
        let (prompt, generated) = ids.split_at(prompt_tokens);
        self.reset();
        self.begin_turn(prompt)?;
        let threads = self.runner.decoder.backend().info().threads;
        if !before.is_empty() {
            self.feed(Phase::Prompt, before)?;
            self.runner.decoder.end_prompt(before.len());
        }
        let clocks = Clocks::start();
        if !prompt.is_empty() {
            self.feed(Phase::Prompt, prompt)?;
            self.runner.decoder.end_prompt(prompt.len());
        }
        let (prompt_seconds, prompt_processors_busy) = clocks.read(threads);
        let before_proposals = self.mtp.as_ref().map(Proposals::statistics);
        let kept = if self.mtp.is_some() { depth } else { self.truncate(depth) };
        if kept < depth {
            self.feed(Phase::Prompt, &before[kept..])?;
            self.runner.decoder.end_prompt(depth - kept);
        }
        let clocks = Clocks::start();
        match self.mtp {
            Some(_) => self.generate_likeliest(generated)?,
            None => {
                for id in generated {
                    self.feed(Phase::Generate, std::slice::from_ref(id))?;
                    self.runner.decoder.end_token();
                }
            }
        }
        let (generate_seconds, generate_processors_busy) = clocks.read(threads);
        Ok(BenchRun {
            prompt_tokens,
            generate_tokens,
            depth,
            prompt_seconds,
            generate_seconds,
            prompt_tokens_per_second: rate(prompt_tokens, prompt_seconds),
            generate_tokens_per_second: rate(generate_tokens, generate_seconds),
            prompt_processors_busy,
            generate_processors_busy,
            mtp: before_proposals
                .and_then(|before| Some(self.mtp.as_ref()?.statistics().since(&before))),
        })
    }

    /// Generates as many tokens as `ids` has, always the likeliest. The first one is that of `ids` if nothing was fed before.
    fn generate_likeliest(&mut self, ids: &[u32]) -> Result<(), EngineError> {
        let first = match self.cached.is_empty() {
            true => ids.first().copied().unwrap_or(0),
            false => argmax(&self.logits),
        };
        let options = GenerateOptions::exactly(ids.len(), Sampling::greedy());
        self.generate(&[first], &options, &mut |_| ControlFlow::Continue(())).map(drop)
    }
}
