//! Measurement of a long prompt that arrives while other requests generate.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use forebay_model::sampling::Sampling;
use serde::Serialize;

use crate::engine::{Event, Request, Sink};
use crate::statistics::median;
use crate::{Engine, EngineError, GenerateOptions};

/// Prompt of the requests that generate.
pub const ARRIVAL_PROMPT: usize = 16;

/// Tokens of each request before the prompt arrives, and those of them whose gaps count as the usual ones.
const BEFORE: (usize, usize) = (96, 64);

/// Measurements of one long prompt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ArrivalRun {
    /// Requests that generate.
    pub sequences: usize,
    pub prompt_tokens: usize,
    /// Time between two tokens of a request: the median before the prompt arrives, the median and the most while it is read.
    pub usual_gap_seconds: f64,
    pub median_gap_seconds: f64,
    pub longest_gap_seconds: f64,
    /// Longest pass of the same prompt when it is read alone.
    pub longest_pass_alone_seconds: f64,
    /// Time to the first token of the prompt, alone and beside the others.
    pub first_token_alone_seconds: f64,
    pub first_token_seconds: f64,
    /// Tokens that the others generated meanwhile.
    pub generated_meanwhile: usize,
    /// Passes that had rows of the prompt.
    pub prompt_passes: u64,
}

/// Times of the tokens of a request.
type Times = Arc<Mutex<Vec<Instant>>>;

fn sink(times: &Times) -> Sink {
    let times = times.clone();
    Box::new(move |event: Event| {
        if let Event::Token(_) = event {
            times.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        }
        ControlFlow::Continue(())
    })
}

fn count(times: &Times) -> usize {
    times.lock().unwrap_or_else(PoisonError::into_inner).len()
}

impl Engine<'_> {
    /// Reads a prompt of `prompt_tokens` alone, and again while `sequences` requests generate up to `generate_tokens` each.
    /// Ids are pseudo-random.
    ///
    /// # Errors
    /// Returns an error if the tokens do not fit the context or the queue, or if a read fails.
    pub fn bench_arrival(
        &mut self,
        sequences: usize,
        prompt_tokens: usize,
        generate_tokens: usize,
        seed: u64,
    ) -> Result<ArrivalRun, EngineError> {
        let mut random = fastrand::Rng::with_seed(seed);
        let request = |tokens: Vec<u32>, generated| Request {
            prompt: tokens,
            options: GenerateOptions::exactly(generated, Sampling::greedy()),
            ..Request::default()
        };
        let arriving = self.session().random_ids(prompt_tokens, &mut random);
        let (alone, started) = (Times::default(), Instant::now());
        self.submit(request(arriving, 1), sink(&alone))?;
        let mut longest_pass = 0.0_f64;
        loop {
            let pass = Instant::now();
            if !self.step()? {
                break;
            }
            longest_pass = longest_pass.max(pass.elapsed().as_secs_f64());
        }
        let first_token_alone_seconds = started.elapsed().as_secs_f64();

        let times: Vec<Times> = (0..sequences).map(|_| Times::default()).collect();
        for times in &times {
            let prompt = self.session().random_ids(ARRIVAL_PROMPT, &mut random);
            self.submit(request(prompt, generate_tokens), sink(times))?;
        }
        let before = BEFORE.0.min(generate_tokens / 2);
        while times.iter().any(|times| count(times) < before) && self.step()? {}
        let (own, arrived) = (Times::default(), Instant::now());
        // Other tokens than before, whose keys and values are still there.
        let arriving = self.session().random_ids(prompt_tokens, &mut random);
        let counts: Vec<usize> = times.iter().map(count).collect();
        self.submit(request(arriving, 1), sink(&own))?;
        let passes = self.statistics().prompt_passes;
        while count(&own) == 0 && self.step()? {}
        let first_token_seconds = arrived.elapsed().as_secs_f64();
        let prompt_passes = self.statistics().prompt_passes - passes;
        self.cancel_all();

        let (mut usual, mut gaps, mut generated_meanwhile) = (Vec::new(), Vec::new(), 0);
        for (times, before) in times.iter().zip(counts) {
            let times = times.lock().unwrap_or_else(PoisonError::into_inner);
            let gaps_of = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64());
            let all: Vec<f64> = gaps_of.collect();
            let (earlier, later) = all.split_at(before.saturating_sub(1).min(all.len()));
            usual.extend(&earlier[earlier.len().saturating_sub(BEFORE.1)..]);
            gaps.extend(later);
            generated_meanwhile += times.len() - before;
        }
        Ok(ArrivalRun {
            sequences,
            prompt_tokens,
            usual_gap_seconds: median(usual),
            median_gap_seconds: median(gaps.iter().copied()),
            longest_gap_seconds: gaps.into_iter().fold(0.0, f64::max),
            longest_pass_alone_seconds: longest_pass,
            first_token_alone_seconds,
            first_token_seconds,
            generated_meanwhile,
            prompt_passes,
        })
    }
}
