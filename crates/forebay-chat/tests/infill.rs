//! Tests of prompts for filling in the middle, with tiny models whose vocabularies get the tokens for it.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use forebay_chat::{ExtraText, Gap, infill_prompt};
use forebay_format::Catalog;
use forebay_text::Tokenizer;
use serde_json::{Value, json};

/// Returns a model of the full set of reference data, or of the small one in the project.
fn fixture(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let sets = [
        std::env::var_os("FOREBAY_FIXTURES").map(PathBuf::from),
        Some(root.join("../shared/fixtures")),
        Some(root.join("fixtures")),
    ];
    let found = sets.into_iter().flatten().map(|set| set.join(name)).find(|path| path.exists());
    if found.is_none() {
        // Writes past the test harness, which hides the output of passing tests.
        let _ = writeln!(std::io::stderr(), "SKIPPED: no reference data {name}");
    }
    found
}

/// Returns the tokenizer of a Hugging Face folder with these special tokens from id 500 on.
fn with_tokens(model: &Path, texts: &[&str]) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(model).unwrap() {
        let entry = entry.unwrap();
        std::fs::write(folder.path().join(entry.file_name()), std::fs::read(entry.path()).unwrap())
            .unwrap();
    }
    let path = folder.path().join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (id, text) in (500..).zip(texts) {
        file["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": text, "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false,
        }));
    }
    std::fs::write(&path, file.to_string()).unwrap();
    Tokenizer::from_catalog(&Catalog::open(folder.path()).unwrap()).unwrap()
}

fn gap(prefix: &str, suffix: &str) -> Gap {
    Gap { prefix: prefix.into(), suffix: suffix.into(), ..Gap::default() }
}

fn prompt(tokenizer: &Tokenizer, gap: &Gap) -> String {
    tokenizer.decode(&infill_prompt(tokenizer, gap).unwrap().unwrap(), true)
}

const QWEN: [&str; 5] =
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"];

#[test]
fn texts_stand_in_the_order_of_the_family() {
    let Some(model) = fixture("models/qwen3_moe") else { return };
    let tokenizer = with_tokens(&model, &QWEN[..3]);
    let found = prompt(&tokenizer, &gap("def f(", "return x"));
    assert_eq!(found, "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>");
    // Texts never become control tokens.
    let ids = infill_prompt(&tokenizer, &gap("<|fim_middle|>", "")).unwrap().unwrap();
    assert_eq!(ids.iter().filter(|id| **id == 502).count(), 1);
    let mistral = with_tokens(&model, &["[SUFFIX]", "[PREFIX]"]);
    assert_eq!(prompt(&mistral, &gap("a b", "c")), "[SUFFIX]c[PREFIX]a b");
    assert!(infill_prompt(&with_tokens(&model, &[]), &gap("a", "b")).unwrap().is_none());
}

#[test]
fn the_text_behind_the_gap_gets_no_space() {
    let Some(model) = fixture("models/mistral") else { return };
    let tokenizer = with_tokens(&model, &["[PREFIX]", "[SUFFIX]"]);
    let ids = infill_prompt(&tokenizer, &gap("the", "the")).unwrap().unwrap();
    let at = ids.iter().position(|id| *id == 500).unwrap();
    assert_eq!(ids[..2], [1, 501], "BOS comes first");
    let bytes = |ids: &[u32]| -> Vec<u8> {
        ids.iter().flat_map(|id| tokenizer.token_bytes(*id, true)).collect()
    };
    assert_eq!((bytes(&ids[2..at]), bytes(&ids[at + 1..])), (b"the".to_vec(), b" the".to_vec()));
}

#[test]
fn other_files_come_first_as_far_as_there_is_room() {
    let Some(model) = fixture("models/qwen3_moe") else { return };
    let extra =
        |text: &str, filename: &str| ExtraText { text: text.into(), filename: filename.into() };
    let mut gap =
        Gap { extra: vec![extra("x = 1\n", "a.py"), extra("y = 2\n", "b.py")], ..gap("z", "") };
    let tokenizer = with_tokens(&model, &QWEN);
    let own = "<|file_sep|>filename\n<|fim_prefix|>z<|fim_suffix|><|fim_middle|>";
    let (first, second) = ("<|file_sep|>a.py\nx = 1\n", "<|file_sep|>b.py\ny = 2\n");
    let head = "<|repo_name|>myproject\n";
    assert_eq!(prompt(&tokenizer, &gap), format!("{head}{first}{second}{own}"));
    let all = infill_prompt(&tokenizer, &gap).unwrap().unwrap().len();
    gap.tokens_max = Some(all - 1);
    assert_eq!(prompt(&tokenizer, &gap), format!("{head}{second}{own}"));
    gap.tokens_max = Some(0);
    assert_eq!(prompt(&tokenizer, &gap), format!("{head}{own}"));
    gap.tokens_max = None;
    let without = with_tokens(&model, &QWEN[..3]);
    let expected = "\n\n--- snippet ---\n\nx = 1\n\n\n--- snippet ---\n\ny = 2\n<|fim_prefix|>z<|fim_suffix|><|fim_middle|>";
    assert_eq!(prompt(&without, &gap), expected);
}
