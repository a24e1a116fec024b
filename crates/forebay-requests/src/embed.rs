//! Embeddings of texts.
//!
//! An embedding is made of the states of the text's tokens behind the last layer, normalised as for the logits: their mean, or the
//! last one. Unless the caller wants it as it is, it has the length 1.

use std::ops::ControlFlow;

use forebay_engine::engine::{Event, Pooling, Request, RequestEnd, Sink};
use forebay_text::Tokenizer;
use serde::Deserialize;

use crate::answer::AnswerFailure;
use crate::request::Refusal;

/// Most texts of one call in the engine's queue. Other requests need places there, too.
pub const QUEUED_MAX: usize = 32;

/// Tokens behind the context of which a text that is cut keeps the bytes, because a cut may change the tokens before it.
const TOKENS_BEHIND: usize = 64;

/// One or several texts, or their tokens.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Texts {
    One(String),
    Several(Vec<String>),
    Tokens(Vec<u32>),
    SeveralTokens(Vec<Vec<u32>>),
}

/// How the states of a text's tokens become one embedding.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PoolingName {
    #[default]
    Mean,
    Last,
}

impl From<PoolingName> for Pooling {
    fn from(name: PoolingName) -> Pooling {
        match name {
            PoolingName::Mean => Pooling::Mean,
            PoolingName::Last => Pooling::Last,
        }
    }
}

/// Makes tokens of texts. With `truncates`, texts that are longer than the context are cut, and otherwise one that cannot fit
/// becomes no tokens.
///
/// # Errors
/// Returns why a text has no embedding.
pub fn prompts(
    tokenizer: &Tokenizer,
    texts: Texts,
    context: usize,
    truncates: bool,
) -> Result<Vec<Vec<u32>>, Refusal> {
    let encode = |text: &String| {
        let least = tokenizer.tokens_min(text.len());
        if !truncates && least > context {
            let why = format!(
                "input has a text of at least {least} tokens, and the context has {context}"
            );
            return Err(Refusal::of("input", why));
        }
        let most = tokenizer.bytes_max(context + TOKENS_BEHIND).unwrap_or(text.len());
        let text = &text[..text.floor_char_boundary(most)];
        let ids = tokenizer.encode(text, true, false);
        ids.map_err(|error| Refusal { message: error.to_string(), param: None, code: None })
    };
    let mut prompts = match texts {
        Texts::One(text) => vec![encode(&text)?],
        Texts::Several(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
        Texts::Tokens(tokens) => vec![tokens],
        Texts::SeveralTokens(tokens) => tokens,
    };
    if prompts.iter().any(Vec::is_empty) {
        return Err(Refusal::of("input", "input has an empty text"));
    }
    if truncates {
        prompts.iter_mut().for_each(|prompt| prompt.truncate(context));
    }
    Ok(prompts)
}

/// Returns the length of embeddings of a model with states of `hidden` numbers.
///
/// # Errors
/// Returns an error if the model has fewer dimensions than are wanted.
pub fn dimensions(wanted: Option<usize>, hidden: usize) -> Result<usize, Refusal> {
    let dimensions = wanted.unwrap_or(hidden);
    match (1..=hidden).contains(&dimensions) {
        true => Ok(dimensions),
        false => {
            let why = format!("dimensions must be from 1 to {hidden}, those of the model");
            Err(Refusal::of("dimensions", why))
        }
    }
}

/// Returns the request for the embedding of a text.
pub fn request(prompt: Vec<u32>, pooling: PoolingName, priority: i32) -> Request {
    Request { prompt, priority, pooling: Some(pooling.into()), ..Request::default() }
}

/// Returns the sink of such a request. `send` gets the state, or why there is none: `None` if the request was cancelled.
pub fn sink(send: impl FnOnce(Result<Vec<f32>, Option<AnswerFailure>>) + Send + 'static) -> Sink {
    let mut send = Some(send);
    Box::new(move |event| {
        if let (Event::Finished { end, embedding, .. }, Some(send)) = (event, send.take()) {
            send(match (end, embedding) {
                (_, Some(state)) => Ok(state),
                (RequestEnd::Failed(message), None) => {
                    Err(Some(AnswerFailure { message, is_of_request: false }))
                }
                _ => Err(None),
            });
        }
        ControlFlow::Continue(())
    })
}

/// Returns a vector of the same direction and the length 1. One of zeros stays as it is.
pub fn normalised(state: &[f32]) -> Vec<f32> {
    let length = state.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let divisor = if length > 0.0 { length } else { 1.0 };
    state.iter().map(|x| (f64::from(*x) / divisor) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalised_vectors_have_the_length_1() {
        assert_eq!(normalised(&[3.0, 4.0]), [0.6, 0.8]);
        assert_eq!(normalised(&[0.0, 0.0]), [0.0, 0.0]);
    }

    #[test]
    fn dimensions_are_those_of_the_model_at_most() {
        assert_eq!(dimensions(None, 8), Ok(8));
        assert_eq!(dimensions(Some(1), 8), Ok(1));
        for wrong in [0, 9] {
            let refused = dimensions(Some(wrong), 8).expect_err("out of range");
            assert_eq!(refused.param.as_deref(), Some("dimensions"));
            assert!(refused.message.contains("from 1 to 8"));
        }
    }
}
