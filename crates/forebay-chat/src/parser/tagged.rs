//! Parser for answers with `<think>...</think>` and tagged tool calls.

use super::tools::Tags;
use super::{Draft, Sink};
use crate::{Message, ToolSyntax};

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";

pub struct Tagged {
    state: State,
    tools: Option<(ToolSyntax, Tags)>,
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

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Only white space so far, so a thinking part may begin.
    Start,
    Thinking,
    Content,
    Call,
}

impl Tagged {
    pub fn new(thinking: bool, tools: Option<ToolSyntax>, prompt: &str) -> Tagged {
        let prompt = prompt.trim_end();
        let (state, strip) = match thinking {
            true if prompt.ends_with(THINK) => (State::Thinking, true),
            true if prompt.ends_with(THINK_END) => (State::Content, true),
            true => (State::Start, false),
            false => (State::Content, false),
        };
        Tagged {
            state,
            tools: tools.map(|syntax| (syntax, syntax.tags())),
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
        let is_tool_tag = self.tools.as_ref().is_some_and(|(_, tags)| {
            name == tags.open
                || name == tags.close
                || tags.wrappers.contains(&name)
                || tags.inner.contains(&name)
        });
        if is_tool_tag || name == THINK || name == THINK_END {
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
        let text = self.pending.trim_start();
        if let Some(rest) = text.strip_prefix(THINK) {
            self.pending = rest.to_owned();
            (self.state, self.strip) = (State::Thinking, true);
            return true;
        }
        // Also true if there is only white space.
        if THINK.starts_with(text) {
            return false;
        }
        self.state = State::Content;
        true
    }

    fn thinking(&mut self, sink: Sink<'_>) -> bool {
        if let Some(at) = self.pending.find(THINK_END) {
            let text = self.take(at, THINK_END.len());
            self.reasoning(text.trim_end(), sink);
            (self.state, self.strip) = (State::Content, true);
            return true;
        }
        let decided = self.pending.len() - overlap(&self.pending, THINK_END);
        // The white space before the closing tag is not part of the reasoning.
        let decided = self.pending[..decided].trim_end().len();
        let text = self.take(decided, 0);
        self.reasoning(&text, sink);
        false
    }

    fn content(&mut self, sink: Sink<'_>) -> bool {
        let Some((_, tags)) = &self.tools else {
            let text = std::mem::take(&mut self.pending);
            self.show(&text, sink);
            return false;
        };
        let all = || tags.wrappers.iter().copied().chain([tags.open]);
        let found = all().filter_map(|tag| Some((self.pending.find(tag)?, tag))).min();
        let Some((at, tag)) = found else {
            let held = all().map(|tag| overlap(&self.pending, tag)).max().unwrap_or(0);
            let decided = self.pending[..self.pending.len() - held].trim_end().len();
            let text = self.take(decided, 0);
            self.show(&text, sink);
            return false;
        };
        let opens = tag == tags.open;
        let text = self.take(at, tag.len());
        let shown = text.trim_end();
        self.show(shown, sink);
        self.strip = true;
        if opens {
            self.before_call = text[shown.len()..].to_owned();
            (self.state, self.searched) = (State::Call, 0);
        }
        true
    }

    fn call(&mut self, sink: Sink<'_>) -> bool {
        let Some((_, tags)) = &self.tools else { return false };
        let (close, from) = (tags.close, self.searched);
        let Some(at) = self.pending[from..].find(close) else {
            let end = self.pending.len().saturating_sub(close.len());
            self.searched = self.pending.floor_char_boundary(end);
            return false;
        };
        let body = self.take(from + at, close.len());
        self.end_call(&body, close, sink);
        self.state = State::Content;
        true
    }

    /// Adds the call in `body`. Text that is not a call stays in the content as it was written.
    fn end_call(&mut self, body: &str, close: &str, sink: Sink<'_>) {
        let Some((syntax, tags)) = &self.tools else { return };
        match syntax.parse(body) {
            Some((name, arguments)) => {
                self.draft.begin_call(&name, sink);
                self.draft.arguments(&arguments, sink);
                self.strip = true;
            }
            None => {
                let text = format!("{}{}{body}{close}", self.before_call, tags.open);
                self.strip = self.draft.message.content.is_empty();
                self.show(&text, sink);
                self.strip = false;
            }
        }
    }

    pub fn finish(mut self, sink: Sink<'_>) -> Message {
        let rest = std::mem::take(&mut self.pending);
        match self.state {
            State::Thinking => self.reasoning(rest.trim_end(), sink),
            State::Start | State::Content => self.show(&rest, sink),
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

/// Returns the length in bytes of the longest suffix of `text` that is a proper prefix of `tag`.
fn overlap(text: &str, tag: &str) -> usize {
    let longest = text.len().min(tag.len() - 1);
    (1..=longest)
        .rev()
        .find(|&n| text.as_bytes()[text.len() - n..] == tag.as_bytes()[..n])
        .unwrap_or(0)
}
