//! Recorded routing through the cache state machine that the engine runs, under any policy and capacity.

mod curve;
mod lookups;
mod predictors;

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::blocks::{ExpertIndex, LayerIndex};
use crate::cache::{CacheCounters, CacheShape, CacheState, LayerShape};
use crate::error::StreamError;
use crate::policy::{PolicyKind, Ranking, Scope};
use crate::routing::Phase;

pub use curve::LruCurve;
pub use lookups::Lookups;
pub use predictors::{Prediction, Predictor, predict};

/// A policy that a replay can run: one of the engine's, or one that knows the trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ReplayPolicy {
    Online(PolicyKind),
    /// Only the experts that the trace uses most stay: the best of all fixed choices, as nobody can make it beforehand.
    HotList(Scope),
    /// The expert whose next use is farthest away goes: the bound for experts of one size, and very near it for others.
    Belady(Scope),
}

impl ReplayPolicy {
    /// All policies, the bounds last.
    pub fn all() -> Vec<ReplayPolicy> {
        let online = PolicyKind::ALL.into_iter().map(ReplayPolicy::Online);
        let scopes = [Scope::PerLayer, Scope::Global];
        let knowing = scopes.map(ReplayPolicy::HotList).into_iter();
        online.chain(knowing).chain(scopes.map(ReplayPolicy::Belady)).collect()
    }

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            ReplayPolicy::Online(policy) => policy.name(),
            ReplayPolicy::HotList(Scope::Global) => "hot-list",
            ReplayPolicy::HotList(Scope::PerLayer) => "layer-hot-list",
            ReplayPolicy::Belady(Scope::Global) => "belady",
            ReplayPolicy::Belady(Scope::PerLayer) => "layer-belady",
        }
    }

    /// Who competes for the same capacity.
    pub fn scope(self) -> Scope {
        match self {
            ReplayPolicy::Online(policy) => policy.scope,
            ReplayPolicy::HotList(scope) | ReplayPolicy::Belady(scope) => scope,
        }
    }
}

impl fmt::Display for ReplayPolicy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

impl FromStr for ReplayPolicy {
    type Err = StreamError;

    fn from_str(text: &str) -> Result<ReplayPolicy, StreamError> {
        let mut all = ReplayPolicy::all().into_iter();
        all.find(|policy| policy.name() == text)
            .ok_or_else(|| StreamError::UnknownPolicy { name: text.to_owned() })
    }
}

impl Serialize for ReplayPolicy {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// How much may stay.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Capacity {
    /// Bytes in all; policies per layer give each layer with experts the same share of them.
    Bytes(u64),
    /// A share of the experts, 0 to 1: of each layer's, or of all, rounded down.
    Share(f64),
    /// So many experts for each layer; global policies share the sum.
    ExpertsPerLayer(u32),
}

impl Capacity {
    /// The cache of this capacity. `batch_may_exceed`: see [`CacheShape::batch_may_exceed`].
    pub fn shape(self, scope: Scope, layers: &[(u32, u64)], batch_may_exceed: bool) -> CacheShape {
        let per_layer = |(experts, _): &(u32, u64)| match self {
            Capacity::Share(share) => (f64::from(*experts) * share.clamp(0.0, 1.0)) as u64,
            Capacity::ExpertsPerLayer(count) => u64::from(count.min(*experts)),
            Capacity::Bytes(_) => 0,
        };
        if let Capacity::Bytes(bytes) = self {
            let shape = CacheShape::from_bytes(scope, layers, bytes);
            return CacheShape { batch_may_exceed, ..shape };
        }
        let of_layer: Vec<u64> = layers.iter().map(per_layer).collect();
        let experts = layers.iter().map(|layer| u64::from(layer.0)).sum::<u64>();
        let together = match self {
            Capacity::Share(share) => (experts as f64 * share.clamp(0.0, 1.0)) as u64,
            _ => of_layer.iter().sum(),
        };
        let group = |layer: usize| if scope == Scope::PerLayer { layer } else { 0 };
        let shapes = layers.iter().enumerate();
        CacheShape {
            layers: shapes
                .map(|(layer, &(experts, _))| LayerShape { experts, cost: 1, group: group(layer) })
                .collect(),
            groups: if scope == Scope::PerLayer { of_layer } else { vec![together] },
            batch_may_exceed,
            preloaded: vec![false; layers.len()],
        }
    }
}

/// What a replay counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ReplayCounters {
    pub all: CacheCounters,
    pub prompt: CacheCounters,
    pub generate: CacheCounters,
}

/// What one batch of a replay did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchOutcome {
    pub phase: Phase,
    pub layer: LayerIndex,
    pub lookups: u32,
    pub hits: u32,
    /// Experts of the layer that are resident after it.
    pub resident: u32,
}

/// Runs lookups through the cache, which is empty at first and stays warm from the prompt to the generated tokens.
///
/// # Panics
/// If the shape has fewer layers or experts than the trace.
pub fn replay(lookups: &Lookups, policy: ReplayPolicy, shape: &CacheShape) -> ReplayCounters {
    replay_observed(lookups, policy, shape, |_| {})
}

/// As [`replay`], and shows every batch's outcome.
///
/// # Panics
/// As [`replay`].
pub fn replay_observed(
    lookups: &Lookups,
    policy: ReplayPolicy,
    shape: &CacheShape,
    observe: impl FnMut(BatchOutcome),
) -> ReplayCounters {
    match policy {
        ReplayPolicy::Online(policy) => {
            let cache = CacheState::new(policy, shape);
            run(lookups, cache, |cache, layer, expert, _| cache.lookup(layer, expert), observe)
        }
        ReplayPolicy::HotList(_) => {
            let mut cache = CacheState::with_ranking(Ranking::Fixed, shape);
            for (layer, expert) in hot_list(lookups, shape) {
                cache.fix(layer, expert);
            }
            run(lookups, cache, |cache, layer, expert, _| cache.lookup(layer, expert), observe)
        }
        ReplayPolicy::Belady(_) => {
            let next = next_uses(lookups, shape);
            let cache = CacheState::with_ranking(Ranking::NextUse, shape);
            let lookup = |cache: &mut CacheState, layer, expert, number: usize| {
                cache.lookup_knowing(layer, expert, next[number])
            };
            run(lookups, cache, lookup, observe)
        }
    }
}

fn run(
    lookups: &Lookups,
    mut cache: CacheState,
    mut lookup: impl FnMut(&mut CacheState, LayerIndex, ExpertIndex, usize) -> bool,
    mut observe: impl FnMut(BatchOutcome),
) -> ReplayCounters {
    let mut counters = ReplayCounters::default();
    let mut evicted = Vec::new();
    let mut number = 0;
    for (phase, layer, experts) in lookups.batches() {
        let before = cache.counters();
        for &expert in experts {
            lookup(&mut cache, layer, expert, number);
            number += 1;
        }
        evicted.clear();
        cache.retain(layer, experts, &mut evicted);
        let after = cache.counters();
        let of_phase = match phase {
            Phase::Prompt => &mut counters.prompt,
            Phase::Generate => &mut counters.generate,
        };
        of_phase.add_between(&before, &after);
        observe(BatchOutcome {
            phase,
            layer,
            lookups: experts.len() as u32,
            hits: (after.hits - before.hits) as u32,
            resident: cache.resident(layer),
        });
    }
    counters.all = cache.counters();
    counters
}

/// First entry of every layer, and the number of entries: layers one after the other.
fn flat(layers: impl Iterator<Item = u32>) -> (Vec<usize>, usize) {
    let mut end = 0;
    let mut first = Vec::new();
    for experts in layers {
        first.push(end);
        end += experts as usize;
    }
    (first, end)
}

/// For every lookup the number of the batch that looks the same expert up next.
fn next_uses(lookups: &Lookups, shape: &CacheShape) -> Vec<u64> {
    let (first, entries) = flat(shape.layers.iter().map(|layer| layer.experts));
    let mut coming = vec![u64::MAX; entries];
    let mut next = vec![u64::MAX; lookups.len()];
    let batches: Vec<_> = lookups.batches().collect();
    let mut end = lookups.len();
    for (number, (_, layer, experts)) in batches.iter().enumerate().rev() {
        let start = end - experts.len();
        for (place, expert) in next[start..end].iter_mut().zip(*experts) {
            let entry = first[layer.0 as usize] + expert.0 as usize;
            *place = std::mem::replace(&mut coming[entry], number as u64);
        }
        end = start;
    }
    next
}

/// The experts that are looked up most for what they cost, as far as each group has room; of equals the first.
fn hot_list(lookups: &Lookups, shape: &CacheShape) -> Vec<(LayerIndex, ExpertIndex)> {
    let (first, entries) = flat(shape.layers.iter().map(|layer| layer.experts));
    let mut uses = vec![0_u64; entries];
    for (_, layer, experts) in lookups.batches() {
        for expert in experts {
            uses[first[layer.0 as usize] + expert.0 as usize] += 1;
        }
    }
    let mut all: Vec<(LayerIndex, ExpertIndex, u64)> = Vec::new();
    for (layer, of) in shape.layers.iter().enumerate() {
        let experts = (0..of.experts).map(|expert| {
            (LayerIndex(layer as u32), ExpertIndex(expert), uses[first[layer] + expert as usize])
        });
        all.extend(experts.filter(|expert| expert.2 > 0));
    }
    let cost = |layer: LayerIndex| shape.layers[layer.0 as usize].cost.max(1);
    all.sort_by_key(|&(layer, expert, uses)| {
        (std::cmp::Reverse((u128::from(uses) << 32) / u128::from(cost(layer))), layer, expert)
    });
    let mut room = shape.groups.clone();
    all.retain(|&(layer, _, _)| {
        let of = &shape.layers[layer.0 as usize];
        let left = room[of.group].checked_sub(of.cost);
        room[of.group] = left.unwrap_or(room[of.group]);
        left.is_some()
    });
    all.into_iter().map(|(layer, expert, _)| (layer, expert)).collect()
}
