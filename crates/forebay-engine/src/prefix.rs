//! Measurement of requests that begin alike, one after the other.

use std::ops::ControlFlow;
use std::sync::mpsc;

use forebay_model::sampling::Sampling;
use serde::Serialize;

use crate::engine::{Event, Request};
use crate::statistics::median;
use crate::{Engine, EngineError, GenerateOptions};

/// Tokens of each prompt behind the part that all have in common.
pub const OWN_TOKENS: usize = 16;

/// Measurements of requests with a common prefix.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PrefixRun {
    pub requests: usize,
    pub prefix_tokens: usize,
    pub own_tokens: usize,
    /// Time to the first token of the first request, and the median of the others.
    pub first_seconds: f64,
    pub later_seconds: f64,
    /// KV blocks with content after the last request, and those that the prefix and all own parts need once, in bytes.
    pub kv_bytes: u64,
    pub kv_bytes_once: u64,
}

impl Engine<'_> {
    /// Runs `requests` requests one after the other. Their prompts have the same `prefix_tokens` tokens at the start, and
    /// [`OWN_TOKENS`] others. Ids are pseudo-random.
    ///
    /// # Errors
    /// Returns an error if the tokens do not fit the context, or if a read fails.
    pub fn bench_prefix(
        &mut self,
        requests: usize,
        prefix_tokens: usize,
        seed: u64,
    ) -> Result<PrefixRun, EngineError> {
        let mut random = fastrand::Rng::with_seed(seed);
        let prefix = self.session().random_ids(prefix_tokens, &mut random);
        let before = self.session().runner.kv_bytes();
        let (sender, seconds) = mpsc::channel();
        for _ in 0..requests {
            let own = self.session().random_ids(OWN_TOKENS, &mut random);
            let request = Request {
                prompt: prefix.iter().copied().chain(own).collect(),
                options: GenerateOptions::exactly(1, Sampling::greedy()),
                ..Request::default()
            };
            let sender = sender.clone();
            let sink = Box::new(move |event| {
                if let Event::Finished { statistics, .. } = event {
                    let _ = sender.send(statistics.first_token_seconds.unwrap_or(0.0));
                }
                ControlFlow::Continue(())
            });
            self.submit(request, sink)?;
            self.drain()?;
        }
        let seconds: Vec<f64> = seconds.try_iter().collect();
        let (first, later) = seconds.split_first().unwrap_or((&0.0, &[]));
        let runner = &self.session().runner;
        Ok(PrefixRun {
            requests,
            prefix_tokens,
            own_tokens: OWN_TOKENS,
            first_seconds: *first,
            later_seconds: median(later.iter().copied()),
            kv_bytes: runner.kv_bytes().saturating_sub(before),
            kv_bytes_once: runner.kv_bytes_of(prefix_tokens + requests * OWN_TOKENS),
        })
    }
}
