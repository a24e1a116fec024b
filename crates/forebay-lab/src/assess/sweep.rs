//! Runs recorded routing through caches of many capacities and computes miss ratios by policy.

use std::thread;

use forebay_store::Interrupt;
use forebay_stream::{CacheShape, FaultedExperts, LayerShape, Lookups, Phase, Scope};
use serde::Serialize;

use super::record::RoutingShape;
use crate::replay::{ReplayPolicy, replay_observed};

/// Largest number of capacities in a curve.
const CAPACITIES_MAX: u32 = 32;
/// Largest number of capacities for a policy that searches its victim among all experts of the model. This search is
/// slow with thousands of experts.
const SEARCHED_CAPACITIES_MAX: u32 = 8;

/// One policy over all capacities.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyCurve {
    pub policy: String,
    /// True if the policy needs to know the future or the whole recording. It is a bound and cannot run in the engine.
    pub is_bound: bool,
    pub points: Vec<CurvePoint>,
}

/// One capacity. Rates count generated tokens only. Prompts go through the cache before them and warm it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CurvePoint {
    /// Kept experts as a share of all.
    pub share: f64,
    /// Capacity in bytes of the model's file.
    pub capacity_bytes: u64,
    pub hit_rate: f64,
    /// Bounds of the hit rate with other prompts of the same kind: the middle 95 % of samples that draw as many prompts
    /// with replacement. `None` with fewer than two prompts.
    pub hit_rate_interval: Option<[f64; 2]>,
    /// Misses per generated token: over all tokens, and without the first quarter.
    pub faulted_experts_per_token: FaultedExperts,
    pub missed_bytes_per_token: f64,
}

/// Cache statistics of the generated tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Met {
    pub lookups: u64,
    pub hits: u64,
    pub missed_bytes: u64,
    /// Number of (token, layer) pairs that missed at least one expert.
    pub layers_missed: u64,
    /// Misses of each generated token.
    pub misses: Vec<u32>,
    /// Lookups and hits of each prompt's continuation.
    pub passages: Vec<(u64, u64)>,
}

/// Samples of prompts from which an interval is computed.
const SAMPLES: usize = 1000;
/// Share of the samples below an interval, and above it.
const TAIL: f64 = 0.025;

impl Met {
    /// Returns the hits per lookup, or 0 without lookups.
    pub fn hit_rate(&self) -> f64 {
        if self.lookups == 0 { 0.0 } else { self.hits as f64 / self.lookups as f64 }
    }

    /// Returns the misses per token, defined as in the engine's statistics.
    pub fn faulted(&self) -> FaultedExperts {
        let mean = |misses: &[u32]| {
            let sum: u64 = misses.iter().map(|&misses| u64::from(misses)).sum();
            (!misses.is_empty()).then(|| sum as f64 / misses.len() as f64)
        };
        let warm_up = (self.misses.len() / 4).max(1).min(self.misses.len());
        FaultedExperts { all: mean(&self.misses), steady: mean(&self.misses[warm_up..]) }
    }

    /// Returns the interval of the hit rate. The same passages give the same interval.
    pub fn hit_rate_interval(&self) -> Option<[f64; 2]> {
        let passages: Vec<(u64, u64)> =
            self.passages.iter().copied().filter(|(lookups, _)| *lookups > 0).collect();
        if passages.len() < 2 {
            return None;
        }
        let mut random = fastrand::Rng::with_seed(0);
        let mut sample = || {
            let drawn = (0..passages.len()).map(|_| passages[random.usize(..passages.len())]);
            let (lookups, hits) = drawn.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            hits as f64 / lookups as f64
        };
        let mut rates: Vec<f64> = (0..SAMPLES).map(|_| sample()).collect();
        rates.sort_by(f64::total_cmp);
        let tail = (TAIL * SAMPLES as f64) as usize;
        Some([rates[tail], rates[SAMPLES - 1 - tail]])
    }

    /// Returns `sum` divided by the number of generated tokens.
    pub fn per_token(&self, sum: u64) -> f64 {
        sum as f64 / self.misses.len().max(1) as f64
    }
}

/// Returns the shape of a cache that keeps `slots` experts of each layer. A global policy gets the same number of bytes
/// in one group.
pub fn shape_of(scope: Scope, routing: &RoutingShape, slots: u32) -> CacheShape {
    let bytes = |&(experts, bytes): &(u32, u64)| u64::from(slots.min(experts)) * bytes;
    let per_layer = scope == Scope::PerLayer;
    let layers = routing.layers.iter().enumerate().map(|(layer, &(experts, cost))| LayerShape {
        experts,
        cost,
        group: if per_layer { layer } else { 0 },
    });
    let groups = match per_layer {
        true => routing.layers.iter().map(bytes).collect(),
        false => vec![routing.layers.iter().map(bytes).sum()],
    };
    CacheShape {
        layers: layers.collect(),
        groups,
        batch_may_exceed: false,
        preloaded: vec![false; routing.layers.len()],
    }
}

/// Returns the numbers of kept experts per layer that a curve has points for, from 1 to all.
fn capacities(routing: &RoutingShape, points_max: u32) -> Vec<u32> {
    let most = routing.layers.iter().map(|layer| layer.0).max().unwrap_or(0);
    let points = most.min(points_max);
    let at = |index: u32| ((u64::from(index) * u64::from(most)).div_ceil(u64::from(points))) as u32;
    (1..=points).map(at).collect()
}

/// Replays lookups through the same state machine that the engine runs.
pub fn simulate(lookups: &Lookups, policy: ReplayPolicy, shape: &CacheShape) -> Met {
    let mut met = Met::default();
    let mut last_layer = None;
    let mut in_prompt = false;
    replay_observed(lookups, policy, shape, |batch| {
        if batch.phase == Phase::Prompt {
            last_layer = None;
            if !in_prompt {
                met.passages.push((0, 0));
            }
            in_prompt = true;
            return;
        }
        in_prompt = false;
        // Layers come in ascending order, so a layer that is not higher begins the next token.
        if last_layer.is_none_or(|last| batch.layer <= last) {
            met.misses.push(0);
        }
        last_layer = Some(batch.layer);
        let misses = batch.lookups - batch.hits;
        met.lookups += u64::from(batch.lookups);
        met.hits += u64::from(batch.hits);
        if let Some(passage) = met.passages.last_mut() {
            passage.0 += u64::from(batch.lookups);
            passage.1 += u64::from(batch.hits);
        }
        met.missed_bytes += u64::from(misses) * lookups.layers()[batch.layer.0 as usize].1;
        met.layers_missed += u64::from(misses > 0);
        if let Some(token) = met.misses.last_mut() {
            *token += misses;
        }
    });
    met
}

/// Policies of a report, the engine's default first.
pub const SHOWN: [&str; 7] =
    ["layer-lfu", "layer-lru", "lfu", "lru", "random", "hot-list", "belady"];
/// Policies that are also run for each domain.
pub const SHOWN_BY_DOMAIN: [&str; 2] = ["layer-lfu", "layer-lru"];

/// Computes the curves of a report, each on its own thread. Points are missing after an interrupt.
pub fn curves(
    lookups: &Lookups,
    routing: &RoutingShape,
    policies: &[&str],
    interrupt: &Interrupt,
) -> Vec<PolicyCurve> {
    let policies = policies.iter().filter_map(|name| name.parse::<ReplayPolicy>().ok());
    thread::scope(|scope| {
        let threads: Vec<_> = policies
            .map(|policy| scope.spawn(move || curve(lookups, routing, policy, interrupt)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|one| one.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

fn curve(
    lookups: &Lookups,
    routing: &RoutingShape,
    policy: ReplayPolicy,
    interrupt: &Interrupt,
) -> PolicyCurve {
    let point = |slots| {
        let met = simulate(lookups, policy, &shape_of(policy.scope(), routing, slots));
        point(routing, slots, &met)
    };
    // A global LRU list needs no search.
    let is_searched = policy.scope() == Scope::Global && policy.name() != "lru";
    let experts: u32 = routing.layers.iter().map(|layer| layer.0).sum();
    let few = is_searched && experts > SEARCHED_EXPERTS_MAX;
    let points_max = if few { SEARCHED_CAPACITIES_MAX } else { CAPACITIES_MAX };
    let capacities = capacities(routing, points_max).into_iter();
    PolicyCurve {
        policy: policy.name().to_owned(),
        is_bound: !matches!(policy, ReplayPolicy::Online(_)),
        points: capacities.take_while(|_| !interrupt.is_requested()).map(point).collect(),
    }
}

/// Number of experts above which searched policies get fewer points ([`SEARCHED_CAPACITIES_MAX`]).
const SEARCHED_EXPERTS_MAX: u32 = 1024;

fn point(routing: &RoutingShape, slots: u32, met: &Met) -> CurvePoint {
    let capacity = |&(experts, bytes): &(u32, u64)| u64::from(slots.min(experts)) * bytes;
    let capacity_bytes: u64 = routing.layers.iter().map(capacity).sum();
    CurvePoint {
        share: capacity_bytes as f64 / routing.expert_bytes().max(1) as f64,
        capacity_bytes,
        hit_rate: met.hit_rate(),
        hit_rate_interval: met.hit_rate_interval(),
        faulted_experts_per_token: met.faulted(),
        missed_bytes_per_token: met.per_token(met.missed_bytes),
    }
}

impl PolicyCurve {
    /// Returns the smallest capacity from which on the hit rate is at least `wanted`.
    pub fn reaches(&self, wanted: f64) -> Option<&CurvePoint> {
        let below = self.points.iter().rposition(|point| point.hit_rate < wanted);
        self.points.get(below.map_or(0, |index| index + 1))
    }

    /// Returns the point whose share is nearest to `share`.
    pub fn at(&self, share: f64) -> Option<&CurvePoint> {
        let distance = |point: &&CurvePoint| (point.share - share).abs();
        self.points.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_stream::{ExpertIndex, LayerIndex};

    /// Two layers of four experts, of 100 and 50 bytes. A token uses one expert of each.
    fn routing() -> RoutingShape {
        RoutingShape { layers: vec![(4, 100), (4, 50)], experts_per_token: 1 }
    }

    fn trace() -> Lookups {
        let mut trace = Lookups::new(routing().layers);
        let mut push = |phase, layer, experts: &[u32]| {
            let experts: Vec<ExpertIndex> = experts.iter().copied().map(ExpertIndex).collect();
            trace.push(phase, LayerIndex(layer), experts.len(), &experts);
        };
        push(Phase::Prompt, 0, &[0, 1]);
        push(Phase::Prompt, 1, &[2]);
        for (first, second) in [(1, 2), (0, 2), (0, 3), (3, 2)] {
            push(Phase::Generate, 0, &[first]);
            push(Phase::Generate, 1, &[second]);
        }
        trace
    }

    #[test]
    fn a_hand_made_trace_by_layer_and_slot() {
        let policy: ReplayPolicy = "layer-lru".parse().unwrap();
        let met = simulate(&trace(), policy, &shape_of(policy.scope(), &routing(), 1));
        // Layer 0 keeps expert 1 of the prompt: hit, miss, hit, miss. Layer 1 keeps expert 2: hit, hit, miss, miss.
        assert_eq!((met.lookups, met.hits), (8, 4));
        assert_eq!(met.missed_bytes, 2 * 100 + 2 * 50);
        assert_eq!(met.misses, [0, 1, 1, 2]);
        assert_eq!(met.layers_missed, 4);
        assert_eq!((&met.passages[..], met.hit_rate_interval()), (&[(8, 4)][..], None));
        let faulted = met.faulted();
        assert_eq!((faulted.all, faulted.steady), (Some(1.0), Some(4.0 / 3.0)));
        let all = simulate(&trace(), policy, &shape_of(policy.scope(), &routing(), 4));
        // Only first uses miss: expert 3 of both layers.
        assert_eq!(all.misses, [0, 0, 1, 1]);
    }

    #[test]
    fn an_interval_holds_the_rate_and_shrinks_with_more_prompts() {
        let of = |passages: Vec<(u64, u64)>| Met { passages, ..Met::default() };
        let alike = of(vec![(100, 70); 5]).hit_rate_interval().unwrap();
        assert_eq!(alike, [0.7, 0.7]);
        let spread = |copies: usize| {
            let passages = [(100, 50), (100, 70), (100, 90), (0, 0)].repeat(copies);
            let [low, high] = of(passages).hit_rate_interval().unwrap();
            assert!(low < 0.7 && 0.7 < high, "{low} {high}");
            high - low
        };
        assert!(spread(30) < spread(2) / 2.0);
    }

    #[test]
    fn a_global_list_smaller_than_a_token_never_hits() {
        let mut trace = Lookups::new(vec![(4, 100), (4, 100)]);
        for layer in [0, 1, 0, 1, 0, 1] {
            trace.push(Phase::Generate, LayerIndex(layer), 1, &[ExpertIndex(2)]);
        }
        let policy: ReplayPolicy = "lru".parse().unwrap();
        let mut shape = shape_of(policy.scope(), &routing(), 1);
        shape.layers.iter_mut().for_each(|layer| layer.cost = 100);
        shape.groups = vec![100];
        assert_eq!(simulate(&trace, policy, &shape).hits, 0);
        shape.groups = vec![200];
        assert_eq!(simulate(&trace, policy, &shape).hits, 4);
    }

    #[test]
    fn capacities_end_with_all() {
        assert_eq!(capacities(&routing(), 32), [1, 2, 3, 4]);
        let many = RoutingShape { layers: vec![(0, 0), (128, 1)], experts_per_token: 8 };
        let found = capacities(&many, 32);
        assert_eq!((found.len(), found[0], found[31]), (32, 4, 128));
        let curves = curves(&trace(), &routing(), &SHOWN, &Interrupt::new());
        for curve in &curves {
            let last = curve.points.last().unwrap();
            // Only first uses miss; a hot list also reads its experts once.
            assert_eq!((last.share, last.capacity_bytes, last.hit_rate), (1.0, 600, 0.75));
        }
        assert_eq!(curves.iter().map(|curve| curve.is_bound).filter(|&bound| bound).count(), 2);
        let lru = &curves[1];
        assert_eq!(lru.reaches(0.7).unwrap().hit_rate, 0.75);
        assert!(lru.reaches(0.8).is_none());
        assert_eq!(lru.at(0.3).unwrap().share, 0.25);
    }
}
