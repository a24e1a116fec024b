//! Properties of every replay: Belady is a bound, larger LRU lists include smaller ones, and curves equal replays.
//! Global LRU hits nothing below one token cycle.

use std::collections::HashSet;

use forebay_lab::replay::{LruCurve, Predictor, ReplayPolicy, predict, replay, replay_observed};
use forebay_stream::routing::{
    LookupOrder, Phase, RoutingHeader, RoutingLayer, RoutingTrace, Rows, Turn,
};
use forebay_stream::{Capacity, ExpertIndex, LayerIndex, Lookups, PolicyKind, Rule, Scope};
use proptest::prelude::*;

/// Source of reproducible random choices.
struct Random(fastrand::Rng);

impl Random {
    fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0.u64(..end)
    }

    /// Returns distinct experts. Low numbers are more frequent.
    fn experts(&mut self, of: u32, count: usize) -> Vec<ExpertIndex> {
        let mut chosen = Vec::new();
        while chosen.len() < count {
            let end = 1 + self.below(u64::from(of));
            let expert = self.below(end) as u32;
            if !chosen.contains(&ExpertIndex(expert)) {
                chosen.push(ExpertIndex(expert));
            }
        }
        chosen
    }
}

const EXPERTS: u32 = 12;

/// Returns the lookups of a prompt, which may touch many experts, and of `tokens` generated tokens.
fn lookups(seed: u64, sizes: &[u64], tokens: usize, used: usize) -> Lookups {
    let mut random = Random::new(seed);
    let mut lookups = Lookups::new(sizes.iter().map(|&bytes| (EXPERTS, bytes)).collect());
    let layers = sizes.len() as u32;
    for layer in 0..layers {
        let touched = 1 + random.below(u64::from(EXPERTS)) as usize;
        let experts = random.experts(EXPERTS, touched);
        lookups.push(Phase::Prompt, LayerIndex(layer), touched, &experts);
    }
    for _ in 0..tokens {
        for layer in 0..layers {
            let experts = random.experts(EXPERTS, used);
            lookups.push(Phase::Generate, LayerIndex(layer), 1, &experts);
        }
    }
    lookups
}

fn hits(lookups: &Lookups, policy: ReplayPolicy, capacity: Capacity, whole: bool) -> u64 {
    let shape = capacity.shape(policy.scope(), lookups.layers(), whole);
    replay(lookups, policy, &shape).all.hits
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]

    #[test]
    fn belady_is_never_worse_than_any_other(
        seed in any::<u64>(), layers in 1_usize..5, used in 1_usize..5, kept in 0_u32..13, whole in any::<bool>(),
    ) {
        let lookups = lookups(seed, &vec![7; layers], 40, used);
        let capacity = Capacity::ExpertsPerLayer(kept);
        for scope in [Scope::Global, Scope::PerLayer] {
            let bound = hits(&lookups, ReplayPolicy::Belady(scope), capacity, whole);
            for policy in ReplayPolicy::all().into_iter().filter(|policy| policy.scope() == scope) {
                let found = hits(&lookups, policy, capacity, whole);
                prop_assert!(found <= bound, "{policy}: {found} hits, {bound} are possible");
            }
        }
    }

    #[test]
    fn a_larger_lru_list_holds_what_a_smaller_one_holds(
        seed in any::<u64>(), sizes in prop::collection::vec(1_u64..5, 1..5), used in 1_usize..5,
        small in 0_u64..60, more in 0_u64..60, whole in any::<bool>(), per_layer in any::<bool>(),
    ) {
        let lookups = lookups(seed, &sizes, 40, used);
        let scope = if per_layer { Scope::PerLayer } else { Scope::Global };
        let policy = PolicyKind { rule: Rule::Lru, scope };
        let hit_by = |bytes: u64| {
            let shape = Capacity::Bytes(bytes).shape(scope, lookups.layers(), whole);
            let mut hits = Vec::new();
            replay_observed(&lookups, ReplayPolicy::Online(policy), &shape, |batch| hits.push(batch.hits));
            hits
        };
        // The larger list hits at least as often in every batch, and therefore in total.
        let (small_hits, large_hits) = (hit_by(small), hit_by(small + more));
        prop_assert!(small_hits.iter().zip(&large_hits).all(|(small, large)| small <= large));
    }

    #[test]
    fn the_curve_is_the_replay_at_every_capacity(
        seed in any::<u64>(), sizes in prop::collection::vec(1_u64..5, 1..5), used in 1_usize..5,
        whole in any::<bool>(), per_layer in any::<bool>(),
    ) {
        let lookups = lookups(seed, &sizes, 60, used);
        let scope = if per_layer { Scope::PerLayer } else { Scope::Global };
        let curve = LruCurve::of(&lookups, scope, whole);
        let policy = ReplayPolicy::Online(PolicyKind { rule: Rule::Lru, scope });
        for bytes in 0..=lookups.total_bytes() + 3 {
            let shape = Capacity::Bytes(bytes).shape(scope, lookups.layers(), whole);
            let counters = replay(&lookups, policy, &shape);
            prop_assert_eq!(curve.hits(bytes), [counters.prompt.hits, counters.generate.hits]);
        }
        let last = curve.points().last();
        if let Some((bytes, hits)) = last {
            prop_assert_eq!(curve.hits(bytes), hits);
        }
    }

    #[test]
    fn belady_hits_more_with_more(
        seed in any::<u64>(), layers in 1_usize..5, used in 1_usize..5, kept in 0_u32..12,
    ) {
        let lookups = lookups(seed, &vec![3; layers], 40, used);
        let of = |kept| hits(&lookups, ReplayPolicy::Belady(Scope::Global), Capacity::ExpertsPerLayer(kept), false);
        prop_assert!(of(kept) <= of(kept + 1));
    }
}

#[test]
fn below_one_token_cycle_only_global_recency_hits_nothing() {
    // Every token uses the same two experts of every layer, which is the easiest routing there is.
    let layers = 6;
    let mut steady = Lookups::new(vec![(EXPERTS, 10); layers]);
    for _ in 0..30 {
        for layer in 0..layers as u32 {
            steady.push(Phase::Generate, LayerIndex(layer), 1, &[ExpertIndex(3), ExpertIndex(8)]);
        }
    }
    assert_eq!(steady.cycle_bytes(), 2 * 10 * layers as u64);
    // The capacity is one whole batch short. If it were one expert short, every batch would still hit its younger
    // expert.
    let below = Capacity::Bytes(steady.cycle_bytes() - 2 * 10);
    let of = |policy| hits(&steady, ReplayPolicy::Online(policy), below, false);
    assert_eq!(of(PolicyKind::LRU), 0);
    for policy in PolicyKind::ALL.into_iter().filter(|policy| policy.is_per_layer()) {
        // Every layer has room for one of its two experts. Whichever the policy keeps (layer-random keeps either),
        // the next token hits it.
        assert_eq!(of(policy), 29 * 6, "{policy}");
    }
    let at = Capacity::Bytes(steady.cycle_bytes());
    assert_eq!(hits(&steady, ReplayPolicy::Online(PolicyKind::LRU), at, false), 2 * 29 * 6);
}

#[test]
fn random_is_the_same_every_time_and_a_hot_list_stays() {
    let lookups = lookups(3, &[5, 5, 5], 200, 3);
    let quarter = Capacity::Share(0.25);
    let random = ReplayPolicy::Online(PolicyKind::RANDOM);
    assert_eq!(hits(&lookups, random, quarter, false), hits(&lookups, random, quarter, false));
    let shape = quarter.shape(Scope::PerLayer, lookups.layers(), false);
    let hot = replay(&lookups, ReplayPolicy::HotList(Scope::PerLayer), &shape).all;
    // An expert that is not on the list is evicted right after its use, so each of its lookups misses.
    let mut uses = vec![[0_u64; EXPERTS as usize]; 3];
    for (_, layer, experts) in lookups.batches() {
        experts.iter().for_each(|expert| uses[layer.0 as usize][expert.0 as usize] += 1);
    }
    let of_layer = |mut uses: [u64; EXPERTS as usize]| {
        uses.sort_unstable_by(|a, b| b.cmp(a));
        uses[..3].iter().map(|uses| uses - 1).sum::<u64>()
    };
    assert_eq!(hot.hits, uses.into_iter().map(of_layer).sum::<u64>());
}

/// Returns a trace whose tokens mostly repeat the choices of the token before. Its scores predict the choices
/// exactly.
fn repeating(scores: bool) -> RoutingTrace {
    let layer = RoutingLayer { experts: 8, used: 2, expert_bytes: 100 };
    let header = RoutingHeader::new("m".into(), "a".into(), vec![layer; 2], LookupOrder::Ascending);
    let mut trace = RoutingTrace::new(RoutingHeader { scores, ..header });
    trace.begin_turn(Turn { prompt_hash: None, prompt_tokens: 0 });
    for token in 0..40_u16 {
        let expert = (token / 10) % 4;
        let choices = [expert, 4 + expert, 7 - expert, expert / 2];
        let mut said = [0.0; 16];
        choices[..2].iter().for_each(|&id| said[usize::from(id)] = 1.0);
        choices[2..].iter().for_each(|&id| said[8 + usize::from(id)] = 1.0);
        let scores: &[f32] = if scores { &said } else { &[] };
        let rows = Rows { tokens: 1, choices: &choices, weights: &[], scores };
        trace.push(Phase::Generate, rows).unwrap();
    }
    trace
}

#[test]
fn predictors_are_told_with_what_they_cost() {
    let trace = repeating(true);
    let lookups = Lookups::of(&trace);
    let at = |predictor, capacity| {
        predict(&trace, &lookups, PolicyKind::LAYER_LRU, capacity, predictor, 2).unwrap()
    };
    // With nothing cached, every expert is a miss. The router predicts all of them, and the lag all but those that
    // change.
    let none = Capacity::ExpertsPerLayer(0);
    let router = at(Predictor::NextRouter, none);
    assert_eq!((router.lookups, router.foreseen, router.wasted_bytes), (160, 160, 0));
    let lag = at(Predictor::Lag, Capacity::ExpertsPerLayer(0));
    assert_eq!(lag.displaced_bytes, 200);
    assert_eq!(lag.foreseen + lag.misses_with, 160, "what is not foreseen is waited for");
    assert!(
        lag.foreseen > 130 && lag.wasted_bytes == (lag.reads_prefetched - lag.reads_useful) * 100
    );
    assert_eq!(lag.read_bytes_with, (lag.misses_with + lag.reads_prefetched) * 100);
    // Slots for predicted experts reduce the capacity of the cache.
    let three = at(Predictor::HotList, Capacity::ExpertsPerLayer(3));
    assert!(three.misses_without <= three.misses_with + three.reads_useful);
    let without = repeating(false);
    let lookups = Lookups::of(&without);
    let asked = predict(&without, &lookups, PolicyKind::LRU, none, Predictor::NextRouter, 1);
    assert!(asked.is_none());
}

#[test]
fn lookups_are_the_distinct_experts_of_a_batch_in_the_engines_order() {
    let layer = RoutingLayer { experts: 8, used: 2, expert_bytes: 1 };
    for (order, wanted) in [(LookupOrder::Ascending, [1, 3, 5]), (LookupOrder::LastUse, [5, 3, 1])]
    {
        let header = RoutingHeader::new("m".into(), "a".into(), vec![layer], order);
        let mut trace = RoutingTrace::new(header);
        trace.begin_turn(Turn { prompt_hash: None, prompt_tokens: 2 });
        let choices = [3, 5, 3, 1];
        let rows = Rows { tokens: 2, choices: &choices, weights: &[], scores: &[] };
        trace.push(Phase::Prompt, rows).unwrap();
        let lookups = Lookups::of(&trace);
        let (_, _, experts) = lookups.batches().next().unwrap();
        assert_eq!(experts, wanted.map(ExpertIndex));
        assert_eq!(experts.iter().collect::<HashSet<_>>().len(), lookups.len());
    }
}
