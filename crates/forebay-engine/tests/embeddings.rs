//! Tests embeddings: states behind the last layer, whatever runs beside them.

#[path = "support/logits.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod logits;
mod support;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use forebay_engine::engine::{EngineOptions, Event, Pooling, Request, RequestEnd, SnapshotError};
use forebay_engine::{Engine, EngineError, GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;
use logits::{References, json, prompt};
use safetensors::SafeTensors;
use support::fixture;

fn open(path: &Path, sequences: usize, kv_ram_bytes: Option<u64>) -> Session {
    let options = SessionOptions {
        context: Some(96),
        threads: Some(2),
        sequences,
        kv_ram_bytes,
        kv_tokens: Some(96),
        ..SessionOptions::default()
    };
    Session::open(path, &options, &mut |_, _| {}).unwrap()
}

fn request(prompt: &[u32], pooling: Option<Pooling>, priority: i32) -> Request {
    let options = GenerateOptions::exactly(20, Sampling::greedy());
    Request { prompt: prompt.to_vec(), options, pooling, priority, ..Request::default() }
}

/// Runs requests, each submitted three steps after the one before. Returns their embeddings and ends.
fn run(engine: &mut Engine, requests: &[Request]) -> Vec<(Option<Vec<f32>>, Option<RequestEnd>)> {
    let results = Arc::new(Mutex::new(vec![(None, None); requests.len()]));
    for (index, request) in requests.iter().enumerate() {
        let results = results.clone();
        let sink = move |event| {
            if let Event::Finished { end, embedding, .. } = event {
                results.lock().unwrap()[index] = (embedding, Some(end));
            }
            ControlFlow::Continue(())
        };
        engine.submit(request.clone(), Box::new(sink)).unwrap();
        for _ in 0..3 {
            engine.step().unwrap();
        }
    }
    engine.drain().unwrap();
    let results = results.lock().unwrap();
    results.clone()
}

/// The head is the embedding table in this model, so its product with the last token's state is the reference's logits.
#[test]
fn the_last_state_gives_the_logits_of_the_reference() {
    let path = fixture("models/llama3_rope").expect("it is part of the project");
    let ids = prompt(&json(&path.join("reference.json")), "short");
    let reference = References::open(&path.join("reference.safetensors")).floats("hf.short.logits");
    let reference = reference.expect("the reference has logits");
    let bytes = std::fs::read(path.join("model.safetensors")).unwrap();
    let head = SafeTensors::deserialize(&bytes).unwrap();
    let head = head.tensor("model.embed_tokens.weight").unwrap();
    let [vocabulary, hidden] = *head.shape() else { panic!("a matrix") };
    let floats = head.data().chunks_exact(4);
    let weights: Vec<f32> =
        floats.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    let mut engine = Engine::new(open(&path, 1, None), &EngineOptions::default());
    let last = run(&mut engine, &[request(&ids, Some(Pooling::Last), 0)]);
    let state = last[0].0.clone().expect("an embedding");
    assert_eq!(state.len(), hidden);
    let expected = &reference[reference.len() - vocabulary..];
    let product = |row: &[f32]| row.iter().zip(&state).map(|(w, x)| w * x).sum::<f32>();
    let spread = expected.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
    for (row, expected) in weights.chunks_exact(hidden).zip(expected) {
        assert!((product(row) - expected).abs() < 1e-3 * spread, "{} {expected}", product(row));
    }
    // The mean is that of the states of all prefixes' last tokens.
    let mean = run(&mut engine, &[request(&ids, Some(Pooling::Mean), 0)]);
    let mean = mean[0].0.clone().expect("an embedding");
    let prefixes: Vec<Request> =
        (1..=ids.len()).map(|end| request(&ids[..end], Some(Pooling::Last), 0)).collect();
    let states = run(&mut engine, &prefixes);
    for (dimension, mean) in mean.iter().enumerate() {
        let sum: f64 =
            states.iter().map(|(state, _)| f64::from(state.as_ref().unwrap()[dimension])).sum();
        assert!((sum / ids.len() as f64 - f64::from(*mean)).abs() < 1e-4);
    }
}

#[test]
fn embeddings_do_not_depend_on_other_requests() {
    for name in ["models/llama3_rope", "models/qwen3_moe", "models/gemma3"] {
        let path = fixture(name).expect("it is part of the project");
        let mut engine = Engine::new(open(&path, 1, None), &EngineOptions::default());
        let vocabulary = engine.session().vocab_size() as u32;
        let ids: Vec<u32> = (0..70).map(|i| (i * 37 + 11) % vocabulary).collect();
        let all = [
            request(&ids[..40], None, 0),
            request(&ids[..40], Some(Pooling::Mean), 0),
            request(&ids[..1], Some(Pooling::Last), 1),
            request(&ids[5..], Some(Pooling::Mean), 0),
            request(&ids[..9], None, 2),
            request(&ids[..40], Some(Pooling::Last), 3),
        ];
        let alone: Vec<_> =
            all.iter().flat_map(|of| run(&mut engine, std::slice::from_ref(of))).collect();
        assert!(
            alone.iter().zip(&all).all(|(found, of)| found.0.is_some() == of.pooling.is_some())
        );
        // Together, and where each request of a higher priority suspends the one before.
        for (sequences, kv_ram_bytes) in [(4, None), (1, None), (1, Some(0))] {
            let mut engine = Engine::new(
                open(&path, sequences, kv_ram_bytes),
                &EngineOptions { prompt_rows: Some(7), ..EngineOptions::default() },
            );
            assert_eq!(run(&mut engine, &all), alone, "{name} {sequences} {kv_ram_bytes:?}");
            assert!(sequences > 1 || engine.statistics().suspended > 0);
        }
    }
}

#[test]
fn an_embedding_has_no_snapshot() {
    let path = fixture("models/llama3_rope").expect("it is part of the project");
    let mut engine = Engine::new(open(&path, 1, None), &EngineOptions::default());
    let embedding = request(&[1, 2, 3], Some(Pooling::Mean), 0);
    let id = engine.submit(embedding, Box::new(|_| ControlFlow::Continue(()))).unwrap();
    assert!(matches!(engine.snapshot(id), Err(EngineError::Snapshot(SnapshotError::None))));
}
