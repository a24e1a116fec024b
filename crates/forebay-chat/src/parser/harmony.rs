//! Parser for answers of gpt-oss: messages with a header of role, recipient and channel.
//!
//! `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`
//!
//! The marks are control tokens, so text that only looks like a mark is text.

use super::{Draft, Sink};
use crate::Message;

pub struct Harmony {
    state: State,
    header: Header,
    draft: Draft,
    /// True once a message body has begun.
    began: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Header,
    Body(Part),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Reasoning,
    Content,
    Call,
}

/// Text before `<|message|>`. The recipient may be before or after the channel.
#[derive(Default)]
struct Header {
    role: String,
    channel: String,
    place: Place,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Role,
    Channel,
    /// Type of a tool call's arguments, which is always JSON.
    Constrain,
}

impl Header {
    fn push(&mut self, text: &str) {
        match self.place {
            Place::Role => self.role.push_str(text),
            Place::Channel => self.channel.push_str(text),
            Place::Constrain => {}
        }
    }

    /// Returns the tool that the message is for.
    fn recipient(&self) -> Option<&str> {
        let words = self.role.split_whitespace().chain(self.channel.split_whitespace());
        let mut named = words.filter_map(|word| word.strip_prefix("to="));
        named.next_back().filter(|name| !matches!(*name, "user" | "assistant" | "all"))
    }

    fn part(&self) -> Part {
        if self.recipient().is_some() {
            return Part::Call;
        }
        match self.channel.split_whitespace().next() {
            Some("analysis") => Part::Reasoning,
            // Commentary without a recipient is for the user, and so is everything final.
            _ => Part::Content,
        }
    }
}

impl Harmony {
    /// Creates a parser that begins where the prompt ends: in the header that the template opened.
    pub fn new(prompt: &str) -> Harmony {
        let mut parser = Harmony {
            state: State::Header,
            header: Header::default(),
            draft: Draft::default(),
            began: false,
        };
        let opened = prompt.rfind("<|start|>").map_or("", |at| &prompt[at..]);
        if !opened.contains("<|end|>") {
            parser.opened(opened);
        }
        parser
    }

    /// Reads the header, or the part of it, that is in the prompt.
    fn opened(&mut self, header: &str) {
        for part in header.split("<|").skip(1) {
            let Some((name, text)) = part.split_once("|>") else { continue };
            self.control(&format!("<|{name}|>"), &mut |_| {});
            if self.state == State::Header {
                self.header.push(text);
            }
        }
        self.began = false;
    }

    pub fn text(&mut self, piece: &str, sink: Sink<'_>) {
        match self.state {
            State::Header => self.header.push(piece),
            State::Body(Part::Reasoning) => self.draft.reasoning(piece, sink),
            State::Body(Part::Content) => self.draft.content(piece, sink),
            State::Body(Part::Call) => self.draft.arguments(piece, sink),
        }
    }

    pub fn control(&mut self, name: &str, sink: Sink<'_>) {
        match name {
            "<|start|>" | "<|end|>" | "<|return|>" | "<|call|>" => {
                (self.state, self.header) = (State::Header, Header::default());
            }
            "<|channel|>" => {
                if self.state != State::Header {
                    self.header = Header::default();
                }
                (self.state, self.header.place) = (State::Header, Place::Channel);
            }
            "<|constrain|>" if self.state == State::Header => self.header.place = Place::Constrain,
            "<|message|>" => {
                let part = self.header.part();
                if part == Part::Call {
                    let recipient = self.header.recipient().unwrap_or_default();
                    let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
                    self.draft.begin_call(name, sink);
                }
                self.draft.separate = true;
                self.began = true;
                self.state = State::Body(part);
            }
            _ => {}
        }
    }

    pub fn finish(mut self, sink: Sink<'_>) -> Message {
        // The model did not follow the format: all of its output is a role without a message.
        let role = std::mem::take(&mut self.header.role);
        if !self.began && self.state == State::Header && self.header.place == Place::Role {
            let text = role.strip_prefix("assistant").unwrap_or(&role);
            self.draft.content(text, sink);
        }
        self.draft.finish()
    }
}
