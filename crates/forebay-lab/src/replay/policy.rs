//! Policies that a replay can run: the engine's, and bounds that know the trace.

use std::fmt;
use std::ops::ControlFlow;
use std::str::FromStr;

use forebay_stream::{
    BatchOutcome, CacheShape, CacheState, ExpertIndex, LayerIndex, Lookups, PolicyKind, Ranking,
    ReplayCounters, Scope, StreamError, replay_through,
};
use serde::Serialize;

use super::layers::flat;

/// Policy that a replay can run: one of the engine's, or one that knows the trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ReplayPolicy {
    Online(PolicyKind),
    /// Keeps a fixed set of experts: those that the trace uses most. For experts of one size, this is the best fixed
    /// set, but an engine cannot know it in advance.
    HotList(Scope),
    /// Evicts the expert whose next use is farthest away. This is the bound for experts of one size, and very close
    /// to it for others.
    Belady(Scope),
}

impl ReplayPolicy {
    /// Returns all policies, with the bounds last.
    pub fn all() -> Vec<ReplayPolicy> {
        let online = PolicyKind::ALL.into_iter().map(ReplayPolicy::Online);
        let scopes = [Scope::PerLayer, Scope::Global];
        let knowing = scopes.map(ReplayPolicy::HotList).into_iter();
        online.chain(knowing).chain(scopes.map(ReplayPolicy::Belady)).collect()
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            ReplayPolicy::Online(policy) => policy.name(),
            ReplayPolicy::HotList(Scope::Global) => "hot-list",
            ReplayPolicy::HotList(Scope::PerLayer) => "layer-hot-list",
            ReplayPolicy::Belady(Scope::Global) => "belady",
            ReplayPolicy::Belady(Scope::PerLayer) => "layer-belady",
        }
    }

    /// Returns the scope in which experts compete for capacity.
    pub fn scope(self) -> Scope {
        match self {
            ReplayPolicy::Online(policy) => policy.scope,
            ReplayPolicy::HotList(scope) | ReplayPolicy::Belady(scope) => scope,
        }
    }
}

impl From<PolicyKind> for ReplayPolicy {
    fn from(policy: PolicyKind) -> ReplayPolicy {
        ReplayPolicy::Online(policy)
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

/// Runs the lookups through a cache that is empty at first. It stays warm from the prompt to the generated tokens.
///
/// # Panics
/// Panics if the shape has fewer layers or experts than the trace.
pub fn replay(lookups: &Lookups, policy: ReplayPolicy, shape: &CacheShape) -> ReplayCounters {
    replay_observed(lookups, policy, shape, |_| {})
}

/// Runs the same replay as [`replay`], and passes the outcome of every batch to `observe`.
///
/// # Panics
/// Panics if the shape has fewer layers or experts than the trace.
pub fn replay_observed(
    lookups: &Lookups,
    policy: ReplayPolicy,
    shape: &CacheShape,
    mut observe: impl FnMut(BatchOutcome),
) -> ReplayCounters {
    replay_while(lookups, policy, shape, |batch| {
        observe(batch);
        ControlFlow::Continue(())
    })
}

/// Runs the same replay as [`replay_observed`] until `observe` breaks. The counters then cover only the batches so
/// far.
///
/// # Panics
/// Panics if the shape has fewer layers or experts than the trace.
pub fn replay_while(
    lookups: &Lookups,
    policy: ReplayPolicy,
    shape: &CacheShape,
    observe: impl FnMut(BatchOutcome) -> ControlFlow<()>,
) -> ReplayCounters {
    let plain = |cache: &mut CacheState, layer, expert, _| cache.lookup(layer, expert);
    match policy {
        ReplayPolicy::Online(policy) => {
            replay_through(CacheState::new(policy, shape), lookups, plain, observe)
        }
        ReplayPolicy::HotList(_) => {
            let mut cache = CacheState::with_ranking(Ranking::Fixed, shape);
            for (layer, expert) in hot_list(lookups, shape) {
                cache.fix(layer, expert);
            }
            replay_through(cache, lookups, plain, observe)
        }
        ReplayPolicy::Belady(_) => {
            let next = next_uses(lookups, shape);
            let cache = CacheState::with_ranking(Ranking::NextUse, shape);
            let lookup = |cache: &mut CacheState, layer, expert, number: usize| {
                cache.lookup_knowing(layer, expert, next[number])
            };
            replay_through(cache, lookups, lookup, observe)
        }
    }
}

/// Returns, for every lookup, the number of the batch that looks up the same expert next. It is `u64::MAX` if there
/// is none.
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

/// Returns the experts with the most lookups for their cost, as many as each group has room for. Ties go to the lower
/// layer, then to the lower expert.
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
