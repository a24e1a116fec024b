//! The decoder: runs a batch of tokens through all layers of a backend and returns logits.

use crate::ModelError;
use crate::arch::Architecture;
use crate::backend::{Backend, Batch, Begun, ChosenExperts, End, NextBlock, Step};
use crate::weights::{FeedForwardWeights, Weights};
use forebay_compute::RowKind;
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
        let values = tokens * architecture.layers.len() * architecture.experts_per_token();
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

/// A model that is ready to compute: its description, weights, and a backend with a key/value cache.
pub struct Decoder {
    architecture: Architecture,
    weights: Weights,
    backend: Box<dyn Backend>,
    position: usize,
    followed: Option<Box<dyn ChosenExperts>>,
    interrupt: Interrupt,
    watch: Option<PromptWatch>,
}

/// Progress callback for prompts, called after each layer of each batch with (tokens done, tokens in the prompt). Tokens
/// that have passed some of the layers count in part. It must not allocate and should return quickly.
pub type PromptWatch = Box<dyn FnMut(usize, usize) + Send>;

impl Decoder {
    /// Creates a decoder. `backend` must have been created for the same description and weights.
    pub fn new(architecture: Architecture, weights: Weights, backend: Box<dyn Backend>) -> Decoder {
        Decoder {
            architecture,
            weights,
            backend,
            position: 0,
            followed: None,
            interrupt: Interrupt::new(),
            watch: None,
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

    /// Returns the residency of blocks in host memory, if the backend streams weights through it.
    pub fn residency(&self) -> Option<&Residency> {
        self.backend.residency()
    }

    /// Makes tokens use the given experts from now on; `None` returns the choice to the routers.
    pub fn follow(&mut self, experts: Option<Box<dyn ChosenExperts>>) {
        self.followed = experts;
    }

    /// Makes [`Decoder::forward`] return [`ModelError::Interrupted`] once `interrupt` is set.
    pub fn stop_on(&mut self, interrupt: &Interrupt) {
        self.interrupt = interrupt.clone();
    }

    /// Sets the progress callback for calls with more than one token.
    pub fn watch_prompts(&mut self, watch: Option<PromptWatch>) {
        self.watch = watch;
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

    /// Returns the number of bytes reserved for keys and values.
    pub fn cache_bytes(&self) -> u64 {
        self.backend.cache_bytes()
    }

    /// Returns the number of positions that the cache can hold.
    pub fn context(&self) -> usize {
        self.backend.context()
    }

    /// Returns the number of positions in the cache.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Drops all positions from `position` on and returns the number of positions left.
    ///
    /// Sliding-window layers keep little more than their window. If `position` is too far back for them, all positions
    /// are dropped.
    pub fn truncate(&mut self, position: usize) -> usize {
        self.position = self.backend.truncate(self.position.min(position));
        self.position
    }

    /// Runs `tokens`, all of one kind, after the positions in the cache and writes logits `[positions, vocabulary]`.
    ///
    /// Appends the chosen experts of every token to `routing`, if given.
    ///
    /// # Errors
    /// Returns an error if the context is full, a token is outside the vocabulary, a read fails, values are not finite, or
    /// the call was interrupted ([`ModelError::Interrupted`]). After an error, [`Decoder::position`] is the position before
    /// the call, or 0 if sliding-window layers cannot go back that far ([`Decoder::truncate`]).
    pub fn forward(
        &mut self,
        kind: RowKind,
        tokens: &[u32],
        wanted: LogitsWanted,
        logits: &mut Vec<f32>,
        routing: Option<&mut Routing>,
    ) -> Result<(), ModelError> {
        logits.clear();
        self.run(kind, tokens, &mut Output::Logits(wanted, logits), routing)
    }

    /// Runs `tokens` like [`Decoder::forward`], but returns only the `count` largest logits of the last token, with their
    /// ids, in descending order. Equal logits are sorted by id.
    ///
    /// # Errors
    /// Returns the errors of [`Decoder::forward`].
    ///
    /// # Panics
    /// Panics if `count` is 0 or larger than the backend's [`Backend::largest_count`].
    pub fn forward_largest(
        &mut self,
        kind: RowKind,
        tokens: &[u32],
        count: usize,
        largest: &mut Vec<(f32, u32)>,
        routing: Option<&mut Routing>,
    ) -> Result<(), ModelError> {
        largest.clear();
        self.run(kind, tokens, &mut Output::Largest(count, largest), routing)
    }

    fn run(
        &mut self,
        kind: RowKind,
        tokens: &[u32],
        output: &mut Output<'_>,
        mut routing: Option<&mut Routing>,
    ) -> Result<(), ModelError> {
        self.check(tokens)?;
        let start = self.position;
        let batch = self.backend.batch_tokens();
        let last_batch = tokens.len().div_ceil(batch).saturating_sub(1);
        let whole = Whole { start, tokens: tokens.len(), kind };
        for (index, tokens) in tokens.chunks(batch).enumerate() {
            let last = index == last_batch;
            let done = self.traced_batch(tokens, whole, last, output, routing.as_deref_mut());
            // An interrupted step may report an error of its own or none; the interrupt takes precedence.
            let cut_short = self.backend.was_cut_short();
            let done = if cut_short { Err(ModelError::Interrupted) } else { done };
            if let Err(error) = done {
                self.truncate(start);
                return Err(error);
            }
        }
        Ok(())
    }

    fn check(&self, tokens: &[u32]) -> Result<(), ModelError> {
        let vocabulary = self.architecture.vocabulary;
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocabulary) {
            return Err(ModelError::TokenOutOfRange { id: *id, vocabulary });
        }
        let (used, context) = (self.position, self.context());
        if used + tokens.len() > context {
            return Err(ModelError::ContextFull { used, context, wanted: tokens.len() });
        }
        Ok(())
    }

    /// Runs [`Decoder::forward_batch`] in a tracing span that records cache hits, misses and reads of the pass.
    fn traced_batch(
        &mut self,
        tokens: &[u32],
        whole: Whole,
        last: bool,
        output: &mut Output<'_>,
        routing: Option<&mut Routing>,
    ) -> Result<(), ModelError> {
        let (position, count) = (self.position, tokens.len());
        let span = match count {
            1 => pass_span!("token", position, count),
            _ => pass_span!("prompt_batch", position, count),
        };
        let before = self.residency().filter(|_| !span.is_disabled()).map(Residency::statistics);
        let done = span.in_scope(|| self.forward_batch(tokens, whole, last, output, routing));
        if let (Some(before), Some(residency)) = (before, self.residency()) {
            let now = residency.statistics();
            span.record("hits", now.hits - before.hits);
            span.record("misses", now.misses - before.misses);
            span.record("read_bytes", now.bytes_read - before.bytes_read);
            span.record("wait_seconds", now.wait_seconds - before.wait_seconds);
        }
        done
    }

    fn forward_batch(
        &mut self,
        tokens: &[u32],
        whole: Whole,
        last: bool,
        output: &mut Output<'_>,
        mut routing: Option<&mut Routing>,
    ) -> Result<(), ModelError> {
        let Decoder { architecture, weights, backend, position, followed, interrupt, watch } = self;
        interrupt.check()?;
        let (count, layers) = (tokens.len(), architecture.layers.len());
        let step = Step {
            architecture,
            weights,
            layer: 0,
            position: *position,
            count,
            kind: whole.kind,
            chosen: None,
        };
        let end = output.end(last);
        if let Some(followed) = followed {
            followed.begin(count);
        }
        let scores = routing.as_deref().and_then(|routing| routing.scores.as_ref());
        let batch = Batch {
            tokens,
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
        let to_do = if begun == Begun::Recorded { 0 } else { layers };
        for layer in 0..to_do {
            let _span = tracing::trace_span!("layer", layer).entered();
            let has_experts = architecture.layers[layer].feed_forward.has_experts();
            let followed = followed.as_ref().filter(|_| has_experts);
            let chosen = followed.map(|followed| followed.experts(layer));
            let step = Step { layer, chosen, ..step };
            let rows = routing.as_deref_mut().map(|routing| RoutingRows {
                experts: &mut routing.experts[row_start..],
                weights: &mut routing.weights[row_start..],
                scores: routing.scores.as_mut().map(|scores| &mut scores[score_start..]),
            });
            layer_step(backend.as_mut(), &step, rows, interrupt)?;
            if let Some(watch) = watch.as_mut().filter(|_| whole.tokens > 1) {
                let before = step.position - whole.start;
                watch(before + count * (layer + 1) / (layers + 1), whole.tokens);
            }
        }
        *position += count;
        let step = Step { layer: layers, ..step };
        match (end, output) {
            (End::Nothing, _) => backend.end(&step),
            (_, Output::Logits(LogitsWanted::All, logits)) => backend.head(&step, 0, logits),
            (_, Output::Logits(_, logits)) => backend.head(&step, count - 1, logits),
            (_, Output::Largest(count, largest)) => backend.largest(&step, *count, largest),
        }?;
        if let Some(routing) = routing {
            backend.recorded_routing(&step, &mut routing.experts[row_start..]);
        }
        if let Some(watch) = watch.as_mut().filter(|_| whole.tokens > 1) {
            watch(*position - whole.start, whole.tokens);
        }
        Ok(())
    }
}

/// The call of [`Decoder::forward`] that a batch belongs to.
#[derive(Clone, Copy)]
struct Whole {
    /// Position of the call's first token.
    start: usize,
    tokens: usize,
    kind: RowKind,
}

/// The output that a call produces.
enum Output<'a> {
    Logits(LogitsWanted, &'a mut Vec<f32>),
    Largest(usize, &'a mut Vec<(f32, u32)>),
}

impl Output<'_> {
    /// Returns how a batch of this call ends.
    fn end(&self, last: bool) -> End {
        match self {
            Output::Logits(LogitsWanted::None, _) => End::Nothing,
            Output::Logits(LogitsWanted::Last, _) | Output::Largest(..) if !last => End::Nothing,
            Output::Logits(..) => End::Logits,
            Output::Largest(count, _) => End::Largest(*count),
        }
    }
}

/// Runs one layer: attention, then the feed-forward. The norm of each block adds the output of the block before it to the
/// residual stream.
pub(crate) fn layer_step(
    backend: &mut dyn Backend,
    step: &Step<'_>,
    routing: Option<RoutingRows<'_>>,
    interrupt: &Interrupt,
) -> Result<(), ModelError> {
    interrupt.check()?;
    backend.enter_layer(step)?;
    backend.norm(step, NextBlock::Attention, step.layer > 0)?;
    backend.project(step)?;
    interrupt.check()?;
    backend.attend(step)?;
    interrupt.check()?;
    backend.project_output(step)?;
    backend.norm(step, NextBlock::FeedForward, true)?;
    feed_forward_step(backend, step, routing, interrupt)
}

/// Runs the feed-forward of one layer on the normed residual stream.
pub(crate) fn feed_forward_step(
    backend: &mut dyn Backend,
    step: &Step<'_>,
    routing: Option<RoutingRows<'_>>,
    interrupt: &Interrupt,
) -> Result<(), ModelError> {
    match step.layer_weights().feed_forward {
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
        f.debug_struct("Decoder")
            .field("family", &self.architecture.family)
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}
