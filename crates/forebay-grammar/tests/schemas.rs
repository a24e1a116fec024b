//! Schemas as clients send them: the grammar allows their values, and no others.

use std::sync::Arc;

use forebay_format::{Document, HfMetadata};
use forebay_grammar::{Compiler, Grammar, GrammarError, Rules};
use forebay_text::Tokenizer;
use serde_json::{Map, Value, json};

const END: &str = "<|im_end|>";

/// Returns a tokenizer with a token for every byte.
fn tokenizer() -> Arc<Tokenizer> {
    // The byte-level alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
    let mut next = 256;
    let mut vocabulary = Map::new();
    for byte in 0..=255u8 {
        let plain = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if plain { u32::from(byte) } else { next };
        next += u32::from(!plain);
        vocabulary.insert(char::from_u32(code).unwrap().to_string(), byte.into());
    }
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let end = json!({ "id": 256, "content": END, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false });
    let description = json!({
        "version": "1.0", "added_tokens": [end], "normalizer": null, "pre_tokenizer": level, "post_processor": null,
        "decoder": level, "model": { "type": "BPE", "vocab": vocabulary, "merges": [] },
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, description.to_string()).unwrap();
    let metadata = HfMetadata {
        config: json!({}),
        tokenizer_json: Some(Document::on_disk(path)),
        tokenizer_config: Some(json!({ "eos_token": END })),
        generation_config: None,
        chat_template: None,
    };
    Arc::new(Tokenizer::from_hugging_face(&metadata).unwrap())
}

fn compile(schema: &Value) -> Result<Grammar, GrammarError> {
    Compiler::new(&tokenizer()).compile(&Rules::JsonSchema(schema.clone()), None)
}

/// Returns true if an answer may be this text.
fn allows(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = grammar.begin();
    let mut mask = Vec::new();
    let allowed = |mask: &[u32], id: usize| mask[id / 32] >> (id % 32) & 1 == 1;
    for byte in text.bytes() {
        // A complete answer has no mask.
        if matcher.is_complete() || matcher.mask(&mut mask).is_err() || !allowed(&mask, byte.into())
        {
            return false;
        }
        matcher.accept(byte.into()).unwrap();
    }
    matcher.is_complete() || matcher.mask(&mut mask).is_ok() && allowed(&mask, 256)
}

#[track_caller]
fn check(schema: Value, good: &[&str], bad: &[&str]) {
    let grammar = compile(&schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
    for text in good {
        assert!(allows(&grammar, text), "{schema} allows {text}");
    }
    for text in bad {
        assert!(!allows(&grammar, text), "{schema} does not allow {text}");
    }
}

#[test]
fn objects_are_closed() {
    let a = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
    check(a.clone(), &["{}", "{\"a\": 1}"], &["{\"b\": 1}", "{\"a\": 1, \"b\": 1}"]);
    let mut open = a.clone();
    open["additionalProperties"] = true.into();
    check(open, &["{\"a\": 1, \"b\": [{}, 1.5, null]}"], &["{\"a\": true}"]);
    check(json!({ "type": "object" }), &["{}", "{\"x\": {\"y\": -1.25}}"], &["[]", "1"]);
    check(json!({}), &["{}", "1", "[1, \"x\"]"], &["x"]);
    check(json!(true), &["{}", "1"], &["x"]);
    let b =
        json!({ "type": "object", "properties": { "b": { "type": "null" } }, "required": ["b"] });
    check(
        json!({ "allOf": [a, b] }),
        &["{\"a\": 1, \"b\": null}"],
        &["{\"a\": 1}", "{\"a\": 1, \"b\": null, \"c\": 1}"],
    );
    let defs = json!({ "b": b });
    check(
        json!({ "$defs": defs, "$ref": "#/$defs/b", "properties": { "a": { "type": "boolean" } } }),
        &["{\"b\": null}", "{\"a\": true, \"b\": null}"],
        &["{\"b\": null, \"c\": 1}", "{\"a\": 1, \"b\": null}"],
    );
    check(
        json!({ "properties": { "k": { "type": "string" } }, "required": ["k"], "anyOf": [a, b] }),
        &["{\"k\": \"\"}", "{\"k\": \"\", \"a\": 1}", "{\"k\": \"\", \"b\": null}"],
        &["{\"k\": \"\", \"a\": 1, \"b\": null}", "{\"k\": \"\", \"c\": 1}"],
    );
    // Recursive ones, as Pydantic writes them.
    let node = json!({ "type": "object", "required": ["v"],
        "properties": { "v": { "type": "boolean" }, "next": { "anyOf": [{ "$ref": "#/$defs/node" }, { "type": "null" }] } } });
    check(
        json!({ "$defs": { "node": node }, "allOf": [{ "$ref": "#/$defs/node" }], "description": "x" }),
        &["{\"v\": true, \"next\": {\"v\": false, \"next\": null}}"],
        &["{\"v\": true, \"next\": {\"v\": false, \"more\": 1}}"],
    );
}

#[test]
fn only_the_odd_part_is_left_out() {
    check(
        json!({ "type": "string", "format": "iban", "maxLength": 2 }),
        &["\"ab\""],
        &["\"abc\"", "1"],
    );
    check(
        json!({ "type": "array", "items": { "type": "integer" }, "uniqueItems": true, "maxItems": 2 }),
        &["[1, 1]"],
        &["[1, 2, 3]", "[true]"],
    );
    check(json!({ "type": "integer", "not": { "const": 3 } }), &["3", "4"], &["\"3\""]);
    check(json!({ "type": "string", "pattern": "^(?=a)", "minLength": 1 }), &["\"b\""], &["\"\""]);
    check(
        json!({ "type": "array", "contains": { "type": "string" }, "items": { "type": "null" } }),
        &["[null]"],
        &["[1]"],
    );
    check(
        json!({ "type": "object", "properties": { "a": { "type": "null" } }, "patternProperties": { "(?!x)": {} } }),
        &["{\"a\": null, \"b\": 1}"],
        &["{\"a\": 1}"],
    );
    check(
        json!({ "$schema": "https://example.com/s", "$ref": "https://example.com/x", "type": "boolean" }),
        &["true"],
        &["1"],
    );
    check(json!({ "type": "any" }), &["1", "{}"], &["x"]);
    check(
        json!({ "type": "string", "maxLength": 2.0, "minLength": null }),
        &["\"ab\""],
        &["\"abc\""],
    );
    check(
        json!({ "type": "object", "properties": { "a": {}, "b": {} }, "minProperties": 2, "maxProperties": 1.0 }),
        &["{\"a\": 1}"],
        &["{\"c\": 1}"],
    );
    check(
        json!({ "oneOf": [{ "type": "integer" }, { "type": "number", "minimum": 2 }] }),
        &["1", "3", "2.5"],
        &["1.5"],
    );
    // What is no schema is still an error.
    for wrong in [json!({ "properties": 1, "type": "object" }), json!({ "enum": 1 }), json!(1)] {
        assert!(compile(&wrong).is_err(), "{wrong}");
    }
}

#[test]
fn answers_cannot_go_on_forever() {
    let (digits, spaces) = ("9".repeat(40), " ".repeat(40));
    check(
        json!({ "type": "integer" }),
        &["0", "-7", "999999999999999999"],
        &[&digits, &format!("-{digits}"), "1.5", "01"],
    );
    check(
        json!({ "type": "number" }),
        &["0", "-7", "1.5", "-0.000000001", "123456789012345.5"],
        &[
            &digits,
            &format!("0.{digits}"),
            &format!("0.5{}", "0".repeat(40)),
            &format!("1e{digits}"),
        ],
    );
    check(
        json!({ "type": "number", "minimum": 0, "maximum": 1 }),
        &["0.5", "1", "0"],
        &["1.5", "-1", &format!("0.{digits}")],
    );
    check(json!({ "type": "number", "exclusiveMinimum": 1e-9 }), &["0.5", "3"], &["0"]);
    check(json!({ "type": "integer", "minimum": 5 }), &["5", "600"], &["4", &digits]);
    check(json!({}), &["1.5", "[2]"], &[&digits, &format!("{{\"a\": 0.{digits}}}")]);
    check(
        json!({ "type": "object" }),
        &["{\"a\": 12}"],
        &[&format!("{{\"a\": {digits}}}"), &format!("{{{spaces}}}")],
    );
    check(
        json!({ "type": "array", "items": {} }),
        &["[ 1 ]"],
        &[&format!("[{spaces}1]"), &format!("[0.{digits}]")],
    );
    let time = |fraction: &str| format!("\"2026-01-02T03:04:05{fraction}Z\"");
    check(
        json!({ "type": "string", "format": "date-time" }),
        &[&time(""), &time(".25"), &time(".25").replace('Z', "+01:00")],
        &[&time(&format!(".{digits}")), &time("").replace(":05", ":60")],
    );
    check(
        json!({ "type": "string", "format": "duration" }),
        &["\"P3D\"", "\"PT1H30M\""],
        &[&format!("\"P{digits}D\"")],
    );
}

#[test]
fn an_answer_may_continue_a_text() {
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"] });
    let grammar = compile(&schema).unwrap();
    let after = grammar.after("{\"a\": 1").unwrap();
    assert!(allows(&after, "2}") && allows(&after, "}") && !allows(&after, "{\"a\": 1}"));
    assert!(allows(&grammar, "{\"a\": 1}"));
    assert!(grammar.after("[").is_err());
    assert!(grammar.after("").is_ok());
}
