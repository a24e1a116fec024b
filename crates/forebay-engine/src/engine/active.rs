//! A request that runs.

use std::sync::Arc;
use std::time::Instant;

use forebay_compute::RowKind;
use forebay_model::sampling::Sampler;
use forebay_text::{TextStream, Tokenizer};

use super::request::{
    Event, GeneratedToken, Request, RequestEnd, RequestId, RequestStatistics, Sink,
};
use super::waiting::Submitted;
use crate::kv::{Row, SequenceId};
use crate::statistics::WeightUse;
use crate::{GenerateOptions, Session};

pub struct Active {
    pub id: RequestId,
    pub priority: i32,
    pub options: GenerateOptions,
    pub sequence: SequenceId,
    /// Why the request ends after this pass.
    pub end: Option<RequestEnd>,
    sampler: Sampler,
    sink: Sink,
    logprobs: Option<usize>,
    text: Option<TextStream<Arc<Tokenizer>>>,
    /// The prompt and the generated tokens.
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Number of tokens whose keys and values are computed.
    done: usize,
    submitted: Instant,
    statistics: RequestStatistics,
}

impl Active {
    /// Starts a request whose sequence has `cached` rows of the prompt.
    pub fn new(
        id: RequestId,
        Submitted { request, sink, submitted }: Submitted,
        (sequence, cached): (SequenceId, usize),
        session: &Session,
    ) -> Active {
        let tokenizer = request.text.then(|| session.tokenizer.clone()).flatten();
        let sampler = Sampler::new(request.options.sampling.clone(), session.vocab_size());
        let Request { prompt, options, priority, logprobs, .. } = *request;
        let statistics = RequestStatistics {
            prompt_tokens: prompt.len(),
            cached_tokens: cached,
            waited_seconds: submitted.elapsed().as_secs_f64(),
            ..RequestStatistics::default()
        };
        let no_tokens = options.max_tokens == Some(0);
        Active {
            id,
            priority,
            options,
            sequence,
            end: no_tokens.then_some(RequestEnd::MaxTokens),
            sampler,
            sink,
            logprobs,
            text: tokenizer.map(TextStream::continuing),
            prompt_len: prompt.len(),
            tokens: prompt,
            done: cached,
            submitted,
            statistics,
        }
    }

    /// Makes a suspended request of a snapshot, with the prompt and the generated tokens in `tokens`.
    pub fn restored(
        id: RequestId,
        submitted: Submitted,
        tokens: &[u32],
        statistics: RequestStatistics,
        random_state: u64,
        session: &Session,
    ) -> Active {
        let mut active = Active::new(id, submitted, (SequenceId::NONE, 0), session);
        active.sampler.set_random_state(random_state);
        for &id in &tokens[active.prompt_len..] {
            active.tokens.push(id);
            active.sampler.note(id);
            if let Some(text) = &mut active.text {
                text.push(id);
            }
        }
        active.statistics = statistics;
        active
    }

    /// Continues with a sequence that has the first `done` rows.
    pub fn resume(&mut self, sequence: SequenceId, done: usize) {
        (self.sequence, self.done) = (sequence, done);
    }

    /// Returns the number of rows that are computed.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Returns the rows of all known tokens, computed or not.
    pub fn rows(&self) -> Vec<Row> {
        let kind = |index: usize| match index < self.prompt_len {
            true => RowKind::Prompt,
            false => RowKind::Decode,
        };
        let rows = self.tokens.iter().enumerate();
        rows.map(|(index, &token)| Row { token, kind: kind(index) }).collect()
    }

    /// Returns the most rows that the sequence can have at its end, in a context of so many positions.
    pub fn most_rows(&self, context: usize) -> usize {
        let generated = self.options.max_tokens.unwrap_or(context);
        self.prompt_len.saturating_add(generated).min(context)
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    pub fn statistics(&self) -> RequestStatistics {
        self.statistics
    }

    pub fn random_state(&self) -> u64 {
        self.sampler.random_state()
    }

    pub fn logprobs(&self) -> Option<usize> {
        self.logprobs
    }

    pub fn reports_text(&self) -> bool {
        self.text.is_some()
    }

    /// Adds a share of the use of weights between two moments.
    pub fn note_weights(&mut self, before: &WeightUse, now: &WeightUse, share: f64) {
        self.statistics.weights.add_between(before, now, share);
    }

    pub fn note_suspended(&mut self) {
        self.statistics.suspended += 1;
    }

    /// Returns the number of prompt tokens that are not computed yet.
    pub fn prompt_left(&self) -> usize {
        self.prompt_len.saturating_sub(self.done)
    }

    /// Returns the next `count` tokens to compute.
    pub fn next_tokens(&self, count: usize) -> &[u32] {
        &self.tokens[self.done..self.done + count]
    }

    /// Returns how many of the largest logits are enough; `None` if all are needed.
    pub fn deciding(&self) -> Option<usize> {
        self.sampler.deciding().filter(|_| self.logprobs.is_none())
    }

    /// Notes that the next `count` tokens are computed. Returns true if the next token can be chosen.
    pub fn advance(&mut self, count: usize) -> bool {
        self.done += count;
        self.statistics.passes += 1;
        self.done == self.tokens.len()
    }

    /// Chooses the next token from the largest logits, which may be more than this request needs.
    pub fn choose_from(&mut self, largest: &[(f32, u32)]) -> GeneratedToken {
        let own = self.sampler.deciding().unwrap_or(largest.len()).min(largest.len());
        let id = self.sampler.sample_from(&largest[..own], &self.tokens);
        GeneratedToken { id, text: String::new(), logprob: None, likeliest: Vec::new() }
    }

    /// Chooses the next token from all logits.
    pub fn choose(&mut self, logits: &[f32]) -> GeneratedToken {
        let id = self.sampler.sample(logits, &self.tokens);
        let (logprob, likeliest) = match self.logprobs {
            None => (None, Vec::new()),
            Some(count) => {
                let (own, likeliest) = log_probabilities(logits, id, count);
                (Some(own), likeliest)
            }
        };
        GeneratedToken { id, text: String::new(), logprob, likeliest }
    }

    /// Takes over the chosen token and reports it, unless it ends the answer. `full` says that the context has no room for
    /// another token.
    pub fn take(&mut self, mut token: GeneratedToken, ends: bool, full: bool) {
        if ends {
            self.end = Some(RequestEnd::End);
            return;
        }
        let first = &mut self.statistics.first_token_seconds;
        first.get_or_insert_with(|| self.submitted.elapsed().as_secs_f64());
        self.statistics.generated_tokens += 1;
        self.tokens.push(token.id);
        if let Some(text) = &mut self.text {
            token.text = text.push(token.id);
        }
        let generated = self.statistics.generated_tokens;
        if (self.sink)(Event::Token(token)).is_break() {
            self.end = Some(RequestEnd::Stopped);
        } else if self.options.max_tokens.is_some_and(|most| generated >= most) {
            self.end = Some(RequestEnd::MaxTokens);
        } else if full {
            self.end = Some(RequestEnd::ContextFull);
        }
    }

    /// Reports the end.
    pub fn finish(mut self, end: RequestEnd) {
        self.statistics.total_seconds = self.submitted.elapsed().as_secs_f64();
        let text = self.text.map(TextStream::finish).unwrap_or_default();
        let _ = (self.sink)(Event::Finished { end, text, statistics: self.statistics });
    }
}

/// Returns the logarithm of the probability of token `id`, and the `count` likeliest tokens with theirs.
fn log_probabilities(logits: &[f32], id: u32, count: usize) -> (f32, Vec<(u32, f32)>) {
    let largest = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    let sum: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
    let log_sum = f64::from(largest) + sum.ln();
    let of = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let count = count.min(order.len());
    if count > 0 && count < order.len() {
        order.select_nth_unstable_by(count - 1, by_logit);
    }
    order.truncate(count);
    order.sort_unstable_by(by_logit);
    (of(logits[id as usize]), order.into_iter().map(|id| (id, of(logits[id as usize]))).collect())
}
