//! Fuzzes the tokenizer's part of GGUF metadata, and the encoding of text with the resulting tokenizer.
//!
//! An input is a list of lines. The first byte of a line gives the meaning of the rest:
//!
//! - `M`: model.
//! - `P`: pre-tokenizer.
//! - `T`: token, after one digit for its type.
//! - `S`: score of the last token.
//! - `G`: merge.
//! - `F`: key of a flag that is set.
//! - `I`: key and number of a special token.
//! - `X`: text to encode.
//!
//! With this form, most mutations change the meaning and not the container.

#![no_main]

use forebay_format::{Array, ByteStrings, GgufMetadata, Value};
use forebay_text::Tokenizer;
use libfuzzer_sys::fuzz_target;

#[derive(Default)]
struct Input {
    tokens: ByteStrings,
    types: Vec<i32>,
    scores: Vec<f32>,
    merges: ByteStrings,
    texts: Vec<String>,
}

fn set(metadata: &mut GgufMetadata, key: &str, value: Value) {
    metadata.insert(format!("tokenizer.ggml.{key}"), value);
}

fn read(data: &[u8]) -> (GgufMetadata, Input) {
    let mut metadata = GgufMetadata::new(3);
    let mut input = Input::default();
    for line in data.split(|byte| *byte == b'\n') {
        let Some((tag, rest)) = line.split_first() else { continue };
        let text = String::from_utf8_lossy(rest);
        match tag {
            b'M' => set(&mut metadata, "model", Value::String(rest.to_vec())),
            b'P' => set(&mut metadata, "pre", Value::String(rest.to_vec())),
            b'T' => {
                let (kind, token) = rest.split_first().unwrap_or((&b'1', &[]));
                input.tokens.push(token);
                input.types.push(i32::from(*kind) - i32::from(b'0'));
                input.scores.push(-(input.scores.len() as f32));
            }
            b'S' => {
                if let (Some(last), Ok(score)) = (input.scores.last_mut(), text.parse()) {
                    *last = score;
                }
            }
            b'G' => input.merges.push(rest),
            b'F' => set(&mut metadata, &text, Value::Bool(true)),
            b'I' => {
                if let Some((key, number)) = text.rsplit_once(' ') {
                    let number = number.parse().unwrap_or(u32::MAX);
                    set(&mut metadata, key, Value::U32(number));
                }
            }
            b'X' => input.texts.push(text.into_owned()),
            _ => {}
        }
    }
    (metadata, input)
}

fuzz_target!(|data: &[u8]| {
    forebay_fuzz::bounded(data, |data| {
        let (mut metadata, input) = read(data);
        let Input { tokens, types, scores, merges, texts } = input;
        set(&mut metadata, "tokens", Value::Array(Array::String(tokens)));
        set(&mut metadata, "token_type", Value::Array(Array::I32(types)));
        set(&mut metadata, "scores", Value::Array(Array::F32(scores)));
        set(&mut metadata, "merges", Value::Array(Array::String(merges)));
        let Ok(tokenizer) = Tokenizer::from_gguf(&metadata) else { return };
        for text in &texts {
            for parse_special in [false, true] {
                if let Ok(ids) = tokenizer.encode(text, true, parse_special) {
                    assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
                    let _ = tokenizer.decode(&ids, true);
                }
            }
        }
        let count = tokenizer.vocab_size() as u32;
        let _ = tokenizer.decode(&[0, count / 2, count.wrapping_sub(1), count, u32::MAX], false);
    });
});
