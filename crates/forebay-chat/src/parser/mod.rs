//! Incremental parsing of generated text into a message.
//!
//! The message does not depend on how the text is cut into pieces.

mod gemma;
mod harmony;
mod json_calls;
mod kimi3;
mod live;
mod minimax3;
mod muse;
mod python;
mod tagged;
mod thought;
mod tools;
mod value_end;

use crate::format::Kind;
use crate::{Format, Message};
use harmony::Harmony;
use muse::Muse;
use tagged::Tagged;

/// A part of an answer as it arrives. All parts of one kind together form that part of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    Reasoning(&'a str),
    Content(&'a str),
    /// A tool call begins. `index` counts the calls of the answer from 0.
    ToolCall {
        index: usize,
        name: &'a str,
    },
    /// More of the arguments of that call.
    Arguments {
        index: usize,
        text: &'a str,
    },
}

/// Function that a parser calls with each event.
pub type Sink<'a> = &'a mut dyn FnMut(Event<'_>);

/// Parser that turns one answer of a model into a [`Message`].
pub struct Parser {
    family: Family,
}

enum Family {
    Plain(String),
    Tagged(Box<Tagged>),
    Harmony(Harmony),
    Muse(Box<Muse>),
}

impl Parser {
    /// Creates a parser for the answer to `prompt`, which is the rendered text. Some templates open
    /// the thinking part at its end.
    pub fn new(format: &Format, prompt: &str) -> Parser {
        let family = match format.kind {
            Kind::Plain => Family::Plain(String::new()),
            Kind::Tagged { thinking, tools } => {
                Family::Tagged(Box::new(Tagged::new(thinking, tools, &format.offer, prompt)))
            }
            Kind::Harmony => Family::Harmony(Harmony::new(prompt)),
            Kind::Muse => Family::Muse(Box::new(Muse::new(&format.offer))),
        };
        Parser { family }
    }

    /// Creates a parser for an answer that continues `text`, with which the prompt ends.
    pub fn continuing(format: &Format, prompt: &str, text: &str) -> Parser {
        // Templates may trim the text.
        let before = prompt.strip_suffix(text).or_else(|| prompt.strip_suffix(text.trim_start()));
        let mut parser = Parser::new(format, before.unwrap_or(prompt));
        if let Family::Tagged(parser) = &mut parser.family {
            parser.continue_text(if before.is_some() { text } else { "" });
        }
        parser
    }

    /// Returns true while the answer is reasoning.
    pub(crate) fn is_thinking(&self) -> bool {
        match &self.family {
            Family::Tagged(parser) => parser.is_thinking(),
            Family::Plain(_) | Family::Harmony(_) | Family::Muse(_) => false,
        }
    }

    /// Reports each tool call only when it is complete. Otherwise the arguments are reported as they arrive, so that a call
    /// whose end cannot be read may have arguments that are not valid JSON.
    #[must_use]
    pub fn with_whole_calls(mut self) -> Parser {
        match &mut self.family {
            Family::Tagged(parser) => parser.whole_calls = true,
            Family::Muse(parser) => parser.report_whole_calls(),
            Family::Plain(_) | Family::Harmony(_) => {}
        }
        self
    }

    /// Parses a piece of generated text.
    pub fn text(&mut self, piece: &str, sink: Sink<'_>) {
        if piece.is_empty() {
            return;
        }
        match &mut self.family {
            Family::Plain(content) => {
                content.push_str(piece);
                sink(Event::Content(piece));
            }
            Family::Tagged(parser) => parser.text(piece, sink),
            Family::Harmony(parser) => parser.text(piece, sink),
            Family::Muse(parser) => parser.text(piece, sink),
        }
    }

    /// Parses a control token given by its text, such as `<|channel|>`.
    pub fn control(&mut self, name: &str, sink: Sink<'_>) {
        match &mut self.family {
            Family::Plain(_) => {}
            Family::Tagged(parser) => parser.control(name, sink),
            Family::Harmony(parser) => parser.control(name, sink),
            Family::Muse(parser) => parser.control(name, sink),
        }
    }

    /// Ends the answer, wherever it was cut, and returns the message. Text that was held back
    /// because it could have become a tag is reported first.
    pub fn finish(self, sink: Sink<'_>) -> Message {
        match self.family {
            Family::Plain(content) => Message::new("assistant", content),
            Family::Tagged(parser) => parser.finish(sink),
            Family::Harmony(parser) => parser.finish(sink),
            Family::Muse(parser) => parser.finish(sink),
        }
    }
}

/// Parts of an unfinished message. Every addition is reported.
#[derive(Default)]
pub(crate) struct Draft {
    pub message: Message,
    /// True if another piece of reasoning or content follows, which an empty line must separate.
    pub separate: bool,
}

impl Draft {
    pub fn reasoning(&mut self, text: &str, sink: Sink<'_>) {
        if !text.is_empty() {
            let whole = self.message.reasoning.get_or_insert_default();
            append(whole, &mut self.separate, text, &mut |text| sink(Event::Reasoning(text)));
        }
    }

    pub fn content(&mut self, text: &str, sink: Sink<'_>) {
        if !text.is_empty() {
            let whole = &mut self.message.content;
            append(whole, &mut self.separate, text, &mut |text| sink(Event::Content(text)));
        }
    }

    pub fn begin_call(&mut self, name: &str, sink: Sink<'_>) {
        let call = crate::ToolCall { name: name.to_owned(), ..crate::ToolCall::default() };
        self.message.tool_calls.push(call);
        sink(Event::ToolCall { index: self.message.tool_calls.len() - 1, name });
    }

    pub fn arguments(&mut self, text: &str, sink: Sink<'_>) {
        let Some(index) = self.message.tool_calls.len().checked_sub(1) else { return };
        if !text.is_empty() {
            self.message.tool_calls[index].arguments.push_str(text);
            sink(Event::Arguments { index, text });
        }
    }

    pub fn finish(mut self) -> Message {
        self.message.role = "assistant".to_owned();
        self.message
    }
}

fn append(whole: &mut String, separate: &mut bool, text: &str, report: &mut dyn FnMut(&str)) {
    if std::mem::take(separate) && !whole.is_empty() {
        whole.push_str("\n\n");
        report("\n\n");
    }
    whole.push_str(text);
    report(text);
}

/// Returns the length in bytes of the longest suffix of `text` that is a proper prefix of `tag`.
fn overlap(text: &str, tag: &str) -> usize {
    let longest = text.len().min(tag.len() - 1);
    (1..=longest)
        .rev()
        .find(|&n| text.as_bytes()[text.len() - n..] == tag.as_bytes()[..n])
        .unwrap_or(0)
}
