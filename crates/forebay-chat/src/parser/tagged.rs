//! Parser for answers with reasoning between marks, such as `<think>...</think>`, and tool calls with or without marks.

use super::value_end::ValueEnd;
use super::{Draft, Sink};
use crate::offer::Offer;
use crate::syntax::{Tags, ThinkMarks};
use crate::{Message, ToolSyntax};

pub struct Tagged {
    state: State,
    thinking: Option<ThinkMarks>,
    tools: Option<Tools>,
    draft: Draft,
    /// Text that is not decided yet: it may be part of a tag, or white space before one.
    pending: String,
    /// Number of leading bytes of `pending` that cannot contain the start of a tool call's closing
    /// tag.
    searched: usize,
    /// True while white space is dropped, until other text arrives.
    strip: bool,
    /// White space that was dropped before the open tool call.
    before_call: String,
}

/// Tool calls that the answer may have.
struct Tools {
    syntax: ToolSyntax,
    tags: Tags,
    offer: Offer,
    /// Finds the end of the open call, if no tag ends it.
    end: ValueEnd,
    /// True while a call without marks may begin.
    may_begin: bool,
}

impl Tools {
    fn new(syntax: ToolSyntax, offer: &Offer) -> Tools {
        Tools {
            syntax,
            tags: syntax.tags(),
            offer: offer.clone(),
            end: end_of(syntax),
            may_begin: syntax.is_bare(),
        }
    }

    /// Returns true if there are calls in the answer. Otherwise, all of it is text.
    fn counts(&self) -> bool {
        match self.offer {
            Offer::Nothing => false,
            Offer::Unknown => !self.syntax.is_bare(),
            Offer::Tools(_) => true,
        }
    }
}

/// Returns the search for the end of a call that no tag ends.
fn end_of(syntax: ToolSyntax) -> ValueEnd {
    match syntax {
        ToolSyntax::Python => ValueEnd::new(b"\"'", None),
        ToolSyntax::Llama => ValueEnd::new(b"\"", None),
        _ => ValueEnd::new(b"\"", Some("[ARGS]")),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Only white space so far, so a thinking part may begin.
    Start,
    Thinking,
    Content,
    Call,
}

impl Tagged {
    pub fn new(
        thinking: Option<ThinkMarks>,
        syntax: Option<ToolSyntax>,
        offer: &Offer,
        prompt: &str,
    ) -> Tagged {
        let prompt = prompt.trim_end();
        let (state, strip) = match thinking {
            Some(marks) if prompt.ends_with(marks.open()) => (State::Thinking, true),
            Some(marks) if prompt.ends_with(marks.close()) => (State::Content, true),
            Some(_) => (State::Start, false),
            None => (State::Content, false),
        };
        Tagged {
            state,
            thinking,
            tools: syntax.map(|syntax| Tools::new(syntax, offer)),
            draft: Draft::default(),
            pending: String::new(),
            searched: 0,
            strip,
            before_call: String::new(),
        }
    }

    pub fn text(&mut self, piece: &str, sink: Sink<'_>) {
        self.pending.push_str(piece);
        while self.step(sink) {}
    }

    /// Handles a control token. Some vocabularies have the tags as control tokens; others are not
    /// text.
    pub fn control(&mut self, name: &str, sink: Sink<'_>) {
        let is_tag =
            self.tools.as_ref().is_some_and(|tools| tools.tags.all().any(|tag| tag == name));
        let marks = self.thinking.unwrap_or(ThinkMarks::Tags);
        if is_tag || name == marks.open_token() || name == marks.close() {
            self.text(name, sink);
        }
    }

    /// Decides about the beginning of the pending text. Returns true if there may be more to
    /// decide.
    fn step(&mut self, sink: Sink<'_>) -> bool {
        match self.state {
            State::Start => self.start(),
            State::Thinking => self.thinking(sink),
            State::Content => self.content(sink),
            State::Call => self.call(sink),
        }
    }

    fn start(&mut self) -> bool {
        let open = self.thinking.map_or("", ThinkMarks::open);
        let text = self.pending.trim_start();
        if let Some(rest) = text.strip_prefix(open) {
            self.pending = rest.to_owned();
            (self.state, self.strip) = (State::Thinking, true);
            return true;
        }
        // Also true if there is only white space.
        if open.starts_with(text) {
            return false;
        }
        self.state = State::Content;
        true
    }

    fn thinking(&mut self, sink: Sink<'_>) -> bool {
        let close = self.thinking.map_or("", ThinkMarks::close);
        if let Some(at) = self.pending.find(close) {
            let text = self.take(at, close.len());
            self.reasoning(text.trim_end(), sink);
            (self.state, self.strip) = (State::Content, true);
            return true;
        }
        let decided = self.pending.len() - overlap(&self.pending, close);
        // The white space before the closing tag is not part of the reasoning.
        let decided = self.pending[..decided].trim_end().len();
        let text = self.take(decided, 0);
        self.reasoning(&text, sink);
        false
    }

    fn content(&mut self, sink: Sink<'_>) -> bool {
        let Some(tools) = self.tools.as_ref().filter(|tools| tools.counts()) else {
            let text = std::mem::take(&mut self.pending);
            self.show(&text, sink);
            return false;
        };
        if tools.may_begin {
            return self.bare();
        }
        let (tags, is_bare) = (tools.tags, tools.syntax.is_bare());
        let all = || tags.wrappers.iter().copied().chain((!is_bare).then_some(tags.open));
        let found = all().filter_map(|tag| Some((self.pending.find(tag)?, tag))).min();
        let Some((at, tag)) = found else {
            let held = all().map(|tag| overlap(&self.pending, tag)).max().unwrap_or(0);
            let decided = self.pending[..self.pending.len() - held].trim_end().len();
            let text = self.take(decided, 0);
            self.show(&text, sink);
            return false;
        };
        let text = self.take(at, tag.len());
        let shown = text.trim_end();
        self.show(shown, sink);
        self.strip = true;
        if is_bare {
            self.may_begin(true);
        } else if tag == tags.open {
            self.begin_call(text[shown.len()..].to_owned());
        }
        true
    }

    /// Decides if a call without marks begins with the pending text.
    fn bare(&mut self) -> bool {
        let Some(tools) = &self.tools else { return false };
        let has_calls = !self.draft.message.tool_calls.is_empty();
        let text = match has_calls {
            true => self.pending.trim_start_matches(separates),
            false => self.pending.trim_start(),
        };
        if let Some(rest) = tools.tags.wrappers.iter().find_map(|mark| text.strip_prefix(mark)) {
            self.pending = rest.to_owned();
            self.strip = true;
            return true;
        }
        // Also true if there is no text.
        if tools.tags.wrappers.iter().any(|mark| mark.starts_with(text)) {
            return false;
        }
        let begins = match tools.syntax {
            ToolSyntax::Llama => text.starts_with(['{', '[']),
            _ => text.starts_with('['),
        };
        if begins {
            let before = self.pending[..self.pending.len() - text.len()].to_owned();
            self.pending = text.to_owned();
            self.begin_call(before);
        } else {
            self.may_begin(false);
        }
        true
    }

    fn may_begin(&mut self, may_begin: bool) {
        if let Some(tools) = &mut self.tools {
            tools.may_begin = may_begin;
        }
    }

    fn begin_call(&mut self, before: String) {
        self.before_call = before;
        (self.state, self.searched) = (State::Call, 0);
        if let Some(tools) = &mut self.tools {
            tools.end = end_of(tools.syntax);
        }
    }

    fn call(&mut self, sink: Sink<'_>) -> bool {
        let Some(tools) = &mut self.tools else { return false };
        let (at, close) = match tools.tags.close {
            Some(close) => {
                let Some(at) = self.pending[self.searched..].find(close) else {
                    let end = self.pending.len().saturating_sub(close.len());
                    self.searched = self.pending.floor_char_boundary(end);
                    return false;
                };
                (self.searched + at, close)
            }
            None => {
                let Some(at) = tools.end.find(&self.pending) else { return false };
                (at, "")
            }
        };
        let body = self.take(at, close.len());
        self.end_call(&body, close, sink);
        self.state = State::Content;
        true
    }

    /// Adds the calls in `body`. Text that is not a call stays in the content as it was written.
    fn end_call(&mut self, body: &str, close: &str, sink: Sink<'_>) {
        let Some(tools) = &mut self.tools else { return };
        let calls = tools.syntax.parse(body, &tools.offer);
        tools.may_begin = tools.syntax.is_bare() && calls.is_some();
        match calls {
            Some(calls) => {
                for call in calls {
                    self.draft.begin_call(&call.name, sink);
                    self.draft.arguments(&call.arguments, sink);
                }
                self.strip = true;
            }
            None => {
                let text = format!("{}{}{body}{close}", self.before_call, tools.tags.open);
                // White space before a call without marks was not dropped, unless something came before it.
                self.strip &= tools.syntax.is_bare() || self.draft.message.content.is_empty();
                self.show(&text, sink);
                self.strip = false;
            }
        }
    }

    pub fn finish(mut self, sink: Sink<'_>) -> Message {
        let rest = std::mem::take(&mut self.pending);
        match self.state {
            State::Thinking => self.reasoning(rest.trim_end(), sink),
            State::Start | State::Content => {
                let has_calls = !self.draft.message.tool_calls.is_empty();
                let between = has_calls && self.tools.as_ref().is_some_and(|tools| tools.may_begin);
                // What separates a call from the next one is no text.
                let is_text = !between || rest.contains(|c| !separates(c));
                self.show(if is_text { &rest } else { "" }, sink);
            }
            State::Call => self.end_call(&rest, "", sink),
        }
        self.draft.finish()
    }

    fn reasoning(&mut self, text: &str, sink: Sink<'_>) {
        let text = self.stripped(text);
        self.draft.reasoning(text, sink);
    }

    fn show(&mut self, text: &str, sink: Sink<'_>) {
        let text = self.stripped(text);
        self.draft.content(text, sink);
    }

    fn stripped<'a>(&mut self, text: &'a str) -> &'a str {
        if !self.strip {
            return text;
        }
        let text = text.trim_start();
        self.strip = text.is_empty();
        text
    }

    /// Removes and returns the first `length` bytes of the pending text, and drops the next `tag`
    /// bytes.
    fn take(&mut self, length: usize, tag: usize) -> String {
        let rest = self.pending.split_off(length + tag);
        let mut text = std::mem::replace(&mut self.pending, rest);
        text.truncate(length);
        text
    }
}

/// Returns true if a character may be between two calls without marks.
fn separates(c: char) -> bool {
    c.is_whitespace() || matches!(c, ';' | ',')
}

/// Returns the length in bytes of the longest suffix of `text` that is a proper prefix of `tag`.
fn overlap(text: &str, tag: &str) -> usize {
    let longest = text.len().min(tag.len() - 1);
    (1..=longest)
        .rev()
        .find(|&n| text.as_bytes()[text.len() - n..] == tag.as_bytes()[..n])
        .unwrap_or(0)
}
