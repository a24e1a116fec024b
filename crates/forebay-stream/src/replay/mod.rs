//! Recorded routing through the cache state machine that the engine runs, under any policy and capacity.

mod lookups;

use std::ops::ControlFlow;

use serde::Serialize;

use crate::blocks::{ExpertIndex, LayerIndex};
use crate::cache::{CacheCounters, CacheShape, CacheState, LayerShape};
use crate::policy::{PolicyKind, Scope};
use crate::routing::Phase;

pub use lookups::Lookups;

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
pub fn replay(lookups: &Lookups, policy: PolicyKind, shape: &CacheShape) -> ReplayCounters {
    replay_observed(lookups, policy, shape, |_| {})
}

/// As [`replay`], and shows every batch's outcome.
///
/// # Panics
/// As [`replay`].
pub fn replay_observed(
    lookups: &Lookups,
    policy: PolicyKind,
    shape: &CacheShape,
    mut observe: impl FnMut(BatchOutcome),
) -> ReplayCounters {
    let cache = CacheState::new(policy, shape);
    let lookup = |cache: &mut CacheState, layer, expert, _| cache.lookup(layer, expert);
    replay_through(cache, lookups, lookup, |batch| {
        observe(batch);
        ControlFlow::Continue(())
    })
}

/// Runs lookups through `cache` and shows every batch's outcome, until `observe` says otherwise; the counters are then
/// those of the batches so far. `lookup` looks one expert up; it gets the number of the lookup, counted from 0.
///
/// # Panics
/// If the cache has fewer layers or experts than the trace.
pub fn replay_through(
    mut cache: CacheState,
    lookups: &Lookups,
    mut lookup: impl FnMut(&mut CacheState, LayerIndex, ExpertIndex, usize) -> bool,
    mut observe: impl FnMut(BatchOutcome) -> ControlFlow<()>,
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
        let outcome = BatchOutcome {
            phase,
            layer,
            lookups: experts.len() as u32,
            hits: (after.hits - before.hits) as u32,
            resident: cache.resident(layer),
        };
        if observe(outcome).is_break() {
            break;
        }
    }
    counters.all = cache.counters();
    counters
}
