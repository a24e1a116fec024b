//! Measures the speed of replays: accesses per second of one thread, under every policy, on routing of a real model's
//! shape.
//!
//! Run it with `cargo run --release -p forebay-lab --example replay_rate [ACCESSES [TRACE.csv]]`. Results are
//! recorded in `bench/results/`.

use std::fs::File;
use std::io::BufReader;
use std::time::Instant;

use forebay_lab::replay::{LruCurve, ReplayPolicy, replay};
use forebay_stream::routing::{LookupOrder, RoutingHeader, RoutingLayer, RoutingRecorder};
use forebay_stream::{
    Capacity, ExpertIndex, LayerIndex, Lookups, Phase, PolicyKind, RoutingTrace, Scope,
};

const LAYERS: u32 = 48;
const EXPERTS: u32 = 128;
const USED: usize = 8;

/// Returns lookups of synthetic tokens. Each expert stays for the next token with probability 0.3. The others come
/// from a skewed distribution.
fn synthetic(accesses: usize) -> Lookups {
    let mut random = fastrand::Rng::with_seed(1);
    let mut below = move |end: u64| random.u64(..end);
    let sizes =
        (0..LAYERS).map(|layer| (EXPERTS, if layer % 3 == 0 { 3_059_712 } else { 2_654_208 }));
    let mut lookups = Lookups::new(sizes.collect());
    let mut last = vec![Vec::<ExpertIndex>::new(); LAYERS as usize];
    for _ in 0..accesses.div_ceil(USED * LAYERS as usize) {
        for layer in 0..LAYERS {
            let before = &mut last[layer as usize];
            before.retain(|_| below(10) < 3);
            while before.len() < USED {
                let end = 1 + below(u64::from(EXPERTS));
                let expert = ExpertIndex(below(end) as u32);
                if !before.contains(&expert) {
                    before.push(expert);
                }
            }
            before.sort_unstable();
            lookups.push(Phase::Generate, LayerIndex(layer), 1, before);
        }
    }
    lookups
}

/// Returns the microseconds to record one generated token, including compression and writing to memory.
fn recording_microseconds() -> f64 {
    const TOKENS: usize = 2000;
    let layer = RoutingLayer { experts: EXPERTS, used: USED as u32, expert_bytes: 1 };
    let layers = vec![layer; LAYERS as usize];
    let header = RoutingHeader::new("m".into(), "a".into(), layers, LookupOrder::Ascending);
    let header = RoutingHeader { weights: true, ..header };
    let lookups = synthetic(TOKENS * USED * LAYERS as usize);
    let experts: Vec<i32> =
        lookups.batches().flat_map(|batch| batch.2.iter().map(|expert| expert.0 as i32)).collect();
    let weights: Vec<f32> =
        (0..experts.len()).map(|at| 1.0 / (1.0 + (at * 7919 % 1009) as f32)).collect();
    let mut recorder = RoutingRecorder::new(Box::new(std::io::sink()), header).expect("a header");
    recorder.turn(&[]).expect("nothing to fail");
    let row = USED * LAYERS as usize;
    let started = Instant::now();
    for (experts, weights) in experts.chunks(row).zip(weights.chunks(row)) {
        recorder.record(Phase::Generate, experts, weights, &[], 1).expect("nothing to fail");
    }
    recorder.finish().expect("nothing to fail");
    1e6 * started.elapsed().as_secs_f64() / TOKENS as f64
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let accesses = arguments.next().map_or(10_000_000, |text| text.parse().expect("a number"));
    let lookups = match arguments.next() {
        None => synthetic(accesses),
        Some(path) => {
            let file = BufReader::new(File::open(path).expect("a trace"));
            Lookups::of(&RoutingTrace::from_csv(file).expect("routing in its CSV form"))
        }
    };
    println!("{} accesses, {} bytes of experts", lookups.len(), lookups.total_bytes());
    for scope in [Scope::Global, Scope::PerLayer] {
        let started = Instant::now();
        let curve = LruCurve::of(&lookups, scope, true);
        let seconds = started.elapsed().as_secs_f64();
        let points = curve.points().count();
        println!("{scope:?} LRU at all capacities: {seconds:.3} s, {points} points");
    }
    println!("routing log: {:.1} us for each token", recording_microseconds());
    println!("policy  capacity  hit rate  million accesses/s");
    for policy in ReplayPolicy::all() {
        for share in [0.1, 0.25, 0.75] {
            // Rankings that search for their victim are slow. They are only timed with at most a million accesses.
            let is_list = matches!(
                policy,
                ReplayPolicy::Online(
                    PolicyKind::LRU
                        | PolicyKind::LAYER_LRU
                        | PolicyKind::SLRU
                        | PolicyKind::LAYER_SLRU
                )
            );
            if !is_list && lookups.len() > 1_000_000 {
                continue;
            }
            let capacity = Capacity::Bytes((lookups.total_bytes() as f64 * share) as u64);
            let shape = capacity.shape(policy.scope(), lookups.layers(), true);
            let started = Instant::now();
            let counters = replay(&lookups, policy, &shape);
            let rate = lookups.len() as f64 / started.elapsed().as_secs_f64() / 1e6;
            println!("{policy:18} {share:4}  {:.4}  {rate:.1}", counters.all.hit_rate());
        }
    }
}
