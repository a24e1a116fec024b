//! A replay of the engine's own routing trace gives the engine's own counters.

mod support;

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use forebay_engine::{EngineError, GenerateOptions, RoutingSource, Session, SessionOptions};
use forebay_model::sampling::Sampling;
use forebay_stream::{
    CacheShape, Lookups, Phase, PolicyKind, ReplayPolicy, RoutingTrace, StreamError, replay,
    routing,
};
use support::fixture;

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn options(ram_bytes: Option<u64>, policy: PolicyKind) -> SessionOptions {
    SessionOptions {
        ram_bytes,
        policy,
        context: Some(128),
        threads: Some(2),
        ..SessionOptions::default()
    }
}

fn open(path: &Path, options: &SessionOptions) -> Result<Session, EngineError> {
    Session::open(path, options, &mut |_, _| {})
}

/// The smallest budget that runs, and one that holds everything.
fn budgets(path: &Path) -> [u64; 3] {
    let policy = PolicyKind::LRU;
    let smallest = match open(path, &options(Some(1), policy)) {
        Err(EngineError::Stream(StreamError::BudgetTooSmall { needed_bytes, .. })) => needed_bytes,
        other => panic!("one byte must be refused as too small: {:?}", other.map(drop)),
    };
    let all = open(path, &options(None, policy)).unwrap().plan().unwrap().arena_bytes + (8 << 20);
    [smallest + (all - smallest) / 4, smallest + (all - smallest) / 2, all]
}

fn models() -> Vec<PathBuf> {
    ["gguf/qwen3_moe/qwen3_moe-Q8_0.gguf", "models/qwen3_moe", "models/mixtral"]
        .iter()
        .filter_map(|name| fixture(name))
        .collect()
}

/// Two turns, the second behind the first, and one that is longer than a batch.
fn talk(session: &mut Session) -> usize {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let mut generated = 0;
    for (count, reset) in [(20, true), (5, false), (70, true)] {
        if reset {
            session.reset();
        }
        let ids = |index: usize| ((index * 7919 + count) % session.vocab_size()) as u32;
        let prompt: Vec<u32> = (0..count).map(ids).collect();
        let options = GenerateOptions {
            max_tokens: Some(12),
            sampling: sampling.clone(),
            ignore_end: true,
            ..GenerateOptions::default()
        };
        let answer = session.generate(&prompt, &options, &mut |_| ControlFlow::Continue(()));
        generated += answer.unwrap().tokens.len() - 1;
    }
    generated
}

fn recorded(session: &mut Session) -> (RoutingTrace, usize) {
    let out = Shared::default();
    session.record_routing(Box::new(out.clone())).unwrap();
    let generated = talk(session);
    session.end_routing().unwrap();
    let trace = routing::read(out.0.lock().unwrap().as_slice()).unwrap();
    (trace, generated)
}

#[test]
fn the_replay_of_its_own_trace_gives_the_engines_counters() {
    for path in models() {
        let mut seen: Option<RoutingTrace> = None;
        for ram in budgets(&path) {
            for policy in PolicyKind::ALL {
                let mut session = open(&path, &options(Some(ram), policy)).unwrap();
                let (trace, generated) = recorded(&mut session);
                let plan = session.plan().unwrap();
                let shape = CacheShape::from_plan(plan).after_preload(plan);
                let lookups = Lookups::of(&trace);
                let counters = replay(&lookups, ReplayPolicy::Online(policy), &shape);
                let engine = session.statistics().stream.unwrap();
                let what = format!("{} with {ram} bytes and {policy}", path.display());
                assert_eq!(
                    (engine.lookups, engine.hits, engine.evictions),
                    (counters.all.lookups, counters.all.hits, counters.all.evictions),
                    "{what}"
                );
                let per_token = counters.generate.misses() as f64 / generated as f64;
                assert_eq!(engine.faulted_experts_per_token.all, Some(per_token), "{what}");
                // Whatever is in memory, the same experts are chosen.
                let first = seen.get_or_insert_with(|| trace.clone());
                assert!(*first == trace, "{what}: other routing");
            }
        }
    }
}

#[test]
fn who_follows_its_own_trace_does_the_same() {
    for path in models() {
        let mut session = open(&path, &options(None, PolicyKind::LAYER_LFU)).unwrap();
        let (own, _) = recorded(&mut session);
        session.follow_routing(RoutingSource::Trace(own.clone())).unwrap();
        let (followed, _) = recorded(&mut session);
        assert!(own == followed, "{}", path.display());
        session.follow_routing(RoutingSource::Uniform).unwrap();
        let (uniform, _) = recorded(&mut session);
        assert!(own != uniform, "{}", path.display());
        let (layers, mut seen) = (own.header().layers.len(), 0);
        for (token, layer) in (0..uniform.tokens()).flat_map(|t| (0..layers).map(move |l| (t, l))) {
            let mut row: Vec<_> = uniform.experts(token, layer).collect();
            let used = row.len();
            row.sort_unstable();
            row.dedup();
            assert_eq!(row.len(), used, "an expert twice");
            seen += used;
        }
        assert!(seen > 0);
    }
}

#[test]
fn a_trace_of_another_model_is_refused() {
    let paths = models();
    let mut session = open(&paths[0], &options(None, PolicyKind::LAYER_LFU)).unwrap();
    let (mut trace, _) = recorded(&mut session);
    let mut header = trace.header().clone();
    header.layers[0].used += 1;
    trace = RoutingTrace::new(header);
    let refused = session.follow_routing(RoutingSource::Trace(trace));
    assert!(matches!(refused, Err(EngineError::OtherRouting { .. })), "{refused:?}");
}

#[test]
fn a_trace_says_what_it_is_about() {
    for path in models() {
        let mut session = open(&path, &options(None, PolicyKind::LAYER_LFU)).unwrap();
        let (trace, generated) = recorded(&mut session);
        let header = trace.header();
        assert!(header.weights && header.layers.iter().any(|layer| layer.expert_bytes > 0));
        let turns: Vec<u32> = trace.turns().iter().map(|turn| turn.prompt_tokens).collect();
        assert_eq!(turns, [20, 5, 70]);
        let of = |phase| trace.batches().filter(move |batch| batch.phase == phase);
        assert_eq!(of(Phase::Prompt).map(|batch| batch.tokens.len()).sum::<usize>(), 95);
        assert_eq!(of(Phase::Generate).count(), generated);
        for token in 0..trace.tokens() {
            for (layer, of) in header.layers.iter().enumerate() {
                assert_eq!(trace.experts(token, layer).count(), of.used as usize);
                let weights = trace.weights(token, layer);
                assert!(weights.iter().all(|&weight| weight > 0.0 && weight <= 1.0));
                assert!(weights.is_sorted_by(|a, b| a >= b), "best first: {weights:?}");
            }
        }
    }
}

#[test]
fn a_dense_model_has_nothing_to_record() {
    let Some(path) = fixture("gguf/llama_k/llama_k-Q4_K_M.gguf") else { return };
    let mut session = open(&path, &options(None, PolicyKind::LAYER_LFU)).unwrap();
    let refused = session.record_routing(Box::new(std::io::sink()));
    assert!(matches!(refused, Err(EngineError::NoExperts)));
}
