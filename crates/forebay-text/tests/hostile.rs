//! Tests that deliberately wrong metadata gives errors, not panics.

use forebay_format::{Array, ByteStrings, Document, GgufMetadata, HfMetadata, Value};
use forebay_text::{TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::json;

fn strings(texts: &[&str]) -> Value {
    Value::Array(Array::String(texts.iter().collect::<ByteStrings>()))
}

fn metadata(entries: &[(&str, Value)]) -> GgufMetadata {
    let mut metadata = GgufMetadata::new(3);
    for (key, value) in entries {
        metadata.insert(format!("tokenizer.{key}"), value.clone());
    }
    metadata
}

/// Builds a small BPE tokenizer in which `changes` replace its own entries.
fn bpe(changes: &[(&str, Value)]) -> Result<Tokenizer, TextError> {
    let own = [
        ("ggml.model", Value::from("gpt2")),
        ("ggml.pre", Value::from("gpt-2")),
        ("ggml.tokens", strings(&["a", "b", "ab", "<s>"])),
        ("ggml.token_type", Value::Array(Array::I32(vec![1, 1, 1, 3]))),
        ("ggml.merges", strings(&["a b"])),
        ("ggml.bos_token_id", Value::U32(3)),
    ];
    Tokenizer::from_gguf(&metadata(&[&own, changes].concat()))
}

/// Builds a small SentencePiece tokenizer in which `changes` replace its own entries.
fn spm(changes: &[(&str, Value)]) -> Result<Tokenizer, TextError> {
    let own = [
        ("ggml.model", Value::from("llama")),
        ("ggml.tokens", strings(&["<unk>", "<s>", "</s>", "▁", "a", "▁a"])),
        ("ggml.token_type", Value::Array(Array::I32(vec![2, 3, 3, 1, 1, 1]))),
        ("ggml.scores", Value::Array(Array::F32(vec![0.0, 0.0, 0.0, -1.0, -2.0, -3.0]))),
    ];
    Tokenizer::from_gguf(&metadata(&[&own, changes].concat()))
}

#[test]
fn the_small_models_themselves_work() {
    let tokenizer = bpe(&[]).unwrap();
    assert_eq!(tokenizer.encode("abba<s>", false, true).unwrap(), [2, 1, 0, 3]);
    let tokenizer = spm(&[]).unwrap();
    assert_eq!(tokenizer.encode("a a", true, false).unwrap(), [1, 5, 5]);
    // There are no byte tokens, so the unknown token takes their place.
    assert_eq!(tokenizer.encode("aé", false, false).unwrap(), [5, 0, 0]);
    assert!(tokenizer.adds_bos());
}

#[test]
fn keys_that_are_missing_or_of_the_wrong_type() {
    let none = Tokenizer::from_gguf(&GgufMetadata::new(3));
    assert!(matches!(none, Err(TextError::MissingKey { .. })));
    for key in ["ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.merges"] {
        let broken = bpe(&[(key, Value::F32(1.0))]);
        assert!(matches!(broken, Err(TextError::WrongType { .. })), "{key}");
    }
    for key in ["ggml.bos_token_id", "ggml.eos_token_id", "ggml.eot_token_id"] {
        assert!(
            matches!(bpe(&[(key, Value::from("x"))]), Err(TextError::WrongType { .. })),
            "{key}"
        );
        for outside in [Value::U64(u64::MAX), Value::U32(4), Value::I32(-1), Value::I64(i64::MIN)] {
            let left_out = bpe(&[(key, outside)]).unwrap();
            let bos = if key == "ggml.bos_token_id" { None } else { Some(3) };
            assert_eq!((left_out.bos_id(), left_out.eos_id()), (bos, None), "{key}");
            assert!(left_out.eog_ids().is_empty(), "{key}");
        }
    }
    // A BOS that does not exist is not added, whatever else the file says.
    let without = [("ggml.bos_token_id", Value::U32(9)), ("ggml.add_bos_token", Value::Bool(true))];
    assert_eq!(bpe(&without).unwrap().encode("ab", true, true).unwrap(), [2]);
    for key in ["ggml.add_bos_token", "ggml.add_eos_token"] {
        assert!(matches!(bpe(&[(key, Value::U32(1))]), Err(TextError::WrongType { .. })), "{key}");
    }
    // The metadata requests EOS, but there is none.
    let without = bpe(&[("ggml.add_eos_token", Value::Bool(true))]);
    assert!(matches!(without, Err(TextError::MissingKey { .. })));
}

#[test]
fn unknown_models_and_pre_tokenizers_are_refused_with_the_known_ones() {
    let error = bpe(&[("ggml.model", Value::from("rwkv"))]).err().unwrap();
    assert!(matches!(&error, TextError::UnknownModel { .. }) && error.to_string().contains("gpt2"));
    let error = bpe(&[("ggml.pre", Value::from("nonesuch"))]).err().unwrap();
    assert!(matches!(error, TextError::UnknownPreTokenizer { .. }));
}

#[test]
fn inconsistent_vocabularies() {
    let empty = bpe(&[("ggml.tokens", strings(&[])), ("ggml.token_type", strings(&[]))]);
    assert!(empty.is_err());
    let twice = bpe(&[("ggml.tokens", strings(&["a", "b", "ab", "a"]))]).unwrap();
    assert_eq!(twice.encode("a", false, false).unwrap(), [0]);
    assert_eq!(twice.decode(&[0, 3], true), "aa");
    let without_scores = Tokenizer::from_gguf(&metadata(&[
        ("ggml.model", Value::from("llama")),
        ("ggml.tokens", strings(&["<unk>", "<s>", "</s>", "a", "b", "ab", "▁ab"])),
        ("ggml.token_type", Value::Array(Array::I32(vec![2, 3, 3, 1, 1, 1, 1]))),
    ]));
    assert_eq!(without_scores.unwrap().encode("ab", false, false).unwrap(), [6]);
    let few_types = bpe(&[("ggml.token_type", Value::Array(Array::I32(vec![1, 1])))]);
    assert!(matches!(few_types, Err(TextError::WrongLength { .. })));
    let few_scores = spm(&[("ggml.scores", Value::Array(Array::F32(vec![0.0; 5])))]);
    assert!(matches!(few_scores, Err(TextError::WrongLength { .. })));
    let no_number = spm(&[("ggml.scores", Value::Array(Array::F32(vec![f32::NAN; 6])))]);
    assert!(matches!(no_number, Err(TextError::ScoreNotANumber { id: 0 })));
    let infinite = spm(&[("ggml.scores", Value::Array(Array::F32(vec![f32::INFINITY; 6])))]);
    assert_eq!(infinite.unwrap().encode("a", false, false).unwrap(), [5]);
}

#[test]
fn merges_that_name_no_tokens() {
    for merge in ["a x", "b a", "ab", "", " ", "a ", " a", "  "] {
        let broken = bpe(&[("ggml.merges", strings(&["a b", merge]))]);
        let index = match broken {
            Err(TextError::MergeOfUnknownToken { index, .. }) => index,
            other => panic!("{merge:?} gave {:?}", other.map(|_| ())),
        };
        assert_eq!(index, 1);
    }
    let twice = bpe(&[("ggml.merges", strings(&["a b", "a b"]))]).unwrap();
    assert_eq!(twice.encode("ab", false, false).unwrap(), [2]);
}

#[test]
fn bytes_without_a_token_are_an_error() {
    let tokenizer = bpe(&[]).unwrap();
    let error = tokenizer.encode("abc", false, false);
    assert!(matches!(error, Err(TextError::NoTokenForByte { byte: b'c' })));
}

#[test]
fn empty_and_invalid_token_texts_are_no_trouble() {
    let mut tokens = ByteStrings::default();
    [&b"a"[..], b"", b"", b"\xff\xfe", b"\xc3", b"<s>"].iter().for_each(|text| tokens.push(text));
    let tokenizer = bpe(&[
        ("ggml.tokens", Value::Array(Array::String(tokens))),
        ("ggml.token_type", Value::Array(Array::I32(vec![1, 3, 4, 4, 3, -7]))),
        ("ggml.merges", strings(&[])),
    ]);
    let tokenizer = tokenizer.unwrap();
    assert_eq!(tokenizer.encode("a", true, true).unwrap(), [0]);
    assert_eq!(tokenizer.decode(&[0, 1, 2, 3, 4, 5, 6, u32::MAX], false), "a\u{fffd}\u{fffd}");
    assert_eq!(tokenizer.token_text(u32::MAX), None);
}

/// Returns a small `tokenizer.json`. `added` are its added tokens.
fn tokenizer_json(added: serde_json::Value) -> serde_json::Value {
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    })
}

fn added_token(id: u32, text: &str) -> serde_json::Value {
    json!({
        "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true
    })
}

fn hugging_face(file: &[u8], tokenizer_config: serde_json::Value) -> Result<Tokenizer, TextError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, file).unwrap();
    Tokenizer::from_hugging_face(&HfMetadata {
        config: json!({"eos_token_id": [3, 99, -1, "x"]}),
        tokenizer_json: Some(Document::on_disk(path)),
        tokenizer_config: Some(tokenizer_config),
        generation_config: None,
        tiktoken: None,
        chat_templates: Default::default(),
    })
}

#[test]
fn configuration_adds_what_the_library_does_not() {
    let file = tokenizer_json(json!([added_token(3, "<s>")])).to_string();
    let plain = hugging_face(file.as_bytes(), json!({"bos_token": "<s>"})).unwrap();
    // The file's truncation to two tokens must not cut a prompt.
    assert_eq!(plain.encode("ababab", true, true).unwrap(), [2, 2, 2]);
    assert!(!plain.adds_bos());
    assert_eq!(plain.eog_ids(), [3]);
    let config = json!({"bos_token": {"content": "<s>"}, "add_bos_token": true});
    let wished = hugging_face(file.as_bytes(), config).unwrap();
    assert_eq!(wished.encode("ab", true, true).unwrap(), [3, 2]);
    assert_eq!(wished.encode("ab", false, true).unwrap(), [2]);
    assert!(wished.adds_bos());
}

#[test]
fn broken_tokenizer_files() {
    let good = tokenizer_json(json!([]));
    let whole = good.to_string();
    for length in [0, 1, whole.len() / 2, whole.len() - 1] {
        assert!(hugging_face(&whole.as_bytes()[..length], json!({})).is_err());
    }
    let with = |part: &str, value: serde_json::Value| {
        let mut file = good.clone();
        file[part] = value;
        hugging_face(file.to_string().as_bytes(), json!({}))
    };
    assert!(with("decoder", json!(null)).is_err());
    assert!(
        with("decoder", json!({"type": "WordPiece", "prefix": "##", "cleanup": true})).is_err()
    );
    assert!(with("model", json!({"type": "BPE", "vocab": {}, "merges": []})).is_err());
    assert!(with("model", json!({"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]})).is_err());
    let far = json!({"type": "BPE", "vocab": {"a": 0, "b": u32::MAX}, "merges": []});
    assert!(matches!(with("model", far), Err(TextError::VocabularyTooLarge { .. })));
    let doubled = json!({"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []});
    assert!(with("model", doubled).is_err());
    for added in [json!([added_token(u32::MAX, "x")]), json!([{"id": 3}]), json!("x"), json!([1])] {
        // These may be refused or renumbered, but they must not panic.
        hugging_face(tokenizer_json(added).to_string().as_bytes(), json!({})).ok();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the lists hold, the result is a tokenizer or an error.
    #[test]
    fn random_metadata_does_not_panic(
        tokens in prop::collection::vec("[ab▁<>s]{0,3}", 0..12),
        types in prop::collection::vec(-1i32..8, 0..12),
        scores in prop::collection::vec(any::<f32>(), 0..12),
        merges in prop::collection::vec("[ab ]{0,4}", 0..4),
        model in prop::sample::select(vec!["gpt2", "llama", "gemma4"]),
        special in 0u32..14,
        text in "[ab▁<>s é]{0,12}",
    ) {
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
        let built = Tokenizer::from_gguf(&metadata(&[
            ("ggml.model", Value::from(model)),
            ("ggml.tokens", strings(&tokens)),
            ("ggml.token_type", Value::Array(Array::I32(types))),
            ("ggml.scores", Value::Array(Array::F32(scores))),
            ("ggml.merges", strings(&merges)),
            ("ggml.bos_token_id", Value::U32(special)),
            ("ggml.unknown_token_id", Value::U32(special)),
        ]));
        if let Ok(tokenizer) = built
            && let Ok(ids) = tokenizer.encode(&text, true, true)
        {
            tokenizer.decode(&ids, true);
        }
    }
}
