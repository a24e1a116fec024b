//! A tokenizer from `tokenizer.json`, run by the `tokenizers` library.
//!
//! The library encodes. This crate decodes, as it does for GGUF, because decoding must work token
//! by token and never return parts of characters.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::OnceLock;

use forebay_format::{Document, HfMetadata};
use serde_json::Value;
use tokenizers::{AddedToken, Decoder as _, DecoderWrapper};

use crate::endings::{self, Kinds};
use crate::infill;
use crate::limits::{self, Checked};
use crate::pieces::Spelling;
use crate::special::{SpecialTokens, Strip};
use crate::tokenizer::{Affixes, Encoder, Tokenizer};
use crate::vocabulary::{TOKENS_MAX, TokenKind, Vocabulary, byte_of_token};
use crate::{TextError, byte_level, tiktoken, warnings};

/// Size limit of a tokenizer file in bytes. The largest known files have 35 MB.
const FILE_BYTES_MAX: u64 = 96 << 20;

/// The library's tokenizer.
pub struct HuggingFace {
    tokenizer: tokenizers::Tokenizer,
    /// A copy that treats the texts of special tokens as ordinary text. It is made when first
    /// needed.
    plain: OnceLock<Box<tokenizers::Tokenizer>>,
    /// A copy that treats the texts of all guarded tokens as ordinary text.
    unguarded: OnceLock<Box<tokenizers::Tokenizer>>,
    /// Texts of the tokens that the text of messages must not become.
    guarded_texts: HashSet<String>,
    /// True if a guarded token is searched in normalised text, which messages could be written for.
    normalizes_specials: bool,
    /// True if a space goes before the first part of a text only.
    spaces_first_part: bool,
    checked: Checked,
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
        self.check_text(text)?;
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

    /// Returns the ids of a part of a prompt between guarded tokens, all of which is text. `is_first` is true if no token comes
    /// before it.
    pub fn encode_part(&self, text: &str, is_first: bool) -> Result<Vec<u32>, TextError> {
        // No token merges with this character.
        const MARK: &str = "☺";
        let library = self.unguarded.get_or_init(|| {
            let mut library = Box::new(self.tokenizer.clone());
            let known = library.get_added_tokens_decoder();
            let tokens =
                known.into_values().filter(|token| self.guarded_texts.contains(&token.content));
            let tokens = tokens.map(|token| AddedToken { special: true, ..token });
            // A token that cannot be added stays what it is in the other copy, where it can.
            let _ = library.add_special_tokens(tokens.collect::<Vec<_>>());
            library.set_encode_special_tokens(true);
            library
        });
        let encode = |text: &str| {
            self.check_text(text)?;
            let encoding = guarded(|| library.encode_fast(text, false));
            let encoding = encoding.map_err(|reason| TextError::Encode { reason })?;
            Ok(encoding.get_ids().to_vec())
        };
        if self.spaces_first_part && !is_first {
            let (mark, all) = (encode(MARK)?, encode(&format!("{MARK}{text}"))?);
            if let Some(ids) = all.strip_prefix(mark.as_slice()) {
                return Ok(ids.to_vec());
            }
        }
        encode(text)
    }

    /// Refuses a text that the normalizers of the file would make too much longer.
    fn check_text(&self, text: &str) -> Result<(), TextError> {
        let checked =
            guarded(|| Ok(self.checked.check_text(text, self.tokenizer.get_normalizer())));
        checked.and_then(|checked| checked).map_err(|reason| TextError::Encode { reason })
    }

    pub fn normalizes_specials(&self) -> bool {
        self.normalizes_specials
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
    let Some(document) = &metadata.tokenizer_json else {
        let list = metadata.tiktoken.as_ref().ok_or(TextError::NoTokenizerFile)?;
        return tiktoken::tokenizer(metadata, list);
    };
    let (path, bytes) = (document.path(), read(document)?);
    let checked = limits::check(&bytes).map_err(|reason| bad_file(path, reason))?;
    let description = &checked.description;
    let library = guarded(|| {
        let mut library = tokenizers::Tokenizer::from_bytes(&bytes)?;
        // Files contain the settings of their last use, but a prompt must be neither cut nor
        // padded.
        library.with_padding(None);
        library.with_truncation(None)?;
        Ok(library)
    });
    let mut library = library.map_err(|reason| bad_file(path, reason))?;
    let configuration = metadata.tokenizer_config.as_ref().unwrap_or(&Value::Null);
    add_tokens(&mut library, configuration).map_err(|reason| bad_file(path, reason))?;

    let decoder = Decoder::new(&description["decoder"])
        .map_err(|part| bad_file(path, format!("the decoder `{part}` is not supported")))?;
    let mut vocabulary = vocabulary(&library, &decoder, path)?;
    decoder.apply_replacements(&mut vocabulary).map_err(|reason| bad_file(path, reason))?;
    let token = |name: &str| named_token(&vocabulary, configuration, &metadata.config, name);
    let (bos, eos) = (token("bos_token"), token("eos_token"));
    let named: Vec<u32> = end_ids(metadata, vocabulary.len()).into_iter().chain(eos).collect();
    let eog = endings::find(&mut vocabulary, Kinds::Reliable, named);
    let infill = infill::find(&vocabulary, infill::Named::default());

    let kind = format!("hf ({})", description["model"]["type"].as_str().unwrap_or("unknown model"));
    let added = library.get_added_tokens_decoder();
    let specials = SpecialTokens::new(&vocabulary, |id| {
        let token = added.get(&id);
        token.map_or(Strip::default(), |token| Strip { left: token.lstrip, right: token.rstrip })
    })?;
    let texts = specials.guarded().filter_map(|id| vocabulary.text(id));
    let normalized = |id| added.get(&id).is_some_and(|token| token.normalized);
    let mut hugging_face = HuggingFace {
        normalizes_specials: !description["normalizer"].is_null()
            && specials.guarded().any(normalized),
        spaces_first_part: spaces_first_part(&description["pre_tokenizer"]),
        guarded_texts: texts.map(|text| String::from_utf8_lossy(text).into_owned()).collect(),
        tokenizer: library,
        plain: OnceLock::new(),
        unguarded: OnceLock::new(),
        checked,
        affixes: None,
    };
    let affixes = hugging_face.apply_wishes(configuration, bos, eos)?;
    Ok(Tokenizer {
        specials,
        vocabulary,
        encoder: Encoder::HuggingFace(hugging_face),
        spelling: decoder.spelling,
        bos,
        eos,
        affixes,
        eog,
        infill,
        kind,
        // What the library normalises may leave nothing of a text.
        longest: None,
    })
}

/// Returns true if a pre-tokenizer puts a space before the first part of a text only.
fn spaces_first_part(pre_tokenizer: &Value) -> bool {
    let parts = pre_tokenizer["pretokenizers"].as_array();
    parts
        .into_iter()
        .flatten()
        .chain([pre_tokenizer])
        .any(|part| part["type"] == "Metaspace" && part["prepend_scheme"] == "first")
}

fn read(document: &Document) -> Result<Cow<'_, [u8]>, TextError> {
    let failed = |error: std::io::Error| bad_file(document.path(), error.to_string());
    let bytes = document.bytes().map_err(failed)?;
    if bytes > FILE_BYTES_MAX {
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
    if count > TOKENS_MAX {
        return Err(TextError::VocabularyTooLarge { tokens: count, limit: TOKENS_MAX });
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
pub fn named_token(
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

/// Returns the end tokens of `generation_config.json` and `config.json`: one id or a list. Ids that are not in the vocabulary are
/// left out.
pub fn end_ids(metadata: &HfMetadata, tokens: usize) -> Vec<u32> {
    let entries = [metadata.generation_config.as_ref(), Some(&metadata.config)]
        .into_iter()
        .flatten()
        .filter_map(|config| config.get("eos_token_id"))
        .flat_map(|entry| match entry {
            Value::Array(ids) => ids.as_slice(),
            one => std::slice::from_ref(one),
        });
    let mut found = Vec::new();
    for id in entries.filter_map(Value::as_i64) {
        match u32::try_from(id).ok().filter(|id| (*id as usize) < tokens) {
            Some(id) => found.push(id),
            None => warnings::warn(format!(
                "`eos_token_id` names token {id}, but the vocabulary has {tokens} tokens: it is left out"
            )),
        }
    }
    found
}

/// Adds the tokens of `tokenizer_config.json` that `tokenizer.json` lacks or describes otherwise, as transformers does.
fn add_tokens(library: &mut tokenizers::Tokenizer, configuration: &Value) -> Result<(), String> {
    let entries = configuration["added_tokens_decoder"].as_object();
    let mut wanted = Vec::new();
    for (id, entry) in entries.into_iter().flatten() {
        let flag = |name: &str| entry[name] == true;
        let Some(content) = entry["content"].as_str().filter(|content| !content.is_empty()) else {
            continue;
        };
        let Ok(id) = id.parse::<u32>() else { continue };
        if content.len() > limits::ADDED_TOKEN_BYTES_MAX {
            return Err(format!(
                "an added token of tokenizer_config.json has {} bytes",
                content.len()
            ));
        }
        let token = AddedToken {
            content: content.to_owned(),
            single_word: flag("single_word"),
            lstrip: flag("lstrip"),
            rstrip: flag("rstrip"),
            normalized: entry["normalized"].as_bool().unwrap_or(!flag("special")),
            special: flag("special"),
        };
        wanted.push((id, token));
    }
    let known = library.get_added_tokens_decoder();
    wanted.retain(|(id, token)| known.get(id) != Some(token));
    wanted.sort_by_key(|(id, _)| *id);
    if wanted.is_empty() {
        return Ok(());
    }
    let tokens: Vec<AddedToken> = wanted.iter().map(|(_, token)| token.clone()).collect();
    guarded(|| library.add_tokens(tokens))?;
    for (id, AddedToken { content, .. }) in wanted {
        let given = library.token_to_id(&content);
        if given != Some(id) {
            let given = given.map_or("none".to_owned(), |given| given.to_string());
            warnings::warn(format!(
                "tokenizer_config.json gives the added token {content:?} the id {id}, but by tokenizer.json it is {given}"
            ));
        }
    }
    Ok(())
}

/// Operations of the `decoder` of a `tokenizer.json`, as far as they are supported.
struct Decoder {
    spelling: Spelling,
    has_byte_tokens: bool,
    /// Replacements in each token, if there are others than `▁` by a space.
    replacements: Vec<DecoderWrapper>,
    /// True if one of these replaces `▁`.
    replaces_spaces: bool,
}

impl Decoder {
    /// Reads the description of a decoder. It supports `ByteLevel`, and sequences that replace texts in each token, decode byte
    /// tokens and remove one leading space. Returns the first part that is not supported.
    fn new(description: &Value) -> Result<Self, String> {
        let parts = match description["decoders"].as_array() {
            Some(parts) => parts.as_slice(),
            None => std::slice::from_ref(description),
        };
        let (mut byte_level, mut spaces, mut space_prefix) = (false, false, false);
        let (mut has_byte_tokens, mut is_fused) = (false, false);
        let (mut replacements, mut replaces_spaces) = (Vec::new(), false);
        for part in parts {
            match part["type"].as_str().unwrap_or("none") {
                "ByteLevel" => byte_level = true,
                "ByteFallback" => has_byte_tokens = true,
                "Fuse" => is_fused = true,
                "Replace" => {
                    let pattern = part["pattern"]["String"].as_str();
                    let of_spaces = pattern == Some("▁") && part["content"] == " ";
                    // Behind `Fuse`, a longer text could be in two tokens.
                    let within = pattern.is_some_and(|pattern| pattern.chars().count() == 1);
                    if byte_level || is_fused && !within {
                        return Err(format!("Replace {}", part["pattern"]));
                    }
                    spaces |= of_spaces;
                    replaces_spaces |= of_spaces;
                    let part = serde_json::from_value(part.clone());
                    replacements.push(part.map_err(|error| error.to_string())?);
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
        if replacements.len() == 1 && replaces_spaces {
            replacements.clear();
        }
        Ok(Self { spelling, has_byte_tokens, replacements, replaces_spaces })
    }

    /// Writes each token as the replacements make it.
    fn apply_replacements(&self, vocabulary: &mut Vocabulary) -> Result<(), String> {
        if self.replacements.is_empty() {
            return Ok(());
        }
        for id in vocabulary.of_kind(|kind| kind == TokenKind::Normal).collect::<Vec<_>>() {
            let Some(text) = vocabulary.text(id).and_then(|text| std::str::from_utf8(text).ok())
            else {
                continue;
            };
            let mut parts = vec![text.to_owned()];
            for part in &self.replacements {
                parts = guarded(|| part.decode_chain(parts))?;
            }
            let text = parts.concat();
            let bytes = match (self.spelling, self.replaces_spaces) {
                (Spelling::ByteLevel, _) => byte_level::decode(text.as_bytes()),
                (_, true) => text.into_bytes(),
                (_, false) => text.replace('▁', " ").into_bytes(),
            };
            if bytes != self.spelling.bytes(vocabulary, id, true) {
                vocabulary.set_written(id, bytes);
            }
        }
        Ok(())
    }
}
