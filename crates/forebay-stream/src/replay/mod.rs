//! Runs recorded routing through the engine's cache state machine, under any policy and capacity.

mod lookups;

use std::ops::ControlFlow;

use serde::Serialize;

use crate::blocks::{ExpertIndex, LayerIndex};
use crate::cache::{CacheCounters, CacheShape, CacheState, LayerShape};
use crate::policy::{PolicyKind, Scope};
use crate::routing::Phase;

pub use lookups::Lookups;

/// Capacity of a cache.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Capacity {
    /// Total bytes. A per-layer policy gives each layer with experts an equal share.
    Bytes(u64),
    /// Fraction of the experts, 0 to 1, rounded down: of each layer's experts, or of all for a global policy.
    Share(f64),
    /// Number of experts for each layer. A global policy shares the sum.
    ExpertsPerLayer(u32),
}

impl Capacity {
    /// Returns the cache shape of this capacity. For `batch_may_exceed`, see [`CacheShape::batch_may_exceed`].
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

/// Counters of a replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ReplayCounters {
    pub all: CacheCounters,
    pub prompt: CacheCounters,
    pub generate: CacheCounters,
}

/// Outcome of one batch of a replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchOutcome {
    pub phase: Phase,
    pub layer: LayerIndex,
    pub lookups: u32,
    pub hits: u32,
    /// Number of the layer's experts that are resident after the batch.
    pub resident: u32,
}

/// Runs lookups through a cache that is empty at first and stays warm from the prompt to the generated tokens.
///
/// # Panics
/// Panics if the shape has fewer layers or experts than the trace.
pub fn replay(lookups: &Lookups, policy: PolicyKind, shape: &CacheShape) -> ReplayCounters {
    replay_observed(lookups, policy, shape, |_| {})
}

/// Runs lookups like [`replay`], and passes every batch's outcome to `observe`.
///
/// # Panics
/// Panics as [`replay`] does.
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

/// Runs lookups through `cache` and passes every batch's outcome to `observe`, until it returns [`ControlFlow::Break`].
/// Returns the counters of the batches so far. `lookup` looks one expert up; its last argument is the number of the
/// lookup, counted from 0.
///
/// # Panics
/// Panics if the cache has fewer layers or experts than the trace.
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
