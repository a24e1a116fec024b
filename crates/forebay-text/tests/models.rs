//! Tests of the tiny models' tokenizers, as Hugging Face folders and as GGUF.

mod common;

use std::path::{Path, PathBuf};

use common::fixture;
use forebay_format::Catalog;
use forebay_text::{TextStream, Tokenizer};
use serde_json::Value;

/// Reads the JSON file `path`.
fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Reads a list of token ids.
fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn check(tokenizer: &Tokenizer, case: &Value, prefix: &str) -> Result<(), String> {
    let text = case["text"].as_str().unwrap();
    for (add_special, key) in [(false, "ids"), (true, "ids_with_special")] {
        let expected = case.get(format!("{prefix}{key}")).unwrap_or(&case[key]);
        let found = tokenizer.encode(text, add_special, true).map_err(|e| e.to_string())?;
        if found != ids(expected) {
            return Err(format!("{text:?} {key}: expected {expected}, found {found:?}"));
        }
    }
    let ids = ids(&case["ids"]);
    let decoded = tokenizer.decode(&ids, true);
    if decoded != case["decoded"] {
        return Err(format!("{text:?} decoded: expected {}, found {decoded:?}", case["decoded"]));
    }
    for keep_special in [false, true] {
        let mut stream = TextStream::new(tokenizer).keep_special(keep_special);
        let mut streamed: String = ids.iter().map(|id| stream.push(*id)).collect();
        streamed += &stream.finish();
        if streamed != tokenizer.decode(&ids, keep_special) {
            return Err(format!("{text:?} streamed: {streamed:?}"));
        }
    }
    Ok(())
}

fn check_model(model: &Path, tokens: &Path, prefix: &str) {
    let catalog = Catalog::open(model).unwrap();
    let tokenizer = Tokenizer::from_catalog(&catalog).unwrap();
    let tokens = json(tokens);
    let cases = tokens["cases"].as_array().unwrap();
    let failed: Vec<String> =
        cases.iter().filter_map(|case| check(&tokenizer, case, prefix).err()).collect();
    assert!(
        failed.is_empty(),
        "{}: {} of {} cases:\n{}",
        model.display(),
        failed.len(),
        cases.len(),
        failed.join("\n")
    );
    let eog = tokenizer.eog_ids();
    assert!(!eog.is_empty() && eog.iter().all(|id| tokenizer.is_end_of_generation(*id)));
}

/// Returns the sub-folders of `name`.
fn folders(name: &str) -> Vec<PathBuf> {
    let Some(folder) = fixture(name) else { return Vec::new() };
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir()).collect()
}

#[test]
fn hugging_face_folders() {
    for model in folders("models") {
        check_model(&model, &model.join("tokens.json"), "");
    }
}

#[test]
fn gguf_files() {
    for folder in folders("gguf") {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let Some(tokens) = [folder.join("tokens.json")]
            .into_iter()
            .find(|path| path.exists())
            .or_else(|| fixture(&format!("models/{name}/tokens.json")))
        else {
            continue;
        };
        let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let is_gguf =
            |path: &PathBuf| path.extension().is_some_and(|extension| extension == "gguf");
        for model in files.filter(is_gguf) {
            check_model(&model, &tokens, "llamacpp_");
        }
    }
}

/// User input must not become control tokens.
#[test]
fn special_texts_are_plain_without_parsing() {
    for model in folders("models") {
        let catalog = Catalog::open(&model).unwrap();
        let tokenizer = Tokenizer::from_catalog(&catalog).unwrap();
        let eos = tokenizer.eos_id().unwrap();
        let text = tokenizer.token_text(eos).unwrap().into_owned();
        assert_eq!(tokenizer.encode(&text, false, true).unwrap(), [eos]);
        let plain = tokenizer.encode(&text, false, false).unwrap();
        assert!(!plain.contains(&eos), "{}", model.display());
        assert_eq!(tokenizer.decode(&[eos], false), "");
        assert_eq!(tokenizer.decode(&[eos], true), text);
    }
}

/// Generated text continues a prompt with its own space; a new text begins without one.
#[test]
fn leading_space_belongs_to_what_goes_on() {
    let Some(model) = fixture("models/mistral") else { return };
    let tokenizer = Tokenizer::from_catalog(&Catalog::open(&model).unwrap()).unwrap();
    let ids = tokenizer.encode("the", false, false).unwrap();
    let mut new = TextStream::new(&tokenizer);
    let mut continuing = TextStream::continuing(&tokenizer);
    let text = |stream: &mut TextStream<&Tokenizer>| {
        ids.iter().map(|id| stream.push(*id)).collect::<String>()
    };
    assert_eq!(text(&mut new), "the");
    assert_eq!(text(&mut continuing), " the");
}
