//! Routing profiles have the hit rates of the published recordings that they are named after.

use forebay_stream::routing::{RoutingLayer, RoutingProfile, RoutingTrace};
use forebay_stream::{Capacity, Lookups, PolicyKind, Rule, Scope, replay};

/// Experts of a layer, and what a token uses of them, in Qwen3.8-Flash-Next.
const EXPERTS: u32 = 512;
const USED: u32 = 10;

fn trace(profile: &str, experts: u32, used: u32, layers: usize) -> RoutingTrace {
    let layers = vec![RoutingLayer { experts, used, expert_bytes: 1 }; layers];
    RoutingProfile::find(profile).unwrap().trace(&layers, 7).unwrap()
}

/// Returns the hits per look-up of LRU caches with so many experts, counted by hand: the cache of a layer is a list.
fn lru(trace: &RoutingTrace, cached: usize) -> f64 {
    let (mut hits, mut lookups) = (0, 0);
    for layer in 0..trace.header().layers.len() {
        let mut list: Vec<u32> = Vec::new();
        for token in 0..trace.tokens() {
            let experts: Vec<u32> = trace.experts(token, layer).map(|expert| expert.0).collect();
            lookups += experts.len();
            hits += experts.iter().filter(|expert| list.contains(expert)).count();
            list.retain(|expert| !experts.contains(expert));
            list.splice(0..0, experts);
            list.truncate(cached);
        }
    }
    hits as f64 / lookups as f64
}

/// Returns the hits per look-up of caches with so many experts in each layer.
fn replayed(trace: &RoutingTrace, cached: u32, rule: Rule) -> f64 {
    let lookups = Lookups::of(trace);
    let policy = PolicyKind { rule, scope: Scope::PerLayer };
    let shape = Capacity::ExpertsPerLayer(cached).shape(Scope::PerLayer, lookups.layers(), false);
    let counted = replay(&lookups, policy, &shape).generate;
    counted.hits as f64 / counted.lookups as f64
}

/// The recording of Qwen3.8-Flash-Next: an LRU cache of 64 of 512 experts in each layer hits 67 %, and one of 128
/// hits 81 %.
#[test]
fn flash_next_has_the_published_hits() {
    let trace = trace("qwen3.8-flash-next", EXPERTS, USED, 4);
    for (cached, published) in [(64, 0.67), (128, 0.81)] {
        let found = lru(&trace, cached);
        assert!((found - published).abs() < 0.02, "{cached}: {found:.3}");
    }
    // Replays count the same, up to the order of a token's experts.
    for cached in [64, 128] {
        let found = replayed(&trace, cached, Rule::Lru);
        assert!((found - lru(&trace, cached as usize)).abs() < 0.005, "{cached}: {found:.3}");
    }
}

/// For another number of experts, the hits are those of the same shares.
#[test]
fn shares_count_for_other_models() {
    for (experts, used) in [(256, 8), (128, 6), (384, 6)] {
        let trace = trace("qwen3.8-flash-next", experts, used, 2);
        for (part, published) in [(8, 0.67), (4, 0.81)] {
            let found = lru(&trace, (experts / part) as usize);
            assert!((found - published).abs() < 0.02, "{experts} {part}: {found:.3}");
        }
    }
}

/// The same recording: the 32 experts that one half uses most have 10 % of the uses in the other half.
#[test]
fn few_experts_of_flash_next_are_popular() {
    let trace = trace("qwen3.8-flash-next", EXPERTS, USED, 8);
    let (mut covered, mut uses) = (0, 0);
    for layer in 0..trace.header().layers.len() {
        let mut counts = vec![0; EXPERTS as usize];
        let half = trace.tokens() / 2;
        let experts = |token: usize| trace.experts(token, layer).map(|expert| expert.0 as usize);
        (0..half).flat_map(experts).for_each(|expert| counts[expert] += 1);
        let mut ranked: Vec<usize> = (0..counts.len()).collect();
        ranked.sort_by_key(|expert| std::cmp::Reverse(counts[*expert]));
        let hot = &ranked[..32];
        covered += (half..trace.tokens()).flat_map(experts).filter(|e| hot.contains(e)).count();
        uses += (half..trace.tokens()).flat_map(experts).count();
    }
    let share = covered as f64 / uses as f64;
    assert!((share - 0.10).abs() < 0.02, "{share:.3}");
}

/// What the page says about other policies: there, rules that count uses find less than LRU does.
#[test]
fn counting_uses_finds_less_than_lru() {
    let trace = trace("qwen3.8-flash-next", EXPERTS, USED, 4);
    for cached in [64, 128] {
        let [lru, lfru, lfu] =
            [Rule::Lru, Rule::Lfru, Rule::Lfu].map(|rule| replayed(&trace, cached, rule));
        println!("{cached}: LRU {lru:.3}, LFRU {lfru:.3}, LFU {lfu:.3}");
        assert!(lfu < lru, "{cached}: {lfu:.3} {lru:.3}");
    }
}
