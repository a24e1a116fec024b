//! Tests that GGUF keys name the tokens for filling in the middle, and that real vocabularies have them.

mod common;

use std::io::Read as _;

use common::fixture;
use forebay_format::{Array, ByteStrings, Catalog, GgufMetadata, Value};
use forebay_text::{TextError, Tokenizer};

/// Builds a tokenizer whose tokens 3 to 8 could be those for filling in the middle, with these keys.
fn with_keys(keys: &[(&str, u32)]) -> Result<Tokenizer, TextError> {
    let strings =
        |texts: &[&str]| Value::Array(Array::String(texts.iter().collect::<ByteStrings>()));
    let mut metadata = GgufMetadata::new(3);
    let own = [
        ("model", Value::from("gpt2")),
        ("pre", Value::from("gpt-2")),
        ("tokens", strings(&["a", "b", "ab", "p", "s", "m", "pad", "rep", "sep"])),
        ("token_type", Value::Array(Array::I32(vec![1, 1, 1, 3, 3, 3, 3, 3, 3]))),
        ("merges", strings(&["a b"])),
    ];
    let keys = keys.iter().map(|(key, id)| (*key, Value::U32(*id)));
    for (key, value) in own.into_iter().chain(keys) {
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
    }
    Tokenizer::from_gguf(&metadata)
}

#[test]
fn keys_of_gguf_name_the_tokens() {
    assert!(with_keys(&[]).unwrap().infill().is_none());
    let now = [("fim_pre_token_id", 3), ("fim_suf_token_id", 4), ("fim_mid_token_id", 5)];
    let older = [("prefix_token_id", 3), ("suffix_token_id", 4), ("middle_token_id", 5)];
    for keys in [now, older] {
        let tokenizer = with_keys(&keys).unwrap();
        let found = tokenizer.infill().unwrap();
        assert_eq!((found.prefix, found.suffix, found.middle), (3, 4, Some(5)));
        assert_eq!((found.repository, found.file), (None, None));
        assert!(with_keys(&keys[..2]).unwrap().infill().is_none());
    }
    let more = [("fim_pad_token_id", 6), ("fim_rep_token_id", 7), ("fim_sep_token_id", 8)];
    let tokenizer = with_keys(&[&now[..], &more[..]].concat()).unwrap();
    let found = tokenizer.infill().unwrap();
    assert_eq!((found.repository, found.file), (Some(7), Some(8)));
    // Nothing, or another file, follows these tokens.
    assert_eq!(tokenizer.eog_ids(), [6, 7, 8]);
    // A token that does not exist is left out.
    assert!(with_keys(&[("fim_pre_token_id", 9)]).unwrap().infill().is_none());
}

#[test]
fn real_vocabularies_are_recognised() {
    for (name, texts) in [
        ("starcoder", Some(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])),
        ("gpt-2", None),
        ("llama-spm", None),
    ] {
        let Some(packed) = fixture(&format!("vocab/ggml-vocab-{name}.gguf.gz")) else { continue };
        let mut bytes = Vec::new();
        let file = std::fs::File::open(packed).unwrap();
        flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vocabulary.gguf");
        std::fs::write(&path, bytes).unwrap();
        let tokenizer = Tokenizer::from_catalog(&Catalog::open(&path).unwrap()).unwrap();
        let found = tokenizer.infill().map(|tokens| {
            let ids = [Some(tokens.prefix), Some(tokens.suffix), tokens.middle];
            ids.map(|id| tokenizer.token_text(id.unwrap()).unwrap().into_owned())
        });
        assert_eq!(found, texts.map(|texts| texts.map(str::to_owned)), "{name}");
    }
}
