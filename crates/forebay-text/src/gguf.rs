//! Tokenizers from the metadata of GGUF files.

use forebay_format::{ByteStrings, GgufMetadata, Value};

use crate::bpe::{Alphabet, Bpe};
use crate::endings::{self, Kinds};
use crate::infill;
use crate::pieces::Spelling;
use crate::pretokenize::Splitter;
use crate::sentencepiece::SentencePiece;
use crate::special::{SpecialTokens, Strip};
use crate::tokenizer::{Affixes, Encoder, Tokenizer};
use crate::vocabulary::{TokenKind, Vocabulary};
use crate::{TextError, pretokenize, warnings};

const MODEL: &str = "tokenizer.ggml.model";
const PRE_TOKENIZER: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
/// Keys of tokens for filling in the middle: the present name, and the older one.
const FIM_PREFIX: [&str; 2] = ["tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id"];
const FIM_SUFFIX: [&str; 2] = ["tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id"];
const FIM_MIDDLE: [&str; 2] = ["tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id"];
const FIM_PAD: &str = "tokenizer.ggml.fim_pad_token_id";
const FIM_REPOSITORY: &str = "tokenizer.ggml.fim_rep_token_id";
const FIM_FILE: &str = "tokenizer.ggml.fim_sep_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";

/// Supported values of [`MODEL`].
const MODELS: &[&str] = &["gpt2", "llama", "gemma4"];

/// Rules of a tokenizer model, used unless the file says otherwise.
struct Defaults {
    adds_bos: bool,
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
}

/// Builds the tokenizer that the metadata describes.
///
/// # Errors
/// Returns an error if a key is missing, has the wrong type or is inconsistent, or if the model or
/// pre-tokenizer is unknown.
pub fn tokenizer(metadata: &GgufMetadata) -> Result<Tokenizer, TextError> {
    let model = string(metadata, MODEL)?.ok_or(TextError::MissingKey { key: MODEL })?;
    let mut vocabulary = vocabulary(metadata)?;
    let id = |key, default: Option<u32>| token_id(metadata, key, default, vocabulary.len());

    let (splitter, defaults) = match model {
        "llama" => {
            (None, Defaults { adds_bos: true, bos: Some(1), eos: Some(2), unknown: Some(0) })
        }
        "gpt2" | "gemma4" => {
            // Files older than pre-tokenizer names use the default one.
            let named = string(metadata, PRE_TOKENIZER)?.unwrap_or("default");
            let splitter = Splitter::named(if model == "gemma4" { "gemma4" } else { named })?;
            let adds_bos = splitter.adds_bos();
            (Some(splitter), Defaults { adds_bos, bos: None, eos: None, unknown: None })
        }
        other => {
            let known = MODELS.join(", ");
            return Err(TextError::UnknownModel { name: other.to_owned(), known });
        }
    };
    let (bos, eos) = (id(BOS, defaults.bos)?, id(EOS, defaults.eos)?);
    let unknown = id(UNKNOWN, defaults.unknown)?;
    let infill = infill_tokens(|key| id(key, None))?;
    // Another file follows these tokens, or nothing.
    let files = [id(FIM_PAD, None)?, infill.repository, infill.file];
    let named_endings = [eos, id(EOT, None)?, id(EOM, None)?].into_iter().chain(files);
    let eog = endings::find(&mut vocabulary, Kinds::Doubtful, named_endings.flatten());
    let infill = infill::find(&vocabulary, infill);

    let (encoder, spelling, kind) = match splitter {
        None => {
            let space_prefix = boolean(metadata, ADD_SPACE_PREFIX)?.unwrap_or(true);
            let pieces = SentencePiece::new(
                &vocabulary,
                &scores(metadata, vocabulary.len())?,
                unknown,
                space_prefix,
            )?;
            let spelling = Spelling::Underscore { space_prefix };
            (Encoder::SentencePiece(pieces), spelling, "spm".to_owned())
        }
        Some(splitter) => {
            let alphabet = alphabet_of(&splitter);
            let kind = format!("bpe ({})", splitter.name());
            let merges = strings(metadata, MERGES)?;
            let bpe = Bpe::new(&vocabulary, merges.iter(), splitter, alphabet, unknown)?;
            let spelling = match alphabet {
                Alphabet::ByteLevel => Spelling::ByteLevel,
                Alphabet::Characters => Spelling::Underscore { space_prefix: false },
            };
            (Encoder::Bpe(bpe), spelling, kind)
        }
    };
    let specials = SpecialTokens::new(&vocabulary, strip_rule(metadata, &vocabulary))?;
    let affixes = affixes(metadata, &defaults, bos, eos)?;
    // A token that swallows whitespace may stand for any number of bytes, and an unknown character for up to 4.
    let texts = (0..vocabulary.len() as u32).filter_map(|id| vocabulary.text(id));
    let longest = (!specials.swallow()).then(|| texts.map(<[u8]>::len).fold(4, usize::max));
    Ok(Tokenizer {
        vocabulary,
        encoder,
        specials,
        spelling,
        bos,
        eos,
        affixes,
        eog,
        infill,
        kind,
        longest,
    })
}

/// Reads the tokens for filling in the middle that the file names.
fn infill_tokens(
    id: impl Fn(&'static str) -> Result<Option<u32>, TextError>,
) -> Result<infill::Named, TextError> {
    let either = |[now, older]: [&'static str; 2]| Ok(id(now)?.or(id(older)?));
    Ok(infill::Named {
        prefix: either(FIM_PREFIX)?,
        suffix: either(FIM_SUFFIX)?,
        middle: either(FIM_MIDDLE)?,
        repository: id(FIM_REPOSITORY)?,
        file: id(FIM_FILE)?,
    })
}

fn alphabet_of(splitter: &Splitter) -> Alphabet {
    if splitter.name() == pretokenize::GEMMA_4 { Alphabet::Characters } else { Alphabet::ByteLevel }
}

fn vocabulary(metadata: &GgufMetadata) -> Result<Vocabulary, TextError> {
    let tokens = strings(metadata, TOKENS)?;
    let kinds = match metadata.get(TOKEN_TYPES) {
        None => vec![TokenKind::Normal; tokens.len()],
        Some(value) => {
            let numbers = value.as_array().and_then(|array| array.to_i64s());
            let numbers =
                numbers.ok_or_else(|| wrong_type(TOKEN_TYPES, "an array of integers", value))?;
            numbers.into_iter().map(TokenKind::from_gguf).collect()
        }
    };
    Vocabulary::new(tokens.iter(), kinds)
}

/// Returns the tokens that go around a text. It is an error if the file explicitly requests a token
/// that it does not name. A default request for such a token is ignored.
fn affixes(
    metadata: &GgufMetadata,
    defaults: &Defaults,
    bos: Option<u32>,
    eos: Option<u32>,
) -> Result<Affixes, TextError> {
    let wish = |key, token_key, default, token: Option<u32>| match boolean(metadata, key)? {
        Some(true) if token.is_none() && metadata.get(token_key).is_none() => {
            Err(TextError::MissingKey { key: token_key })
        }
        wish => Ok(token.filter(|_| wish.unwrap_or(default))),
    };
    Ok(Affixes {
        before: wish(ADD_BOS, BOS, defaults.adds_bos, bos)?,
        after: wish(ADD_EOS, EOS, false, eos)?,
    })
}

/// Returns the whitespace that special tokens swallow. GGUF does not store this property, so the
/// models that need it are recognised by name. In Phi-3, every special token swallows the
/// whitespace after it, except those taken over from Llama.
fn strip_rule<'a>(
    metadata: &'a GgufMetadata,
    vocabulary: &'a Vocabulary,
) -> impl Fn(u32) -> Strip + 'a {
    let name = metadata.str("general.name").unwrap_or_default().to_lowercase();
    let is_phi_3 = name.contains("phi-3") || name.contains("phi3");
    move |id| {
        let from_llama = [&b"<unk>"[..], b"<s>", b"<|endoftext|>"];
        let keeps = vocabulary.text(id).is_none_or(|text| from_llama.contains(&text));
        Strip { left: false, right: is_phi_3 && !keeps }
    }
}

/// Returns the scores of the tokens. Without scores, all are equal, as in llama.cpp.
fn scores(metadata: &GgufMetadata, tokens: usize) -> Result<Vec<f32>, TextError> {
    let Some(value) = metadata.get(SCORES) else {
        warnings::warn(format!(
            "`{SCORES}` is missing: neighbours are joined from the left, which may not be how the model was trained"
        ));
        return Ok(vec![0.0; tokens]);
    };
    let numbers = value.as_array().and_then(|array| array.to_f32s());
    numbers.ok_or_else(|| wrong_type(SCORES, "an array of floats", value))
}

/// Returns the token that `key` names. The default is used only if the vocabulary has it. An id that the vocabulary does not
/// have is left out: many files have such ids for tokens that nothing needs.
fn token_id(
    metadata: &GgufMetadata,
    key: &'static str,
    default: Option<u32>,
    tokens: usize,
) -> Result<Option<u32>, TextError> {
    let Some(value) = metadata.get(key) else {
        return Ok(default.filter(|id| (*id as usize) < tokens));
    };
    let id = value.as_u64().map(i128::from).or(value.as_i64().map(i128::from));
    let id = id.ok_or_else(|| wrong_type(key, "a token id", value))?;
    let known = u32::try_from(id).ok().filter(|id| (*id as usize) < tokens);
    if known.is_none() {
        warnings::warn(format!(
            "`{key}` names token {id}, but the vocabulary has {tokens} tokens: it is left out"
        ));
    }
    Ok(known)
}

fn string<'a>(metadata: &'a GgufMetadata, key: &'static str) -> Result<Option<&'a str>, TextError> {
    let Some(value) = metadata.get(key) else { return Ok(None) };
    value.as_str().map(Some).ok_or_else(|| wrong_type(key, "a string", value))
}

fn boolean(metadata: &GgufMetadata, key: &'static str) -> Result<Option<bool>, TextError> {
    let Some(value) = metadata.get(key) else { return Ok(None) };
    value.as_bool().map(Some).ok_or_else(|| wrong_type(key, "a bool", value))
}

fn strings<'a>(
    metadata: &'a GgufMetadata,
    key: &'static str,
) -> Result<&'a ByteStrings, TextError> {
    let value = metadata.get(key).ok_or(TextError::MissingKey { key })?;
    value.as_strings().ok_or_else(|| wrong_type(key, "an array of strings", value))
}

fn wrong_type(key: &'static str, expected: &'static str, found: &Value) -> TextError {
    TextError::WrongType { key, expected, found: found.describe() }
}
