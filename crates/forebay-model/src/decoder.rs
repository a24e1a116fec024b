//! The decoder: runs the rows of a pass through all layers of a backend and returns logits.

use std::ops::Range;

use crate::ModelError;
use crate::arch::Architecture;
use crate::backend::{Backend, Batch, Begun, ChosenExperts, End, NextBlock, Run, Selector, Step};
use crate::states::States;
use crate::weights::{FeedForwardWeights, Weights};
use forebay_ops::RowKind;
use forebay_store::Interrupt;
use forebay_stream::Residency;
use tracing::field::Empty;

/// The span of one pass through the layers.
macro_rules! pass_span {
    ($name:literal, $position:ident, $tokens:ident) => {
        tracing::debug_span!(
            $name,
            $position,
            tokens = $tokens,
            hits = Empty,
            misses = Empty,
            read_bytes = Empty,
            wait_seconds = Empty
        )
    };
}

/// The positions of a call for which logits are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsWanted {
    None,
    Last,
    All,
}

/// Recorded routing of tokens, as rows `[tokens, layers, k]`.
#[derive(Debug, Clone, Default)]
pub struct Routing {
    /// Chosen experts, best first; -1 in layers without experts.
    pub experts: Vec<i32>,
    /// Weights of the chosen experts; 0 in layers without experts. All are 0 if the backend does not support
    /// [`Backend::routing_weights`].
    pub weights: Vec<f32>,
    /// Scores from [`Backend::early_scores`], as rows `[tokens, experts of all layers]`. `None` if the caller does not
    /// want them.
    pub scores: Option<Vec<f32>>,
}

impl Routing {
    /// Removes all rows and keeps the allocated memory.
    pub fn clear(&mut self) {
        self.experts.clear();
        self.weights.clear();
        self.scores.iter_mut().for_each(Vec::clear);
    }

    /// Appends empty rows for `tokens` tokens.
    fn grow(&mut self, tokens: usize, architecture: &Architecture) {
        let values = tokens * architecture.main_layers() * architecture.experts_per_token();
        self.experts.resize(self.experts.len() + values, -1);
        self.weights.resize(self.weights.len() + values, 0.0);
        if let Some(scores) = &mut self.scores {
            let experts: usize = architecture.expert_layers().map(|experts| experts.count).sum();
            scores.resize(scores.len() + tokens * experts, 0.0);
        }
    }
}

/// The rows of [`Routing`] that belong to one batch.
pub(crate) struct RoutingRows<'a> {
    /// `[tokens, layers, k]`
    experts: &'a mut [i32],
    weights: &'a mut [f32],
    /// `[tokens, experts of all layers]`
    scores: Option<&'a mut [f32]>,
}

/// A model that is ready to compute: its description, weights, and a backend with pools of KV blocks.
pub struct Decoder {
    architecture: Architecture,
    weights: Weights,
    backend: Box<dyn Backend>,
    followed: Option<Box<dyn ChosenExperts>>,
    /// States of recurrent layers and of layers with n-grams, if the model has any.
    states: Option<States>,
    interrupt: Interrupt,
    final_rows: Vec<f32>,
}

/// The rows of a pass.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    /// Tokens of all rows, run by run.
    pub tokens: &'a [u32],
    /// The runs; all decode rows come before all prompt rows. The blocks of their positions are set
    /// ([`Backend::set_block`]).
    pub runs: &'a [Run],
    /// Rows whose logits are wanted, ascending.
    pub outputs: &'a [u32],
    /// Rows whose states behind the last layer are wanted ([`Decoder::final_rows`]).
    pub final_rows: &'a [Range<usize>],
}

/// How far a pass has come that runs in several parts.
#[derive(Debug, Clone, Default)]
pub struct Paused {
    /// The layer before which it is paused; 0 if it has not begun.
    layer: usize,
    /// Experts that replace the routers' choice in each layer, `[layers][rows, k]`, if there are any.
    chosen: Vec<Vec<u32>>,
}

impl Paused {
    /// Returns the layer with which the pass goes on.
    pub fn layer(&self) -> usize {
        self.layer
    }
}

/// The logits that a pass returns for every row in [`Pass::outputs`].
pub enum Output<'a> {
    /// All logits: appends `[outputs, vocabulary]`.
    Logits(&'a mut Vec<f32>),
    /// The largest logits with their ids, in descending order: appends `[outputs, count]`. Equal logits are sorted by id.
    Largest(usize, &'a mut Vec<(f32, u32)>),
    /// What the selector wants of every row ([`Backend::select`]).
    Selected(&'a mut dyn Selector),
}

/// Progress callback for passes, called after each layer with (layers done, layers). It must not allocate and should
/// return quickly.
pub type PassWatch<'a> = &'a mut dyn FnMut(usize, usize);

impl Decoder {
    /// Creates a decoder. `backend` must have been created for the same description and weights.
    pub fn new(architecture: Architecture, weights: Weights, backend: Box<dyn Backend>) -> Decoder {
        let interrupt = Interrupt::new();
        let states = architecture
            .has_states()
            .then(|| States::new(backend.tables(), architecture.ngrams.as_ref()));
        Decoder {
            architecture,
            weights,
            backend,
            followed: None,
            states,
            interrupt,
            final_rows: Vec::new(),
        }
    }

    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Returns the backend, to set and copy KV blocks between passes.
    pub fn backend_mut(&mut self) -> &mut dyn Backend {
        self.backend.as_mut()
    }

    /// Returns true if some layers have a state. Their rows can only be computed one after another: a sequence goes on where its
    /// state is ([`Decoder::has_state`]).
    pub fn is_recurrent(&self) -> bool {
        self.states.is_some()
    }

    /// Returns true if the sequence of a table can go on behind its first `position` positions. Always true for models whose
    /// sequences have no states.
    pub fn has_state(&self, table: usize, position: usize) -> bool {
        self.states.as_ref().is_none_or(|states| states.has(table, position))
    }

    /// Drops the states of a table. Call this before another sequence uses the table.
    pub fn forget_state(&mut self, table: usize) {
        if let Some(states) = &mut self.states {
            states.forget(table);
        }
    }

    /// Returns the number of bytes of one state of a sequence; 0 if the model has none.
    pub fn state_bytes(&self) -> usize {
        self.backend.state_bytes() + self.states.as_ref().map_or(0, States::token_bytes)
    }

    /// Copies the state of a table after its first `position` positions to `bytes`. Returns false if there is none.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    ///
    /// # Panics
    /// Panics if `bytes` is not [`Decoder::state_bytes`] long.
    pub fn save_state(
        &mut self,
        table: usize,
        position: usize,
        bytes: &mut [u8],
    ) -> Result<bool, ModelError> {
        let Some(states) = &mut self.states else { return Ok(false) };
        let Some(place) = states.place(table, position) else { return Ok(false) };
        let (bytes, tokens) = bytes.split_at_mut(bytes.len() - states.token_bytes());
        self.backend.save_state(place, bytes)?;
        states.save_tokens(place, tokens);
        Ok(true)
    }

    /// Makes `bytes` the state of a table after the first `position` positions of its sequence. It has no other state then.
    ///
    /// # Errors
    /// Returns an error if the device fails. The table has no state then.
    ///
    /// # Panics
    /// Panics if the model's sequences have no states, or if `bytes` is not [`Decoder::state_bytes`] long.
    pub fn restore_state(
        &mut self,
        table: usize,
        position: usize,
        bytes: &[u8],
    ) -> Result<(), ModelError> {
        let states = self.states.as_mut().expect("sequences have states");
        let (bytes, tokens) = bytes.split_at(bytes.len() - states.token_bytes());
        let place = states.begin_set(table);
        self.backend.restore_state(place, bytes)?;
        states.restore_tokens(place, tokens);
        states.set(table, position);
        Ok(())
    }

    /// Returns the states behind the last layer of the rows that passes wanted, `[rows, hidden]`, since
    /// [`Decoder::clear_final_rows`]. They are normalised as for the logits, unless the predicting layer takes them as they are. It
    /// then gets all residual streams, `[rows, streams, hidden]` ([`Architecture::predicted_from`]).
    pub fn final_rows(&self) -> &[f32] {
        &self.final_rows
    }

    pub fn clear_final_rows(&mut self) {
        self.final_rows.clear();
    }

    /// Returns the residency of blocks in host memory, if the backend streams weights through it.
    pub fn residency(&self) -> Option<&Residency> {
        self.backend.residency()
    }

    /// Makes tokens use the given experts from now on; `None` returns the choice to the routers.
    pub fn follow(&mut self, experts: Option<Box<dyn ChosenExperts>>) {
        self.followed = experts;
    }

    /// Makes [`Decoder::pass`] return [`ModelError::Interrupted`] once `interrupt` is set.
    pub fn stop_on(&mut self, interrupt: &Interrupt) {
        self.interrupt = interrupt.clone();
    }

    /// Closes the counters of a generated token.
    pub fn end_token(&mut self) {
        if let Some(residency) = self.backend.residency_mut() {
            residency.end_token();
        }
    }

    /// Closes the counters of a prompt of `tokens` tokens.
    pub fn end_prompt(&mut self, tokens: usize) {
        if let Some(residency) = self.backend.residency_mut() {
            residency.end_prompt(tokens);
        }
    }

    /// Runs the rows of a pass through all layers: writes their keys and values to their blocks, and the logits that the
    /// caller wants to `output`. Appends the chosen experts of every row to `routing`, if given.
    ///
    /// # Errors
    /// Returns an error if a token is outside the vocabulary, a sequence has no state for its rows, a read fails, values are not finite, or the call was
    /// interrupted ([`ModelError::Interrupted`]). The blocks of the pass's own positions then hold anything; all other
    /// positions are unchanged.
    ///
    /// # Panics
    /// Panics if the runs and tokens do not fit each other or the backend's limits.
    pub fn pass(
        &mut self,
        pass: &Pass<'_>,
        mut output: Output<'_>,
        routing: Option<&mut Routing>,
        watch: Option<PassWatch<'_>>,
    ) -> Result<(), ModelError> {
        let layers = self.architecture.main_layers();
        self.pass_in_parts(pass, &mut Paused::default(), layers, &mut output, routing, watch)?;
        Ok(())
    }

    /// Runs rows of a pass through the next `layers` layers. Returns true if the pass has ended, and false if it is paused.
    /// Other passes may then run before the next call. The rows, outputs and tokens must be the same in every call, and
    /// routing can only be recorded by a call for all layers.
    ///
    /// # Errors
    /// Returns the errors of [`Decoder::pass`]. The pass then begins again with the next call.
    ///
    /// # Panics
    /// Panics as [`Decoder::pass`] does, or if the backend cannot pause ([`Backend::pauses`]).
    pub fn pass_part(
        &mut self,
        pass: &Pass<'_>,
        paused: &mut Paused,
        layers: usize,
        mut output: Output<'_>,
    ) -> Result<bool, ModelError> {
        self.pass_in_parts(pass, paused, layers, &mut output, None, None)
    }

    fn pass_in_parts(
        &mut self,
        pass: &Pass<'_>,
        paused: &mut Paused,
        layers: usize,
        output: &mut Output<'_>,
        routing: Option<&mut Routing>,
        watch: Option<PassWatch<'_>>,
    ) -> Result<bool, ModelError> {
        self.check(pass)?;
        let kept = output.len();
        let run = |of: &mut Self| of.run(pass, paused, layers, output, routing, watch);
        let done = self.in_span(pass, run);
        // An interrupted step may report an error of its own or none; the interrupt takes precedence.
        let cut_short = self.backend.was_cut_short();
        let done = if cut_short { Err(ModelError::Interrupted) } else { done };
        if done.is_err() {
            output.truncate(kept);
            *paused = Paused::default();
        }
        if let (Some(states), Ok(true)) = (&mut self.states, &done) {
            states.end(pass.runs, pass.tokens);
        }
        done
    }

    fn check(&self, pass: &Pass<'_>) -> Result<(), ModelError> {
        assert!(pass.runs.is_sorted_by_key(|run| run.kind == RowKind::Prompt), "decode rows first");
        self.check_rows(pass.tokens, pass.runs)
    }

    /// Returns what a pass needs beside its rows.
    pub(crate) fn parts(&mut self) -> (&Architecture, &Weights, &mut dyn Backend, &Interrupt) {
        (&self.architecture, &self.weights, self.backend.as_mut(), &self.interrupt)
    }

    /// Checks the rows of a pass against the backend's limits.
    pub(crate) fn check_rows(&self, tokens: &[u32], runs: &[Run]) -> Result<(), ModelError> {
        let rows: usize = runs.iter().map(|run| run.count).sum();
        assert_eq!(rows, tokens.len(), "the runs have as many rows as there are tokens");
        assert!((1..=self.backend.batch_tokens()).contains(&rows), "{rows} rows in a pass");
        let vocabulary = self.architecture.vocabulary;
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocabulary) {
            return Err(ModelError::TokenOutOfRange { id: *id, vocabulary });
        }
        let context = self.backend.context();
        for run in runs {
            assert!(run.count > 0 && run.table < self.backend.tables(), "{run:?}");
            if run.position + run.count > context {
                let (used, wanted) = (run.position, run.count);
                return Err(ModelError::ContextFull { used, context, wanted });
            }
        }
        Ok(())
    }

    /// Calls `run` in a tracing span that records cache hits, misses and reads of the pass.
    fn in_span<T>(&mut self, pass: &Pass<'_>, run: impl FnOnce(&mut Self) -> T) -> T {
        let (position, count) = (pass.runs[0].position, pass.tokens.len());
        let span = match pass.runs.iter().any(|run| run.kind == RowKind::Prompt) {
            false => pass_span!("token", position, count),
            true => pass_span!("prompt_batch", position, count),
        };
        let before = self.residency().filter(|_| !span.is_disabled()).map(Residency::statistics);
        let done = span.in_scope(|| run(self));
        if let (Some(before), Some(residency)) = (before, self.residency()) {
            let now = residency.statistics();
            span.record("hits", now.hits - before.hits);
            span.record("misses", now.misses - before.misses);
            span.record("read_bytes", now.bytes_read - before.bytes_read);
            span.record("wait_seconds", now.wait_seconds - before.wait_seconds);
        }
        done
    }

    fn run(
        &mut self,
        pass: &Pass<'_>,
        paused: &mut Paused,
        part: usize,
        output: &mut Output<'_>,
        mut routing: Option<&mut Routing>,
        mut watch: Option<PassWatch<'_>>,
    ) -> Result<bool, ModelError> {
        let Decoder { architecture, weights, backend, followed, states, interrupt, final_rows } =
            self;
        interrupt.check()?;
        if let Some(states) = states {
            states.begin(pass.runs)?;
        }
        let (count, layers) = (pass.tokens.len(), architecture.main_layers());
        let first = paused.layer;
        let mut last = layers.min(first.saturating_add(part.max(1)));
        // Other passes would replace the choice of keys that the next layer takes.
        while last < layers && architecture.takes_choice(last) {
            last += 1;
        }
        let of_decode = pass.runs.iter().filter(|run| run.kind == RowKind::Decode);
        let step = Step {
            architecture,
            weights,
            layer: 0,
            runs: pass.runs,
            states: states.as_ref().map_or(&[], States::places),
            count,
            decode: of_decode.map(|run| run.count).sum(),
            outputs: pass.outputs,
            chosen: None,
        };
        let ends = last == layers;
        let end = if pass.outputs.is_empty() || !ends { End::Nothing } else { output.end() };
        if let Some(followed) = followed.as_mut().filter(|_| first == 0) {
            followed.begin(pass.runs);
        }
        let scores = routing.as_deref().and_then(|routing| routing.scores.as_ref());
        let batch = Batch {
            tokens: pass.tokens,
            tokens_before: states.as_ref().map_or(&[], States::tokens_before),
            first_layer: first,
            end,
            routing: routing.is_some(),
            chosen: followed.as_deref(),
            scores: scores.is_some(),
        };
        let score_start = scores.map_or(0, Vec::len);
        let begun = backend.begin(&step, &batch)?;
        let row_start = routing.as_deref().map_or(0, |routing| routing.experts.len());
        if let Some(routing) = routing.as_deref_mut() {
            routing.grow(count, architecture);
        }
        let to_do = if begun == Begun::Recorded { 0..0 } else { first..last };
        for layer in to_do {
            let _span = tracing::trace_span!("layer", layer).entered();
            let has_experts = architecture.layers[layer].feed_forward.has_experts();
            let followed = followed.as_ref().filter(|_| has_experts);
            let chosen = followed.map(|followed| match paused.chosen.get(layer) {
                Some(chosen) => chosen,
                None => followed.experts(layer),
            });
            let step = Step { layer, chosen, ..step };
            let rows = routing.as_deref_mut().map(|routing| RoutingRows {
                experts: &mut routing.experts[row_start..],
                weights: &mut routing.weights[row_start..],
                scores: routing.scores.as_mut().map(|scores| &mut scores[score_start..]),
            });
            let continues = layer > first;
            layer_step(backend.as_mut(), &step, continues, rows, interrupt)?;
            if let Some(watch) = &mut watch {
                watch(layer + 1, layers + 1);
            }
        }
        if !ends {
            if let Some(followed) = followed.as_ref().filter(|_| first == 0) {
                // Other passes replace them before this one goes on.
                paused.chosen = (0..layers).map(|layer| followed.experts(layer).to_vec()).collect();
            }
            paused.layer = last;
            backend.pause(&Step { layer: last, ..step })?;
            return Ok(false);
        }
        *paused = Paused::default();
        let step = Step { layer: layers, ..step };
        end_pass(backend.as_mut(), &step, end, output)?;
        for rows in pass.final_rows {
            backend.final_rows(&step, rows.clone(), final_rows)?;
        }
        if let Some(routing) = routing {
            backend.recorded_routing(&step, &mut routing.experts[row_start..]);
        }
        if let Some(watch) = &mut watch {
            watch(layers + 1, layers + 1);
        }
        Ok(true)
    }
}

/// Runs the last step of a pass.
pub(crate) fn end_pass(
    backend: &mut dyn Backend,
    step: &Step<'_>,
    end: End,
    output: &mut Output<'_>,
) -> Result<(), ModelError> {
    match (end, output) {
        (End::Nothing, _) => backend.end(step),
        (_, Output::Logits(logits)) => backend.head(step, logits),
        (_, Output::Largest(count, largest)) => backend.largest(step, *count, largest),
        (_, Output::Selected(selector)) => backend.select(step, *selector),
    }
}

impl Output<'_> {
    /// Returns how a pass with this output ends.
    pub(crate) fn end(&self) -> End {
        match self {
            Output::Logits(_) => End::Logits,
            Output::Largest(count, _) => End::Largest(*count),
            Output::Selected(_) => End::Selected,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Output::Logits(logits) => logits.len(),
            Output::Largest(_, largest) => largest.len(),
            Output::Selected(selector) => selector.taken(),
        }
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        match self {
            Output::Logits(logits) => logits.truncate(len),
            Output::Largest(_, largest) => largest.truncate(len),
            Output::Selected(selector) => selector.truncate(len),
        }
    }
}

/// Runs one layer: attention, then the feed-forward. Some layers have only one of them. The norm of each block adds the output of
/// the block before it to the residual stream. `continues` says that the layer before this one was the last step.
pub(crate) fn layer_step(
    backend: &mut dyn Backend,
    step: &Step<'_>,
    continues: bool,
    routing: Option<RoutingRows<'_>>,
    interrupt: &Interrupt,
) -> Result<(), ModelError> {
    interrupt.check()?;
    backend.enter_layer(step)?;
    let has_mixer = step.has_mixer();
    let mut continues = continues;
    if step.layer_weights().ngrams.is_some() {
        backend.add_ngrams(step, continues)?;
        continues = false;
    }
    if has_mixer {
        backend.norm(step, NextBlock::Attention, continues)?;
        backend.project(step)?;
        interrupt.check()?;
        backend.attend(step)?;
        interrupt.check()?;
        backend.project_output(step)?;
    }
    if step.has_feed_forward() {
        backend.norm(step, NextBlock::FeedForward, continues || has_mixer)?;
        feed_forward_step(backend, step, routing, interrupt)?;
    }
    match step.layer_weights().embeddings {
        Some(_) => backend.layer_embeddings(step),
        None => Ok(()),
    }
}

/// Runs the feed-forward of one layer on the normed residual stream.
pub(crate) fn feed_forward_step(
    backend: &mut dyn Backend,
    step: &Step<'_>,
    routing: Option<RoutingRows<'_>>,
    interrupt: &Interrupt,
) -> Result<(), ModelError> {
    match step.layer_weights().feed_forward {
        FeedForwardWeights::None => Ok(()),
        FeedForwardWeights::Dense { .. } => backend.dense_feed_forward(step),
        FeedForwardWeights::Experts { .. } => {
            match routing {
                Some(RoutingRows { experts, weights, scores }) => {
                    if let Some(scores) = scores {
                        backend.early_scores(step, scores)?;
                    }
                    backend.route(step, Some(experts))?;
                    backend.routing_weights(step, weights);
                }
                None => backend.route(step, None)?,
            }
            interrupt.check()?;
            backend.experts(step)
        }
    }
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder").field("family", &self.architecture.family).finish_non_exhaustive()
    }
}
