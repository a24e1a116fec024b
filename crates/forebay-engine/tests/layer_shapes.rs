//! Tests models whose layers differ in the shape of attention, share keys and values, or have embeddings of their own.

#[path = "support/requests.rs"]
mod requests;
mod support;

use std::path::Path;

use forebay_engine::engine::EngineOptions;
use forebay_engine::{Engine, Session, SessionOptions, inspect};
use serde_json::{Value, json};
use support::{changed, fixture};
use tempfile::TempDir;

const MODELS: [&str; 5] = [
    "models/gemma4_moe",
    "models/gemma4_ple",
    "models/mimo_v2_flash",
    "gguf/gemma4_moe/gemma4_moe-Q8_0.gguf",
    "gguf/gemma4_ple/gemma4_ple-Q8_0.gguf",
];

fn engine(path: &Path) -> Engine<'static> {
    let options = SessionOptions { sequences: 2, context: Some(256), ..SessionOptions::default() };
    let session = Session::open(path, &options, &mut |_, _| {}).unwrap();
    Engine::new(session, &EngineOptions::default())
}

fn ask(engine: &mut Engine, prompt: &[u32]) -> (usize, Vec<(u32, u32)>) {
    requests::ask_one(engine, prompt, 24, b"")
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

/// Returns a copy of a fixture where one value of the text model's configuration was replaced.
fn with_value(name: &str, key: &str, value: &Value) -> Option<TempDir> {
    changed(name, |config| {
        let of = match config.get("text_config").is_some() {
            true => &mut config["text_config"],
            false => config,
        };
        of[key] = value.clone();
    })
}

#[test]
fn values_that_no_model_has_are_refused() {
    let numbers = [json!(3), json!(u64::MAX), json!(-1), json!("many"), json!(0.5)];
    let cases: [(&str, &str, &[Value]); 17] = [
        ("gemma4_moe", "global_head_dim", &numbers),
        ("gemma4_moe", "num_global_key_value_heads", &numbers),
        ("gemma4_moe", "head_dim", &numbers),
        ("gemma4_moe", "intermediate_size", &numbers),
        ("gemma4_moe", "num_kv_shared_layers", &numbers),
        ("gemma4_moe", "top_k_experts", &numbers),
        ("gemma4_moe", "use_bidirectional_attention", &[json!("all")]),
        ("gemma4_ple", "hidden_size_per_layer_input", &numbers),
        ("gemma4_ple", "num_kv_shared_layers", &numbers),
        // A sliding window may be as long as it likes.
        ("gemma4_ple", "sliding_window", &numbers[2..]),
        ("mimo_v2_flash", "swa_num_key_value_heads", &numbers),
        ("mimo_v2_flash", "swa_num_attention_heads", &numbers),
        ("mimo_v2_flash", "swa_head_dim", &numbers),
        ("mimo_v2_flash", "swa_v_head_dim", &numbers),
        ("mimo_v2_flash", "v_head_dim", &numbers),
        ("mimo_v2_flash", "attention_value_scale", &[json!(0.0), json!(1e300)]),
        ("mimo_v2_flash", "swa_rope_theta", &[json!(-1.0)]),
    ];
    for (name, key, values) in cases {
        for value in values {
            let Some(folder) = with_value(name, key, value) else { continue };
            let options = SessionOptions { context: Some(64), ..SessionOptions::default() };
            let opened = Session::open(folder.path(), &options, &mut |_, _| {});
            // Three experts, or three layers with keys of others, are what the models may have.
            let may = ["top_k_experts", "num_kv_shared_layers"].contains(&key) && *value == 3;
            assert!(opened.is_err() || may, "{name}: {key} = {value}");
        }
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
