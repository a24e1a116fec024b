//! Parser for answers of Muse: messages with a header that names who they are for.
//!
//! `<|start|>assistant to=self<|message|>...<|eom|><|start|>assistant
//! to=weather<|message|><atem:function_calls>...<|eom|>`
//!
//! The marks around messages are control tokens, so text that only looks like a mark is text. Calls count in messages
//! to a tool only: others may quote one.

use super::tagged::Tagged;
use super::{Draft, Sink};
use crate::offer::Offer;
use crate::{Message, ToolSyntax};

pub struct Muse {
    part: Part,
    /// Text before `<|message|>`. The prompt begins the first header.
    header: String,
    /// Reads messages to tools, and keeps the draft.
    calls: Tagged,
    /// True once a message body has begun.
    began: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Header,
    Reasoning,
    Content,
    Call,
}

impl Muse {
    pub fn new(offer: &Offer) -> Muse {
        Muse {
            part: Part::Header,
            header: String::new(),
            calls: Tagged::new(None, Some(ToolSyntax::Atem), offer, ""),
            began: false,
        }
    }

    pub fn report_whole_calls(&mut self) {
        self.calls.whole_calls = true;
    }

    pub fn text(&mut self, piece: &str, sink: Sink<'_>) {
        match self.part {
            Part::Header => self.header.push_str(piece),
            Part::Reasoning => self.draft().reasoning(piece, sink),
            Part::Content => self.draft().content(piece, sink),
            Part::Call => self.calls.text(piece, sink),
        }
    }

    pub fn control(&mut self, name: &str, sink: Sink<'_>) {
        match name {
            "<|start|>" | "<|eom|>" | "<|eot|>" => {
                self.end_part(sink);
                self.header.clear();
                self.part = Part::Header;
            }
            "<|message|>" if self.part == Part::Header => {
                let mut words = self.header.split_whitespace();
                self.part = match words.find_map(|word| word.strip_prefix("to=")) {
                    Some("self") => Part::Reasoning,
                    None | Some("user") => Part::Content,
                    Some(_) => Part::Call,
                };
                self.draft().separate = true;
                self.began = true;
            }
            _ => {}
        }
    }

    /// Ends the body of a message.
    fn end_part(&mut self, sink: Sink<'_>) {
        if self.part == Part::Call {
            self.calls.flush(sink);
        }
    }

    fn draft(&mut self) -> &mut Draft {
        self.calls.draft()
    }

    pub fn finish(mut self, sink: Sink<'_>) -> Message {
        self.end_part(sink);
        // The model did not follow the format: all of its output is a header without a message.
        if !self.began && self.part == Part::Header {
            let header = std::mem::take(&mut self.header);
            self.draft().content(&header, sink);
        }
        self.calls.finish(sink)
    }
}
