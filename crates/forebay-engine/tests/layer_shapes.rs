//! Tests models whose layers differ in the shape of attention, share keys and values, or have embeddings of their own.

mod support;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use forebay_engine::engine::{EngineOptions, Event, Request};
use forebay_engine::{Engine, GenerateOptions, Session, SessionOptions, inspect};
use forebay_model::sampling::Sampling;
use serde_json::{Value, json};
use support::fixture;

const MODELS: [&str; 5] = [
    "models/gemma4_moe",
    "models/gemma4_ple",
    "models/mimo_v2_flash",
    "gguf/gemma4_moe/gemma4_moe-Q8_0.gguf",
    "gguf/gemma4_ple/gemma4_ple-Q8_0.gguf",
];

fn engine(path: &Path) -> Engine {
    let options = SessionOptions { sequences: 2, context: Some(256), ..SessionOptions::default() };
    let session = Session::open(path, &options, &mut |_, _| {}).unwrap();
    Engine::new(session, &EngineOptions::default())
}

/// Runs a request to its end. Returns the number of its cached tokens, and its answer with the bits of the probabilities.
fn ask(engine: &mut Engine, prompt: &[u32]) -> (usize, Vec<(u32, u32)>) {
    let answer = Arc::new(Mutex::new((0, Vec::new())));
    let to = answer.clone();
    let sink = Box::new(move |event: Event| {
        let mut answer = to.lock().unwrap();
        match event {
            Event::Token(token) => {
                answer.1.push((token.id, token.logprob.expect("asked for").to_bits()));
            }
            Event::Finished { statistics, .. } => answer.0 = statistics.cached_tokens,
        }
        ControlFlow::Continue(())
    });
    let request = Request {
        prompt: prompt.to_vec(),
        options: GenerateOptions::exactly(24, Sampling::greedy()),
        logprobs: Some(0),
        ..Request::default()
    };
    engine.submit(request, sink).unwrap();
    engine.drain().unwrap();
    let mut answer = answer.lock().unwrap();
    std::mem::take(&mut *answer)
}

/// Every layer finds its keys and values in blocks that another request has left, behind its window and before it.
#[test]
fn a_prompt_goes_on_behind_any_beginning_with_the_same_bits() {
    let prompt: Vec<u32> = (0..150).map(|at| (at * 37 + 11) % 490).collect();
    for path in MODELS.iter().filter_map(|name| fixture(name)) {
        let (cached, alone) = ask(&mut engine(&path), &prompt);
        assert_eq!(cached, 0);
        for beginning in [16, 17, 50, 100, 149] {
            let mut engine = engine(&path);
            ask(&mut engine, &prompt[..beginning]);
            let (cached, answer) = ask(&mut engine, &prompt);
            assert!(cached >= 16, "{}: {cached} of {beginning}", path.display());
            assert_eq!(answer, alone, "{}: behind {beginning}", path.display());
        }
    }
}

/// A copy of a folder, with some values of its configuration replaced.
fn changed(name: &str, changes: &[(&str, Value)]) -> Option<tempfile::TempDir> {
    let from: PathBuf = fixture(name)?;
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let of = match config.get("text_config").is_some() {
        true => &mut config["text_config"],
        false => &mut config,
    };
    for (key, value) in changes {
        of[*key] = value.clone();
    }
    std::fs::write(path, config.to_string()).unwrap();
    Some(folder)
}

#[test]
fn values_that_no_model_has_are_refused() {
    let huge = json!(u64::MAX);
    let cases = [
        ("models/gemma4_moe", "global_head_dim"),
        ("models/gemma4_moe", "num_global_key_value_heads"),
        ("models/gemma4_moe", "head_dim"),
        ("models/gemma4_moe", "intermediate_size"),
        ("models/gemma4_moe", "num_kv_shared_layers"),
        ("models/gemma4_moe", "top_k_experts"),
        ("models/gemma4_ple", "hidden_size_per_layer_input"),
        ("models/gemma4_ple", "num_kv_shared_layers"),
        ("models/gemma4_ple", "sliding_window"),
        ("models/mimo_v2_flash", "swa_num_key_value_heads"),
        ("models/mimo_v2_flash", "swa_num_attention_heads"),
        ("models/mimo_v2_flash", "swa_head_dim"),
        ("models/mimo_v2_flash", "swa_v_head_dim"),
        ("models/mimo_v2_flash", "v_head_dim"),
    ];
    for (name, key) in cases {
        // A sliding window may be as long as it likes.
        let values = [json!(3), huge.clone(), json!(-1), json!("many"), json!(0.5)];
        for value in values.into_iter().skip(if key == "sliding_window" { 2 } else { 0 }) {
            let Some(folder) = changed(name, &[(key, value.clone())]) else { continue };
            let options = SessionOptions { context: Some(64), ..SessionOptions::default() };
            let opened = Session::open(folder.path(), &options, &mut |_, _| {});
            // Three experts, or three layers with keys of others, are what the models may have.
            let may = ["top_k_experts", "num_kv_shared_layers"].contains(&key) && value == 3;
            assert!(opened.is_err() || may, "{name}: {key} = {value}");
        }
    }
    let both = json!("all");
    for (name, key, value) in [
        ("models/gemma4_moe", "use_bidirectional_attention", both),
        ("models/mimo_v2_flash", "attention_value_scale", json!(0.0)),
        ("models/mimo_v2_flash", "attention_value_scale", json!(1e300)),
        ("models/mimo_v2_flash", "swa_rope_theta", json!(-1.0)),
    ] {
        let Some(folder) = changed(name, &[(key, value.clone())]) else { continue };
        let options = SessionOptions { context: Some(64), ..SessionOptions::default() };
        let opened = Session::open(folder.path(), &options, &mut |_, _| {});
        assert!(opened.is_err(), "{name}: {key} = {value}");
    }
}

#[test]
fn inspect_counts_the_keys_and_values_that_layers_keep() {
    // Two planes of two bytes. Gemma 4: heads of 32 in layers with a window, of 64 in the others.
    let expected = [
        ("models/gemma4_moe", 5 * 2 * 32 * 4 + 64 * 4, 64 * 4),
        // The last two of six layers use the keys of others.
        ("models/gemma4_ple", 2 * 2 * (32 + 64) * 4, 2 * 2 * 64 * 4),
        ("models/mimo_v2_flash", 2 * (2 + 4) * (48 + 32) * 2, 2 * 2 * (48 + 32) * 2),
    ];
    for (name, all, kept) in expected {
        let Some(path) = fixture(name) else { continue };
        let found = inspect(&path).unwrap();
        let counts = (found.kv_bytes_per_position, found.kv_bytes_per_position_kept);
        assert_eq!(counts, (all, kept), "{name}");
        let has = |name: &str| found.features.iter().any(|feature| feature.name == name);
        assert!(has("attention by layer") && has("sliding window"), "{name}");
        assert_eq!(has("shared keys and values"), name.ends_with("ple"));
        assert_eq!(has("keys as values"), name.ends_with("moe"));
    }
}
