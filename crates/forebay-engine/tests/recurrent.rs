//! Tests what is special about models with recurrent layers, beside the tests that run for every model: the memory of their
//! states, what they refuse, and what `inspect` says.

mod support;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use forebay_engine::engine::EngineOptions;
use forebay_engine::{
    Engine, EngineError, GenerateOptions, KvDisk, KvDiskOptions, KvDiskStore, KvDiskType, Session,
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
        assert!(states > 10_000);
        assert_eq!(bytes(5) - bytes(2), 3 * (states + block), "{}", path.display());
        // Other layers alone keep keys and values.
        let layers = inspection.model.layers as u64;
        let (heads, dim) = (inspection.model.kv_heads as u64, inspection.model.head_dim as u64);
        assert!(inspection.kv_bytes_per_position < layers * heads * dim * 4);
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

#[test]
fn a_cache_on_disk_is_refused() {
    let Some(path) = fixture("models/qwen3_5_moe") else { return };
    let mut engine = Engine::new(open(&path, 2), &EngineOptions::default());
    let folder = tempfile::tempdir().unwrap();
    let store = KvDiskStore::open(KvDiskOptions::new(&folder.path().join("kv"), 1 << 20)).unwrap();
    let disk = KvDisk { store: Arc::new(store), ty: KvDiskType::AsCached };
    let error = engine.set_kv_disk(disk, "a model").unwrap_err();
    assert!(matches!(error, EngineError::Recurrent { .. }), "{error}");
    assert!(error.to_string().contains("a KV cache on disk"), "{error}");
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
