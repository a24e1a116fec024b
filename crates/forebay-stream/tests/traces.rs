//! Recorded routing of real models, replayed by the policy code that the engine runs: the published hit rates come out.

use std::io::Write as _;
use std::path::PathBuf;

use forebay_stream::{CacheShape, PolicyKind, ReplayCounters, RoutingTrace, replay};

const MIB: u64 = 1 << 20;

fn trace(name: &str) -> Option<RoutingTrace> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let folder = std::env::var_os("FOREBAY_TRACES").map_or(beside, PathBuf::from);
    let path = folder.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Some(RoutingTrace::from_csv(&text).unwrap()),
        Err(error) => {
            // Past the capture of the test harness, which hides what passing tests print.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: no recorded routing at {}: {error}",
                path.display()
            );
            None
        }
    }
}

fn at(trace: &RoutingTrace, policy: PolicyKind, capacity_mib: u64) -> ReplayCounters {
    let shape = CacheShape::from_bytes(policy, trace.layers(), capacity_mib * MIB);
    replay(trace, policy, &shape)
}

fn percent(rate: f64) -> f64 {
    (rate * 1000.0).round() / 10.0
}

#[test]
fn the_recording_engines_own_counts() {
    // Counted from the recordings: their rows say which accesses read from disk.
    for (name, capacity_mib, hits, lookups, published) in [
        ("qwen.route.csv", 4000, 29_597, 39_526, 74.9),
        ("gptoss.route.csv", 3000, 2066, 6375, 32.4),
    ] {
        let Some(trace) = trace(name) else { return };
        let counters = at(&trace, PolicyKind::GlobalLru, capacity_mib).all;
        assert_eq!((counters.hits, counters.lookups), (hits, lookups), "{name}");
        assert_eq!(percent(counters.hit_rate()), published, "{name}");
    }
}

#[test]
fn the_published_table_of_generated_tokens() {
    let Some(trace) = trace("qwen.route.csv") else { return };
    for (capacity_mib, global, per_layer, frequency) in [
        (500, 0.0, 38.3, 38.3),
        (1000, 37.7, 42.3, 45.1),
        (2000, 56.5, 59.4, 63.3),
        (3000, 70.6, 71.1, 74.2),
        (4000, 80.3, 79.7, 81.7),
        (8000, 96.0, 95.0, 95.2),
    ] {
        let rate = |policy| 100.0 * at(&trace, policy, capacity_mib).generate.hit_rate();
        let (lru, layer_lru) = (rate(PolicyKind::GlobalLru), rate(PolicyKind::PerLayerLru));
        assert!((lru - global).abs() <= 0.05, "{capacity_mib} MiB: {lru}");
        assert!((layer_lru - per_layer).abs() <= 0.051, "{capacity_mib} MiB: {layer_lru}");
        // The published counts never age; ours do, and are no worse for it.
        let aged = rate(PolicyKind::PerLayerLfu);
        eprintln!(
            "{capacity_mib} MiB: layer-lfu {aged:.1} %, published without ageing {frequency} %"
        );
        assert!(aged >= frequency - 0.051 && aged <= frequency + 1.0, "{capacity_mib} MiB: {aged}");
    }
}

#[test]
fn below_one_token_cycle_a_global_list_is_useless() {
    for (name, capacity_mib) in [("qwen.route.csv", 770), ("gptoss.route.csv", 880)] {
        let Some(trace) = trace(name) else { return };
        assert_eq!(at(&trace, PolicyKind::GlobalLru, capacity_mib).generate.hits, 0, "{name}");
        for policy in [PolicyKind::PerLayerLru, PolicyKind::PerLayerLfu] {
            assert!(at(&trace, policy, capacity_mib).generate.hit_rate() > 0.15, "{name} {policy}");
        }
    }
}

#[test]
fn broken_traces_are_refused_with_their_line() {
    let head = "# route_trace v1\n# model=x n_layer=2 n_expert=4 n_expert_used=2\n# layer=1 expert_bytes=10\n";
    let good = format!("{head}turn,phase,step,layer,slot,expert,weight\n0,0,0,1,0,3,0.5\n");
    let trace = RoutingTrace::from_csv(&good).unwrap();
    assert_eq!(trace.layers(), [(0, 0), (4, 10)]);
    assert_eq!(trace.batches().count(), 1);
    for (row, why) in [
        ("0,0,0,1,0", "expert is missing"),
        ("0,2,0,1,0,1", "phase 2"),
        ("0,0,0,1,0,4", "4 experts"),
        ("0,0,0,7,0,1", "0 experts"),
        ("0,0,0,18446744073709551615,0,1", "0 experts"),
        ("0,0,x,1,0,1", "not a number"),
        ("# layer=99999999 expert_bytes=1", "layer 99999999"),
        ("# n_expert=4000000000", "experts in a layer"),
        ("# layer=0 expert_bytes=99999999999999", "are possible"),
        ("{\"json\": 1}", "not a number"),
    ] {
        let error = RoutingTrace::from_csv(&format!("{head}{row}\n")).unwrap_err();
        assert_eq!(error.line, 4);
        assert!(error.to_string().contains(why), "{error}");
    }
}
