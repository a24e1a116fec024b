//! Conversations that end with a message of the assistant, which the model continues.
//!
//! Templates end every message of the assistant. A word behind the message's text shows where the template wrote the text, and
//! the prompt is cut there.

use serde_json::{Map, Value};

use crate::{ChatError, Message};

/// A conversation whose last message is open.
pub(crate) struct Open {
    pub messages: Vec<Message>,
    /// Word behind the text that is continued.
    mark: String,
}

/// Returns the text that an answer continues, if the last message is one of the assistant with a text: its content, or its
/// reasoning if it has no content yet. A message with calls of tools is complete.
pub fn continued_text(messages: &[Message]) -> Option<&str> {
    let last = messages.last().filter(|last| last.role == "assistant")?;
    if !last.tool_calls.is_empty() {
        return None;
    }
    let reasoning = last.reasoning.as_deref().unwrap_or_default();
    let text = if last.content.is_empty() { reasoning } else { &last.content };
    (!text.is_empty()).then_some(text)
}

impl Open {
    /// Opens the last message. `others` are values that the template may write besides the messages.
    ///
    /// # Errors
    /// Returns an error if the last message cannot be continued.
    pub fn of(
        messages: &[Message],
        others: (Option<&Value>, &Map<String, Value>),
    ) -> Result<Open, ChatError> {
        if continued_text(messages).is_none() {
            return Err(ChatError::NothingToContinue);
        }
        let (tools, variables) = others;
        let all = format!("{messages:?} {tools:?} {variables:?}");
        // Letters pass through every filter of a template.
        let mut mark = "WhatIsContinuedEndsHere".to_owned();
        while all.contains(&mark) {
            mark.push('X');
        }
        let mut messages = messages.to_vec();
        if let Some(last) = messages.last_mut() {
            match &mut last.reasoning {
                Some(reasoning) if last.content.is_empty() => reasoning.push_str(&mark),
                _ => last.content.push_str(&mark),
            }
        }
        Ok(Open { messages, mark })
    }

    /// Cuts the rendered conversation behind the text.
    ///
    /// # Errors
    /// Returns an error if the template did not write the text.
    pub fn cut(&self, mut rendered: String) -> Result<String, ChatError> {
        let at = rendered.rfind(&self.mark).ok_or(ChatError::NotContinued)?;
        rendered.truncate(at);
        match rendered.contains(&self.mark) {
            true => Ok(rendered.replace(&self.mark, "")),
            false => Ok(rendered),
        }
    }
}
