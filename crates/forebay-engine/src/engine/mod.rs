//! Many sequences on one model: requests wait, run together in passes, and report what they generate.
//!
//! [`Engine::step`] runs one pass: one row for every request that generates, and a part of the prompts of others. What a
//! request generates depends on its own prompt, options and seed alone, never on the requests beside it, and not on when
//! they come or end.

mod active;
mod alone;
mod batch_size;
mod latency;
mod masks;
mod probabilities;
mod proposing;
mod reading;
mod request;
mod schedule;
mod shares;
mod snapshot;
mod waiting;

use std::cell::OnceCell;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use forebay_model::ModelError;
use forebay_ops::RowKind;
use forebay_options::{BadOption, OptionName};

use self::active::Active;
pub(crate) use self::alone::Asked;
use self::alone::Held;
use self::batch_size::{BatchSize, Measured};
pub use self::latency::Latency;
use self::latency::Pace;
use self::masks::{MaskThreads, MasksOfRows};
use self::probabilities::SCORED_ROWS_MAX;
use self::reading::Reading;
pub use self::request::{
    Event, GeneratedToken, Pooling, PromptToken, Request, RequestEnd, RequestId, RequestStatistics,
    Sink,
};
use self::schedule::{Limits, Part, Progress};
use self::shares::Shares;
pub(crate) use self::snapshot::Block as SnapshotBlock;
pub use self::snapshot::{Snapshot, SnapshotError};
pub use self::waiting::QueueError;
use self::waiting::{State, Submitted, Waiting};
use crate::kv_tiers::{DiskTier, KvDisk, KvDiskType, KvTierStatistics};
use crate::pass_logits::{PassLogits, WantedRow};
use crate::runner::{FetchRates, Logits, Outputs, Rows, Runner};
use crate::statistics::WeightUse;
use crate::{EngineError, Session};

/// Limits of an [`Engine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    /// Most requests that run at a time. `None` is what [`SessionOptions::sequences`](crate::SessionOptions::sequences)
    /// has room for.
    pub running: Option<usize>,
    /// Most prompt rows in a pass that also has rows of generating requests. Fewer rows make the pauses of these shorter.
    /// `None` is what the backend takes.
    pub prompt_rows: Option<usize>,
    /// Most requests that generate in one pass. `None` is all of them with [`Latency::Automatic`]. Otherwise it lets the
    /// engine find the number that gives most tokens per second, by prediction and measurement.
    pub generating: Option<usize>,
    /// Time between two tokens of a request that the engine aims for.
    pub latency: Latency,
    /// Most requests that wait.
    pub waiting: usize,
    /// True if several callers share the queue. None of them may then fill it: a caller may have as many requests waiting as
    /// places are left for others.
    pub callers_share: bool,
    /// Time for which a caller counts as one after its last request ended: a place is left free for it, and passes of others
    /// stay short.
    pub presence: Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            running: None,
            prompt_rows: None,
            generating: None,
            latency: Latency::Automatic,
            waiting: 1024,
            callers_share: false,
            presence: Duration::from_secs(1),
        }
    }
}

/// Work of an [`Engine`] since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineStatistics {
    /// Passes with prompt rows, which may also have rows of generating requests.
    pub prompt_passes: u64,
    /// Parts in which these passes ran. A pass that never pauses is one part.
    pub prompt_parts: u64,
    pub prompt_tokens: u64,
    pub prompt_seconds: f64,
    /// Passes in which all rows are those of generating requests.
    pub generate_passes: u64,
    /// Rows of those passes, one for each request that generates, and one more for each proposal that was accepted.
    pub generate_rows: u64,
    pub generate_seconds: f64,
    /// Number of times that a request was suspended for another one.
    pub suspended: u64,
    /// Number of suspended requests that were computed again, because the swap space was full.
    pub computed_again: u64,
}

/// Blocks of an engine's KV cache, over all groups of layers. `total` is the sum of `free`, `cached` and `referenced`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvBlocks {
    pub total: usize,
    /// Blocks without content.
    pub free: usize,
    /// Blocks with content that no request uses. They are evicted when blocks are needed.
    pub cached: usize,
    /// Blocks that requests use, each counted once.
    pub referenced: usize,
    /// Cached blocks that were given out for other content since the start.
    pub evictions: u64,
}

/// An open model that runs many requests, or one for the session that has the model.
pub struct Engine<'s> {
    session: Held<'s>,
    /// True if the predicting layer is loaded.
    proposes: bool,
    limits: Limits,
    /// The choice of the number of requests that generate in a pass, if the engine makes it.
    batch_size: Option<BatchSize>,
    pace: Pace,
    statistics: EngineStatistics,
    /// Use of weights up to the last pass.
    weights: WeightUse,
    /// Experts that were not in memory up to the last measurement.
    missed: f64,
    waiting_max: usize,
    /// Requests that have not begun, the next one first.
    waiting: VecDeque<Waiting>,
    running: Vec<Active>,
    /// The callers of the running requests.
    shares: Shares,
    /// True if no caller may fill the queue.
    callers_share: bool,
    /// A pass of prompt rows that is paused.
    reading: Option<Reading>,
    /// True if the next such pass has one prompt only.
    reads_alone: bool,
    next_id: u64,
    /// Rates by prediction, until they are measured. They are read when they are first needed.
    predicted: OnceCell<FetchRates>,
    // Buffers that are reused from pass to pass.
    parts: Vec<Part>,
    logits: PassLogits,
    /// Threads that compute masks. They start with the first request that has a grammar.
    masks: MaskThreads,
}

impl Engine<'static> {
    /// Takes over an open model. The session's own sequence ends. If the predicting layer is loaded
    /// ([`SessionOptions::mtp`](crate::SessionOptions::mtp)), one request runs at a time.
    pub fn new(mut session: Session, options: &EngineOptions) -> Engine<'static> {
        session.end_sequence();
        session.runner.tiers_mut().keep(true);
        Engine::of(Held::Own(Box::new(session)), options)
    }

    /// Ends all requests and returns the open model.
    pub fn into_session(mut self) -> Session {
        self.cancel_all();
        self.session.runner.tiers_mut().keep(false);
        self.session.begin_sequence();
        match self.session {
            Held::Own(session) => *session,
            Held::Lent(_) => unreachable!("a lent session does not live for ever"),
        }
    }
}

impl<'s> Engine<'s> {
    fn of(session: Held<'s>, options: &EngineOptions) -> Engine<'s> {
        let backend = session.runner.decoder.backend();
        let rows = backend.batch_tokens();
        let proposes = session.mtp.is_some();
        let running = options.running.unwrap_or(usize::MAX);
        let running = if proposes { 1 } else { running.min(backend.tables()).max(1) };
        let together = running.min(backend.decode_rows());
        let prompt_rows = options.prompt_rows.unwrap_or(rows).clamp(1, rows);
        // Only experts that are not in memory can make a pass of fewer rows better.
        let has_choice = together > 1 && options.generating.is_none();
        let has_choice = has_choice && options.latency != Latency::Automatic;
        let chooses = has_choice && session.experts_so_far().is_some();
        let batch_size = chooses.then(|| BatchSize::new(together, session.predict_together()));
        let decode_rows = match &batch_size {
            Some(batch_size) => batch_size.rows(),
            None => options.generating.unwrap_or(together).clamp(1, together),
        };
        let limits = Limits {
            running,
            rows,
            prompt_rows,
            prompt_rows_alone: rows,
            decode_rows,
            shared_rows: usize::MAX,
            rows_of_ahead: usize::MAX,
        };
        Engine {
            batch_size,
            pace: Pace::new(options.latency, prompt_rows),
            statistics: EngineStatistics::default(),
            weights: session.weight_use(),
            missed: 0.0,
            proposes,
            session,
            limits,
            waiting_max: options.waiting,
            waiting: VecDeque::new(),
            running: Vec::new(),
            shares: Shares::new(options.presence),
            callers_share: options.callers_share,
            reading: None,
            reads_alone: false,
            next_id: 0,
            predicted: OnceCell::new(),
            parts: Vec::new(),
            logits: PassLogits::default(),
            masks: MaskThreads::default(),
        }
    }

    /// Returns the open model, for its description and statistics.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Returns the most requests that run at a time.
    pub fn running_max(&self) -> usize {
        self.limits.running
    }

    /// Returns the number of requests that wait, and of those that run.
    pub fn load(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// Returns what the engine has done.
    pub fn statistics(&self) -> EngineStatistics {
        self.statistics
    }

    /// Returns the blocks of the KV cache.
    pub fn kv_blocks(&self) -> KvBlocks {
        self.session.runner.kv_blocks().fold(KvBlocks::default(), |sum, group| KvBlocks {
            total: sum.total + group.total,
            free: sum.free + group.free,
            cached: sum.cached + group.cached,
            referenced: sum.referenced + group.referenced,
            evictions: sum.evictions + group.evictions_total,
        })
    }

    /// Returns what the tiers of the KV cache below the device hold and have done.
    pub fn kv_tiers(&self) -> KvTierStatistics {
        self.session.runner.tiers().statistics()
    }

    /// Adds a tier on disk to the KV cache. `name` is what a listing of the folder calls the model. Several engines may use one
    /// store.
    ///
    /// # Errors
    /// Returns an error if the model's files cannot be read to identify them, if the folder cannot be written, or if keys and
    /// values are to be rounded and are not f16.
    pub fn set_kv_disk(&mut self, disk: KvDisk, name: &str) -> Result<(), EngineError> {
        let KvDisk { store, ty } = disk;
        let mut identity = self.session.strong_identity()?;
        let mut name = name.to_owned();
        if ty == KvDiskType::Q8_0 {
            if !self.session.has_f16_kv() {
                return Err(EngineError::Option(BadOption {
                    name: OptionName::KvDiskType,
                    value: "q8_0".to_owned(),
                    expected: format!(
                        "it needs keys and values in f16 ({}, without {})",
                        OptionName::KvType.with("f16"),
                        OptionName::Exact
                    ),
                }));
            }
            // Blocks behind rounded ones differ, too, so both kinds must not meet.
            identity.extend(b" q8_0 on disk");
            name.push_str(" (rounded to q8_0)");
        }
        let runner = &mut self.session.runner;
        runner.set_identity(identity);
        let model = store.add_model(runner.root(b""), &name)?;
        let states = runner.state_group().map(|group| group as u32);
        runner.tiers_mut().set_disk(DiskTier { store, model, ty, states });
        Ok(())
    }

    /// Writes keys and values to the disk that later requests may share, if there is such a tier, for up to `limit`: everything,
    /// or what was used more than once or took long to compute.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn write_kv(&mut self, everything: bool, limit: Duration) -> Result<(), EngineError> {
        self.session.runner.write_kv(everything, limit)
    }

    /// Returns the use of weights by all passes that have ended.
    pub fn weight_use(&self) -> WeightUse {
        self.weights
    }

    /// Queues a request behind those of the same or a higher priority. `sink` gets its events from [`Engine::step`].
    ///
    /// # Errors
    /// Returns an error if the prompt is empty or longer than the context, has a token outside the vocabulary, or if too
    /// many requests wait.
    pub fn submit(&mut self, request: Request, sink: Sink) -> Result<RequestId, EngineError> {
        self.check(&request)?;
        let id = self.new_id();
        let priority = request.priority;
        let state = State::New(Submitted::new(request, sink));
        self.queue(Waiting::new(id, priority, state));
        Ok(id)
    }

    fn new_id(&mut self) -> RequestId {
        self.next_id += 1;
        RequestId(self.next_id - 1)
    }

    fn check(&self, request: &Request) -> Result<(), EngineError> {
        if request.prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let (context, wanted) = (self.session.context(), request.prompt.len());
        if wanted > context {
            return Err(ModelError::ContextFull { used: 0, context, wanted }.into());
        }
        let vocabulary = self.session.vocab_size();
        if let Some(&id) = request.prompt.iter().find(|id| **id as usize >= vocabulary) {
            return Err(ModelError::TokenOutOfRange { id, vocabulary }.into());
        }
        self.check_pooling(request)?;
        if self.waiting.len() >= self.waiting_max {
            return Err(QueueError::Full { waiting: self.waiting.len() }.into());
        }
        let left = self.waiting_max - self.waiting.len();
        if self.callers_share && self.waiting_of(request.share) >= left {
            return Err(
                QueueError::ShareFull { waiting: self.waiting_of(request.share), left }.into()
            );
        }
        Ok(())
    }

    /// Ends a request. Its sink gets [`RequestEnd::Cancelled`]. Does nothing if the request has ended already.
    pub fn cancel(&mut self, id: RequestId) {
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.id == id)
            && let Some(waiting) = self.waiting.remove(at)
        {
            self.end_waiting(waiting, RequestEnd::Cancelled);
        }
        if let Some(at) = self.running.iter().position(|active| active.id == id) {
            self.end(at, RequestEnd::Cancelled);
        }
    }

    /// Ends all requests.
    pub fn cancel_all(&mut self) {
        while let Some(waiting) = self.waiting.pop_front() {
            self.end_waiting(waiting, RequestEnd::Cancelled);
        }
        while !self.running.is_empty() {
            self.end(0, RequestEnd::Cancelled);
        }
    }

    /// Runs passes until no request is left.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::step`].
    pub fn drain(&mut self) -> Result<(), EngineError> {
        while self.step()? {}
        Ok(())
    }

    /// Starts waiting requests as far as there is room, and runs one pass. Returns false if there is nothing to do.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails, or if the session is interrupted. Requests whose rows failed have not
    /// changed, and another step tries these rows again. A request whose own values are not finite ends with
    /// [`RequestEnd::Failed`], and the others go on.
    pub fn step(&mut self) -> Result<bool, EngineError> {
        self.begin_waiting()?;
        if self.running.is_empty() {
            return Ok(self.wait_for_blocks());
        }
        // A request that is suspended here begins again in a later step at the earliest, so every step runs a pass.
        loop {
            let ran = self.step_of_running();
            self.end_finished();
            match ran {
                Err(EngineError::OutOfBlocks(_)) if self.make_room()? => {}
                ran => return ran.map(|()| true),
            }
        }
    }

    /// Runs one pass of the requests that run.
    fn step_of_running(&mut self) -> Result<(), EngineError> {
        let mut parts = std::mem::take(&mut self.parts);
        self.take_turns();
        self.take_arrivals()?;
        let pauses = self.pace.is_bounded() && self.session.runner.decoder.backend().pauses();
        let limits = self.limits_now(pauses);
        let runner = &self.session.runner;
        let progress = self.running.iter().map(|active| match active.rows_left() {
            _ if runner.is_arriving(active.sequence) => Progress::Arrives,
            0 => Progress::Generates,
            left if active.reads() => {
                let border = self.state_border(active);
                let left = border.map_or(left, |border| border - active.done());
                let most = if active.scores_prompt() { SCORED_ROWS_MAX } else { left };
                Progress::Reads(left.min(most))
            }
            left => Progress::Follows(left),
        });
        let share = |index: usize| self.running[index].share;
        let is_ahead = |share: u64| self.shares.is_ahead(share);
        schedule::choose(&limits, progress, share, is_ahead, &mut parts);
        self.note_turns(&parts);
        let decode = parts.iter().take_while(|part| !part.reads).count();
        let ran = match pauses && (decode > 0 || self.reading.is_some()) {
            true => self.run_between(&parts[..decode], &parts[decode..]),
            false => self.run_noted(&parts),
        };
        self.parts = parts;
        ran
    }

    /// Takes note of requests whose keys and values have arrived on the device. Waits for the first one if no other request
    /// can run.
    fn take_arrivals(&mut self) -> Result<(), EngineError> {
        let Engine { session, running, .. } = self;
        session.runner.take_arrivals()?;
        let all_arrive = running.iter().all(|of| session.runner.is_arriving(of.sequence));
        match running.first() {
            Some(first) if all_arrive => session.runner.wait_for_arrival(first.sequence),
            _ => Ok(()),
        }
    }

    /// Runs parts together, and takes their time into account.
    fn run_noted(&mut self, parts: &[Part]) -> Result<(), EngineError> {
        let started = Instant::now();
        match self.run(parts) {
            Err(EngineError::Model(ModelError::NumericFailure { .. })) if parts.len() > 1 => {
                self.run_one_by_one(parts)
            }
            ran => ran,
        }?;
        let time = started.elapsed();
        let streamed_share = self.note_weights(parts);
        self.note_use(parts, time.as_secs_f64());
        self.note(parts, time, streamed_share);
        Ok(())
    }

    /// Gives every request its share of what a pass needed of the weights. Returns the share of the model that the pass copied
    /// to the GPU or read from the disk.
    fn note_weights(&mut self, parts: &[Part]) -> f64 {
        let now = self.session.weight_use();
        let before = std::mem::replace(&mut self.weights, now);
        let rows: usize = parts.iter().map(|part| part.count).sum();
        for part in parts {
            let share = part.count as f64 / rows as f64;
            self.running[part.index].note_weights(&before, &now, share);
        }
        if let Some(disk) = self.session.runner.tiers().disk() {
            disk.store.share_disk(now.bytes_from_disk > before.bytes_from_disk);
        }
        let streamed = |of: &WeightUse| of.bytes_from_ram + of.bytes_from_disk;
        (streamed(&now) - streamed(&before)) / self.session.info().weights_bytes.max(1) as f64
    }

    /// Takes the time of a pass into account for the next ones.
    fn note(&mut self, parts: &[Part], time: Duration, streamed_share: f64) {
        let rows = |reads| parts.iter().filter(move |part| part.reads == reads).map(|p| p.count);
        let (prompt_rows, decode_rows): (usize, usize) = (rows(true).sum(), rows(false).sum());
        // Known tokens take time of their own, from which nothing follows for other passes.
        let follows = parts.iter().any(|part| !part.reads && part.kind == RowKind::Prompt);
        if prompt_rows > 0 {
            self.statistics.prompt_parts += 1;
            self.note_prompt(prompt_rows, time.as_secs_f64());
            if (decode_rows > 0 || self.shares.passes_are_short) && !follows {
                self.pace.note_prompt(prompt_rows, time.as_secs_f64(), streamed_share);
            }
            return;
        }
        let statistics = &mut self.statistics;
        statistics.generate_passes += 1;
        statistics.generate_rows += decode_rows as u64;
        statistics.generate_seconds += time.as_secs_f64();
        if follows {
            self.session.runner.decoder.end_prompt(decode_rows);
            return;
        }
        self.pace.note_generate(time.as_secs_f64(), streamed_share);
        self.shares.costs.note(decode_rows, time.as_secs_f64());
        self.session.runner.decoder.end_token();
        if let Some(batch_size) = &mut self.batch_size {
            let available = (self.running.len() + self.waiting.len()).min(self.limits.running);
            let seconds = time.as_secs_f64();
            batch_size.note(Measured { rows: decode_rows, available, seconds }, || {
                let missed = self.weights.expert_misses;
                std::mem::replace(&mut self.missed, missed) < missed
            });
            self.limits.decode_rows = batch_size.rows();
        }
    }

    fn note_prompt(&mut self, rows: usize, seconds: f64) {
        self.statistics.prompt_passes += 1;
        self.statistics.prompt_tokens += rows as u64;
        self.statistics.prompt_seconds += seconds;
        if !self.is_lent() {
            self.session.runner.decoder.end_prompt(rows);
        }
    }

    /// Runs every part in a pass of its own, so that only the requests with broken values fail.
    fn run_one_by_one(&mut self, parts: &[Part]) -> Result<(), EngineError> {
        for part in parts {
            match self.run(std::slice::from_ref(part)) {
                Err(error @ EngineError::Model(ModelError::NumericFailure { .. })) => {
                    self.running[part.index].end = Some(RequestEnd::Failed(error.to_string()));
                }
                ran => ran?,
            }
        }
        Ok(())
    }

    /// Runs the parts in one pass, and gives every request whose prompt is read its next token.
    fn run(&mut self, parts: &[Part]) -> Result<(), EngineError> {
        if let (true, [part]) = (self.proposes, parts) {
            return self.run_proposing(part);
        }
        self.run_pass(parts)?;
        self.take_results(parts);
        Ok(())
    }

    /// Calls `run` with the rows of the parts and with where their logits go. The masks of their grammars are computed
    /// meanwhile.
    fn run_with_logits<T>(
        &mut self,
        parts: &[Part],
        run: impl FnOnce(&mut Runner, &[Rows<'_>], &mut Outputs<'_>) -> T,
    ) -> T {
        let begun = self.begin_masks(parts);
        let Engine { session, running, logits, masks, .. } = self;
        let session = &mut **session;
        let running = &*running;
        let active = |part: &Part| &running[part.index];
        // The rows with logits: those of a prompt that is scored choose nothing, except for the last one.
        let with_logits = || {
            parts.iter().flat_map(|part| {
                let active = &running[part.index];
                let (rows, chooses) = (logits_rows(active, part), has_logits(active, part));
                (1..=rows).map(move |row| (part, (chooses && row == rows).then_some(active)))
            })
        };
        let mut masks = MasksOfRows {
            pending: masks.pending(begun),
            requests: with_logits().map(|(_, chooses)| chooses).collect(),
        };
        let rows: Vec<Rows<'_>> = parts.iter().map(|part| rows_of(active(part), part)).collect();
        let wanted = with_logits().map(|(part, chooses)| match chooses {
            Some(active) => active.wanted_after(part.count),
            None => WantedRow::whole(),
        });
        let most = session.runner.decoder.backend().largest_count();
        let ran = logits
            .of_pass(most, wanted, &mut masks, |output| run(&mut session.runner, &rows, output));
        masks.pending.wait();
        let come = masks.pending.come;
        self.return_masks(come);
        ran
    }

    /// Takes over that parts are computed, and gives every request whose prompt is read its next token.
    fn take_results(&mut self, parts: &[Part]) {
        let vocabulary = self.session.vocab_size();
        let hidden = self.session.info().hidden;
        let mut states = self.session.runner.decoder.final_rows();
        let mut row = 0;
        let (mut turn_ends, mut borders) = (Vec::new(), Vec::new());
        for part in parts {
            let border = self.state_border(&self.running[part.index]);
            let active = &mut self.running[part.index];
            if active.pools() {
                let own;
                (own, states) = states.split_at(part.count * hidden);
                active.pool(part.count, own);
                continue;
            }
            let first = row;
            row += logits_rows(active, part);
            for scored in 0..part.count * usize::from(active.scores_prompt() && part.reads) {
                let logits = self.logits.row(first + scored, vocabulary, 1);
                logits.into_iter().for_each(|logits| active.score(scored, logits));
            }
            let own = row.saturating_sub(1);
            let was_reading = active.reads();
            if border == Some(active.done() + part.count) {
                borders.push(active.sequence);
            }
            let goes_on = active.advance(part.count);
            if was_reading && !active.reads() {
                turn_ends.push(active.sequence);
            }
            if !goes_on {
                continue;
            }
            if active.options.max_tokens == Some(0) {
                // Only the prompt was wanted.
                active.end = Some(RequestEnd::MaxTokens);
                continue;
            }
            let logits = self.logits.row(own, vocabulary, active.needed_count());
            if let Some(chosen) = logits.and_then(|logits| active.choose(logits)) {
                let ends = self.session.ends_with(chosen.id, &active.options);
                active.take(chosen, ends, self.session.context());
            }
        }
        let runner = &mut self.session.runner;
        turn_ends.into_iter().for_each(|sequence| runner.note_end_of_turn(sequence));
        for sequence in borders {
            if let Err(error) = runner.keep_state(sequence) {
                tracing::warn!("a state is not kept for later requests: {error}");
            }
        }
    }

    fn end_finished(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            match self.running[at].end.take() {
                Some(end) => self.end(at, end),
                None => at += 1,
            }
        }
    }

    fn end(&mut self, at: usize, end: RequestEnd) {
        let active = self.running.remove(at);
        self.session.runner.end(active.sequence);
        self.session.drop_proposal();
        self.read_no_more(active.id);
        active.finish(end);
    }
}

/// Returns true if the last row of a part has logits: it is generated, or the last one of its prompt. A row of a request
/// that is computed again may have logits that are not used, because its next token is known.
fn has_logits(active: &Active, part: &Part) -> bool {
    !active.pools() && (part.kind == RowKind::Decode || part.count == active.rows_left())
}

/// Returns the number of the last rows of a part that have logits.
fn logits_rows(active: &Active, part: &Part) -> usize {
    match active.scores_prompt() && part.reads {
        true => part.count,
        false => usize::from(has_logits(active, part)),
    }
}

/// Returns the rows of a part.
fn rows_of<'a>(active: &'a Active, part: &Part) -> Rows<'a> {
    Rows {
        sequence: active.sequence,
        kind: part.kind,
        tokens: active.next_tokens(part.count),
        logits: match has_logits(active, part) {
            _ if active.pools() => Logits::FinalStates,
            _ if active.scores_prompt() && part.reads => Logits::All,
            true => Logits::Last,
            false => Logits::None,
        },
    }
}
