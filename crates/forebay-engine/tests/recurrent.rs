//! Tests what is special about models with recurrent layers, beside the tests that run for every model: the memory of their
//! states, what they refuse, and what `inspect` says.

#[path = "support/requests.rs"]
mod requests;
mod support;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::engine::EngineOptions;
use forebay_engine::{
    Engine, GenerateOptions, KvDisk, KvDiskOptions, KvDiskStore, KvDiskType, Session,
    SessionOptions, inspect,
};
use forebay_model::sampling::Sampling;
use support::{fixture, recurrent_models};

fn open(path: &Path, sequences: usize) -> Session {
    let options = SessionOptions {
        sequences,
        context: Some(128),
        kv_tokens: Some(128),
        ..SessionOptions::default()
    };
    Session::open(path, &options, &mut |_, _| {}).unwrap()
}

#[test]
fn every_sequence_has_the_memory_of_its_states() {
    for path in recurrent_models() {
        let inspection = inspect(&path).unwrap();
        let states = inspection.state_bytes_per_sequence;
        let bytes = |sequences| open(&path, sequences).statistics().kv_cache_bytes;
        // The last block of keys and values of every sequence may be filled in part. They are f16 here.
        let block = 16 * inspection.kv_bytes_per_position;
        assert!(states > 1_000);
        assert_eq!(bytes(5) - bytes(2), 3 * (states + block), "{}", path.display());
        // Other layers alone keep keys and values, unless a layer has both.
        let layers = inspection.model.layers as u64;
        let (heads, dim) = (inspection.model.kv_heads as u64, inspection.model.head_dim as u64);
        let (kept, of_all) = (inspection.kv_bytes_per_position, layers * heads * dim * 4);
        let has_both = ["falcon-h1", "inkling"].contains(&inspection.model.architecture);
        if inspection.model.architecture == "inkling" {
            // Its layers differ in their heads.
            continue;
        }
        assert!(if has_both { kept == of_all } else { kept < of_all }, "{}", path.display());
    }
}

#[test]
fn a_conversation_goes_on_without_reading_it_again() {
    let exact = SessionOptions { exact: true, context: Some(128), ..SessionOptions::default() };
    let open = |path: &Path| Session::open(path, &exact, &mut |_, _| {}).unwrap();
    for path in recurrent_models() {
        let mut session = open(&path);
        let options = GenerateOptions::exactly(6, Sampling::greedy());
        let answer = |session: &mut Session, prompt: &[u32]| {
            session.generate(prompt, &options, &mut |_| ControlFlow::Continue(())).unwrap().tokens
        };
        let first = answer(&mut session, &[5, 9, 31, 7]);
        let cached = session.cached_tokens().to_vec();
        // Everything but the last token of the answer.
        assert_eq!(cached.len(), 4 + first.len() - 1);
        let second = answer(&mut session, &[first[5], 40, 41]);
        // In one piece, as a prompt.
        let mut again = open(&path);
        let whole: Vec<u32> = cached.iter().chain(&[first[5], 40, 41]).copied().collect();
        let other = answer(&mut again, &whole);
        assert_eq!(second, other, "{}", path.display());
    }
}

/// A template leaves out what a model thought, so the next turn differs from what is cached.
#[test]
fn a_chat_goes_back_to_the_last_kept_state() {
    let options = SessionOptions {
        exact: true,
        context: Some(400),
        kv_ram_bytes: Some(64 << 20),
        snapshot_every: Some(64),
        ..SessionOptions::default()
    };
    for path in recurrent_models() {
        let answer = |session: &mut Session, prompt: &[u32]| {
            let options = GenerateOptions::exactly(6, Sampling::greedy());
            session.generate(prompt, &options, &mut |_| ControlFlow::Continue(())).unwrap().tokens
        };
        let open = || Session::open(&path, &options, &mut |_, _| {}).unwrap();
        let prompt: Vec<u32> = (0..200).map(|at| (at * 37 + 11) % 490).collect();
        let mut session = open();
        session.keep_states();
        answer(&mut session, &prompt);
        assert_eq!(session.truncate(190), 176, "a state is kept 16 tokens before the end");
        let next = [&prompt[176..190], &[3; 40]].concat();
        let second = answer(&mut session, &next);
        let whole = [&prompt[..190], &[3; 40]].concat();
        assert_eq!(second, answer(&mut open(), &whole), "{}", path.display());
        assert_eq!(session.truncate(150), 64);
        assert_eq!(session.truncate(20), 0);
        // Nothing is kept unless the caller wishes it.
        let mut other = open();
        answer(&mut other, &prompt);
        assert_eq!(other.truncate(190), 0);
    }
}

fn ask(engine: &mut Engine, prompt: &[u32], namespace: &[u8]) -> (usize, Vec<(u32, u32)>) {
    requests::ask_one(engine, prompt, 12, namespace)
}

/// The state near the end of a prompt is kept. The next turn of a conversation begins there, and gets the bits that it has alone.
#[test]
fn the_next_turn_begins_near_the_end_of_the_last_prompt() {
    for path in recurrent_models() {
        let engine = |kv_ram_bytes: Option<u64>| {
            let options = SessionOptions {
                sequences: 2,
                context: Some(256),
                kv_ram_bytes,
                ..SessionOptions::default()
            };
            let session = Session::open(&path, &options, &mut |_, _| {}).unwrap();
            Engine::new(session, &EngineOptions::default())
        };
        let first: Vec<u32> = (0..130).map(|at| (at * 37 + 11) % 490).collect();
        // The template ends a prompt with tokens that the next turn does not have.
        let said = (0..40).map(|at| (at * 53 + 7) % 490);
        let second: Vec<u32> = first[..122].iter().copied().chain(said).collect();
        let third: Vec<u32> = second[..150].iter().copied().chain([5, 6, 7]).collect();
        let alone: Vec<_> = [&first, &second, &third]
            .into_iter()
            .map(|prompt| ask(&mut engine(Some(0)), prompt, b"").1)
            .collect();
        let mut together = engine(None);
        let mut of = |prompt: &[u32], namespace: &[u8]| ask(&mut together, prompt, namespace);
        assert_eq!(of(&first, b""), (0, alone[0].clone()), "{}", path.display());
        // 130 - 16 tokens, in whole blocks of 16.
        assert_eq!(of(&second, b""), (112, alone[1].clone()), "{}", path.display());
        // Nothing more was kept: the second prompt added fewer than 64 tokens. The same prompt again finds the same state.
        assert_eq!(of(&third, b""), (112, alone[2].clone()), "{}", path.display());
        assert_eq!(of(&first, b""), (112, alone[0].clone()), "{}", path.display());
        // A prompt that ends before, and another client, find nothing. The former keeps a state of its own.
        assert_eq!(of(&first[..100], b"").0, 0);
        assert_eq!(of(&first[..112], b"").0, 80);
        assert_eq!(of(&second, b"another").0, 0);
        // Without memory for states, everything is read again.
        let mut short = engine(Some(0));
        assert_eq!(ask(&mut short, &first, b"").0, 0);
        assert_eq!(ask(&mut short, &second, b""), (0, alone[1].clone()), "{}", path.display());
    }
}

/// Returns an engine that keeps a state after every 64 rows of a prompt.
fn engine_with_snapshots(path: &Path, kv_ram_bytes: Option<u64>) -> Engine<'static> {
    let options = SessionOptions {
        sequences: 2,
        context: Some(512),
        kv_ram_bytes,
        snapshot_every: Some(64),
        for_engine: true,
        ..SessionOptions::default()
    };
    let session = Session::open(path, &options, &mut |_, _| {}).unwrap();
    Engine::new(session, &EngineOptions::default())
}

/// Two questions about one document, and an edit in the middle of a prompt.
#[test]
fn prompts_that_differ_in_the_middle_begin_at_the_last_state_before() {
    for path in recurrent_models() {
        let document: Vec<u32> = (0..330).map(|at| (at * 41 + 3) % 490).collect();
        let edited: Vec<u32> = document[..200].iter().copied().chain([9; 60]).collect();
        let expected: Vec<_> = [&document, &edited]
            .into_iter()
            .map(|prompt| ask(&mut engine_with_snapshots(&path, Some(0)), prompt, b"").1)
            .collect();
        let mut engine = engine_with_snapshots(&path, Some(64 << 20));
        assert_eq!(ask(&mut engine, &document, b""), (0, expected[0].clone()));
        assert_eq!(ask(&mut engine, &edited, b""), (192, expected[1].clone()), "{path:?}");
        // No state is kept at row 256, because that at row 304 follows soon.
        assert_eq!(ask(&mut engine, &document[..300], b"").0, 192);
        assert_eq!(ask(&mut engine, &document, b""), (304, expected[0].clone()), "{path:?}");
    }
}

/// States and blocks that were written to the disk are found by an engine that begins later.
#[test]
fn a_conversation_goes_on_after_a_restart() {
    for path in recurrent_models() {
        for ty in [KvDiskType::AsCached, KvDiskType::Q8_0] {
            let folder = tempfile::tempdir().unwrap();
            let open = || {
                let options = KvDiskOptions::new(&folder.path().join("kv"), 256 << 20);
                let store = Arc::new(KvDiskStore::open(options).unwrap());
                let mut engine = engine_with_snapshots(&path, Some(64 << 20));
                engine.set_kv_disk(KvDisk { store, ty }, "a model").unwrap();
                engine
            };
            let first: Vec<u32> = (0..330).map(|at| (at * 37 + 11) % 490).collect();
            let second: Vec<u32> = first[..322].iter().copied().chain([8; 40]).collect();
            let alone = ask(&mut engine_with_snapshots(&path, Some(0)), &second, b"").1;
            let mut engine = open();
            assert_eq!(ask(&mut engine, &first, b"").0, 0);
            engine.write_kv(true, Duration::from_secs(30)).unwrap();
            drop(engine);
            let mut again = open();
            let (cached, answer) = ask(&mut again, &second, b"");
            assert_eq!(cached, 304, "{}", path.display());
            assert!(again.kv_tiers().disk_positions == 304, "{:?}", again.kv_tiers());
            if ty == KvDiskType::AsCached {
                assert_eq!(answer, alone, "{}", path.display());
            }
        }
    }
}

#[test]
fn inspect_explains_what_is_special() {
    let Some(path) = fixture("models/qwen3_5_moe") else { return };
    let inspection = inspect(&path).unwrap();
    let detail = |name: &str| {
        let found = inspection.features.iter().find(|feature| feature.name == name);
        found.unwrap_or_else(|| panic!("no feature {name}")).detail.clone()
    };
    assert!(detail("gated DeltaNet").starts_with("3 of 4 layers"), "{}", detail("gated DeltaNet"));
    assert!(detail("gated attention").contains("sigmoid"));
    assert!(detail("shared experts").contains("gate"));
    let left_out = inspection.model.left_out.unwrap();
    assert!(left_out.contains("2 tensors"), "mtp.*: {left_out}");
    assert!(left_out.contains("21 tensors"), "model.visual.*: {left_out}");
    assert!(left_out.contains("images"), "{left_out}");
}
