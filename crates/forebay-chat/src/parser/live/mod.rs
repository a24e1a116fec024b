//! Calls in a body that is not complete yet, so that their arguments are sent while they are generated.
//!
//! The complete body decides what a call is ([`ToolSyntax::parse`]). A reader here only says a beginning of the same calls,
//! and stops where it is in doubt. What is sent is never taken back, so this is the rule:
//!
//! - Until the arguments have [`DECIDED_BYTES`], nothing is sent. A body that turns out not to be a call is text.
//! - From then on the body is a call. If the rest cannot be read, the call ends where it could be read to the last byte,
//!   and its arguments are not valid JSON, because their closing bracket is missing.

mod gemma;
mod json;
mod minimax3;
mod python;
mod tags;

use std::convert::Infallible;

use serde_json::{Value, json};

use super::tools::Call;
use super::{Draft, Sink};
use crate::ToolSyntax;
use crate::offer::Offer;
use crate::suffixed::PLAIN;
use tags::Form;

/// Bytes of arguments after which a body is a call, whatever follows.
const DECIDED_BYTES: usize = 32;

/// Longest name or key, with the marks around it. A body with a longer one is read at its end only.
const HEAD_BYTES_MAX: usize = 1024;

/// Why a reader stops.
enum Stop {
    /// It needs more text.
    More,
    /// It cannot read the text.
    Wrong,
}

type Step<T> = Result<T, Stop>;

/// A call as far as it was read.
#[derive(Default)]
struct Begun {
    name: Option<String>,
    /// Beginning of the arguments in JSON.
    arguments: String,
}

impl Begun {
    fn named(name: &str) -> Begun {
        Begun { name: Some(name.to_owned()), ..Begun::default() }
    }

    /// Writes the key of the next member.
    fn key(&mut self, key: &str) {
        self.arguments.push(if self.arguments.is_empty() { '{' } else { ',' });
        self.arguments += &json!(key).to_string();
        self.arguments.push(':');
    }

    fn value(&mut self, value: &Value) {
        self.arguments += &value.to_string();
    }

    /// Writes a quotation mark, which begins or ends a text.
    fn quote(&mut self) {
        self.arguments.push('"');
    }

    /// Writes a part of a text.
    fn text(&mut self, text: &str) {
        let quoted = json!(text).to_string();
        self.arguments += &quoted[1..quoted.len() - 1];
    }

    /// Writes the end of the arguments.
    fn end(&mut self) {
        self.arguments.push_str(if self.arguments.is_empty() { "{}" } else { "}" });
    }
}

/// A reader of the calls of a body. It gets the whole body each time, which has only grown.
trait Read {
    /// Reads on, until it stops. `calls` are those that were read so far.
    fn read(&mut self, body: &str, calls: &mut Vec<Begun>, offer: &Offer) -> Step<Infallible>;
}

/// Calls of a body, as far as they were read and sent.
pub struct Live {
    syntax: ToolSyntax,
    /// `None` before it is known which form the body has.
    reader: Option<Box<dyn Read + Send>>,
    /// True if nothing more can be read.
    stopped: bool,
    calls: Vec<Begun>,
    /// True once the body is a call.
    decided: bool,
    /// Number of calls whose beginning was sent.
    begun: usize,
    /// Bytes of the last of them that were sent.
    sent: usize,
}

impl Live {
    /// Creates the reader of a body. With `whole`, calls are sent when they are complete.
    pub fn new(syntax: ToolSyntax, whole: bool) -> Live {
        Live {
            syntax,
            reader: None,
            stopped: whole,
            calls: Vec::new(),
            decided: false,
            begun: 0,
            sent: 0,
        }
    }

    /// Reads on, and sends what is decided. `body` has grown since the last call.
    pub fn read(&mut self, body: &str, offer: &Offer, draft: &mut Draft, sink: Sink<'_>) {
        if self.stopped {
            return;
        }
        if self.reader.is_none() {
            match reader_of(self.syntax, body) {
                Ok(reader) => self.reader = Some(reader),
                Err(Stop::More) => return,
                Err(Stop::Wrong) => self.stopped = true,
            }
        }
        if let Some(reader) = &mut self.reader {
            let Err(stop) = reader.read(body, &mut self.calls, offer);
            self.stopped |= matches!(stop, Stop::Wrong);
        }
        // A call without marks is one only if its tool is offered.
        let is_other = |call: &Begun| call.name.as_ref().is_some_and(|name| !offer.names(name));
        if self.syntax.is_bare()
            && let Some(at) = self.calls.iter().position(is_other)
        {
            self.calls.truncate(at);
            self.stopped = true;
        }
        self.send(draft, sink);
    }

    fn send(&mut self, draft: &mut Draft, sink: Sink<'_>) {
        let named = self.calls.iter().take_while(|call| call.name.is_some());
        let bytes: usize = named.map(|call| call.arguments.len()).sum();
        self.decided |= bytes >= DECIDED_BYTES;
        if !self.decided {
            return;
        }
        for (index, call) in self.calls.iter().enumerate().skip(self.begun.saturating_sub(1)) {
            let Some(name) = &call.name else { return };
            if index == self.begun {
                draft.begin_call(name, sink);
                (self.begun, self.sent) = (index + 1, 0);
            }
            draft.arguments(&call.arguments[self.sent..], sink);
            self.sent = call.arguments.len();
        }
    }

    /// Sends the rest of the calls. `calls` are those of the complete body, or `None` if it cannot be read. Returns true if the
    /// body is a call.
    pub fn finish(self, calls: Option<Vec<Call>>, draft: &mut Draft, sink: Sink<'_>) -> bool {
        let Some(calls) = calls else { return self.decided };
        for (index, call) in calls.into_iter().enumerate() {
            if index >= self.begun {
                draft.begin_call(&call.name, sink);
                draft.arguments(&call.arguments, sink);
            } else if index + 1 == self.begun {
                let sent = &self.calls[index].arguments[..self.sent];
                match call.arguments.strip_prefix(sent) {
                    Some(rest) => draft.arguments(rest, sink),
                    // A repeated parameter was sent twice. In JSON, the last one counts.
                    None if serde_json::from_str::<Value>(sent).is_err() => {
                        draft.arguments("}", sink);
                    }
                    None => {}
                }
            }
        }
        true
    }
}

/// Returns the reader of a body, which may depend on how it begins.
fn reader_of(syntax: ToolSyntax, body: &str) -> Step<Box<dyn Read + Send>> {
    use json::{Described, Head, Named};
    let tags = |form| -> Box<dyn Read + Send> { Box::new(tags::Tags::new(form)) };
    let is_list = || {
        let Some(list) = body.trim_start().strip_prefix('[') else {
            return if body.trim_start().is_empty() { Err(Stop::More) } else { Ok(false) };
        };
        list.trim_start().chars().next().map(|c| c == '{').ok_or(Stop::More)
    };
    Ok(match syntax {
        ToolSyntax::Json
        | ToolSyntax::Llama
        | ToolSyntax::MarkedList(_)
        | ToolSyntax::Nemotron2
        | ToolSyntax::Hunyuan => Box::new(Described::default()),
        ToolSyntax::MistralList { .. } | ToolSyntax::MistralArguments { .. } => match is_list()? {
            true => Box::new(Described::default()),
            false => Box::new(Named::new(Head::Mistral)),
        },
        ToolSyntax::DeepSeek { .. } => Box::new(Named::new(Head::DeepSeek)),
        ToolSyntax::Kimi => Box::new(Named::new(Head::Kimi)),
        ToolSyntax::Solar => Box::new(Named::new(Head::Solar)),
        ToolSyntax::Cohere => Box::new(Described::of_cohere()),
        ToolSyntax::FunctionTags => tags(Form::Function { in_lines: true }),
        ToolSyntax::Seed => tags(Form::Function { in_lines: false }),
        ToolSyntax::ArgumentTags { .. } => tags(Form::Argument(&PLAIN)),
        ToolSyntax::Suffixed(marks) => tags(Form::Argument(&marks.arguments)),
        ToolSyntax::Dsml(names) => tags(tags::dsml(names)),
        ToolSyntax::MiniMax | ToolSyntax::Dots => tags(tags::MINIMAX),
        ToolSyntax::Atem => tags(tags::ATEM),
        ToolSyntax::Kimi3 => tags(Form::Kimi3),
        ToolSyntax::MiniMax3 => Box::new(minimax3::Elements::default()),
        ToolSyntax::FunctionGemma => Box::new(gemma::Members::new("<escape>")),
        ToolSyntax::Gemma4 => Box::new(gemma::Members::new("<|\"|>")),
        ToolSyntax::Python | ToolSyntax::Olmo3 => Box::new(python::Calls::default()),
        ToolSyntax::Lfm2 => match is_list()? || body.trim_start().starts_with('{') {
            true => Box::new(Described::default()),
            false => Box::new(python::Calls::default()),
        },
    })
}

/// A place in a body.
#[derive(Clone, Copy)]
struct Cursor<'a> {
    body: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn rest(&self) -> &'a str {
        &self.body[self.at..]
    }

    /// Skips white space.
    fn space(&mut self) {
        self.at = self.body.len() - self.rest().trim_start().len();
    }

    /// Returns the next character behind white space.
    fn next(&mut self) -> Step<char> {
        self.space();
        self.rest().chars().next().ok_or(Stop::More)
    }

    /// Takes a text if it comes next.
    fn takes(&mut self, text: &str) -> Step<bool> {
        let rest = self.rest();
        if rest.starts_with(text) {
            self.at += text.len();
            return Ok(true);
        }
        if text.starts_with(rest) { Err(Stop::More) } else { Ok(false) }
    }

    /// Takes a text, which must come next.
    fn expect(&mut self, text: &str) -> Step<()> {
        if self.takes(text)? { Ok(()) } else { Err(Stop::Wrong) }
    }

    /// Takes the text before a mark, and the mark.
    fn until(&mut self, mark: &str) -> Step<&'a str> {
        let rest = self.rest();
        match rest.find(mark) {
            Some(at) if at <= HEAD_BYTES_MAX => {
                self.at += at + mark.len();
                Ok(&rest[..at])
            }
            // The mark may still come early enough.
            None if rest.len() < HEAD_BYTES_MAX + mark.len() => Err(Stop::More),
            _ => Err(Stop::Wrong),
        }
    }
}

/// Returns a name, which has no white space in it.
fn name(text: &str) -> Step<&str> {
    let name = text.trim();
    match name.is_empty() || name.contains(char::is_whitespace) {
        true => Err(Stop::Wrong),
        false => Ok(name),
    }
}

/// Returns the call that is being read.
fn last(calls: &mut [Begun]) -> Step<&mut Begun> {
    calls.last_mut().ok_or(Stop::Wrong)
}

/// A value up to a mark, of which a text is sent as it comes.
struct Marked {
    /// Where the value begins.
    start: usize,
    /// Bytes of the body that were searched.
    searched: usize,
    /// Where the text begins that was not sent yet, if the value is a text.
    unsent: Option<usize>,
}

impl Marked {
    /// Begins a value at `start`. `is_text` says that it is sent as it comes.
    fn begin(start: usize, is_text: bool, call: &mut Begun) -> Marked {
        if is_text {
            call.quote();
        }
        Marked { start, searched: start, unsent: is_text.then_some(start) }
    }

    /// Looks for the mark. Returns the value without its last line end, if `strip` is set, and where the mark ends. The text of
    /// a text was sent then.
    fn read<'a>(
        &mut self,
        body: &'a str,
        mark: &str,
        strip: bool,
        call: &mut Begun,
    ) -> Step<(&'a str, usize)> {
        let found = body[self.searched..].find(mark).map(|at| self.searched + at);
        let end = match found {
            Some(at) if strip && body[self.start..at].ends_with('\n') => at - 1,
            Some(at) => at,
            None => {
                let held = super::overlap(body, mark);
                let line_end = body[..body.len() - held].ends_with('\n');
                let held = held + usize::from(strip && line_end);
                self.searched = self.searched.max(body.len().saturating_sub(mark.len()));
                self.searched = body.floor_char_boundary(self.searched);
                body.len().saturating_sub(held).max(self.start)
            }
        };
        self.send(body, end, call);
        match found {
            Some(at) => {
                if self.unsent.is_some() {
                    call.quote();
                }
                Ok((&body[self.start..end], at + mark.len()))
            }
            None => Err(Stop::More),
        }
    }

    /// Sends a text up to `end`.
    fn send(&mut self, body: &str, end: usize, call: &mut Begun) {
        if let Some(unsent) = &mut self.unsent
            && *unsent < end
        {
            call.text(&body[*unsent..end]);
            *unsent = end;
        }
    }
}
