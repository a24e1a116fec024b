//! Tokenizers of folders, in the forms that published models have.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use forebay_format::{ChatTemplates, Document, HfMetadata};
use forebay_text::{TextError, Tokenizer};
use serde_json::{Value, json};

/// A folder with these files.
fn metadata(files: &[(&str, &str)], tokenizer_config: Value) -> (tempfile::TempDir, HfMetadata) {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let document = |name: &str| {
        let path = folder.path().join(name);
        path.exists().then(|| Document::on_disk(path))
    };
    let metadata = HfMetadata {
        config: json!({}),
        tokenizer_json: document("tokenizer.json"),
        tiktoken: document("tiktoken.model"),
        tokenizer_config: Some(tokenizer_config),
        generation_config: None,
        chat_templates: ChatTemplates::default(),
    };
    (folder, metadata)
}

/// Returns a list of tokens: all bytes, and these.
fn ranks(more: &[&str]) -> String {
    let bytes = (0..=255_u8).map(|byte| vec![byte]);
    let more = more.iter().map(|token| token.as_bytes().to_vec());
    let lines = bytes.chain(more).enumerate();
    lines.map(|(rank, token)| format!("{} {rank}\n", BASE64_STANDARD.encode(token))).collect()
}

fn kimi(added: Value) -> Value {
    json!({ "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "<|im_end|>",
        "added_tokens_decoder": added })
}

#[test]
fn lists_of_ranks_of_kimi() {
    let list = ranks(&["he", "ll", "lo", "hell", "hello", " hello"]);
    let added = json!({
        "262": { "content": "[BOS]", "special": true },
        "263": { "content": "<|im_end|>", "special": true },
        "264": { "content": "<think>", "special": false },
    });
    let (_folder, metadata) = metadata(&[("tiktoken.model", &list)], kimi(added));
    let tokenizer = Tokenizer::from_hugging_face(&metadata).unwrap();
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (Some(262), Some(263)));
    assert_eq!((tokenizer.adds_bos(), tokenizer.vocab_size()), (false, 262 + 256));
    assert_eq!(tokenizer.eog_ids(), [263]);
    assert_eq!(tokenizer.token_text(300).unwrap(), "<|reserved_token_300|>");
    assert_eq!(tokenizer.kind(), "tiktoken (kimi-k2)");
    for (text, ids) in [
        ("hello", &[260][..]),
        ("hello hello", &[260, 261]),
        // The lowest rank is joined first: h-e, l-l, then he-ll.
        ("hellx", &[259, u32::from(b'x')]),
        ("lle", &[257, u32::from(b'e')]),
        ("<think>hello<|im_end|>", &[264, 260, 263]),
    ] {
        let found = tokenizer.encode(text, true, true).unwrap();
        assert_eq!(found, ids, "{text}");
        assert_eq!(tokenizer.decode(&found, true), text);
    }
}

#[test]
fn lists_of_ranks_that_say_too_little_or_are_damaged() {
    let list = ranks(&["he"]);
    let open = |list: &str, configuration: Value| {
        let (_folder, metadata) = metadata(&[("tiktoken.model", list)], configuration);
        Tokenizer::from_hugging_face(&metadata).map(|tokenizer| tokenizer.vocab_size())
    };
    let unknown = open(&list, json!({ "tokenizer_class": "PreTrainedTokenizerFast" })).unwrap_err();
    let text = unknown.to_string();
    assert!(text.contains("tiktoken.model") && text.contains("TikTokenTokenizer"), "{text}");
    let automatic =
        json!({ "auto_map": { "AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null] } });
    assert_eq!(open(&list, automatic).unwrap(), 257 + 256);
    assert_eq!(open(&list, json!({ "tokenizer_class": "QWenTokenizer" })).unwrap(), 257 + 208);
    for damaged in [
        "aGVsbG8= 0\naGU= 2\n",
        "aGVsbG8=\n",
        "!!! 0\n",
        "aGVsbG8= x\n",
        " 0\n",
        "aGVsbG8= 0\n 1\n",
    ] {
        let error = open(damaged, kimi(json!({}))).unwrap_err();
        assert!(matches!(error, TextError::TokenizerFile { .. }), "{damaged:?}: {error}");
    }
    for added in [
        json!({ "x": { "content": "a" } }),
        json!({ "0": { "content": "a" } }),
        json!({ "4000000000": { "content": "a" } }),
    ] {
        assert!(open(&list, kimi(added)).is_err());
    }
    let (_folder, nothing) = metadata(&[], json!({}));
    assert!(matches!(Tokenizer::from_hugging_face(&nothing), Err(TextError::NoTokenizerFile)));
}

/// Returns a small `tokenizer.json` with other parts than usual.
fn tokenizer_json(parts: &[(&str, Value)]) -> String {
    let mut file = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
        "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "▁": 2, "▁a": 3, "_": 4, "a_": 5 }, "merges": ["▁ a", "a _"] },
    });
    for (name, value) in parts {
        file[*name] = value.clone();
    }
    file.to_string()
}

#[test]
fn tokens_that_only_the_configuration_has() {
    let file = tokenizer_json(&[]);
    let added = json!({
        "6": { "content": "<x>", "special": true, "normalized": false },
        "7": { "content": "<y>", "special": false, "normalized": false },
    });
    let configuration = json!({ "added_tokens_decoder": added, "eos_token": "<x>" });
    let (_folder, metadata) = metadata(&[("tokenizer.json", &file)], configuration);
    let tokenizer = Tokenizer::from_hugging_face(&metadata).unwrap();
    assert_eq!(tokenizer.encode("a<x>b<y>", false, true).unwrap(), [0, 6, 1, 7]);
    assert_eq!((tokenizer.eos_id(), tokenizer.vocab_size()), (Some(6), 8));
    assert_eq!(tokenizer.decode(&[0, 6, 7], false), "a<y>");
}

#[test]
fn decoders_with_several_replacements() {
    let replace = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let decoder = |parts: Vec<Value>| {
        let file = tokenizer_json(&[("decoder", json!({ "type": "Sequence", "decoders": parts }))]);
        let (_folder, metadata) = metadata(&[("tokenizer.json", &file)], json!({}));
        Tokenizer::from_hugging_face(&metadata)
    };
    let fuse = json!({ "type": "Fuse" });
    let spaces = || replace("▁", " ");
    let ids = [3, 5, 2, 1];
    for (parts, expected) in [
        (vec![spaces(), fuse.clone()], " aa_ b"),
        (vec![spaces(), replace("_", "-"), fuse.clone()], " aa- b"),
        (vec![replace("a_", "xyz"), spaces()], " axyz b"),
        // What one writes, the next reads.
        (vec![replace("_", "▁"), spaces()], " aa  b"),
        (vec![spaces(), fuse.clone(), replace("b", "")], " aa_ "),
    ] {
        assert_eq!(decoder(parts).unwrap().decode(&ids, true), expected);
    }
    // Behind `Fuse`, this text could be in two tokens.
    let error = decoder(vec![spaces(), fuse, replace("a_", "x")]).unwrap_err();
    assert!(error.to_string().contains("Replace"), "{error}");
}
