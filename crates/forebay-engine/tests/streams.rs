//! Tests models with residual streams beside each other, and with tables that give the experts of tokens.

mod support;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use forebay_engine::engine::{EngineOptions, Event, Pooling, Request};
use forebay_engine::{Engine, EngineError, GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;
use forebay_stream::{RoutingTrace, routing};
use safetensors::SafeTensors;
use serde_json::json;
use support::{
    SharedBytes, changed, copied, fixture, generate_greedily, needed_bytes, with_causes,
};

const MODELS: [&str; 2] = ["models/deepseek_v4", "models/qwen4_exp"];

fn options(ram_bytes: Option<u64>, prefetch: bool) -> SessionOptions {
    SessionOptions {
        ram_bytes,
        prefetch,
        context: Some(128),
        threads: Some(2),
        ..SessionOptions::default()
    }
}

fn open(path: &Path, options: &SessionOptions) -> Result<Session, EngineError> {
    Session::open(path, options, &mut |_, _| {})
}

/// Returns the smallest budget that works.
fn smallest(path: &Path) -> u64 {
    needed_bytes(open(path, &options(Some(1), false)))
}

fn generate(session: &mut Session) -> Vec<u32> {
    let prompt: Vec<u32> = (0..20).map(|at| (at * 37 + 11) % 490).collect();
    generate_greedily(session, &prompt, 12)
}

fn recorded(path: &Path, options: &SessionOptions, scores: bool) -> (RoutingTrace, Vec<u32>) {
    let mut session = open(path, options).unwrap();
    let out = SharedBytes::default();
    session.record_routing(Box::new(out.clone()), scores).unwrap();
    let tokens = generate(&mut session);
    session.end_routing().unwrap();
    let trace = routing::read(out.bytes().as_slice()).unwrap();
    (trace, tokens)
}

/// Early scores and predictions collapse the streams, too. They must not touch what the next output is added with.
#[test]
fn early_scores_and_predictions_of_several_streams_change_nothing() {
    for path in MODELS.iter().filter_map(|name| fixture(name)) {
        let (plain, tokens) = recorded(&path, &options(None, false), false);
        let small = smallest(&path);
        let mut seen: Option<RoutingTrace> = None;
        for (ram, prefetch) in [(None, false), (Some(small), true), (Some(small * 5 / 4), true)] {
            let (trace, same) = recorded(&path, &options(ram, prefetch), true);
            assert_eq!(same, tokens, "{}", path.display());
            for token in 0..plain.tokens() {
                for layer in 0..plain.header().layers.len() {
                    assert!(trace.experts(token, layer).eq(plain.experts(token, layer)));
                    assert_eq!(trace.weights(token, layer), plain.weights(token, layer));
                    let scores = trace.scores(token, layer);
                    assert!(scores.iter().any(|score| *score != scores[0]), "no scores");
                }
            }
            let first = seen.get_or_insert_with(|| trace.clone());
            assert!(*first == trace, "{}: other scores with {ram:?}", path.display());
        }
    }
}

/// Returns the product of a folder's output projection with a state.
fn product(path: &Path, head: &str, state: &[f32]) -> Vec<f32> {
    let bytes = std::fs::read(path.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let head = file.tensor(head).unwrap();
    assert_eq!((head.dtype(), head.shape()[1]), (safetensors::Dtype::BF16, state.len()));
    let (halves, _) = head.data().as_chunks::<2>();
    let wide = |bytes: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    let rows = halves.chunks_exact(state.len());
    rows.map(|row| row.iter().zip(state).map(|(w, x)| wide(w) * x).sum()).collect()
}

/// The state of an embedding is what the streams collapse to, so its product with the head is the logits.
#[test]
fn streams_collapse_behind_the_last_layer_as_for_logits() {
    for (name, head) in MODELS.into_iter().zip(["head.weight", "lm_head.weight"]) {
        let Some(path) = fixture(name) else { continue };
        let prompt: Vec<u32> = (0..20).map(|at| (at * 37 + 11) % 490).collect();
        let mut session = open(&path, &options(None, false)).unwrap();
        let logits = session.logits(&prompt, None).unwrap();
        let expected = &logits[logits.len() - session.vocab_size()..];
        let session = open(&path, &options(None, false)).unwrap();
        let mut engine = Engine::new(session, &EngineOptions::default());
        let found = Arc::new(Mutex::new(None));
        let to = found.clone();
        let sink = move |event| {
            if let Event::Finished { embedding, .. } = event {
                *to.lock().unwrap() = embedding;
            }
            ControlFlow::Continue(())
        };
        let pooling = Some(Pooling::Last);
        let options = GenerateOptions::exactly(1, Sampling::greedy());
        engine
            .submit(Request { prompt, options, pooling, ..Request::default() }, Box::new(sink))
            .unwrap();
        engine.drain().unwrap();
        let state = found.lock().unwrap().take().expect("an embedding");
        let spread = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        for (found, expected) in product(&path, head, &state).iter().zip(expected) {
            assert!((found - expected).abs() < 1e-3 * spread, "{name}: {found}, not {expected}");
        }
    }
}

/// With one layer, the routers predict nothing: every expert that is read ahead comes from the table.
#[test]
fn experts_of_tokens_are_read_before_their_layer() {
    let Some(one) = changed("deepseek_v4", |config| {
        config["num_hidden_layers"] = json!(1);
        config["compress_ratios"] = json!([0]);
    }) else {
        return;
    };
    let path = one.path();
    let expected = generate(&mut open(path, &options(None, false)).unwrap());
    let ram = Some(smallest(path));
    for prefetch in [false, true] {
        let mut session = open(path, &options(ram, prefetch)).unwrap();
        assert_eq!(generate(&mut session), expected);
        let counters = session.statistics().stream.unwrap();
        let ahead = counters.prefetch;
        assert_eq!(ahead.issued > 0, prefetch, "{ahead:?}");
        assert_eq!((ahead.wasted, ahead.used), (0, ahead.issued), "the table is right");
    }
}

/// Returns the error with which a model opens whose table has `numbers` as its first ones.
fn error_with(numbers: [i64; 3]) -> Option<String> {
    let copy = copied("deepseek_v4")?;
    let path = copy.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let length = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let table = &header["layers.0.ffn.gate.tid2eid"];
    assert_eq!(table["dtype"], "I64");
    let first = 8 + length + table["data_offsets"][0].as_u64().unwrap() as usize;
    for (index, number) in numbers.into_iter().enumerate() {
        bytes[first + 8 * index..][..8].copy_from_slice(&number.to_le_bytes());
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();
    open(copy.path(), &options(None, false)).err().map(|error| with_causes(&error))
}

#[test]
fn tables_with_wrong_experts_are_refused() {
    if fixture("models/deepseek_v4").is_none() {
        return;
    }
    assert_eq!(error_with([5, 4, 0]), None);
    for wrong in [[5, 4, 6], [-1, 0, 1], [i64::MAX, 0, 1], [1 << 32, 1, 2], [3, 2, 3]] {
        let error = error_with(wrong).unwrap_or_else(|| panic!("{wrong:?} was taken"));
        assert!(error.contains("tid2eid") && error.contains("token 0"), "{wrong:?}: {error}");
    }
}
