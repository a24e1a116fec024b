//! Prompts for filling in the middle.
//!
//! Sources: "Efficient Training of Language Models to Fill in the Middle" (Bavarian et al., 2022) for the order of the two texts,
//! the technical report of Qwen2.5-Coder for other files of a repository, and mistral-common for Mistral's order. The names of
//! the repository and of the file are those of llama.cpp's server, so that prompts are the same.

use forebay_text::{ContentMarks, TextError, Tokenizer};

/// Name of the repository, which requests do not give.
const REPOSITORY: &str = "myproject\n";
/// Name of the file with the gap, which requests do not give.
const FILE: &str = "filename\n";
/// Text before another file's text, if the model has no token for files.
const SNIPPET: &str = "\n\n--- snippet ---\n\n";
/// A character that no other merges with.
const MARK: &str = "☺";

/// A gap between two texts, and what else the model may see.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gap {
    pub prefix: String,
    pub suffix: String,
    /// Parts of other files. Those at the end matter most.
    pub extra: Vec<ExtraText>,
    /// Most tokens of the prompt, beyond which parts of other files are left out. `None` leaves out none.
    pub tokens_max: Option<usize>,
}

/// A part of another file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtraText {
    pub text: String,
    pub filename: String,
}

/// Returns the prompt for a gap. Its texts never become control tokens. Returns `None` if the model has no tokens for filling in
/// the middle.
///
/// # Errors
/// Returns an error if a text is too long.
pub fn infill_prompt(tokenizer: &Tokenizer, gap: &Gap) -> Result<Option<Vec<u32>>, TextError> {
    let Some(tokens) = tokenizer.infill() else { return Ok(None) };
    let marks = ContentMarks::of(tokenizer);
    let encode = |text: &str| encode_text(tokenizer, &marks, text);
    let mut own = match tokens.middle {
        Some(middle) => {
            let mut own = vec![tokens.prefix];
            own.extend(encode(&gap.prefix)?);
            own.push(tokens.suffix);
            own.extend(encode_within(tokenizer, &marks, &gap.suffix)?);
            own.push(middle);
            own
        }
        None => {
            let mut own = vec![tokens.suffix];
            own.extend(encode_within(tokenizer, &marks, &gap.suffix)?);
            own.push(tokens.prefix);
            own.extend(encode(&gap.prefix)?);
            own
        }
    };
    let mut ids: Vec<u32> =
        tokenizer.bos_id().filter(|_| tokenizer.adds_bos()).into_iter().collect();
    if gap.extra.is_empty() {
        ids.extend(own);
        return Ok(Some(ids));
    }
    if let Some(repository) = tokens.repository {
        ids.push(repository);
        ids.extend(encode(REPOSITORY)?);
    }
    let begin_file = |name: &str| match tokens.file {
        Some(file) => Ok([vec![file], encode(name)?].concat()),
        None => encode(SNIPPET),
    };
    if tokens.file.is_some() {
        own.splice(0..0, begin_file(FILE)?);
    }
    let mut left = gap.tokens_max.unwrap_or(usize::MAX).saturating_sub(ids.len() + own.len());
    let mut parts = Vec::new();
    for ExtraText { text, filename } in gap.extra.iter().rev() {
        let mut part = begin_file(&format!("{filename}\n"))?;
        part.extend(encode(text)?);
        match left.checked_sub(part.len()) {
            Some(rest) => left = rest,
            None => break,
        }
        parts.push(part);
    }
    ids.extend(parts.into_iter().rev().flatten());
    ids.extend(own);
    Ok(Some(ids))
}

/// Encodes a text in which special tokens are text.
fn encode_text(
    tokenizer: &Tokenizer,
    marks: &ContentMarks,
    text: &str,
) -> Result<Vec<u32>, TextError> {
    tokenizer.encode_prompt(&marks.finish(marks.text(text)))
}

/// Encodes a text as it is within a longer one: without the space that some tokenizers put before a text.
fn encode_within(
    tokenizer: &Tokenizer,
    marks: &ContentMarks,
    text: &str,
) -> Result<Vec<u32>, TextError> {
    if tokenizer.adds_first_space() {
        let mark = encode_text(tokenizer, marks, MARK)?;
        let marked = encode_text(tokenizer, marks, &format!("{MARK}{text}"))?;
        if let Some(ids) = marked.strip_prefix(mark.as_slice()) {
            return Ok(ids.to_vec());
        }
    }
    encode_text(tokenizer, marks, text)
}
