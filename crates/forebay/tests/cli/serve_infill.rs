//! Tests filling in the middle over real connections, with a tiny model whose vocabulary gets the tokens for it.

use std::path::Path;

use serde_json::{Value, json};

use crate::harness::{chat_model, demo};
use crate::server::Server;

/// Ids that the tiny model's embedding has rows for and its vocabulary no tokens.
const FIRST: u64 = 500;

/// Makes a tiny model with these special tokens from id [`FIRST`] on in a new folder.
fn model(folder: &Path, texts: &[&str]) -> String {
    let model = chat_model(folder);
    let path = folder.join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (id, text) in (FIRST..).zip(texts) {
        file["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": text, "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false,
        }));
    }
    std::fs::write(&path, file.to_string()).unwrap();
    model
}

fn ids(server: &Server, text: &str) -> Vec<Value> {
    let body = json!({ "content": text, "parse_special": false });
    server.post("/tokenize", &body)["tokens"].as_array().unwrap().clone()
}

/// Returns the answer to a prompt of tokens.
fn of_tokens(server: &Server, prompt: &[Vec<Value>]) -> Value {
    let body = json!({ "prompt": prompt.concat(), "max_tokens": 12, "temperature": 0, "ignore_eos": true });
    server.post("/v1/completions", &body)["choices"][0]["text"].clone()
}

#[test]
fn interfaces_fill_the_same_gap() {
    let folder = tempfile::tempdir().unwrap();
    let tokens =
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"];
    let server = Server::of(&[&model(&folder.path().join("m"), &tokens), "--ctx", "512"]);
    let (prefix, suffix) = ("def add(a, b):\n", "\nprint(add(1, 2))\n");
    let token = |number: u64| vec![json!(FIRST + number)];
    let gap = [token(0), ids(&server, prefix), token(1), ids(&server, suffix), token(2)];
    let expected = of_tokens(&server, &gap);

    let body = json!({ "prompt": prefix, "suffix": suffix, "max_tokens": 12, "temperature": 0 });
    let whole = server.post("/v1/completions", &body);
    assert_eq!(whole["choices"][0]["text"], expected);
    assert_eq!(whole["usage"]["prompt_tokens"], gap.concat().len());
    let options = json!({ "temperature": 0, "num_predict": 12, "repeat_penalty": 1.0 });
    let ollama = json!({ "prompt": prefix, "suffix": suffix, "stream": false, "options": options });
    assert_eq!(server.post("/api/generate", &ollama)["response"], expected);
    let capabilities = server.post("/api/show", &json!({}))["capabilities"].clone();
    assert!(capabilities.as_array().unwrap().contains(&json!("insert")), "{capabilities}");

    // llama.cpp's form: the prompt goes before the gap, and the answer has its names.
    let infill = json!({ "input_prefix": "def add", "prompt": "(a, b):\n", "input_suffix": suffix,
        "n_predict": 12, "temperature": 0 });
    let answer = server.post("/infill", &infill);
    assert_eq!(answer["content"], expected);
    assert_eq!((&answer["stop"], &answer["stop_type"]), (&json!(true), &json!("limit")));
    assert_eq!(answer["tokens_predicted"], 12);
    assert_eq!(answer["tokens_evaluated"], gap.concat().len());
    assert_eq!(answer["timings"]["predicted_n"], 12);
    let shown = answer["prompt"].as_str().unwrap();
    assert_eq!(shown, format!("<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"));
    let mut streamed = infill.clone();
    streamed["stream"] = true.into();
    let parts = server.events("/infill", &streamed);
    let text: String = parts.iter().filter_map(|part| part["content"].as_str()).collect();
    assert_eq!(json!(text), expected);
    let (last, before) = parts.split_last().unwrap();
    assert!(before.iter().all(|part| part["stop"] == false) && last["stop"] == true);
    let mut selected = infill.clone();
    selected["response_fields"] = json!(["content", "timings/predicted_n", "nothing"]);
    let selected = server.post("/infill", &selected);
    assert_eq!(selected, json!({ "content": expected, "timings/predicted_n": 12 }));

    // Other files come before the gap, as far as the context has room for them.
    let extra = |text: &str| json!([{ "text": text, "filename": "b.py" }]);
    let mut with_files = infill.clone();
    with_files["input_extra"] = extra("x = 1\n");
    let shown = server.post("/infill", &with_files)["prompt"].clone();
    let head =
        "<|repo_name|>myproject\n<|file_sep|>b.py\nx = 1\n<|file_sep|>filename\n<|fim_prefix|>";
    assert!(shown.as_str().unwrap().starts_with(head), "{shown}");
    with_files["input_extra"] = extra(&"word ".repeat(600));
    let shown = server.post("/infill", &with_files)["prompt"].clone();
    assert!(!shown.as_str().unwrap().contains("word"), "{shown}");

    for (body, part) in [
        (json!({ "input_suffix": "" }), "input_prefix"),
        (json!({ "input_prefix": "", "input_suffix": "", "n_probs": 21 }), "n_probs"),
        (json!({ "input_prefix": "word ".repeat(600), "input_suffix": "" }), "context"),
    ] {
        let (status, answer) = server.ask("POST", "/infill", "", &body.to_string());
        assert!(status == 400 && answer.contains(part), "{part}: {status} {answer}");
    }
}

#[test]
fn mistral_gets_the_suffix_first() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::of(&[&model(&folder.path().join("m"), &["[PREFIX]", "[SUFFIX]"])]);
    let gap = [vec![json!(FIRST + 1)], ids(&server, "c"), vec![json!(FIRST)], ids(&server, "a b")];
    let body = json!({ "prompt": "a b", "suffix": "c", "max_tokens": 12, "temperature": 0 });
    let text = &server.post("/v1/completions", &body)["choices"][0]["text"];
    assert_eq!(*text, of_tokens(&server, &gap));
}

#[test]
fn a_model_without_the_tokens_says_so() {
    let server = Server::of(&[&demo()]);
    for (path, body) in [
        ("/v1/completions", json!({ "prompt": "a", "suffix": "b" })),
        ("/api/generate", json!({ "prompt": "a", "suffix": "b" })),
        ("/infill", json!({ "input_prefix": "a", "input_suffix": "b" })),
    ] {
        let (status, answer) = server.ask("POST", path, "", &body.to_string());
        assert!(
            status == 400 && answer.contains("filling in the middle"),
            "{path}: {status} {answer}"
        );
    }
    let (status, answer) = server.ask(
        "POST",
        "/v1/chat/completions",
        "",
        &json!({ "messages": [{ "role": "user", "content": "x" }], "suffix": "y" }).to_string(),
    );
    assert!(status == 400 && answer.contains("suffix"), "{answer}");
    let capabilities = server.post("/api/show", &json!({}))["capabilities"].clone();
    assert!(!capabilities.as_array().unwrap().contains(&json!("insert")), "{capabilities}");
}
