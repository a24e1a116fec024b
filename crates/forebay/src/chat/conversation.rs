//! The conversation so far and the prompt that it renders to.

use forebay_chat::{Format, History, encode_chat, encode_text};
use forebay_engine::Session;
use serde_json::{Map, Value};

use crate::failure::Outcome;

/// A conversation and the settings that turn it into a prompt.
pub struct Conversation {
    pub history: History,
    format: Format,
    /// True if the chat template is used. If false, the model continues the concatenated texts of all messages.
    templated: bool,
    /// Template variables, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

/// A rendered conversation.
pub struct Prompt {
    pub text: String,
    pub ids: Vec<u32>,
}

impl Conversation {
    /// Creates an empty conversation. `templated` selects the model's chat template, if it has one. `special_tokens` lets
    /// special tokens in messages be special tokens.
    pub fn new(session: &Session, templated: bool, special_tokens: bool) -> Outcome<Conversation> {
        let template = session.chat_template().filter(|_| templated);
        let mut format = Format::recognise(template, session.tokenizer().ok())?;
        if special_tokens {
            format = format.with_special_tokens_in_messages();
        }
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

    /// Renders and encodes the prompt for the next answer.
    pub fn prompt(&self, session: &Session) -> Outcome<Prompt> {
        let messages = self.history.messages();
        let tokenizer = session.tokenizer()?;
        let Some(template) = session.chat_template().filter(|_| self.templated) else {
            let text: String = messages.iter().map(|message| message.content.as_str()).collect();
            let ids = encode_text(tokenizer, &text)?;
            return Ok(Prompt { text, ids });
        };
        let prompt = self.format.render(template, messages, None, &self.variables)?;
        let ids = encode_chat(tokenizer, &prompt)?;
        Ok(Prompt { text: prompt.into_text(), ids })
    }
}

/// Returns how many ids at the start of `wanted` are already in the cache. At least one id is left to process, because the
/// next token needs the logits of the last one.
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
