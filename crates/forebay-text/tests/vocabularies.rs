//! Comparison of real vocabularies with the ids of llama.cpp.

mod common;

use std::io::Read;
use std::path::Path;
use std::time::Instant;

use common::fixture;
use forebay_format::Catalog;
use forebay_text::{ChatTemplate, TextStream, Tokenizer};
use serde_json::Value;

/// Opens the model of a packed vocabulary, and returns it with the folder that keeps its file.
fn open(name: &str) -> Option<(Catalog, tempfile::TempDir)> {
    let packed = fixture(&format!("vocab/ggml-vocab-{name}.gguf.gz"))?;
    let mut bytes = Vec::new();
    let file = std::fs::File::open(packed).unwrap();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vocabulary.gguf");
    std::fs::write(&path, bytes).unwrap();
    Some((Catalog::open(&path).unwrap(), folder))
}

/// Reads the JSON file `path`.
fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Reads a list of token ids.
fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn check_case(tokenizer: &Tokenizer, case: &Value) -> Result<(), String> {
    let text = case["text"].as_str().unwrap();
    let flag = |name: &str| case[name].as_bool().unwrap();
    let expected = ids(&case["ids"]);
    let found = tokenizer
        .encode(text, flag("add_special"), flag("parse_special"))
        .map_err(|e| e.to_string())?;
    if found != expected {
        return Err(format!("{case:?}\n found {found:?}"));
    }
    let least = tokenizer.tokens_min(text.len());
    if least > found.len() {
        return Err(format!(
            "{text:?} was to have {least} tokens at least, but has {}",
            found.len()
        ));
    }
    let plain = tokenizer.encode(text, false, false).map_err(|e| e.to_string())?;
    let decoded = tokenizer.decode(&plain, true);
    // Swallowed whitespace and `▁` for a space are not restored.
    if decoded != text && !text.contains('▁') && !tokenizer.kind().contains("spm") {
        return Err(format!("{text:?} came back as {decoded:?}"));
    }
    let mut stream = TextStream::new(tokenizer).keep_special(true);
    let mut streamed: String = plain.iter().map(|id| stream.push(*id)).collect();
    streamed += &stream.finish();
    if streamed != decoded {
        return Err(format!("{text:?} streamed as {streamed:?}"));
    }
    Ok(())
}

fn check(name: &str, kind: &str) {
    let Some((catalog, _folder)) = open(name) else { return };
    let Some(cases) = fixture(&format!("vocab/{name}.cases.json")) else { return };
    let start = Instant::now();
    let tokenizer = Tokenizer::from_catalog(&catalog).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("{name}: {} tokens loaded in {seconds:.3} s", tokenizer.vocab_size());
    assert!(seconds < 20.0, "{name} took {seconds} s to load");
    assert_eq!(tokenizer.kind(), kind);
    assert!(tokenizer.eos_id().is_some_and(|id| tokenizer.is_end_of_generation(id)));
    let cases = json(&cases);
    let cases = cases["cases"].as_array().unwrap();
    let failed: Vec<String> =
        cases.iter().filter_map(|case| check_case(&tokenizer, case).err()).collect();
    let count = failed.len();
    assert!(failed.is_empty(), "{name}: {count} of {} cases:\n{}", cases.len(), failed.join("\n"));
    ChatTemplate::from_catalog(&catalog).unwrap();
}

#[test]
fn llama_spm() {
    check("llama-spm", "spm");
}

#[test]
fn phi_3() {
    check("phi-3", "spm");
}

#[test]
fn llama_bpe() {
    check("llama-bpe", "bpe (llama-bpe)");
}

#[test]
fn qwen2() {
    check("qwen2", "bpe (qwen2)");
}

#[test]
fn gpt_2() {
    check("gpt-2", "bpe (gpt-2)");
}

#[test]
fn deepseek_llm() {
    check("deepseek-llm", "bpe (deepseek-llm)");
}

#[test]
fn starcoder() {
    check("starcoder", "bpe (starcoder)");
}

#[test]
fn gemma_4() {
    check("gemma-4", "bpe (gemma4)");
}
