use serde_json::json;

use super::*;

/// Returns a file with other parts than usual.
fn file(parts: &[(&str, Value)]) -> Vec<u8> {
    let mut file = json!({
        "added_tokens": [{ "id": 3, "content": "<s>" }], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": { "type": "ByteLevel" }, "model": { "type": "BPE", "vocab": { "a": 0 }, "merges": [] },
    });
    for (name, value) in parts {
        file[*name] = value.clone();
    }
    file.to_string().into_bytes()
}

fn refused(name: &str, value: Value) -> bool {
    check(&file(&[(name, value)])).is_err()
}

fn replace(from: &str, to: &str) -> Value {
    json!({ "type": "Replace", "pattern": { "String": from }, "content": to })
}

#[test]
fn usual_parts_are_within_the_bounds() {
    let llama = json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "▁" }, replace(" ", "▁")] });
    let checked = check(&file(&[("normalizer", llama)])).unwrap();
    assert_eq!(checked.steps, [Growth { times: 1, plus: 3 }, Growth { times: 3, plus: 0 }]);
    assert_eq!(checked.description["model"], json!({ "type": "BPE" }));
    let xlm = json!({ "type": "Sequence", "normalizers": [{ "type": "NFKC" },
        { "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": "▁" }] });
    assert!(!refused("normalizer", xlm));
    let pieces = json!([{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }]);
    let pair = json!([{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }]);
    let template = json!({ "type": "TemplateProcessing", "single": pieces, "pair": pair,
        "special_tokens": { "<s>": { "id": "<s>", "ids": [3], "tokens": ["<s>"] } } });
    assert!(!refused(
        "post_processor",
        json!({ "type": "Sequence", "processors": [{ "type": "ByteLevel" }, template] })
    ));
}

#[test]
fn normalizers_that_multiply_are_refused() {
    let sequence = |parts: Vec<Value>| json!({ "type": "Sequence", "normalizers": parts });
    for bomb in [
        sequence(vec![replace("l", "ll"); 30]),
        sequence(vec![
            sequence(vec![replace("l", "ll"); 15]),
            sequence(vec![replace("l", "ll"); 15]),
        ]),
        sequence(vec![
            json!({ "type": "Replace", "pattern": { "Regex": "" }, "content": "ab" });
            20
        ]),
        sequence(vec![replace("", "aaaa"); 20]),
        sequence(vec![json!({ "type": "ByteLevel" }); 30]),
        sequence(vec![json!({ "type": "NFKD" }); 30]),
        sequence(vec![json!({ "type": "Prepend", "prepend": "a".repeat(4000) }); 60]),
        sequence(vec![json!({ "type": "NFC" }); 65]),
        replace("a", &"b".repeat(4 << 20)),
        json!({ "type": "Precompiled", "precompiled_charsmap": "/////w==" }),
    ] {
        assert!(refused("normalizer", bomb.clone()), "{}", &bomb.to_string()[..100]);
    }
}

#[test]
fn other_parts_that_multiply_are_refused() {
    let sequence = |name: &str, part: Value, times: usize| json!({ "type": "Sequence", name: vec![part; times] });
    assert!(refused(
        "pre_tokenizer",
        sequence("pretokenizers", json!({ "type": "ByteLevel" }), 10)
    ));
    assert!(refused(
        "pre_tokenizer",
        sequence("pretokenizers", json!({ "type": "Metaspace", "replacement": "▁" }), 10)
    ));
    assert!(refused("pre_tokenizer", sequence("pretokenizers", json!({ "type": "Digits" }), 100)));
    let split = |pattern: &str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated" });
    assert!(refused("pre_tokenizer", split("(?=(a+)+b)c")));
    assert!(refused("pre_tokenizer", split("((a{99}){99}){99}")));
    assert!(!refused("pre_tokenizer", split(r"\p{L}+|\s+(?!\S)|\s+")));
    let copy = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let copies =
        |times: usize| json!({ "type": "TemplateProcessing", "single": vec![copy.clone(); times] });
    assert!(refused("post_processor", copies(9)));
    assert!(refused("post_processor", sequence("processors", copies(2), 9)));
    let special = json!([{ "SpecialToken": { "id": "x", "type_id": 0 } }]);
    let many = json!({ "type": "TemplateProcessing", "single": special, "special_tokens": { "x": { "ids": vec![0; 999] } } });
    assert!(refused("post_processor", many));
    assert!(refused(
        "decoder",
        json!({ "type": "Replace", "pattern": { "Regex": "(a*)*(?=b)" }, "content": "" })
    ));
    assert!(refused("added_tokens", json!([{ "id": 1, "content": "x".repeat(5000) }])));
    assert!(refused(
        "added_tokens",
        json!(vec![json!({ "id": 1, "content": "x".repeat(4000) }); 3000])
    ));
    let model = |rest: Value| {
        let mut model = json!({ "type": "WordPiece", "vocab": {} });
        model.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        model
    };
    assert!(refused("model", model(json!({ "max_input_chars_per_word": 1_000_000 }))));
    assert!(refused("model", model(json!({ "continuing_subword_prefix": "x".repeat(100) }))));
    assert!(refused("model", json!({ "type": "Unigram", "vocab": [["x".repeat(5000), 0.0]] })));
    let values = format!("{{\"padding\": [{}0]}}", "0,".repeat(VALUES_MAX));
    assert!(check(values.as_bytes()).unwrap_err().contains("JSON values"));
    assert!(check(b"{").is_err() && check(b"\xff").is_err() && check(b"[]").is_err());
}

#[test]
fn a_text_may_grow_a_little() {
    let sequence = json!({ "type": "Sequence", "normalizers": vec![replace("l", "ll"); 15] });
    let checked = check(&file(&[("normalizer", sequence.clone())])).unwrap();
    let library: NormalizerWrapper = serde_json::from_value(sequence).unwrap();
    let check = |text: &str| checked.check_text(text, Some(&library));
    assert!(check("hello").is_ok());
    // Only the steps themselves know that nothing grows here.
    assert!(check(&"x".repeat(10_000)).is_ok());
    assert!(check(&"l".repeat(10_000)).is_err());
}
