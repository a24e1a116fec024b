//! The way from a prompt's text to token ids.

use forebay_text::{TextError, Tokenizer};

/// Encodes a whole context. Special tokens in the text are encoded as such, because templates write them. Adds BOS if the
/// tokenizer requires it and the text does not start with it, so `forebay run --raw` accepts the output of
/// `forebay render`.
pub fn encode_prompt(
    tokenizer: &Tokenizer,
    text: &str,
    templated: bool,
) -> Result<Vec<u32>, TextError> {
    let bos = tokenizer.bos_id().filter(|_| tokenizer.adds_bos());
    if templated {
        let mut ids = tokenizer.encode(text, false, true)?;
        if let Some(bos) = bos
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        return Ok(ids);
    }
    let mut ids = tokenizer.encode(text, true, true)?;
    if let Some(bos) = bos
        && ids.starts_with(&[bos, bos])
    {
        ids.remove(0);
    }
    Ok(ids)
}
