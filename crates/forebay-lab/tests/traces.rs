//! Replays of real models' recorded routing give the published hit rates. They run the policy code of the engine.

use std::fs::File;
use std::io::{BufReader, Write as _};
use std::path::PathBuf;

use forebay_lab::replay::{LruCurve, ReplayPolicy, replay};
use forebay_stream::{Capacity, Lookups, PolicyKind, ReplayCounters, RoutingTrace, Scope};

const MIB: u64 = 1 << 20;

fn recorded(name: &str) -> Option<RoutingTrace> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let folder = std::env::var_os("FOREBAY_TRACES").map_or(beside, PathBuf::from);
    let path = folder.join(name);
    match File::open(&path) {
        Ok(file) => Some(RoutingTrace::from_csv(BufReader::new(file)).unwrap()),
        Err(error) => {
            // Write to stderr directly, because the test harness captures what passing tests print.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: no recorded routing at {}: {error}; FOREBAY_TRACES names its folder",
                path.display()
            );
            None
        }
    }
}

fn lookups(name: &str) -> Option<Lookups> {
    recorded(name).map(|trace| Lookups::of(&trace))
}

fn at(lookups: &Lookups, policy: ReplayPolicy, capacity_mib: u64) -> ReplayCounters {
    let capacity = Capacity::Bytes(capacity_mib * MIB);
    replay(lookups, policy, &capacity.shape(policy.scope(), lookups.layers(), true))
}

fn percent(rate: f64) -> f64 {
    (rate * 1000.0).round() / 10.0
}

const LRU: ReplayPolicy = ReplayPolicy::Online(PolicyKind::LRU);

#[test]
fn the_recording_engines_own_counts() {
    // These are counts from the recordings, whose rows say which accesses read from disk.
    for (name, capacity_mib, hits, of, published) in [
        ("qwen.route.csv", 4000, 29_597, 39_526, 74.9),
        ("gptoss.route.csv", 3000, 2066, 6375, 32.4),
    ] {
        let Some(lookups) = lookups(name) else { return };
        let counters = at(&lookups, LRU, capacity_mib).all;
        assert_eq!((counters.hits, counters.lookups), (hits, of), "{name}");
        assert_eq!(percent(counters.hit_rate()), published, "{name}");
    }
}

/// Published hit rates of generated tokens in percent, all without ageing. A row holds the budget in MiB, then
/// Belady, LRU, LFU, per-layer LRU and per-layer LFU.
const PUBLISHED: [(u64, [f64; 5]); 6] = [
    (500, [45.3, 0.0, 26.6, 38.3, 38.3]),
    (1000, [62.7, 37.7, 40.2, 42.3, 45.1]),
    (2000, [79.4, 56.5, 58.6, 59.4, 63.3]),
    (3000, [87.8, 70.6, 71.3, 71.1, 74.2]),
    (4000, [92.7, 80.3, 80.8, 79.7, 81.7]),
    (8000, [97.1, 96.0, 96.0, 95.0, 95.2]),
];

#[test]
fn the_published_table_of_generated_tokens() {
    let Some(lookups) = lookups("qwen.route.csv") else { return };
    let policies = [
        ReplayPolicy::Belady(Scope::Global),
        LRU,
        ReplayPolicy::Online(PolicyKind::LFU_UNAGED),
        ReplayPolicy::Online(PolicyKind::LAYER_LRU),
        ReplayPolicy::Online(PolicyKind::LAYER_LFU_UNAGED),
    ];
    for (capacity_mib, published) in PUBLISHED {
        for (policy, published) in policies.into_iter().zip(published) {
            let rate = 100.0 * at(&lookups, policy, capacity_mib).generate.hit_rate();
            // The published rates are rounded.
            assert!((rate - published).abs() <= 0.055, "{capacity_mib} MiB {policy}: {rate}");
        }
        // The engine's LFU ages its counts. It must be no worse than counts that never age.
        let aged = ReplayPolicy::Online(PolicyKind::LAYER_LFU);
        let aged = 100.0 * at(&lookups, aged, capacity_mib).generate.hit_rate();
        assert!(aged >= published[4] - 0.051 && aged <= published[4] + 1.0, "{aged}");
    }
}

#[test]
fn below_one_token_cycle_a_global_list_is_useless() {
    for (name, cycle_mib, below_mib) in
        [("qwen.route.csv", 785, 770), ("gptoss.route.csv", 908, 880)]
    {
        let Some(lookups) = lookups(name) else { return };
        assert_eq!((lookups.cycle_bytes() as f64 / MIB as f64).round() as u64, cycle_mib);
        assert_eq!(at(&lookups, LRU, below_mib).generate.hits, 0, "{name}");
        for policy in PolicyKind::ALL.into_iter().filter(|policy| policy.is_per_layer()) {
            let counters = at(&lookups, ReplayPolicy::Online(policy), below_mib);
            assert!(counters.generate.hit_rate() > 0.15, "{name} {policy}");
        }
    }
}

#[test]
fn one_pass_gives_what_replays_give() {
    for name in ["qwen.route.csv", "gptoss.route.csv"] {
        let Some(lookups) = lookups(name) else { return };
        for scope in [Scope::Global, Scope::PerLayer] {
            let curve = LruCurve::of(&lookups, scope, true);
            let policy = PolicyKind { scope, ..PolicyKind::LRU };
            for mib in [0, 50, 300, 785, 786, 1000, 2000, 4000, 8000, 60_000] {
                let counters = at(&lookups, ReplayPolicy::Online(policy), mib);
                let hits = [counters.prompt.hits, counters.generate.hits];
                assert_eq!(curve.hits(mib * MIB), hits, "{name} {scope:?} {mib} MiB");
            }
        }
    }
}
