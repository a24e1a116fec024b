//! The one decoder: a batch of tokens in, logits out, whatever computes.

use crate::ModelError;
use crate::arch::Architecture;
use crate::backend::{Backend, Batch, Begun, ChosenExperts, End, NextBlock, Step};
use crate::weights::{FeedForwardWeights, Weights};
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

/// Which positions of a call get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsWanted {
    None,
    Last,
    All,
}

/// What tokens were routed to: rows `[tokens, layers, k]`.
#[derive(Debug, Clone, Default)]
pub struct Routing {
    /// Chosen experts, best first; -1 in layers without experts.
    pub experts: Vec<i32>,
    /// Their weights; 0 where there are none, and all 0 from a backend that does not give them
    /// ([`Backend::gives_routing_weights`]).
    pub weights: Vec<f32>,
    /// If they are wanted, rows `[tokens, experts of all layers]`: what each layer's router says of the token's state
    /// one layer earlier ([`Backend::early_scores`]).
    pub scores: Option<Vec<f32>>,
}

impl Routing {
    /// Forgets all rows and keeps their memory.
    pub fn clear(&mut self) {
        self.experts.clear();
        self.weights.clear();
        self.scores.iter_mut().for_each(Vec::clear);
    }

    /// Adds rows for `tokens` tokens.
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

/// Rows of one batch.
struct RoutingRows<'a> {
    /// `[tokens, layers, k]`
    experts: &'a mut [i32],
    weights: &'a mut [f32],
    /// `[tokens, experts of all layers]`
    scores: Option<&'a mut [f32]>,
}

/// A model ready to compute: description, weights, and the backend with its cache.
pub struct Decoder {
    architecture: Architecture,
    weights: Weights,
    backend: Box<dyn Backend>,
    position: usize,
    followed: Option<Box<dyn ChosenExperts>>,
    interrupt: Interrupt,
    watch: Option<PromptWatch>,
}

/// Called with the tokens of a prompt that are done and all of them, after each layer of each batch: tokens that are
/// through some of the layers count in part. Must not allocate and should return at once.
pub type PromptWatch = Box<dyn FnMut(usize, usize) + Send>;

impl Decoder {
    /// A decoder that computes on `backend`, which was made for the same description and weights.
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

    /// The blocks in host memory, where the backend computes with such.
    pub fn residency(&self) -> Option<&Residency> {
        self.backend.residency()
    }

    /// From now on tokens have the experts that somebody else says; `None`: those that the routers choose.
    pub fn follow(&mut self, experts: Option<Box<dyn ChosenExperts>>) {
        self.followed = experts;
    }

    /// Calls of [`Decoder::forward`] end with [`ModelError::Interrupted`] when `interrupt` says so.
    pub fn stop_on(&mut self, interrupt: &Interrupt) {
        self.interrupt = interrupt.clone();
    }

    /// From now on, calls with more than one token tell `watch` how far they are.
    pub fn watch_prompts(&mut self, watch: Option<PromptWatch>) {
        self.watch = watch;
    }

    /// Ends a generated token in the counters.
    pub fn end_token(&mut self) {
        if let Some(residency) = self.backend.residency_mut() {
            residency.end_token();
        }
    }

    /// Ends a prompt of `tokens` tokens in the counters.
    pub fn end_prompt(&mut self, tokens: usize) {
        if let Some(residency) = self.backend.residency_mut() {
            residency.end_prompt(tokens);
        }
    }

    /// Bytes reserved for keys and values.
    pub fn cache_bytes(&self) -> u64 {
        self.backend.cache_bytes()
    }

    /// Positions that the cache can hold.
    pub fn context(&self) -> usize {
        self.backend.context()
    }

    /// Positions in the cache.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Forgets all positions from `position` on. Layers with a window keep little more than it: if that is too far back
    /// for them, everything is forgotten. How many positions are left.
    pub fn truncate(&mut self, position: usize) -> usize {
        self.position = self.backend.truncate(self.position.min(position));
        self.position
    }

    /// Runs `tokens` after what the cache holds and writes logits `[positions, vocabulary]`.
    ///
    /// `routing`, if given, gets the chosen experts of every token appended.
    ///
    /// # Errors
    /// A full context, a token outside of the vocabulary, a failed read, values that are not
    /// finite, or [`ModelError::Interrupted`]. After an error the cache holds what it held before the call, or nothing where that is too far back for
    /// layers with a window ([`Decoder::truncate`]): [`Decoder::position`] says so.
    pub fn forward(
        &mut self,
        tokens: &[u32],
        wanted: LogitsWanted,
        logits: &mut Vec<f32>,
        routing: Option<&mut Routing>,
    ) -> Result<(), ModelError> {
        logits.clear();
        self.run(tokens, &mut Output::Logits(wanted, logits), routing)
    }

    /// As [`Decoder::forward`], but gives only the `count` largest logits of the last token, with their ids, largest
    /// first, of equals the lower id first.
    ///
    /// # Errors
    /// As [`Decoder::forward`].
    ///
    /// # Panics
    /// When `count` is 0 or more than the backend's [`Backend::largest_count`].
    pub fn forward_largest(
        &mut self,
        tokens: &[u32],
        count: usize,
        largest: &mut Vec<(f32, u32)>,
        routing: Option<&mut Routing>,
    ) -> Result<(), ModelError> {
        largest.clear();
        self.run(tokens, &mut Output::Largest(count, largest), routing)
    }

    fn run(
        &mut self,
        tokens: &[u32],
        output: &mut Output<'_>,
        mut routing: Option<&mut Routing>,
    ) -> Result<(), ModelError> {
        self.check(tokens)?;
        let start = self.position;
        let batch = self.backend.batch_tokens();
        let last_batch = tokens.len().div_ceil(batch).saturating_sub(1);
        let whole = Whole { start, tokens: tokens.len() };
        for (index, tokens) in tokens.chunks(batch).enumerate() {
            let last = index == last_batch;
            let done = self.traced_batch(tokens, whole, last, output, routing.as_deref_mut());
            // Steps that were cut short may have failed because of that, or not at all.
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

    /// As [`Decoder::forward_batch`], within a span that says what the pass found and read.
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
        let step =
            Step { architecture, weights, layer: 0, position: *position, count, chosen: None };
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

/// The call that a batch belongs to.
#[derive(Clone, Copy)]
struct Whole {
    /// Position of its first token.
    start: usize,
    tokens: usize,
}

/// What a call is for.
enum Output<'a> {
    Logits(LogitsWanted, &'a mut Vec<f32>),
    Largest(usize, &'a mut Vec<(f32, u32)>),
}

impl Output<'_> {
    /// How one of the call's batches ends.
    fn end(&self, last: bool) -> End {
        match self {
            Output::Logits(LogitsWanted::None, _) => End::Nothing,
            Output::Logits(LogitsWanted::Last, _) | Output::Largest(..) if !last => End::Nothing,
            Output::Logits(..) => End::Logits,
            Output::Largest(count, _) => End::Largest(*count),
        }
    }
}

/// One layer: attention, then the feed-forward. Outputs of blocks are added to the residual stream by the norm of the
/// next.
fn layer_step(
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
