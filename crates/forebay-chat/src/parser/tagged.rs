//! Parser for answers with reasoning between marks, such as `<think>...</think>`, and tool calls with or without marks.

use super::json_calls::FUNCTOOLS;
use super::live::Live;
use super::thought::Ending;
use super::value_end::ValueEnd;
use super::{Draft, Sink, overlap};
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
    /// Marks around the answer, as far as they may still come.
    around_answer: Around,
    /// Number of leading bytes of the reasoning in `pending` in which no call begins that could end it.
    thought: usize,
    /// Length of `pending` from which on it is looked at again whether it may be calls at the end of the reasoning.
    look_again: usize,
    /// True to send calls when they are complete.
    pub whole_calls: bool,
}

/// Marks around an answer.
#[derive(Clone, Copy)]
enum Around {
    /// The answer may begin with the first mark.
    Before([&'static str; 2]),
    /// The mark that may end the answer.
    Within(&'static str),
    Nothing,
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
    /// True while the answer may begin with [`ToolSyntax::before_text`].
    may_be_named: bool,
    /// The open call, as far as it was read.
    live: Live,
}

impl Tools {
    fn new(syntax: ToolSyntax, offer: &Offer) -> Tools {
        Tools {
            syntax,
            tags: syntax.tags(),
            offer: offer.clone(),
            end: end_of(syntax),
            may_begin: syntax.is_bare(),
            may_be_named: matches!(offer, Offer::Tools(_)),
            live: Live::new(syntax, false),
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

    /// Returns the calls that may end the reasoning: those of offered tools, with a mark before and behind them.
    fn ending(&self) -> Option<Ending<'_>> {
        let is_offered = matches!(self.offer, Offer::Tools(_));
        let has_marks = self.tags.close.is_some() && !self.syntax.is_bare();
        (is_offered && has_marks).then_some(Ending {
            syntax: self.syntax,
            tags: self.tags,
            offer: &self.offer,
        })
    }
}

/// Returns the search for the end of a call that no tag ends.
fn end_of(syntax: ToolSyntax) -> ValueEnd {
    match syntax {
        ToolSyntax::Python => ValueEnd::new(b"\"'", None),
        ToolSyntax::Llama | ToolSyntax::MarkedList(_) => ValueEnd::new(b"\"", None),
        _ => ValueEnd::new(b"\"", Some("[ARGS]")),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Only white space so far, so a thinking part may begin.
    Start,
    Thinking,
    /// Text at the end of the reasoning that may be calls.
    ThoughtCalls,
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
        let mut around_answer = match thinking.and_then(ThinkMarks::around_answer) {
            Some(marks) => Around::Before(marks),
            None => Around::Nothing,
        };
        let (state, strip) = match thinking {
            Some(marks)
                if marks.around_answer().is_some_and(|[open, _]| prompt.ends_with(open)) =>
            {
                if let Around::Before([_, close]) = around_answer {
                    around_answer = Around::Within(close);
                }
                (State::Content, true)
            }
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
            around_answer,
            thought: 0,
            look_again: 0,
            whole_calls: false,
        }
    }

    /// Takes the text that the answer continues. It is no part of the answer.
    pub fn continue_text(&mut self, text: &str) {
        // A call that was begun there is sent when it is complete.
        let whole_calls = std::mem::replace(&mut self.whole_calls, true);
        self.text(text, &mut |_| {});
        self.whole_calls = whole_calls;
        self.draft = Draft::default();
        if self.state == State::Start {
            self.state = State::Content;
        }
        // White space was held back, because it may have been the end of the text.
        if self.state != State::Call && self.pending.trim().is_empty() {
            self.pending.clear();
            self.strip = false;
        }
    }

    /// Returns true while the answer is reasoning.
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking | State::ThoughtCalls)
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
        if is_tag || self.thinking.unwrap_or(ThinkMarks::Tags).has_token(name) {
            self.text(name, sink);
        }
    }

    /// Decides about the beginning of the pending text. Returns true if there may be more to
    /// decide.
    fn step(&mut self, sink: Sink<'_>) -> bool {
        match self.state {
            State::Start => self.start(),
            State::Thinking => self.thinking(sink),
            State::ThoughtCalls => self.thought_calls(sink),
            State::Content => self.content(sink),
            State::Call => self.call(sink),
        }
    }

    fn start(&mut self) -> bool {
        let [open, close] = self.think_marks();
        let text = self.pending.trim_start();
        if let Some(rest) = text.strip_prefix(open) {
            self.pending = rest.to_owned();
            (self.state, self.strip) = (State::Thinking, true);
            return true;
        }
        // An answer without reasoning may begin with the mark that ends it.
        if let Some(rest) = text.strip_prefix(close) {
            self.pending = rest.to_owned();
            (self.state, self.strip) = (State::Content, true);
            return true;
        }
        // Also true if there is only white space.
        if open.starts_with(text) || close.starts_with(text) {
            return false;
        }
        self.state = State::Content;
        true
    }

    fn think_marks(&self) -> [&'static str; 2] {
        self.thinking.map_or(["", ""], |marks| [marks.open(), marks.close()])
    }

    fn thinking(&mut self, sink: Sink<'_>) -> bool {
        let [_, close] = self.think_marks();
        let closed = self.pending.find(close);
        let ending = self.tools.as_ref().and_then(Tools::ending);
        let begun = ending.as_ref().and_then(|ending| {
            let text = &self.pending[self.thought..];
            ending.marks().filter_map(|mark| text.find(mark)).min().map(|at| self.thought + at)
        });
        if let Some(at) = begun.filter(|at| closed.is_none_or(|closed| *at < closed)) {
            let before = self.pending[..at].trim_end().len();
            let text = self.take(before, 0);
            self.reasoning(&text, sink);
            // The white space before the mark belongs to the reasoning, if the call does.
            self.thought = at - before;
            (self.state, self.look_again) = (State::ThoughtCalls, 0);
            return true;
        }
        if let Some(at) = closed {
            self.end_reasoning(at, sink);
            return true;
        }
        let marks = ending.iter().flat_map(Ending::marks).chain([close]);
        let held = marks.map(|mark| overlap(&self.pending, mark)).max().unwrap_or(0);
        // The white space before the closing tag is not part of the reasoning.
        let decided = self.pending[..self.pending.len() - held].trim_end().len();
        let text = self.take(decided, 0);
        self.thought = self.thought.saturating_sub(decided);
        self.reasoning(&text, sink);
        false
    }

    /// Ends the reasoning with the first `at` bytes of the pending text and the mark behind them.
    fn end_reasoning(&mut self, at: usize, sink: Sink<'_>) {
        let [_, close] = self.think_marks();
        let text = self.take(at, close.len());
        self.reasoning(text.trim_end(), sink);
        (self.state, self.strip, self.thought) = (State::Content, true, 0);
    }

    /// Decides if calls end the reasoning, which only the end of the answer shows.
    fn thought_calls(&mut self, sink: Sink<'_>) -> bool {
        let [_, close] = self.think_marks();
        if let Some(at) = self.pending.find(close) {
            self.end_reasoning(at, sink);
            return true;
        }
        if self.pending.len() < self.look_again {
            return false;
        }
        // Seldom enough for the work to stay in proportion to the text.
        self.look_again = self.pending.len() + self.pending.len() / 4;
        let ending = self.tools.as_ref().and_then(Tools::ending);
        if ending.is_some_and(|ending| ending.may_be_calls(&self.pending)) {
            return false;
        }
        self.thought = self.pending.ceil_char_boundary(self.thought + 1);
        self.state = State::Thinking;
        true
    }

    fn content(&mut self, sink: Sink<'_>) -> bool {
        if let Around::Before([open, close]) = self.around_answer {
            let text = self.pending.trim_start();
            let rest = text.strip_prefix(open).map(str::to_owned);
            // Also true if there is only white space.
            if rest.is_none() && open.starts_with(text) {
                return false;
            }
            self.around_answer = Around::Nothing;
            if let Some(rest) = rest {
                (self.pending, self.strip) = (rest, true);
                self.around_answer = Around::Within(close);
            }
        }
        let named = self.tools.as_mut().filter(|tools| tools.may_be_named);
        if let Some((name, tools)) = named.and_then(|of| Some((of.syntax.before_text()?, of))) {
            let text = self.pending.trim_start();
            let rest = text.strip_prefix(name).map(str::to_owned);
            if rest.is_none() && name.starts_with(text) {
                return false;
            }
            tools.may_be_named = false;
            if let Some(rest) = rest {
                (self.pending, self.strip) = (rest, true);
            }
        }
        let tools = self.tools.as_ref().filter(|tools| tools.counts());
        if tools.is_some_and(|tools| tools.may_begin) {
            return self.bare();
        }
        let is_bare = tools.is_some_and(|tools| tools.syntax.is_bare());
        let tags = tools.map(|tools| tools.tags);
        let end = match self.around_answer {
            Around::Within(end) => Some(end),
            _ => None,
        };
        let of_tools = tags
            .iter()
            .flat_map(|tags| tags.wrappers.iter().copied().chain((!is_bare).then_some(tags.open)));
        let dropped = self.thinking.map_or(&[][..], ThinkMarks::dropped);
        let marks: Vec<&str> = of_tools.chain(end).chain(dropped.iter().copied()).collect();
        if marks.is_empty() {
            let text = std::mem::take(&mut self.pending);
            self.show(&text, sink);
            return false;
        }
        let found = marks.iter().filter_map(|tag| Some((self.pending.find(tag)?, *tag))).min();
        let Some((at, tag)) = found else {
            let held = marks.iter().map(|tag| overlap(&self.pending, tag)).max().unwrap_or(0);
            let decided = self.pending[..self.pending.len() - held].trim_end().len();
            let text = self.take(decided, 0);
            self.show(&text, sink);
            return false;
        };
        let text = self.take(at, tag.len());
        let shown = text.trim_end();
        self.show(shown, sink);
        self.strip = true;
        if Some(tag) == end {
            self.around_answer = Around::Nothing;
        } else if is_bare {
            self.may_begin(true);
        } else if tags.is_some_and(|tags| tag == tags.open) {
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
            ToolSyntax::MarkedList(_) if FUNCTOOLS.starts_with(text) => return false,
            ToolSyntax::MarkedList(_) => {
                text.starts_with(['{', '[']) || text.starts_with(FUNCTOOLS)
            }
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
            tools.live = Live::new(tools.syntax, self.whole_calls);
        }
    }

    fn call(&mut self, sink: Sink<'_>) -> bool {
        let Some(tools) = &mut self.tools else { return false };
        let close = tools.tags.close.unwrap_or_default();
        let found = match tools.tags.close {
            Some(close) => {
                let found = self.pending[self.searched..].find(close);
                let found = found.map(|at| self.searched + at);
                let end = self.pending.len().saturating_sub(close.len());
                self.searched = self.pending.floor_char_boundary(end);
                found
            }
            None => tools.end.find(&self.pending),
        };
        let Some(at) = found else {
            let held = if close.is_empty() { 0 } else { overlap(&self.pending, close) };
            let body = &self.pending[..self.pending.len() - held];
            tools.live.read(body, &tools.offer, &mut self.draft, sink);
            return false;
        };
        let body = self.take(at, close.len());
        self.end_call(&body, close, sink);
        self.state = State::Content;
        true
    }

    /// Adds the calls in `body`. Text that is not a call stays in the content as it was written.
    fn end_call(&mut self, body: &str, close: &str, sink: Sink<'_>) {
        let Some(tools) = &mut self.tools else { return };
        tools.live.read(body, &tools.offer, &mut self.draft, sink);
        let live = std::mem::replace(&mut tools.live, Live::new(tools.syntax, self.whole_calls));
        let calls = tools.syntax.parse(body, &tools.offer);
        let is_call = live.finish(calls, &mut self.draft, sink);
        tools.may_begin = tools.syntax.is_bare() && is_call;
        if is_call {
            self.strip = true;
            return;
        }
        let text = format!("{}{}{body}{close}", self.before_call, tools.tags.open);
        // White space before a call without marks was not dropped, unless something came before it.
        self.strip &= tools.syntax.is_bare() || self.draft.message.content.is_empty();
        self.show(&text, sink);
        self.strip = false;
    }

    pub fn finish(mut self, sink: Sink<'_>) -> Message {
        self.flush(sink);
        self.draft.finish()
    }

    /// Decides about the rest of the text, as at the end of an answer. Content may follow.
    pub fn flush(&mut self, sink: Sink<'_>) {
        let rest = std::mem::take(&mut self.pending);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Thinking | State::ThoughtCalls => self.end_thought(&rest, sink),
            State::Start | State::Content => {
                let has_calls = !self.draft.message.tool_calls.is_empty();
                let between = has_calls && self.tools.as_ref().is_some_and(|tools| tools.may_begin);
                // What separates a call from the next one is no text.
                let is_text = !between || rest.contains(|c| !separates(c));
                self.show(if is_text { &rest } else { "" }, sink);
            }
            State::Call => self.end_call(&rest, "", sink),
        }
    }

    pub fn draft(&mut self) -> &mut Draft {
        &mut self.draft
    }

    /// Ends an answer that ends with reasoning, or with calls that end the reasoning.
    fn end_thought(&mut self, rest: &str, sink: Sink<'_>) {
        let ending = self.tools.as_ref().and_then(Tools::ending);
        let found = ending.and_then(|ending| {
            let (at, calls) = ending.find(&rest[self.thought..])?;
            Some((self.thought + at, calls))
        });
        let (at, calls) = found.unwrap_or((rest.len(), Vec::new()));
        self.reasoning(rest[..at].trim_end(), sink);
        for call in calls {
            self.draft.begin_call(&call.name, sink);
            self.draft.arguments(&call.arguments, sink);
        }
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
