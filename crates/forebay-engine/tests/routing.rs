//! Tests that a replay of the engine's own routing trace gives the engine's own counters.

mod support;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use forebay_engine::{
    EngineError, GenerateOptions, RoutingError, RoutingSource, Session, SessionOptions,
};
use forebay_lab::replay::{Predictor, predict};
use forebay_model::sampling::Sampling;
use forebay_stream::{
    CacheShape, Capacity, Lookups, Phase, PolicyKind, RoutingTrace, replay, routing,
};
use safetensors::SafeTensors;
use support::{SharedBytes, fixture, needed_bytes};

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

/// Returns three budgets: one that holds everything, and two at a quarter and half of the way to it from the smallest
/// that runs.
fn budgets(path: &Path) -> [u64; 3] {
    let policy = PolicyKind::LRU;
    let smallest = needed_bytes(open(path, &options(Some(1), policy)));
    let all = open(path, &options(None, policy)).unwrap().plan().unwrap().arena_bytes + (8 << 20);
    [smallest + (all - smallest) / 4, smallest + (all - smallest) / 2, all]
}

fn models() -> Vec<PathBuf> {
    ["gguf/qwen3_moe/qwen3_moe-Q8_0.gguf", "models/qwen3_moe", "models/mixtral"]
        .iter()
        .filter_map(|name| fixture(name))
        .collect()
}

/// Runs three turns and returns the number of tokens generated after the first of each. The second turn continues the
/// first, and the third has a prompt that is longer than a batch.
fn talk(session: &mut Session) -> usize {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let mut generated = 0;
    for (count, reset) in [(20, true), (5, false), (70, true)] {
        if reset {
            session.reset();
        }
        let ids = |index: usize| ((index * 7919 + count) % session.vocab_size()) as u32;
        let prompt: Vec<u32> = (0..count).map(ids).collect();
        let options = GenerateOptions::exactly(12, sampling.clone());
        let answer = session.generate(&prompt, &options, &mut |_| ControlFlow::Continue(()));
        generated += answer.unwrap().tokens.len() - 1;
    }
    generated
}

fn recorded(session: &mut Session, scores: bool) -> (RoutingTrace, usize) {
    let out = SharedBytes::default();
    session.record_routing(Box::new(out.clone()), scores).unwrap();
    let generated = talk(session);
    session.end_routing().unwrap();
    let trace = routing::read(out.bytes().as_slice()).unwrap();
    (trace, generated)
}

#[test]
fn the_replay_of_its_own_trace_gives_the_engines_counters() {
    for path in models() {
        let mut seen: Option<RoutingTrace> = None;
        for ram in budgets(&path) {
            for policy in PolicyKind::ALL {
                let mut session = open(&path, &options(Some(ram), policy)).unwrap();
                let (trace, generated) = recorded(&mut session, false);
                let plan = session.plan().unwrap();
                let shape = CacheShape::from_plan(plan).after_preload(plan);
                let lookups = Lookups::of(&trace);
                let counters = replay(&lookups, policy, &shape);
                let engine = session.statistics().stream.unwrap();
                let what = format!("{} with {ram} bytes and {policy}", path.display());
                assert_eq!(
                    (engine.lookups, engine.hits, engine.evictions),
                    (counters.all.lookups, counters.all.hits, counters.all.evictions),
                    "{what}"
                );
                let per_token = counters.generate.misses() as f64 / generated as f64;
                assert_eq!(engine.faulted_experts_per_token.all, Some(per_token), "{what}");
                // The same experts are chosen whatever is in memory.
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
        let (own, _) = recorded(&mut session, false);
        session.follow_routing(RoutingSource::Trace(Box::new(own.clone()))).unwrap();
        let (followed, _) = recorded(&mut session, false);
        assert!(own == followed, "{}", path.display());
        session.follow_routing(RoutingSource::Uniform).unwrap();
        let (uniform, _) = recorded(&mut session, false);
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
    let (mut trace, _) = recorded(&mut session, false);
    let mut header = trace.header().clone();
    header.layers[0].used += 1;
    trace = RoutingTrace::new(header);
    let refused = session.follow_routing(RoutingSource::Trace(Box::new(trace)));
    assert!(
        matches!(refused, Err(EngineError::Routing(RoutingError::Other { .. }))),
        "{refused:?}"
    );
}

#[test]
fn a_trace_says_what_it_is_about() {
    for path in models() {
        let mut session = open(&path, &options(None, PolicyKind::LAYER_LFU)).unwrap();
        let (trace, generated) = recorded(&mut session, false);
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
    let refused = session.record_routing(Box::new(std::io::sink()), false);
    assert!(matches!(refused, Err(EngineError::Routing(RoutingError::NoExperts))));
}

/// Tensors of a Hugging Face folder in bf16, returned as f64.
struct Tensors(Vec<Vec<u8>>);

impl Tensors {
    fn open(folder: &Path) -> Tensors {
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let weights = files.filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.starts_with("model") && name.ends_with(".safetensors")
        });
        Tensors(weights.map(|path| std::fs::read(path).unwrap()).collect())
    }

    fn get(&self, name: &str) -> Vec<f64> {
        for bytes in &self.0 {
            if let Ok(tensor) = SafeTensors::deserialize(bytes).unwrap().tensor(name) {
                assert_eq!(tensor.dtype(), safetensors::Dtype::BF16);
                let bf16 = tensor.data().chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
                return bf16.map(|bits| f32::from_bits(u32::from(bits) << 16).into()).collect();
            }
        }
        panic!("no tensor {name}");
    }

    fn product(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let rows = self.get(name);
        rows.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }

    /// Computes RMSNorm (Zhang and Sennrich, 2019) with the epsilon of the fixture.
    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + 1e-6).sqrt();
        x.iter().zip(self.get(name)).map(|(x, weight)| x * scale * weight).collect()
    }
}

#[test]
fn early_scores_are_the_routers_product_with_the_state_one_layer_before() {
    let Some(folder) = fixture("models/qwen3_moe") else { return };
    let tensors = Tensors::open(&folder);
    let mut session =
        open(&folder, &SessionOptions { exact: true, ..options(None, PolicyKind::LAYER_LFU) })
            .unwrap();
    let out = SharedBytes::default();
    session.record_routing(Box::new(out.clone()), true).unwrap();
    const TOKENS: [u32; 3] = [7, 101, 402];
    for token in TOKENS {
        session.logits(&[token], None).unwrap();
    }
    session.end_routing().unwrap();
    let trace = routing::read(out.bytes().as_slice()).unwrap();
    for (row, token) in TOKENS.into_iter().enumerate() {
        let hidden = 64;
        let start = token as usize * hidden;
        let mut x = tensors.get("model.embed_tokens.weight")[start..start + hidden].to_vec();
        for layer in 0..2 {
            let of = |name: &str| format!("model.layers.{layer}.{name}.weight");
            let normed = tensors.norm(&of("post_attention_layernorm"), &x);
            let wanted = tensors.product(&of("mlp.gate"), &normed);
            let scores = trace.scores(row, layer);
            assert_eq!(scores.len(), 16);
            for (score, wanted) in scores.iter().zip(&wanted) {
                let near = (f64::from(*score) - wanted).abs() < 1e-4 * wanted.abs().max(1.0);
                assert!(near, "token {token}, layer {layer}: {score}, not {wanted}");
            }
            // A single position attends only to itself, whatever query and key are, so its value passes through. Two
            // heads share the value of their group.
            let normed = tensors.norm(&of("input_layernorm"), &x);
            let values = tensors.product(&of("self_attn.v_proj"), &normed);
            let heads = values.chunks_exact(32).flat_map(|value| [value, value].concat());
            let attended: Vec<f64> = heads.collect();
            let added = tensors.product(&of("self_attn.o_proj"), &attended);
            x.iter_mut().zip(added).for_each(|(x, added)| *x += added);
        }
    }
}

#[test]
fn early_scores_change_nothing_and_do_not_depend_on_the_budget() {
    for path in models() {
        let mut seen: Option<RoutingTrace> = None;
        for (ram, prefetch) in budgets(&path).into_iter().zip([false, true, false]) {
            let options = SessionOptions { prefetch, ..options(Some(ram), PolicyKind::LAYER_LFU) };
            let (trace, _) = recorded(&mut open(&path, &options).unwrap(), true);
            let (without, _) = recorded(&mut open(&path, &options).unwrap(), false);
            assert!(trace.header().scores && !without.header().scores);
            for token in 0..trace.tokens() {
                for (layer, of) in trace.header().layers.iter().enumerate() {
                    assert!(trace.experts(token, layer).eq(without.experts(token, layer)));
                    assert_eq!(trace.weights(token, layer), without.weights(token, layer));
                    assert_eq!(trace.scores(token, layer).len(), of.experts as usize);
                }
            }
            let first = seen.get_or_insert_with(|| trace.clone());
            assert!(*first == trace, "{}: other scores with {ram} bytes", path.display());
        }
        // A predictor that uses the scores must be better than uniform random prediction, whose recall is `used /
        // experts`.
        let trace = seen.unwrap();
        let of = trace.header().layers[0];
        let (policy, none) = (PolicyKind::LAYER_LFU, Capacity::ExpertsPerLayer(0));
        let lookups = Lookups::of(&trace);
        let depth = of.used as usize;
        let predicted = predict(&trace, &lookups, policy, none, Predictor::NextRouter, depth);
        let predicted = predicted.unwrap();
        let recall = predicted.foreseen as f64 / predicted.lookups as f64;
        let chance = f64::from(of.used) / f64::from(of.experts);
        assert!(recall > chance, "{}: {recall} against {chance}", path.display());
        assert_eq!(predicted.predictions, predicted.lookups);
    }
}
