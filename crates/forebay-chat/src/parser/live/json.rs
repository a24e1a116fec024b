//! Calls whose arguments are JSON, which is sent as the model writes it.

use std::convert::Infallible;

use serde_json::value::RawValue;

use super::super::json_calls::FUNCTOOLS;
use super::{Begun, Cursor, Read, Step, Stop, last, name};
use crate::offer::Offer;

/// Deepest nesting of lists and objects.
const DEPTH_MAX: usize = 100;

/// Finds the end of a JSON value, and looks at each byte once.
struct Scan {
    at: usize,
    /// Opening brackets.
    open: Vec<u8>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Value,
    /// A value, or the end of the list.
    Item,
    /// A key, or the end of the object.
    Member,
    Key,
    Colon,
    After,
    Text {
        is_key: bool,
        is_escaped: bool,
    },
    /// A number or a word, which begins here.
    Word(usize),
}

impl Scan {
    fn new(at: usize) -> Scan {
        Scan { at, open: Vec::new(), state: State::Value }
    }

    /// Returns where the value ends. `self.at` is where the scan stopped.
    fn end(&mut self, body: &str) -> Step<usize> {
        while let Some(&byte) = body.as_bytes().get(self.at) {
            if let State::Word(start) = self.state
                && matches!(byte, b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t')
            {
                let word: Result<&RawValue, _> = serde_json::from_str(&body[start..self.at]);
                self.state = word.map(|_| State::After).map_err(|_| Stop::Wrong)?;
                if self.open.is_empty() {
                    return Ok(self.at);
                }
            }
            self.state = self.next(byte)?;
            self.at += 1;
            if self.state == State::After && self.open.is_empty() {
                return Ok(self.at);
            }
        }
        Err(Stop::More)
    }

    fn next(&mut self, byte: u8) -> Step<State> {
        let text = |is_key| State::Text { is_key, is_escaped: false };
        let is_space = matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
        Ok(match (self.state, byte) {
            (State::Text { is_key, is_escaped: true }, _) => text(is_key),
            (State::Text { is_key, .. }, b'\\') => State::Text { is_key, is_escaped: true },
            (State::Text { is_key, .. }, b'"') => {
                if is_key {
                    State::Colon
                } else {
                    State::After
                }
            }
            (State::Text { .. }, 0..0x20) => return Err(Stop::Wrong),
            (state @ (State::Text { .. } | State::Word(_)), _) => state,
            (state, _) if is_space => state,
            (State::Value | State::Item, b'{' | b'[') => {
                if self.open.len() == DEPTH_MAX {
                    return Err(Stop::Wrong);
                }
                self.open.push(byte);
                if byte == b'{' { State::Member } else { State::Item }
            }
            (State::Value | State::Item, b'"') => text(false),
            (State::Value | State::Item, b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => {
                State::Word(self.at)
            }
            (State::Member | State::Key, b'"') => text(true),
            (State::Colon, b':') => State::Value,
            (State::After, b',') => match self.open.last() {
                Some(b'{') => State::Key,
                _ => State::Value,
            },
            (State::Item | State::After, b']') if self.open.last() == Some(&b'[') => self.close(),
            (State::Member | State::After, b'}') if self.open.last() == Some(&b'{') => self.close(),
            _ => return Err(Stop::Wrong),
        })
    }

    fn close(&mut self) -> State {
        self.open.pop();
        State::After
    }
}

/// Arguments that are sent as they are written.
struct Raw {
    scan: Scan,
    sent: usize,
}

impl Raw {
    fn new(start: usize) -> Raw {
        Raw { scan: Scan::new(start), sent: start }
    }

    /// Reads on. Returns where the arguments end.
    fn read(&mut self, body: &str, call: &mut Begun) -> Step<usize> {
        let end = self.scan.end(body);
        call.arguments += &body[self.sent..self.scan.at];
        self.sent = self.scan.at;
        end
    }
}

/// Text before the arguments, which has the name.
#[derive(Clone, Copy)]
pub enum Head {
    /// `f[ARGS]{...}`, `f[CALL_ID]id[ARGS]{...}` or `f{...}`
    Mistral,
    /// `f<｜tool▁sep｜>{...}`, or `function<｜tool▁sep｜>f` and a code block
    DeepSeek,
    /// `functions.f:0<|tool_call_argument_begin|>{...}`
    Kimi,
    /// `ID<|tool_call:name|>f<|tool_call:args|>{...}`
    Solar,
}

/// A name and arguments behind it.
pub struct Named {
    head: Head,
    arguments: Option<Raw>,
}

impl Named {
    pub fn new(head: Head) -> Named {
        Named { head, arguments: None }
    }

    /// Returns the name, and where the arguments begin.
    fn head<'a>(&self, cursor: &mut Cursor<'a>) -> Step<&'a str> {
        match self.head {
            Head::Mistral => {
                let rest = cursor.rest();
                let object = rest.find('{').ok_or(Stop::More);
                let (end, begin) = match rest.find("[ARGS]") {
                    Some(at) if object.as_ref().is_ok_and(|object| at < *object) => {
                        (at, at + "[ARGS]".len())
                    }
                    _ => object.map(|object| (object, object))?,
                };
                cursor.at += begin;
                Ok(rest[..end].split("[CALL_ID]").next().unwrap_or_default())
            }
            Head::DeepSeek => {
                let before = cursor.until("<｜tool▁sep｜>")?;
                match cursor.next()? {
                    '{' => Ok(before),
                    _ => cursor.until("```json"),
                }
            }
            Head::Kimi => {
                let id = cursor.until("<|tool_call_argument_begin|>")?.trim();
                Ok(super::super::json_calls::name_of_id(id))
            }
            Head::Solar => {
                cursor.until("<|tool_call:name|>")?;
                cursor.until("<|tool_call:args|>")
            }
        }
    }
}

impl Read for Named {
    fn read(&mut self, body: &str, calls: &mut Vec<Begun>, _: &Offer) -> Step<Infallible> {
        if self.arguments.is_none() {
            let mut cursor = Cursor { body, at: 0 };
            let name = name(self.head(&mut cursor)?)?;
            if cursor.next()? != '{' {
                return Err(Stop::Wrong);
            }
            calls.push(Begun::named(name));
            self.arguments = Some(Raw::new(cursor.at));
        }
        if let Some(arguments) = &mut self.arguments {
            arguments.read(body, last(calls)?)?;
        }
        Err(Stop::Wrong)
    }
}

/// `{"name": "f", "arguments": {...}}`, or a list of such objects.
#[derive(Default)]
pub struct Described {
    /// True if the key of the name is `tool_name`.
    of_cohere: bool,
    at: usize,
    place: Place,
    in_list: bool,
    /// True within the value of `function`.
    in_function: bool,
    has_arguments: bool,
}

#[derive(Default)]
enum Place {
    #[default]
    Begin,
    Object,
    /// A key, or the end of the object.
    Member,
    Key,
    Value(Field, Option<Raw>),
    After,
    BetweenObjects,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Function,
    Other,
}

impl Described {
    /// Creates a reader of `{"tool_name": "f", "parameters": {...}}`, or of a list of such objects.
    pub fn of_cohere() -> Described {
        Described { of_cohere: true, ..Described::default() }
    }

    fn step(&mut self, body: &str, calls: &mut Vec<Begun>) -> Step<()> {
        let mut cursor = Cursor { body, at: self.at };
        let next = cursor.next()?;
        self.place = match &mut self.place {
            Place::Begin => {
                let functools = FUNCTOOLS.trim_end_matches('[');
                if next == 'f' && !self.of_cohere {
                    cursor.expect(functools)?;
                }
                self.in_list = cursor.next()? == '[';
                cursor.at += usize::from(self.in_list);
                Place::Object
            }
            Place::Object => {
                cursor.expect("{")?;
                calls.push(Begun::default());
                self.has_arguments = false;
                Place::Member
            }
            Place::Member if next == '}' => {
                cursor.at += 1;
                self.end_object(last(calls)?)?
            }
            Place::Member | Place::Key => {
                if next != '"' {
                    return Err(Stop::Wrong);
                }
                let mut scan = Scan::new(cursor.at);
                let start = cursor.at;
                cursor.at = scan.end(body)?;
                let key: String =
                    serde_json::from_str(&body[start..cursor.at]).map_err(|_| Stop::Wrong)?;
                cursor.space();
                cursor.expect(":")?;
                let field = match key.as_str() {
                    "name" if !self.of_cohere => Field::Name,
                    "tool_name" if self.of_cohere => Field::Name,
                    "arguments" | "parameters" => Field::Arguments,
                    "function" if !self.of_cohere => Field::Function,
                    _ => Field::Other,
                };
                Place::Value(field, None)
            }
            Place::Value(field, raw) => {
                let call = last(calls)?;
                match *field {
                    Field::Function if next == '{' && !self.in_function && call.name.is_none() => {
                        if self.has_arguments {
                            return Err(Stop::Wrong);
                        }
                        self.in_function = true;
                        cursor.at += 1;
                        Place::Member
                    }
                    Field::Arguments if self.has_arguments && raw.is_none() => {
                        return Err(Stop::Wrong);
                    }
                    Field::Arguments if matches!(next, '{' | '[') => {
                        self.has_arguments = true;
                        let raw = raw.get_or_insert_with(|| Raw::new(cursor.at));
                        cursor.at = raw.read(body, call)?;
                        Place::After
                    }
                    field => {
                        let start = cursor.at;
                        let raw = raw.get_or_insert_with(|| Raw::new(start));
                        cursor.at = raw.scan.end(body)?;
                        self.has_arguments |= field == Field::Arguments;
                        take(field, &body[start..cursor.at], call)?;
                        Place::After
                    }
                }
            }
            Place::After if next == ',' => {
                cursor.at += 1;
                Place::Key
            }
            Place::After => {
                cursor.expect("}")?;
                self.end_object(last(calls)?)?
            }
            Place::BetweenObjects => {
                cursor.expect(",")?;
                Place::Object
            }
        };
        self.at = cursor.at;
        Ok(())
    }

    /// Ends an object: the value of `function`, or the call.
    fn end_object(&mut self, call: &mut Begun) -> Step<Place> {
        if std::mem::take(&mut self.in_function) {
            return Ok(Place::After);
        }
        if call.name.is_none() {
            return Err(Stop::Wrong);
        }
        if call.arguments.is_empty() {
            call.end();
        }
        if self.in_list { Ok(Place::BetweenObjects) } else { Err(Stop::Wrong) }
    }
}

/// Takes a value that is not sent as it is written.
fn take(field: Field, text: &str, call: &mut Begun) -> Step<()> {
    match field {
        Field::Name if call.name.is_some() => return Err(Stop::Wrong),
        Field::Name => call.name = Some(serde_json::from_str(text).map_err(|_| Stop::Wrong)?),
        Field::Arguments if text == "null" => {}
        Field::Arguments => {
            // Some models write the object as text.
            let inner = serde_json::from_str::<String>(text);
            call.arguments = inner.unwrap_or_else(|_| text.to_owned());
        }
        Field::Function | Field::Other => {}
    }
    Ok(())
}

impl Read for Described {
    fn read(&mut self, body: &str, calls: &mut Vec<Begun>, _: &Offer) -> Step<Infallible> {
        loop {
            self.step(body, calls)?;
        }
    }
}
