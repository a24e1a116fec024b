//! Bounds of a `tokenizer.json`, checked before the `tokenizers` library sees it.
//!
//! The library does what the file says. A few lines can make it double a text over and over, search with patterns that take
//! exponential time, or reserve gigabytes. All published files stay far below these bounds.

mod charsmap;
mod patterns;
mod sizes;

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

use patterns::Patterns;
use sizes::Sizes;

/// Most JSON values of a file. The largest published one has 2 million.
const VALUES_MAX: usize = 6_000_000;
/// Most bytes of a part that is no vocabulary. Character maps have 0.4 MB.
const PART_BYTES_MAX: usize = 8 << 20;
/// Most normalizers, pre-tokenizers or post-processors.
const STEPS_MAX: usize = 64;
/// Most bytes of one added token, and of all of them.
pub const ADDED_TOKEN_BYTES_MAX: usize = 4 << 10;
const ADDED_TOKENS_BYTES_MAX: u64 = 8 << 20;
/// Most bytes of a token and of all tokens of a Unigram model, which keeps them in a tree.
const UNIGRAM_TOKEN_BYTES_MAX: usize = 4 << 10;
const UNIGRAM_BYTES_MAX: usize = 8 << 20;
/// Most characters of a word that a WordPiece model looks up. It tries all parts of it.
const WORD_CHARACTERS_MAX: u64 = 1000;
/// Most bytes that a model puts before or behind each character.
const AFFIX_BYTES_MAX: usize = 64;
/// Most times that normalizers may make a text longer, and that pre-tokenizers may.
const NORMALIZED_MAX: u64 = 1 << 20;
const PRE_TOKENIZED_MAX: u64 = 64;
/// Most bytes that normalizers add to every text.
const PREPENDED_BYTES_MAX: u64 = 64 << 10;
/// Most tokens that post-processors add to a text, and most copies of it that they make.
const AFFIXES_MAX: usize = 256;
const COPIES_MAX: usize = 4;
/// Bytes that a text may have after normalizing, whatever it had before, and times that any text may grow.
const GROWN_BYTES: u64 = 8 << 20;
const GROWN_TIMES: u64 = 12;

/// How much longer a step makes a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Growth {
    times: u64,
    plus: u64,
}

impl Growth {
    const NONE: Growth = Growth { times: 1, plus: 0 };

    fn times(times: usize) -> Growth {
        Growth { times: (times as u64).max(1), plus: 0 }
    }

    fn then(self, next: Growth) -> Growth {
        let plus = self.plus.saturating_mul(next.times).saturating_add(next.plus);
        Growth { times: self.times.saturating_mul(next.times), plus }
    }

    fn of(self, bytes: u64) -> u64 {
        bytes.saturating_mul(self.times).saturating_add(self.plus)
    }
}

/// A file within the bounds.
#[derive(Debug)]
pub struct Checked {
    /// The file without its vocabulary: `added_tokens`, `normalizer`, `pre_tokenizer`, `post_processor`, `decoder`, and of
    /// `model` the scalars.
    pub description: Value,
    /// Growth by each normalizer.
    steps: Vec<Growth>,
}

#[derive(Deserialize)]
struct File<'a> {
    #[serde(borrow)]
    added_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    normalizer: Option<&'a RawValue>,
    #[serde(borrow)]
    pre_tokenizer: Option<&'a RawValue>,
    #[serde(borrow)]
    post_processor: Option<&'a RawValue>,
    #[serde(borrow)]
    decoder: Option<&'a RawValue>,
    #[serde(borrow)]
    model: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Model<'a> {
    #[serde(rename = "type", borrow)]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow)]
    vocab: Option<&'a RawValue>,
    max_input_chars_per_word: Option<u64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

/// Checks the content of a file.
///
/// # Errors
/// Returns what exceeds its bound, or what is wrong with the JSON.
pub fn check(bytes: &[u8]) -> Result<Checked, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let sizes = Sizes::of(text, VALUES_MAX).map_err(|error| error.to_string())?;
    if sizes.values > VALUES_MAX {
        return Err(format!("it has more than {VALUES_MAX} JSON values"));
    }
    let file: File<'_> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut description = Map::new();
    let parts = [
        ("added_tokens", file.added_tokens),
        ("normalizer", file.normalizer),
        ("pre_tokenizer", file.pre_tokenizer),
        ("post_processor", file.post_processor),
        ("decoder", file.decoder),
    ];
    for (name, part) in parts {
        let text = part.map_or("null", RawValue::get);
        if text.len() > PART_BYTES_MAX {
            return Err(format!("`{name}` has {} bytes", text.len()));
        }
        let value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        description.insert(name.to_owned(), value);
    }
    if let Some(model) = file.model {
        description.insert("model".to_owned(), check_model(model)?);
    }
    let description = Value::Object(description);

    let mut patterns = Patterns::default();
    let mut steps = Vec::new();
    normalizers(&description["normalizer"], &mut patterns, &mut steps)?;
    let growth = steps.iter().fold(Growth::NONE, |all, step| all.then(*step));
    if growth.times > NORMALIZED_MAX || growth.plus > PREPENDED_BYTES_MAX {
        return Err("its normalizers make a text too much longer".to_owned());
    }
    let mut count = 0;
    let times = pre_tokenizers(&description["pre_tokenizer"], &mut patterns, &mut count)?;
    if times > PRE_TOKENIZED_MAX {
        return Err("its pre-tokenizers make a text too much longer".to_owned());
    }
    post_processors(&description["post_processor"], &mut 0)?;
    decoders(&description["decoder"], &mut patterns, &mut 0)?;
    added_tokens(&description["added_tokens"], growth)?;
    Ok(Checked { description, steps })
}

impl Checked {
    /// Refuses a text that the normalizers would make too much longer. `normalizer` is the library's.
    ///
    /// # Errors
    /// Returns the reason.
    pub fn check_text(
        &self,
        text: &str,
        normalizer: Option<&NormalizerWrapper>,
    ) -> Result<(), String> {
        let allowed = (text.len() as u64).saturating_mul(GROWN_TIMES).max(GROWN_BYTES);
        let growth = self.steps.iter().fold(Growth::NONE, |all, step| all.then(*step));
        let Some(normalizer) = normalizer else { return Ok(()) };
        if growth.of(text.len() as u64) <= allowed {
            return Ok(());
        }
        let why = || format!("the normalizers of the model make it longer than {allowed} bytes");
        let mut all = Vec::new();
        flatten(normalizer, &mut all);
        if all.len() != self.steps.len() {
            return Err(why());
        }
        let mut text = NormalizedString::from(text);
        for (step, growth) in all.into_iter().zip(&self.steps) {
            if growth.of(text.get().len() as u64) > allowed {
                return Err(why());
            }
            step.normalize(&mut text).map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

fn flatten<'a>(normalizer: &'a NormalizerWrapper, all: &mut Vec<&'a NormalizerWrapper>) {
    match normalizer {
        NormalizerWrapper::Sequence(sequence) => {
            sequence.as_ref().iter().for_each(|step| flatten(step, all));
        }
        step => all.push(step),
    }
}

/// Returns the parts of a sequence, if `part` is one.
fn parts<'a>(part: &'a Value, name: &str) -> Option<&'a Vec<Value>> {
    part.get(name).and_then(Value::as_array)
}

fn too_many(what: &str) -> String {
    format!("it has more than {STEPS_MAX} {what}")
}

fn check_model(model: &RawValue) -> Result<Value, String> {
    let Model {
        kind,
        vocab,
        max_input_chars_per_word,
        continuing_subword_prefix,
        end_of_word_suffix,
    } = serde_json::from_str(model.get()).map_err(|error| error.to_string())?;
    if max_input_chars_per_word.is_some_and(|most| most > WORD_CHARACTERS_MAX) {
        return Err(format!("its words have more than {WORD_CHARACTERS_MAX} characters"));
    }
    let affixes = [continuing_subword_prefix, end_of_word_suffix];
    if affixes.iter().flatten().any(|affix| affix.len() > AFFIX_BYTES_MAX) {
        return Err(format!(
            "a prefix or suffix of its words has more than {AFFIX_BYTES_MAX} bytes"
        ));
    }
    // Legacy files do not name the kind. Only Unigram has a list of tokens.
    let list = vocab.filter(|vocab| vocab.get().trim_start().starts_with('['));
    if let Some(vocab) = list {
        let sizes = Sizes::of(vocab.get(), VALUES_MAX).map_err(|error| error.to_string())?;
        if sizes.longest > UNIGRAM_TOKEN_BYTES_MAX || sizes.bytes > UNIGRAM_BYTES_MAX {
            return Err(format!(
                "its tokens have {} bytes, one has {}",
                sizes.bytes, sizes.longest
            ));
        }
    }
    let mut scalars = Map::new();
    if let Some(kind) = kind {
        scalars.insert("type".to_owned(), kind.into());
    }
    Ok(Value::Object(scalars))
}

fn normalizers(
    part: &Value,
    patterns: &mut Patterns,
    steps: &mut Vec<Growth>,
) -> Result<(), String> {
    if let Some(inner) = parts(part, "normalizers") {
        return inner.iter().try_for_each(|part| normalizers(part, patterns, steps));
    }
    if part.is_null() {
        return Ok(());
    }
    let growth = match part["type"].as_str().unwrap_or_default() {
        "Replace" => {
            let content = part["content"].as_str().unwrap_or_default().len();
            match (part["pattern"]["String"].as_str(), part["pattern"]["Regex"].as_str()) {
                (Some(text), _) if !text.is_empty() => Growth::times(content.div_ceil(text.len())),
                (_, Some(pattern)) => {
                    patterns.add(pattern)?;
                    // It may match between any two bytes.
                    Growth::times(1 + content)
                }
                _ => Growth::times(1 + content),
            }
        }
        "Prepend" => {
            let prepended = part["prepend"].as_str().unwrap_or_default().len();
            Growth { times: 1, plus: prepended as u64 }
        }
        "Precompiled" => {
            let map = part["precompiled_charsmap"].as_str().unwrap_or_default();
            Growth::times(charsmap::longest(map)?)
        }
        // Factors of the worst character of Unicode: U+FDFA becomes 33 bytes.
        "NFKC" | "NFKD" => Growth::times(12),
        "BertNormalizer" => Growth::times(12),
        "NFC" | "NFD" => Growth::times(4),
        "Lowercase" | "ByteLevel" => Growth::times(2),
        _ => Growth::NONE,
    };
    steps.push(growth);
    if steps.len() > STEPS_MAX {
        return Err(too_many("normalizers"));
    }
    Ok(())
}

fn pre_tokenizers(part: &Value, patterns: &mut Patterns, count: &mut usize) -> Result<u64, String> {
    if let Some(inner) = parts(part, "pretokenizers") {
        return inner.iter().try_fold(1_u64, |times, part| {
            Ok(times.saturating_mul(pre_tokenizers(part, patterns, count)?))
        });
    }
    *count += 1;
    if *count > STEPS_MAX {
        return Err(too_many("pre-tokenizers"));
    }
    if let Some(pattern) = part["pattern"]["Regex"].as_str() {
        patterns.add(pattern)?;
    }
    Ok(match part["type"].as_str().unwrap_or_default() {
        // Each byte may become two, and each word gets a space.
        "ByteLevel" => 4,
        "Metaspace" => 2 * part["replacement"].as_str().map_or(4, str::len) as u64,
        _ => 1,
    })
}

/// Returns the number of copies of a text that post-processors make.
fn post_processors(part: &Value, count: &mut usize) -> Result<usize, String> {
    let within = |copies: usize| match copies > COPIES_MAX {
        true => Err("its post-processor repeats a text".to_owned()),
        false => Ok(copies),
    };
    if let Some(inner) = parts(part, "processors") {
        let copies = inner.iter().try_fold(1_usize, |copies, part| {
            within(copies.saturating_mul(post_processors(part, count)?))
        });
        return copies;
    }
    *count += 1;
    if *count > STEPS_MAX {
        return Err(too_many("post-processors"));
    }
    let mut most = 1;
    for name in ["single", "pair"] {
        let pieces = part[name].as_array().into_iter().flatten();
        let copies = pieces.clone().filter(|piece| piece.get("Sequence").is_some()).count();
        most = most.max(if name == "single" { copies } else { copies.div_ceil(2) });
        let ids = |piece: &Value| {
            let id = piece["SpecialToken"]["id"].as_str()?;
            Some(part["special_tokens"][id]["ids"].as_array().map_or(1, Vec::len))
        };
        if pieces.filter_map(ids).sum::<usize>() > AFFIXES_MAX {
            return Err(format!("its post-processor adds more than {AFFIXES_MAX} tokens"));
        }
    }
    within(most)
}

fn decoders(part: &Value, patterns: &mut Patterns, count: &mut usize) -> Result<(), String> {
    if let Some(inner) = parts(part, "decoders") {
        return inner.iter().try_for_each(|part| decoders(part, patterns, count));
    }
    *count += 1;
    if *count > STEPS_MAX {
        return Err(too_many("decoders"));
    }
    part["pattern"]["Regex"].as_str().map_or(Ok(()), |pattern| patterns.add(pattern))
}

fn added_tokens(tokens: &Value, growth: Growth) -> Result<(), String> {
    let texts =
        tokens.as_array().into_iter().flatten().filter_map(|token| token["content"].as_str());
    let mut sum = 0;
    for text in texts {
        if text.len() > ADDED_TOKEN_BYTES_MAX {
            return Err(format!("an added token has {} bytes", text.len()));
        }
        sum += text.len() as u64;
        if growth.of(text.len() as u64) > GROWN_BYTES {
            return Err("its normalizers make an added token too much longer".to_owned());
        }
    }
    if sum > ADDED_TOKENS_BYTES_MAX {
        return Err(format!("its added tokens have {sum} bytes"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
