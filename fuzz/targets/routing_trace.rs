//! Fuzzes routing traces in both forms. The binary form is read without its compression, whose checksum would reject
//! every mutation. An accepted trace must survive being written and read again, and a replay under every policy.

#![no_main]

use forebay_stream::routing::{RoutingTrace, read, read_any, read_uncompressed};
use forebay_stream::{Capacity, Lookups, PolicyKind, replay};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    forebay_fuzz::bounded(data, |data| {
        let _ = read_any(data).map(|trace| check(&trace));
        if let Ok(trace) = read_uncompressed(data) {
            check(&trace);
            let file = trace.write(Vec::new()).expect("memory takes everything");
            assert!(read(file.as_slice()).expect("it was just written") == trace);
        }
    });
});

fn check(trace: &RoutingTrace) {
    let lookups = Lookups::of(trace);
    for policy in PolicyKind::ALL {
        let shape = Capacity::Share(0.5).shape(policy.scope, lookups.layers(), true);
        let counters = replay(&lookups, policy, &shape);
        assert!(counters.all.hits <= counters.all.lookups);
    }
    for token in 0..trace.tokens() {
        for layer in 0..trace.header().layers.len() {
            assert!(
                trace.experts(token, layer).all(|e| e.0 < trace.header().layers[layer].experts)
            );
        }
    }
}
