//! Conversion between messages and text for each family of chat models.
//!
//! A [`Format`] is recognised from a model's chat template and vocabulary. [`Format::render`] turns
//! [`Message`]s into the prompt that the template defines. A [`Parser`] turns generated tokens back
//! into a message: reasoning, content and tool calls. It reports them as they arrive, so that a
//! caller can show an unfinished answer. An [`AnswerStream`] does so with token ids and stop texts.
//! [`History`] holds a conversation of parsed messages.
//!
//! The crate does no input or output: no terminal, no HTTP.

#![forbid(unsafe_code)]

mod answer;
mod calls;
mod continued;
mod conversation;
mod error;
mod format;
mod generic_tools;
mod history;
mod ids;
mod infill;
mod message;
mod offer;
mod parser;
mod probe;
mod prompt;
mod stops;
mod suffixed;
mod syntax;
mod text_calls;

pub use answer::AnswerStream;
pub use calls::CallsWanted;
pub use continued::continued_text;
pub use error::ChatError;
pub use format::{Format, PromptEnd, Think};
pub use history::History;
pub use infill::{ExtraText, Gap, infill_prompt};
pub use message::{Message, ToolCall};
pub use parser::{Event, Parser};
pub use prompt::{encode_chat, encode_text};
pub use suffixed::SuffixedMarks;
pub use syntax::{DsmlNames, ListMarks, ToolSyntax};
