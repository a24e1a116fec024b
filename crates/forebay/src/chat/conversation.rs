//! What the model shall have read before its next answer.

use forebay_chat::{Format, History};
use forebay_engine::Session;
use forebay_text::Tokenizer;
use serde_json::{Map, Value};

use crate::failure::Outcome;

/// A conversation and how it becomes a prompt.
pub struct Conversation {
    pub history: History,
    format: Format,
    /// Without a template, the texts of all messages are one text that the model continues.
    templated: bool,
    /// Variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

/// A conversation as the model reads it.
pub struct Prompt {
    pub text: String,
    pub ids: Vec<u32>,
}

impl Conversation {
    /// An empty conversation. `templated`: the model has a chat template and it is to be used.
    pub fn new(session: &Session, templated: bool) -> Outcome<Conversation> {
        let template = session.chat_template().filter(|_| templated);
        let format = Format::recognise(template, session.tokenizer().ok())?;
        Ok(Conversation {
            history: History::default(),
            format,
            templated: template.is_some(),
            variables: Map::new(),
        })
    }

    pub fn format(&self) -> &Format {
        &self.format
    }

    pub fn templated(&self) -> bool {
        self.templated
    }

    /// The prompt for the next answer.
    pub fn prompt(&self, session: &Session) -> Outcome<Prompt> {
        let messages = self.history.messages();
        let text = match session.chat_template().filter(|_| self.templated) {
            Some(template) => self.format.render(template, messages, None, &self.variables)?,
            None => messages.iter().map(|message| message.content.as_str()).collect(),
        };
        let ids = encode(session.tokenizer()?, &text, self.templated)?;
        Ok(Prompt { text, ids })
    }
}

/// Encodes a whole context. Special tokens that are written in it count as such, since templates
/// write them. BOS is added where the tokenizer wants it and the text does not begin with it: the
/// output of `forebay render` may be continued with `forebay run --raw`.
pub fn encode(tokenizer: &Tokenizer, text: &str, templated: bool) -> anyhow::Result<Vec<u32>> {
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

/// How many ids at the start of `wanted` the cache holds already. One is always left to process:
/// the next token needs the logits of the last.
pub fn reusable(cached: &[u32], wanted: &[u32]) -> usize {
    let common = cached.iter().zip(wanted).take_while(|(a, b)| a == b).count();
    common.min(wanted.len().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_used_as_far_as_it_agrees() {
        assert_eq!(reusable(&[], &[1, 2]), 0);
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 4, 5]), 2);
        assert_eq!(reusable(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(reusable(&[1, 2, 3], &[1, 2]), 1);
        assert_eq!(reusable(&[1], &[]), 0);
    }
}
