//! A tokenizer from `tokenizer.json`, run by the `tokenizers` library.
//!
//! The library encodes. This crate decodes, as it does for GGUF, because decoding must work token
//! by token and never return parts of characters.

use std::borrow::Cow;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::OnceLock;

use forebay_format::{Document, HfMetadata};
use serde_json::Value;

use crate::TextError;
use crate::endings::{self, Kinds};
use crate::infill;
use crate::pieces::Spelling;
use crate::special::{SpecialTokens, Strip};
use crate::tokenizer::{Affixes, Encoder, Tokenizer};
use crate::vocabulary::{MAX_TOKENS, TokenKind, Vocabulary, byte_of_token};

/// Size limit of a tokenizer file in bytes. The largest known files have 35 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The library's tokenizer.
pub struct HuggingFace {
    tokenizer: tokenizers::Tokenizer,
    /// A copy that treats the texts of special tokens as ordinary text. It is made when first
    /// needed.
    plain: OnceLock<Box<tokenizers::Tokenizer>>,
    /// Tokens around a text that the configuration sets in place of the library's own.
    affixes: Option<Affixes>,
}

impl HuggingFace {
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, TextError> {
        let tokenizer = if parse_special {
            &self.tokenizer
        } else {
            self.plain.get_or_init(|| {
                let mut plain = Box::new(self.tokenizer.clone());
                plain.set_encode_special_tokens(true);
                plain
            })
        };
        let library_adds = add_special && self.affixes.is_none();
        let encoding = guarded(|| tokenizer.encode_fast(text, library_adds))
            .map_err(|reason| TextError::Encode { reason })?;
        let ids = encoding.get_ids();
        match self.affixes.filter(|_| add_special) {
            None => Ok(ids.to_vec()),
            Some(Affixes { before, after }) => {
                Ok(before.into_iter().chain(ids.iter().copied()).chain(after).collect())
            }
        }
    }

    /// Applies the settings of `tokenizer_config.json` where they differ from what the library
    /// adds. Files of several model families leave BOS to their configuration. Returns the tokens
    /// that now go around a text.
    fn apply_wishes(
        &mut self,
        configuration: &Value,
        bos: Option<u32>,
        eos: Option<u32>,
    ) -> Result<Affixes, TextError> {
        let around_nothing = self.encode("", true, true)?;
        let own = Affixes {
            before: around_nothing.first().copied().filter(|id| Some(*id) == bos),
            after: around_nothing.last().copied().filter(|id| Some(*id) == eos && bos != eos),
        };
        // Only these classes of transformers obey a `false` in the configuration.
        let class = configuration["tokenizer_class"].as_str().unwrap_or_default();
        let obeys_no = ["Llama", "Gemma", "Cohere"].iter().any(|family| class.contains(family));
        let wish =
            |key: &str, token: Option<u32>, own: Option<u32>| match configuration[key].as_bool() {
                Some(true) => token.or(own),
                Some(false) if obeys_no => None,
                _ => own,
            };
        let wished = Affixes {
            before: wish("add_bos_token", bos, own.before),
            after: wish("add_eos_token", eos, own.after),
        };
        if wished != own {
            self.affixes = Some(wished);
        }
        Ok(wished)
    }
}

/// Calls the library and turns its errors and panics into a text. The library unwraps in places
/// that a broken file can reach.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the tokenizers library panicked".to_owned()),
    }
}

/// Builds the tokenizer of a Hugging Face folder.
///
/// # Errors
/// Returns an error if there is no `tokenizer.json`, or if the library or this crate's decoder does
/// not understand it.
pub fn tokenizer(metadata: &HfMetadata) -> Result<Tokenizer, TextError> {
    let document = metadata.tokenizer_json.as_ref().ok_or(TextError::NoTokenizerFile)?;
    let (path, bytes) = (document.path(), read(document)?);
    let description: Value =
        serde_json::from_slice(&bytes).map_err(|error| bad_file(path, error.to_string()))?;
    let library = guarded(|| {
        let mut library = tokenizers::Tokenizer::from_bytes(&bytes)?;
        // Files contain the settings of their last use, but a prompt must be neither cut nor
        // padded.
        library.with_padding(None);
        library.with_truncation(None)?;
        Ok(library)
    });
    let library = library.map_err(|reason| bad_file(path, reason))?;

    let decoder = Decoder::new(&description["decoder"])
        .map_err(|part| bad_file(path, format!("the decoder `{part}` is not supported")))?;
    let mut vocabulary = vocabulary(&library, &decoder, path)?;
    let configuration = metadata.tokenizer_config.as_ref().unwrap_or(&Value::Null);
    let token = |name: &str| named_token(&vocabulary, configuration, &metadata.config, name);
    let (bos, eos) = (token("bos_token"), token("eos_token"));
    let named = end_ids(metadata).filter(|id| (*id as usize) < vocabulary.len()).chain(eos);
    let named: Vec<u32> = named.collect();
    let eog = endings::find(&mut vocabulary, Kinds::Reliable, named);
    let infill = infill::find(&vocabulary, infill::Named::default());

    let model = description["model"]["type"].as_str().unwrap_or("unknown model");
    let mut hugging_face =
        HuggingFace { tokenizer: library, plain: OnceLock::new(), affixes: None };
    let affixes = hugging_face.apply_wishes(configuration, bos, eos)?;
    Ok(Tokenizer {
        specials: SpecialTokens::new(&vocabulary, |_| Strip::default())?,
        vocabulary,
        encoder: Encoder::HuggingFace(hugging_face),
        spelling: decoder.spelling,
        bos,
        eos,
        affixes,
        eog,
        infill,
        kind: format!("hf ({model})"),
        // What the library normalises may leave nothing of a text.
        longest: None,
    })
}

fn read(document: &Document) -> Result<Cow<'_, [u8]>, TextError> {
    let failed = |error: std::io::Error| bad_file(document.path(), error.to_string());
    let bytes = document.bytes().map_err(failed)?;
    if bytes > MAX_FILE_BYTES {
        let reason = format!("{bytes} bytes are too many for a tokenizer");
        return Err(bad_file(document.path(), reason));
    }
    document.read().map_err(failed)
}

fn bad_file(path: &Path, reason: String) -> TextError {
    TextError::TokenizerFile { path: path.to_owned(), reason }
}

/// Returns the table of all tokens, including added ones. Ids may have holes.
fn vocabulary(
    library: &tokenizers::Tokenizer,
    decoder: &Decoder,
    path: &Path,
) -> Result<Vocabulary, TextError> {
    let ids: HashMap<String, u32> = library.get_vocab(true);
    let last = ids.values().max().ok_or(TextError::EmptyVocabulary)?;
    let count = u64::from(*last) + 1;
    if count > MAX_TOKENS {
        return Err(TextError::VocabularyTooLarge { tokens: count, limit: MAX_TOKENS });
    }
    let mut texts: Vec<&[u8]> = vec![b""; count as usize];
    let mut kinds = vec![TokenKind::Unused; count as usize];
    for (text, id) in &ids {
        let at = *id as usize;
        if kinds[at] != TokenKind::Unused {
            return Err(bad_file(path, format!("token {id} has two texts, one is {text:?}")));
        }
        texts[at] = text.as_bytes();
        let is_byte = decoder.has_byte_tokens && byte_of_token(text.as_bytes()).is_some();
        kinds[at] = if is_byte { TokenKind::Byte } else { TokenKind::Normal };
    }
    for (id, added) in library.get_added_tokens_decoder() {
        if let Some(kind) = kinds.get_mut(id as usize) {
            *kind = if added.special { TokenKind::Control } else { TokenKind::UserDefined };
        }
    }
    Vocabulary::new(texts.into_iter(), kinds)
}

/// Returns the token that the configuration calls `name`. It is given by text or, in `config.json`,
/// by id.
fn named_token(
    vocabulary: &Vocabulary,
    tokenizer_config: &Value,
    config: &Value,
    name: &str,
) -> Option<u32> {
    let entry = &tokenizer_config[name];
    let text = entry.as_str().or_else(|| entry["content"].as_str());
    let by_text = text.and_then(|text| vocabulary.id(text.as_bytes()));
    let by_id = || {
        let id = u32::try_from(config.get(format!("{name}_id"))?.as_u64()?).ok()?;
        vocabulary.text(id).map(|_| id)
    };
    // An entry of null means that there is no such token.
    if entry.is_null() && tokenizer_config.get(name).is_some() {
        None
    } else {
        by_text.or_else(by_id)
    }
}

/// Returns the end tokens of `generation_config.json` and `config.json`: one id or a list.
fn end_ids(metadata: &HfMetadata) -> impl Iterator<Item = u32> {
    [metadata.generation_config.as_ref(), Some(&metadata.config)]
        .into_iter()
        .flatten()
        .filter_map(|config| config.get("eos_token_id"))
        .flat_map(|entry| match entry {
            Value::Array(ids) => ids.as_slice(),
            one => std::slice::from_ref(one),
        })
        .filter_map(|id| u32::try_from(id.as_u64()?).ok())
}

/// Operations of the `decoder` of a `tokenizer.json`, as far as they are supported.
struct Decoder {
    spelling: Spelling,
    has_byte_tokens: bool,
}

impl Decoder {
    /// Reads the description of a decoder. It supports `ByteLevel`, and sequences that replace `▁`
    /// by a space, decode byte tokens and remove one leading space. Returns the name of the first
    /// part that is not supported.
    fn new(description: &Value) -> Result<Self, String> {
        let parts = match description["decoders"].as_array() {
            Some(parts) => parts.as_slice(),
            None => std::slice::from_ref(description),
        };
        let (mut byte_level, mut spaces, mut space_prefix) = (false, false, false);
        let mut has_byte_tokens = false;
        for part in parts {
            match part["type"].as_str().unwrap_or("none") {
                "ByteLevel" => byte_level = true,
                "ByteFallback" => has_byte_tokens = true,
                "Fuse" => {}
                "Replace" if part["pattern"]["String"] == "▁" && part["content"] == " " => {
                    spaces = true;
                }
                "Strip" if part["content"] == " " && part["stop"] == 0 && part["start"] == 1 => {
                    space_prefix = true;
                }
                "Metaspace" if part["replacement"] == "▁" => {
                    spaces = true;
                    space_prefix = part["prepend_scheme"] != "never"
                        && part["add_prefix_space"] != Value::Bool(false);
                }
                other => return Err(other.to_owned()),
            }
        }
        let spelling = match (byte_level, spaces) {
            (true, false) => Spelling::ByteLevel,
            (false, true) => Spelling::Underscore { space_prefix },
            _ => return Err(description["type"].as_str().unwrap_or("none").to_owned()),
        };
        Ok(Self { spelling, has_byte_tokens })
    }
}
