//! Makes a tokenizer of the right size. It has the bytes, a few merges so that text becomes fewer tokens than bytes,
//! syllables to fill the rest, and the BOS and EOS tokens.

use std::collections::HashSet;

use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{Array, ByteStrings, FormatError};

use super::shapes::Shape;

/// Token types of GGUF.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

const BEGIN: &str = "<|begin_of_text|>";
const END: &str = "<|end_of_text|>";

/// Writes the `tokenizer.ggml.*` keys of a byte-level BPE with exactly `shape.vocabulary` tokens.
pub fn describe(shape: &Shape, writer: &mut GgufWriter) -> Result<(), FormatError> {
    let count = shape.vocabulary as usize;
    let (mut tokens, merges) = text_tokens(count - 2);
    tokens.push(BEGIN.to_owned());
    tokens.push(END.to_owned());
    let mut types = vec![NORMAL; count - 2];
    types.extend([CONTROL, CONTROL]);

    writer.set("tokenizer.ggml.model", "gpt2")?;
    writer.set("tokenizer.ggml.pre", shape.pre_tokenizer)?;
    writer.set("tokenizer.ggml.tokens", strings(&tokens))?;
    writer.set("tokenizer.ggml.token_type", Array::I32(types))?;
    writer.set("tokenizer.ggml.merges", strings(&merges))?;
    writer.set("tokenizer.ggml.bos_token_id", shape.vocabulary - 2)?;
    writer.set("tokenizer.ggml.eos_token_id", shape.vocabulary - 1)?;
    writer.set("tokenizer.ggml.add_bos_token", shape.adds_bos)
}

fn strings(all: &[String]) -> ByteStrings {
    all.iter().collect()
}

/// Returns `count` tokens, starting with the 256 bytes, and the merges for the tokens that text can become.
fn text_tokens(count: usize) -> (Vec<String>, Vec<String>) {
    let mut tokens: Vec<String> = (0..=255).map(|byte| byte_character(byte).to_string()).collect();
    let mut known: HashSet<String> = tokens.iter().cloned().collect();
    let mut merges = Vec::new();
    let space = byte_character(b' ');
    let letters = || (b'a'..=b'z').map(char::from);
    let pairs = letters()
        .map(|letter| (space, letter))
        .chain(letters().flat_map(|first| letters().map(move |second| (first, second))));
    for (first, second) in pairs {
        if tokens.len() == count {
            break;
        }
        merges.push(format!("{first} {second}"));
        let token = format!("{first}{second}");
        known.insert(token.clone());
        tokens.push(token);
    }
    // No merge makes these tokens, so text never becomes them, but a model may write them.
    let mut number = 0;
    while tokens.len() < count {
        let token = format!("{space}{}", syllables(number));
        number += 1;
        if known.insert(token.clone()) {
            tokens.push(token);
        }
    }
    (tokens, merges)
}

/// Returns a pronounceable word, a different one for every number.
fn syllables(mut number: usize) -> String {
    const CONSONANTS: &[u8] = b"bdfgklmnprstvz";
    const VOWELS: &[u8] = b"aeiou";
    let mut word = String::new();
    loop {
        word.push(char::from(CONSONANTS[number % CONSONANTS.len()]));
        number /= CONSONANTS.len();
        word.push(char::from(VOWELS[number % VOWELS.len()]));
        number /= VOWELS.len();
        if number == 0 {
            return word;
        }
        number -= 1;
    }
}

/// Returns the printable character that stands for a byte in a byte-level vocabulary (GPT-2). Printable Latin-1
/// characters stand for themselves. The others use the next free characters from U+0100.
fn byte_character(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if is_printable(byte) {
        return char::from(byte);
    }
    let position = (0..byte).filter(|other| !is_printable(*other)).count() as u32;
    char::from_u32(0x100 + position).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_unique_and_exactly_as_many_as_asked() {
        for count in [256, 300, 958, 5000, 151_934] {
            let (tokens, merges) = text_tokens(count);
            assert_eq!(tokens.len(), count);
            assert_eq!(tokens.iter().collect::<HashSet<_>>().len(), count);
            assert_eq!(merges.len(), (count - 256).min(26 * 27));
        }
    }

    #[test]
    fn bytes_have_the_published_characters() {
        assert_eq!(byte_character(b' '), 'Ġ');
        assert_eq!(byte_character(b'\n'), 'Ċ');
        assert_eq!(byte_character(b'a'), 'a');
        assert_eq!(byte_character(0xAD), 'Ń');
    }
}
