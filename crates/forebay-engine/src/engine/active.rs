//! A request that runs.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use forebay_grammar::{GrammarError, Matcher};
use forebay_kv::BlockHash;
use forebay_model::sampling::{RowLogits, Sampler};
use forebay_ops::RowKind;
use forebay_text::{TextStream, Tokenizer};

use super::probabilities::{PromptScores, log_probabilities, log_probabilities_of_largest};
use super::request::{
    Event, GeneratedToken, Pooling, Request, RequestEnd, RequestId, RequestStatistics, Sink,
};
use super::waiting::Submitted;
use crate::kv::{Row, SequenceId};
use crate::pass_logits::{PassLogits, WantedRow};
use crate::runner::Runner;
use crate::statistics::WeightUse;
use crate::{EngineError, GenerateOptions, Session};

/// Fewest known tokens that are computed in one pass. Such a pass takes longer than one of generated rows, and others wait for
/// it: on an H200, 13 ms more at 8 requests, where a row takes 0.6 ms. The number is the same however many requests run, because
/// the two kinds of rows differ in their last bits.
const FORCED_TOGETHER_MIN: usize = 16;

/// Where the cached tokens of a request came from.
#[derive(Debug, Clone, Copy, Default)]
pub struct CachedFrom {
    pub ram: usize,
    pub disk: usize,
    pub read_seconds: f64,
    pub saved_seconds: f64,
}

pub struct Active {
    pub id: RequestId,
    pub priority: i32,
    /// Number of its caller.
    pub share: u64,
    pub options: GenerateOptions,
    pub sequence: SequenceId,
    /// Hash before the first KV block.
    pub root: BlockHash,
    /// True if the last pass computed tokens of its answer.
    pub had_turn: bool,
    /// Why the request ends after this pass.
    pub end: Option<RequestEnd>,
    /// Tokens that come instead of the next chosen ones.
    pub instead: VecDeque<u32>,
    /// The token by which the model ended the answer.
    end_token: Option<GeneratedToken>,
    sampler: Sampler,
    sink: Sink,
    logprobs: Option<usize>,
    text: Option<TextStream<Arc<Tokenizer>>>,
    /// The prompt and the generated tokens.
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Generated tokens that are computed together like a prompt: their indices, in ascending order.
    forced: Vec<Range<usize>>,
    constraint: Option<Constraint>,
    /// The tokens that do not end the answer, as in [`Constraint::mask`], if it has a least length.
    goes_on: Option<Vec<u32>>,
    pooled: Option<Pooled>,
    scores: Option<PromptScores>,
    /// Number of tokens whose keys and values are computed.
    done: usize,
    /// Number of these when the sequence began.
    begun: usize,
    submitted: Instant,
    statistics: RequestStatistics,
}

/// The grammar of an answer.
struct Constraint {
    /// `None` while another thread computes the mask.
    matcher: Option<Matcher>,
    /// Tokens that may come next, once computed: bit `id % 32` of word `id / 32`.
    mask: Vec<u32>,
    /// True if the mask is that of the next token.
    is_computed: bool,
}

impl Active {
    /// Starts a request whose sequence has `cached` rows of the prompt.
    pub fn new(
        id: RequestId,
        Submitted { request, sink, submitted, .. }: Submitted,
        (sequence, cached): (SequenceId, usize),
        session: &Session,
    ) -> Active {
        let tokenizer = request.text.then(|| session.tokenizer.clone()).flatten();
        let sampler = Sampler::new(request.options.sampling.clone());
        let root = session.runner.root(&request.namespace);
        let has_work = request.reads_all();
        let Request {
            prompt,
            options,
            priority,
            share,
            logprobs,
            prompt_logprobs,
            grammar,
            pooling,
            ..
        } = *request;
        let statistics = RequestStatistics {
            exact: session.is_independent(),
            prompt_tokens: prompt.len(),
            cached_tokens: cached,
            waited_seconds: submitted.elapsed().as_secs_f64(),
            ..RequestStatistics::default()
        };
        let no_tokens = options.max_tokens == Some(0) && !has_work;
        let goes_on = grammar.is_none().then(|| going_on(session, &options)).flatten();
        Active {
            id,
            priority,
            share,
            options,
            sequence,
            root,
            had_turn: false,
            end: no_tokens.then_some(RequestEnd::MaxTokens),
            instead: VecDeque::new(),
            end_token: None,
            sampler,
            sink,
            logprobs,
            text: tokenizer.map(TextStream::continuing),
            prompt_len: prompt.len(),
            forced: Vec::new(),
            goes_on,
            constraint: grammar.map(|grammar| Constraint::new(grammar.begin())),
            pooled: pooling.map(Pooled::new),
            scores: prompt_logprobs.map(PromptScores::new),
            tokens: prompt,
            done: cached,
            begun: cached,
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
        (self.sequence, self.done, self.begun) = (sequence, done, done);
    }

    /// Returns the next position within the prompt at which the state of recurrent layers is to be kept, if there is one.
    pub fn state_border(&self, runner: &Runner) -> Option<usize> {
        let border = runner.state_border(self.prompt_len, self.begun, self.done);
        border.filter(|_| !self.pools())
    }

    /// Returns the number of rows that are computed.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Returns the rows of all known tokens, computed or not.
    pub fn rows(&self) -> Vec<Row> {
        let is_forced = |index: usize| self.forced.iter().any(|forced| forced.contains(&index));
        let kind = |index: usize| match index < self.prompt_len || is_forced(index) {
            true => RowKind::Prompt,
            false => RowKind::Decode,
        };
        let rows = self.tokens.iter().enumerate();
        rows.map(|(index, &token)| Row { token, kind: kind(index) }).collect()
    }

    /// Returns the most rows that the sequence can have at its end, in a context of so many positions.
    pub fn rows_max(&self, context: usize) -> usize {
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

    /// Adds where the cached tokens came from.
    pub fn note_cached(&mut self, from: &CachedFrom) {
        self.statistics.cached_tokens_from_ram = from.ram;
        self.statistics.cached_tokens_from_disk = from.disk;
        self.statistics.kv_read_seconds = from.read_seconds;
        self.statistics.saved_seconds = from.saved_seconds;
    }

    pub fn note_suspended(&mut self) {
        self.statistics.suspended += 1;
    }

    /// Returns how many of the prompt's tokens that were not cached are computed, and their number.
    pub fn prompt_progress(&self) -> (usize, usize) {
        (self.done - self.begun, self.prompt_len.saturating_sub(self.begun))
    }

    /// Returns true if tokens of the prompt are not computed yet.
    pub fn reads(&self) -> bool {
        self.done < self.prompt_len
    }

    /// Returns the number of the next tokens that are computed together: the rest of the prompt, or of tokens that the grammar
    /// forced. 0 if the next token is computed alone.
    pub fn rows_left(&self) -> usize {
        if self.reads() {
            return self.prompt_len - self.done;
        }
        let now = self.forced.iter().rev().find(|forced| forced.contains(&self.done));
        now.map_or(0, |forced| forced.end - self.done)
    }

    /// Returns true if the request asks for an embedding.
    pub fn pools(&self) -> bool {
        self.pooled.is_some()
    }

    /// Returns true if the logits of the whole prompt are wanted.
    pub fn scores_prompt(&self) -> bool {
        self.scores.is_some()
    }

    /// Returns true if no row of the prompt may come from another request.
    pub fn reads_all(&self) -> bool {
        self.pools() || self.scores_prompt()
    }

    /// Takes the logits after one of the next rows of the prompt.
    pub fn score(&mut self, row: usize, logits: RowLogits<'_>) {
        let index = self.done + row;
        if let (Some(scores), true) = (&mut self.scores, index + 1 < self.prompt_len) {
            scores.take(index, self.tokens[index + 1], logits);
        }
    }

    /// Takes the states of the next `count` rows behind the last layer, `[count, hidden]`. Ends the request if these are the
    /// last ones.
    pub fn pool(&mut self, count: usize, states: &[f32]) {
        let Some(pooled) = &mut self.pooled else { return };
        let first = self.done;
        self.done += count;
        self.statistics.passes += 1;
        pooled.take(first, states, count);
        if self.done == self.tokens.len() {
            self.end = Some(match pooled.state.iter().all(|x| x.is_finite()) {
                true => RequestEnd::End,
                false => RequestEnd::Failed("the model's states are not finite".into()),
            });
        }
    }

    /// Returns true if the request has a state that a snapshot cannot hold.
    pub fn has_own_state(&self) -> bool {
        self.constraint.is_some() || self.reads_all()
    }

    /// Returns the next `count` tokens to compute.
    pub fn next_tokens(&self, count: usize) -> &[u32] {
        &self.tokens[self.done..self.done + count]
    }

    /// Returns what the request wants of the logits after the next `count` rows.
    pub fn wanted_after(&self, count: usize) -> WantedRow<'_> {
        match self.chooses_after(count) {
            true => WantedRow::chooses(
                &self.sampler,
                &self.tokens,
                self.constraint.is_some() || self.must_go_on(),
                self.logprobs,
            ),
            false => WantedRow::unused(),
        }
    }

    /// Returns how many of the largest logits the next choice needs.
    pub fn needed_count(&self) -> usize {
        self.sampler.needs().count
    }

    /// Returns true if no token that ends the answer may come next.
    fn must_go_on(&self) -> bool {
        self.goes_on.is_some() && self.statistics.generated_tokens < self.options.min_tokens
    }

    /// Returns the mask of the next token, if it is computed.
    pub fn mask(&self) -> Option<&[u32]> {
        match &self.constraint {
            Some(constraint) => constraint.is_computed.then_some(&constraint.mask[..]),
            None => self.goes_on.as_deref().filter(|_| self.must_go_on()),
        }
    }

    /// Returns true if a token is chosen after the next `count` rows. Otherwise the next token is known.
    pub fn chooses_after(&self, count: usize) -> bool {
        self.done + count == self.tokens.len()
    }

    /// Gives away the grammar and a buffer for the mask, if the mask of the next token is not computed.
    pub fn lend_matcher(&mut self) -> Option<(Matcher, Vec<u32>)> {
        let constraint = self.constraint.as_mut().filter(|constraint| !constraint.is_computed)?;
        Some((constraint.matcher.take()?, std::mem::take(&mut constraint.mask)))
    }

    /// Takes back the grammar with the mask.
    pub fn return_matcher(
        &mut self,
        matcher: Matcher,
        mask: Vec<u32>,
        computed: Result<(), GrammarError>,
    ) {
        let Some(constraint) = &mut self.constraint else { return };
        (constraint.matcher, constraint.mask) = (Some(matcher), mask);
        match computed {
            Ok(()) => constraint.is_computed = true,
            Err(error) => self.end = Some(end_by_grammar(error)),
        }
    }

    /// Notes that the next `count` tokens are computed. Returns true if the next token can be chosen.
    pub fn advance(&mut self, count: usize) -> bool {
        self.done += count;
        self.statistics.passes += 1;
        self.done == self.tokens.len()
    }

    /// Returns true if a proposal may be checked together with the next row: its token is known, and the one behind it is chosen
    /// without a grammar.
    pub fn may_propose(&self) -> bool {
        self.chooses_after(1) && self.constraint.is_none() && !self.must_go_on()
    }

    /// Computes the next row, with a proposal behind it if the answer may have that token. Returns the row of the logits.
    ///
    /// # Errors
    /// Returns an error of [`Session::advance`].
    pub fn advance_proposing(
        &self,
        session: &mut Session,
        id: u32,
        logits: &mut PassLogits,
    ) -> Result<usize, EngineError> {
        let generated = self.statistics.generated_tokens;
        let is_last = self.options.max_tokens.is_some_and(|most| generated + 1 >= most);
        session.advance(id, !is_last, (&self.sampler, self.logprobs), logits)
    }

    /// Notes that the last pass has computed one more row.
    pub fn accept(&mut self) {
        self.done += 1;
    }

    /// Chooses the next token. Returns `None` if the request has failed.
    pub fn choose(&mut self, logits: RowLogits<'_>) -> Option<GeneratedToken> {
        if self.end.is_some() {
            return None;
        }
        let must_go_on = self.must_go_on();
        let mask = match &self.constraint {
            None => self.goes_on.as_deref().filter(|_| must_go_on),
            Some(constraint) if constraint.is_computed => Some(constraint.mask.as_slice()),
            Some(_) => {
                let why = "the mask of the grammar was not computed";
                self.end = Some(RequestEnd::Failed(why.into()));
                return None;
            }
        };
        let Some(id) = self.sampler.choose(logits, &self.tokens, mask) else {
            self.end = Some(RequestEnd::Failed("no token can be chosen".into()));
            return None;
        };
        let mut token =
            GeneratedToken { id, text: String::new(), logprob: None, likeliest: Vec::new() };
        if let Some(count) = self.logprobs {
            let (own, likeliest) = match logits {
                // These are those of the model: otherwise the row asks for all.
                RowLogits::All(logits) | RowLogits::Changed(logits) => {
                    log_probabilities(logits, id, count)
                }
                RowLogits::Largest(largest) => log_probabilities_of_largest(&largest, id, count),
            };
            (token.logprob, token.likeliest) = (Some(own), likeliest);
        }
        Some(token)
    }

    /// Takes over the chosen token and reports it, unless it ends the answer. The tokens that the grammar then forces follow,
    /// as far as a context of so many positions has room.
    pub fn take(&mut self, mut token: GeneratedToken, ends: bool, context: usize) {
        token.id = self.instead.pop_front().unwrap_or(token.id);
        if ends {
            (self.end, self.end_token) = (Some(RequestEnd::End), Some(token));
            return;
        }
        let first = &mut self.statistics.first_token_seconds;
        first.get_or_insert_with(|| self.submitted.elapsed().as_secs_f64());
        let begin = self.tokens.len();
        let id = token.id;
        self.add(token, context);
        let Some(constraint) = &mut self.constraint else { return };
        match constraint.accept(id, self.logprobs.is_none()) {
            Ok(forced) => {
                for id in forced {
                    if self.end.is_some() {
                        // The rest has no room.
                        return;
                    }
                    let (text, likeliest) = (String::new(), Vec::new());
                    self.sampler.note(id);
                    self.add(GeneratedToken { id, text, logprob: None, likeliest }, context);
                }
            }
            Err(error) => self.end = Some(end_by_grammar(error)),
        }
        // An answer that is complete with its last allowed token was not cut off.
        let goes_on =
            matches!(self.end, None | Some(RequestEnd::MaxTokens | RequestEnd::ContextFull));
        if goes_on && self.constraint.as_ref().is_some_and(Constraint::is_complete) {
            self.end = Some(RequestEnd::End);
        }
        if self.tokens.len() - begin >= FORCED_TOGETHER_MIN {
            self.forced.push(begin..self.tokens.len());
        }
    }

    /// Adds a token to the answer and reports it.
    fn add(&mut self, mut token: GeneratedToken, context: usize) {
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
        } else if self.tokens.len() > context {
            self.end = Some(RequestEnd::ContextFull);
        }
    }

    /// Reports the end.
    pub fn finish(mut self, end: RequestEnd) {
        self.statistics.total_seconds = self.submitted.elapsed().as_secs_f64();
        let text = self.text.map(TextStream::finish).unwrap_or_default();
        let embedding = self.pooled.filter(|_| end == RequestEnd::End);
        let embedding = embedding.map(|pooled| pooled.embedding());
        let statistics = self.statistics;
        let prompt = self.scores.map_or_else(Vec::new, PromptScores::into_tokens);
        let end_token = self.end_token;
        let finished = Event::Finished { end, text, embedding, prompt, end_token, statistics };
        let _ = (self.sink)(finished);
    }
}

/// Returns a mask of the tokens that do not end an answer, if it has a least length.
fn going_on(session: &Session, options: &GenerateOptions) -> Option<Vec<u32>> {
    if options.min_tokens == 0 || options.ignore_end {
        return None;
    }
    let mut mask = vec![u32::MAX; session.vocab_size().div_ceil(32)];
    let by_model = session.tokenizer.iter().flat_map(|tokenizer| tokenizer.eog_ids());
    for id in by_model.chain(&options.stop_ids) {
        if let Some(word) = mask.get_mut(*id as usize / 32) {
            *word &= !(1 << (id % 32));
        }
    }
    Some(mask)
}

/// States of a prompt's tokens, on their way to an embedding.
struct Pooled {
    pooling: Pooling,
    /// Sum of the states, or the last one.
    state: Vec<f64>,
    /// Number of rows that were taken. A request that is computed again brings rows twice.
    rows: usize,
}

impl Pooled {
    fn new(pooling: Pooling) -> Pooled {
        Pooled { pooling, state: Vec::new(), rows: 0 }
    }

    /// Takes `count` rows of states from row `first` on.
    fn take(&mut self, first: usize, states: &[f32], count: usize) {
        let hidden = states.len() / count.max(1);
        self.state.resize(hidden, 0.0);
        for (row, state) in states.chunks_exact(hidden.max(1)).enumerate() {
            if first + row < self.rows {
                continue;
            }
            self.rows += 1;
            for (sum, x) in self.state.iter_mut().zip(state) {
                let before = if self.pooling == Pooling::Mean { *sum } else { 0.0 };
                *sum = before + f64::from(*x);
            }
        }
    }

    fn embedding(&self) -> Vec<f32> {
        let divisor = if self.pooling == Pooling::Mean { self.rows as f64 } else { 1.0 };
        self.state.iter().map(|x| (x / divisor) as f32).collect()
    }
}

impl Constraint {
    fn new(matcher: Matcher) -> Constraint {
        Constraint { matcher: Some(matcher), mask: Vec::new(), is_computed: false }
    }

    /// Takes a chosen token. Returns the tokens that must follow it, which are taken, too, unless `forces` is false.
    fn accept(&mut self, id: u32, forces: bool) -> Result<Vec<u32>, GrammarError> {
        let Some(matcher) = &mut self.matcher else { return Ok(Vec::new()) };
        matcher.accept(id)?;
        let forced = if forces { matcher.forced() } else { Vec::new() };
        for id in &forced {
            matcher.accept(*id)?;
        }
        self.is_computed = false;
        Ok(forced)
    }

    /// Returns true if nothing can follow.
    fn is_complete(&self) -> bool {
        self.matcher.as_ref().is_some_and(Matcher::is_complete)
    }
}

/// Returns the end of a request whose grammar brought this error.
fn end_by_grammar(error: GrammarError) -> RequestEnd {
    match error {
        GrammarError::Stuck(why) => RequestEnd::GrammarStuck(why),
        error => RequestEnd::Failed(error.to_string()),
    }
}
