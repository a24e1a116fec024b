//! The way from a prompt's text to token ids.

use forebay_text::{Prompt, TextError, Tokenizer};

/// Encodes a prompt that a chat template wrote. Adds BOS if the tokenizer requires it and the template did not write it.
pub fn encode_chat(tokenizer: &Tokenizer, prompt: &Prompt) -> Result<Vec<u32>, TextError> {
    let mut ids = tokenizer.encode_prompt(prompt)?;
    if let Some(bos) = tokenizer.bos_id().filter(|_| tokenizer.adds_bos())
        && ids.first() != Some(&bos)
    {
        ids.insert(0, bos);
    }
    Ok(ids)
}

/// Encodes a text that is no conversation. Special tokens in it are encoded as such. A BOS at its beginning is not added again,
/// so `forebay run --raw` accepts the output of `forebay render`.
pub fn encode_text(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, TextError> {
    let mut ids = tokenizer.encode(text, true, true)?;
    if let Some(bos) = tokenizer.bos_id().filter(|_| tokenizer.adds_bos())
        && ids.starts_with(&[bos, bos])
    {
        ids.remove(0);
    }
    Ok(ids)
}
