//! Tokenizers from a list of tokens and their ranks, as tiktoken reads it.
//!
//! Each line has a token in Base64 and its rank, which is also its id. Two neighbours are joined if the result is a token, those
//! with the lowest rank first. Special tokens and the pattern that splits a text into words are not in the file: programs beside
//! it have them.

use std::path::Path;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use forebay_format::{Document, HfMetadata};
use serde_json::Value;

use crate::bpe::Bpe;
use crate::endings::{self, Kinds};
use crate::infill;
use crate::pieces::Spelling;
use crate::pretokenize::Splitter;
use crate::special::{SpecialTokens, Strip};
use crate::tokenizer::{Affixes, Encoder, Tokenizer};
use crate::vocabulary::{TOKENS_MAX, TokenKind, Vocabulary};
use crate::{TextError, byte_level, huggingface};

/// Size limit of a file in bytes. Published ones have 3 MB.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// A program whose tokenizers are known.
struct Program {
    /// Name of its class, as in `tokenizer_config.json`.
    class: &'static str,
    /// Beginning of `model_type` in `config.json`.
    model: &'static str,
    /// Name of the pattern that splits a text into words.
    pattern: &'static str,
    /// Special tokens behind those of the file, where `{}` is a number.
    specials: &'static [(&'static str, std::ops::Range<u32>)],
    /// True if the numbers of special tokens are their ids.
    numbered_by_id: bool,
}

static PROGRAMS: [Program; 2] = [
    Program {
        class: "TikTokenTokenizer",
        model: "kimi",
        pattern: "kimi-k2",
        specials: &[("<|reserved_token_{}|>", 0..256)],
        numbered_by_id: true,
    },
    Program {
        class: "QWenTokenizer",
        model: "qwen",
        pattern: "qwen2",
        specials: &[
            ("<|endoftext|>", 0..1),
            ("<|im_start|>", 0..1),
            ("<|im_end|>", 0..1),
            ("<|extra_{}|>", 0..205),
        ],
        numbered_by_id: false,
    },
];

/// Builds the tokenizer of a folder that has such a file and no `tokenizer.json`.
///
/// # Errors
/// Returns an error if the file is damaged, or if nothing says how a text is split into words.
pub fn tokenizer(metadata: &HfMetadata, document: &Document) -> Result<Tokenizer, TextError> {
    let path = document.path();
    let bad = |reason: String| TextError::TokenizerFile { path: path.to_owned(), reason };
    let configuration = metadata.tokenizer_config.as_ref().unwrap_or(&Value::Null);
    let program = program(configuration, &metadata.config).ok_or_else(|| {
        let known: Vec<&str> = PROGRAMS.iter().map(|program| program.class).collect();
        bad(format!(
            "it does not say how a text is split into words, and `tokenizer_class` in tokenizer_config.json names no known \
             program ({}): a tokenizer.json says it",
            known.join(", ")
        ))
    })?;
    let ranks = ranks(document)?;
    let (texts, kinds) = all_tokens(&ranks, program, configuration).map_err(bad)?;
    let mut vocabulary = Vocabulary::new(texts.iter().map(|text| text.as_bytes()), kinds)?;
    let token =
        |name: &str| huggingface::named_token(&vocabulary, configuration, &metadata.config, name);
    let (bos, eos) = (token("bos_token"), token("eos_token"));
    let named: Vec<u32> =
        huggingface::end_ids(metadata, vocabulary.len()).into_iter().chain(eos).collect();
    let eog = endings::find(&mut vocabulary, Kinds::Reliable, named);
    let infill = infill::find(&vocabulary, infill::Named::default());
    let specials = SpecialTokens::new(&vocabulary, |_| Strip::default())?;
    let splitter = Splitter::named(program.pattern)?;
    let kind = format!("tiktoken ({})", program.pattern);
    let longest = ranks.iter().map(Vec::len).chain(texts.iter().map(String::len)).max();
    let encoder = Encoder::Bpe(Bpe::of_ranks(&vocabulary, splitter, &ranks));
    let adds = |key: &str, token: Option<u32>| token.filter(|_| configuration[key] == true);
    Ok(Tokenizer {
        affixes: Affixes { before: adds("add_bos_token", bos), after: adds("add_eos_token", eos) },
        vocabulary,
        encoder,
        specials,
        spelling: Spelling::ByteLevel,
        bos,
        eos,
        eog,
        infill,
        kind,
        longest,
    })
}

/// Returns the program that the configurations name.
fn program(configuration: &Value, config: &Value) -> Option<&'static Program> {
    let class = configuration["tokenizer_class"].as_str().unwrap_or_default();
    let automatic = configuration["auto_map"]["AutoTokenizer"].to_string();
    let model = config["model_type"].as_str().unwrap_or_default();
    let by_class = PROGRAMS.iter().find(|program| {
        program.class == class || automatic.contains(&format!(".{}\"", program.class))
    });
    by_class.or_else(|| PROGRAMS.iter().find(|program| model.starts_with(program.model)))
}

/// Reads the tokens in the order of their ranks.
fn ranks(document: &Document) -> Result<Vec<Vec<u8>>, TextError> {
    let bad = |reason: String| bad_file(document.path(), reason);
    let bytes = document.bytes().map_err(|error| bad(error.to_string()))?;
    if bytes > FILE_BYTES_MAX {
        return Err(bad(format!("{bytes} bytes are too many for a list of tokens")));
    }
    let content = document.read().map_err(|error| bad(error.to_string()))?;
    let mut ranks = Vec::new();
    let lines = content.split(|byte| *byte == b'\n').zip(1..);
    for (line, number) in lines.map(|(line, number)| (line.trim_ascii(), number)) {
        if line.is_empty() {
            continue;
        }
        let damaged = || bad(format!("line {number} is not a token in Base64 and its rank"));
        let space = line.iter().position(|byte| *byte == b' ').ok_or_else(damaged)?;
        let token = BASE64_STANDARD.decode(&line[..space]).map_err(|_| damaged())?;
        let rank = std::str::from_utf8(&line[space + 1..]).ok().and_then(|rank| rank.parse().ok());
        if rank != Some(ranks.len()) || token.is_empty() {
            return Err(bad(format!("line {number} does not have the rank {}", ranks.len())));
        }
        ranks.push(token);
    }
    Ok(ranks)
}

fn bad_file(path: &Path, reason: String) -> TextError {
    TextError::TokenizerFile { path: path.to_owned(), reason }
}

/// Returns the texts and kinds of all tokens, special ones included.
fn all_tokens(
    ranks: &[Vec<u8>],
    program: &Program,
    configuration: &Value,
) -> Result<(Vec<String>, Vec<TokenKind>), String> {
    let written =
        |token: &Vec<u8>| token.iter().map(|byte| byte_level::char_of_byte(*byte)).collect();
    let mut texts: Vec<String> = ranks.iter().map(written).collect();
    let mut kinds = vec![TokenKind::Normal; texts.len()];
    for (text, numbers) in program.specials {
        for number in numbers.clone() {
            let number = if program.numbered_by_id { texts.len() as u32 } else { number };
            texts.push(text.replace("{}", &number.to_string()));
            kinds.push(TokenKind::Control);
        }
    }
    for (id, token) in configuration["added_tokens_decoder"].as_object().into_iter().flatten() {
        let wrong = || format!("tokenizer_config.json has a token {id:?} that is none");
        let text = token["content"].as_str().ok_or_else(wrong)?;
        let at: usize = id.parse().map_err(|_| wrong())?;
        if at as u64 >= TOKENS_MAX || at < ranks.len() {
            return Err(wrong());
        }
        if at >= texts.len() {
            texts.resize(at + 1, String::new());
            kinds.resize(at + 1, TokenKind::Unused);
        }
        text.clone_into(&mut texts[at]);
        kinds[at] = match token["special"] == false {
            true => TokenKind::UserDefined,
            false => TokenKind::Control,
        };
    }
    Ok((texts, kinds))
}
