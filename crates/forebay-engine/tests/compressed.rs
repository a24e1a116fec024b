//! Tests a model with compressed entries (DeepSeek-V4): where its sequences may be cut, and what its files may say.

#[path = "support/requests.rs"]
mod requests;
mod support;

use std::path::Path;

use forebay_engine::engine::EngineOptions;
use forebay_engine::{Engine, Session, SessionOptions, inspect};
use serde_json::{Value, json};
use support::{changed, fixture, generate_greedily};

const MODEL: &str = "models/deepseek_v4";
const FOLDER: &str = "deepseek_v4";
const CONTEXT: usize = 320;

fn open(path: &Path) -> Session {
    let options = SessionOptions {
        sequences: 2,
        context: Some(CONTEXT),
        threads: Some(2),
        ..SessionOptions::default()
    };
    Session::open(path, &options, &mut |_, _| {}).unwrap()
}

fn prompt(count: usize) -> Vec<u32> {
    (0..count).map(|at| ((at * 37 + 11) % 490) as u32).collect()
}

fn ask(engine: &mut Engine, prompt: &[u32]) -> (usize, Vec<(u32, u32)>) {
    requests::ask_one(engine, prompt, 12, b"")
}

/// Entries end after 4 and after 128 positions, so prompts are cut before, at and behind such ends.
#[test]
fn a_prompt_goes_on_behind_any_beginning_with_the_same_bits() {
    let prompt = prompt(290);
    for name in [MODEL, "gguf/deepseek_v4/deepseek_v4-BF16.gguf"] {
        let Some(path) = fixture(name) else { continue };
        let engine = || Engine::new(open(&path), &EngineOptions::default());
        let (cached, alone) = ask(&mut engine(), &prompt);
        assert_eq!(cached, 0);
        for beginning in [16, 17, 19, 100, 127, 128, 129, 144, 200, 255, 256, 289] {
            let mut engine = engine();
            ask(&mut engine, &prompt[..beginning]);
            let (cached, answer) = ask(&mut engine, &prompt);
            assert!(cached >= 16, "{name}: {cached} of {beginning}");
            assert_eq!(answer, alone, "{name}: behind {beginning}");
        }
    }
}

/// What is computed again behind a cut replaces the entries that the dropped positions left.
#[test]
fn a_sequence_goes_back_and_on_with_the_same_tokens() {
    let Some(path) = fixture(MODEL) else { return };
    let prompt = prompt(270);
    let expected = generate_greedily(&mut open(&path), &prompt, 24);
    let mut session = open(&path);
    for cut in [269, 258, 257, 256, 255, 250, 130, 127, 3] {
        session.reset();
        // Other tokens stand where the prompt goes on.
        let other: Vec<u32> = prompt[cut..].iter().map(|id| (id + 1) % 490).collect();
        generate_greedily(&mut session, &[&prompt[..cut], &other].concat(), 5);
        assert_eq!(session.truncate(cut), cut);
        assert_eq!(generate_greedily(&mut session, &prompt[cut..], 24), expected, "cut at {cut}");
    }
}

#[test]
fn values_that_no_model_has_are_refused() {
    let numbers = [json!(3), json!(0), json!(u64::MAX), json!(-1), json!("many"), json!(0.5)];
    let cases: [(&str, &[Value]); 17] = [
        ("head_dim", &numbers),
        ("q_lora_rank", &numbers),
        ("o_groups", &numbers),
        ("o_lora_rank", &numbers),
        ("index_n_heads", &numbers),
        ("index_head_dim", &numbers),
        ("index_topk", &numbers[1..]),
        ("num_attention_heads", &numbers),
        ("num_key_value_heads", &numbers),
        ("qk_rope_head_dim", &numbers),
        ("sliding_window", &numbers[1..2]),
        (
            "compress_ratios",
            &[json!([0, 4, 128]), json!([0, 4, 8, 4]), json!([0, 4, "a", 4]), json!(4)],
        ),
        ("compress_rope_theta", &[json!(0), json!(-1.0)]),
        ("swiglu_limit", &[json!(0), json!(-1.0)]),
        ("attention_bias", &[json!(true)]),
        ("scoring_func", &[json!("tanh")]),
        (
            "layer_types",
            &[Value::from(vec!["full_attention"; 4]), Value::from(vec!["sliding_attention"; 3])],
        ),
    ];
    for (key, values) in cases {
        for value in values {
            let Some(folder) = changed(FOLDER, |config| config[key] = value.clone()) else {
                return;
            };
            let options = SessionOptions { context: Some(64), ..SessionOptions::default() };
            let opened = Session::open(folder.path(), &options, &mut |_, _| {});
            assert!(opened.is_err(), "{key} = {value}");
        }
    }
    // Other ratios are no hindrance if the weights have them.
    let rates = json!({"compressed_sparse_attention": 6, "heavily_compressed_attention": 128});
    let types =
        ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"];
    let types = json!([types[0], types[1], types[2], types[1]]);
    let set = |config: &mut Value| {
        config["compress_rates"] = rates.clone();
        config["layer_types"] = types.clone();
    };
    let Some(folder) = changed(FOLDER, set) else { return };
    let error = Session::open(folder.path(), &SessionOptions::default(), &mut |_, _| {});
    assert!(error.err().unwrap().to_string().contains("it must divide 16"), "6 positions");
}

#[test]
fn inspect_counts_keys_projections_and_entries() {
    let Some(path) = fixture(MODEL) else { return };
    let found = inspect(&path).unwrap();
    // Two bytes for each element. Entries of 64 elements, in two layers with keys of an indexer of 64.
    let entries = 2 * (2 * (64 + 64) / 4) + 2 * 64 / 16;
    let (keys, chosen, all) = (2 * 64, 2 * 2 * 2 * (64 + 64), 2 * 2 * 64);
    let counts = (found.kv_bytes_per_position, found.kv_bytes_per_position_kept);
    assert_eq!(counts, (4 * keys + 2 * chosen + all + entries, entries));
    let has = |name: &str| found.features.iter().filter(|feature| feature.name == name).count();
    assert_eq!((has("compressed attention"), has("hyper-connections")), (2, 1));
}
