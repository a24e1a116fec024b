//! Benefit and cost of prefetching predicted experts, computed by replay.
//!
//! As in the engine, the predicted experts of a layer are read before its router runs, into slots of their own. They
//! evict nothing from the cache, but their slots reduce its capacity.

use std::fmt;
use std::str::FromStr;

use forebay_stream::{
    CacheState, Capacity, ExpertIndex, Lookups, Phase, PolicyKind, RoutingTrace, replay_observed,
};
use serde::Serialize;

use super::layers::flat;

/// Method of predicting a token's experts in a layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Predictor {
    /// Predicts the experts that the previous token chose in the layer.
    Lag,
    /// Predicts the experts that tokens chose most often in the layer so far.
    HotList,
    /// Predicts the largest scores of the layer's router on the token's state one layer earlier. The trace must have
    /// scores.
    NextRouter,
}

impl Predictor {
    pub const ALL: [Predictor; 3] = [Predictor::Lag, Predictor::HotList, Predictor::NextRouter];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Predictor::Lag => "lag",
            Predictor::HotList => "hot-list",
            Predictor::NextRouter => "next-router",
        }
    }
}

impl fmt::Display for Predictor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

impl FromStr for Predictor {
    type Err = String;

    fn from_str(text: &str) -> Result<Predictor, String> {
        let found = Predictor::ALL.into_iter().find(|predictor| predictor.name() == text);
        found.ok_or_else(|| {
            format!("unknown predictor {text:?}; there are lag, hot-list and next-router")
        })
    }
}

/// Effect of predictions on generated tokens. The recall is `foreseen / lookups`, and the precision is `foreseen /
/// predictions`.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Prediction {
    /// Number of lookups of generated tokens.
    pub lookups: u64,
    /// Number of experts predicted for generated tokens.
    pub predictions: u64,
    /// Number of predicted experts that were looked up, in memory or not.
    pub foreseen: u64,
    /// Number of misses without predictions, when the cache has all of the capacity.
    pub misses_without: u64,
    /// Number of misses that were not predicted, which a token waits for.
    pub misses_with: u64,
    /// Number of reads of predicted experts.
    pub reads_prefetched: u64,
    /// Number of reads of predicted experts that the token needed.
    pub reads_useful: u64,
    /// Bytes of predicted experts that were read but not needed.
    pub wasted_bytes: u64,
    /// Bytes of capacity that hold predicted experts instead of cached ones.
    pub displaced_bytes: u64,
    /// Bytes read for generated tokens without predictions.
    pub read_bytes_without: u64,
    /// Bytes read for generated tokens with predictions.
    pub read_bytes_with: u64,
}

/// Replays the trace with `depth` predicted experts for each generated token and layer. Returns `None` if the
/// predictor needs scores and the trace has none.
///
/// # Panics
/// Panics if `lookups` are not those of `trace`.
pub fn predict(
    trace: &RoutingTrace,
    lookups: &Lookups,
    policy: PolicyKind,
    capacity: Capacity,
    predictor: Predictor,
    depth: usize,
) -> Option<Prediction> {
    if predictor == Predictor::NextRouter && !trace.header().scores {
        return None;
    }
    let layers = lookups.layers();
    let mut shape = capacity.shape(policy.scope, layers, true);
    let mut prediction = Prediction::default();
    let mut bytes_without = 0;
    let counted = replay_observed(lookups, policy, &shape, |batch| {
        if batch.phase == Phase::Generate {
            let misses = u64::from(batch.lookups - batch.hits);
            bytes_without += misses * layers[batch.layer.0 as usize].1;
        }
    });
    prediction.misses_without = counted.generate.misses();
    prediction.read_bytes_without = bytes_without;

    let largest = layers.iter().map(|layer| layer.1).max().unwrap_or(0);
    prediction.displaced_bytes = depth as u64 * largest;
    let places = depth as u64 * shape.layers.iter().map(|of| of.cost).max().unwrap_or(0);
    let sharing = shape.layers.iter().filter(|of| of.experts > 0).map(|of| of.group);
    let sharing = sharing.collect::<std::collections::BTreeSet<_>>().len().max(1) as u64;
    for group in &mut shape.groups {
        *group = group.saturating_sub(places.div_ceil(sharing));
    }
    let mut predictor_state = OnlinePredictor::new(trace, predictor, depth);
    let mut cache = CacheState::new(policy, &shape);
    let mut evicted = Vec::new();
    for ((phase, layer, experts), source) in lookups.batches().zip(lookups.sources()) {
        let token = trace.batch(source).tokens.start;
        let bytes = layers[layer.0 as usize].1;
        if phase == Phase::Generate {
            let predictions = predictor_state.predict(token, layer.0 as usize);
            let read = |predict: &&ExpertIndex| !cache.is_resident(layer, **predict);
            let useful =
                predictions.iter().filter(read).filter(|g| experts.contains(g)).count() as u64;
            let predicted = predictions.iter().filter(read).count() as u64;
            prediction.foreseen +=
                predictions.iter().filter(|g| experts.contains(g)).count() as u64;
            prediction.lookups += experts.len() as u64;
            prediction.predictions += predictions.len() as u64;
            prediction.reads_prefetched += predicted;
            prediction.reads_useful += useful;
            prediction.wasted_bytes += (predicted - useful) * bytes;
            let misses = experts.iter().filter(|e| !cache.is_resident(layer, **e)).count() as u64;
            prediction.misses_with += misses - useful;
            prediction.read_bytes_with += (misses + predicted - useful) * bytes;
        }
        for &expert in experts {
            cache.lookup(layer, expert);
        }
        evicted.clear();
        cache.retain(layer, experts, &mut evicted);
        predictor_state.see(layer.0 as usize, experts);
    }
    Some(prediction)
}

/// State of a predictor during a replay.
struct OnlinePredictor<'a> {
    trace: &'a RoutingTrace,
    predictor: Predictor,
    depth: usize,
    first: Vec<usize>,
    uses: Vec<u32>,
    ranked: Vec<ExpertIndex>,
}

impl<'a> OnlinePredictor<'a> {
    fn new(trace: &'a RoutingTrace, predictor: Predictor, depth: usize) -> OnlinePredictor<'a> {
        let (first, entries) = flat(trace.header().layers.iter().map(|layer| layer.experts));
        OnlinePredictor {
            trace,
            predictor,
            depth,
            first,
            uses: vec![0; entries],
            ranked: Vec::new(),
        }
    }

    fn see(&mut self, layer: usize, experts: &[ExpertIndex]) {
        let first = self.first[layer];
        experts.iter().for_each(|expert| self.uses[first + expert.0 as usize] += 1);
    }

    /// Returns the predicted experts of a token in a layer, the likeliest first. `Lag` keeps the order of the trace.
    fn predict(&mut self, token: usize, layer: usize) -> &[ExpertIndex] {
        self.ranked.clear();
        let experts = self.trace.header().layers[layer].experts;
        match self.predictor {
            Predictor::Lag => {
                if let Some(before) = token.checked_sub(1) {
                    self.ranked.extend(self.trace.experts(before, layer));
                }
            }
            Predictor::HotList => {
                let uses = &self.uses[self.first[layer]..][..experts as usize];
                let used = (0..experts).filter(|&expert| uses[expert as usize] > 0);
                self.ranked.extend(used.map(ExpertIndex));
                let often = |expert: &ExpertIndex| std::cmp::Reverse(uses[expert.0 as usize]);
                self.ranked.sort_by_key(often);
            }
            Predictor::NextRouter => {
                let scores = self.trace.scores(token, layer);
                self.ranked.extend((0..experts).map(ExpertIndex));
                let score = |expert: &ExpertIndex| scores[expert.0 as usize];
                self.ranked.sort_by(|a, b| score(b).total_cmp(&score(a)));
            }
        }
        self.ranked.truncate(self.depth);
        &self.ranked
    }
}
