//! Calls of Gemma 4 and FunctionGemma. Texts are sent as they come, other values when they are complete.

use std::convert::Infallible;

use serde_json::Value;

use super::super::gemma;
use super::{Begun, Cursor, Marked, Read, Step, Stop, last, name};
use crate::offer::Offer;

/// Reader of `call:f{key:value,...}`.
pub struct Members {
    /// Mark before and behind texts.
    quote: &'static str,
    at: usize,
    place: Place,
}

enum Place {
    Call,
    First,
    After,
    Key,
    Value,
    Text(Marked),
    /// A text in the quotation marks of JSON, of which this many bytes were searched, and whether an escape follows.
    Quoted(usize, bool),
    Nested(Nested),
}

/// The search for the end of a list or an object.
#[derive(Default)]
struct Nested {
    /// Bytes of the value that were searched.
    at: usize,
    depth: usize,
    in_text: bool,
}

impl Nested {
    /// Returns the bytes of the value. `text` begins with it.
    fn end(&mut self, text: &str, quote: &str) -> Step<usize> {
        while let Some(&byte) = text.as_bytes().get(self.at) {
            // A mark begins with a character of its own.
            if byte == quote.as_bytes()[0] {
                let rest = &text[self.at..];
                if quote.starts_with(rest) && rest.len() < quote.len() {
                    return Err(Stop::More);
                }
                if rest.starts_with(quote) {
                    self.in_text = !self.in_text;
                    self.at += quote.len();
                    continue;
                }
            }
            self.at += 1;
            match byte {
                _ if self.in_text => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Ok(self.at);
                    }
                }
                _ => {}
            }
        }
        Err(Stop::More)
    }
}

impl Members {
    pub fn new(quote: &'static str) -> Members {
        Members { quote, at: 0, place: Place::Call }
    }

    fn step(&mut self, body: &str, calls: &mut Vec<Begun>) -> Step<()> {
        let quote = self.quote;
        let mut cursor = Cursor { body, at: self.at };
        if let Place::Text(marked) = &mut self.place {
            (_, self.at) = marked.read(body, quote, false, last(calls)?)?;
            self.place = Place::After;
            return Ok(());
        }
        let next = cursor.next()?;
        self.place = match &mut self.place {
            Place::Call => {
                cursor.expect("call:")?;
                calls.push(Begun::named(name(cursor.until("{")?)?));
                Place::First
            }
            Place::First | Place::After if next == '}' => {
                last(calls)?.end();
                return Err(Stop::Wrong);
            }
            Place::First => Place::Key,
            Place::After => {
                cursor.expect(",")?;
                cursor.next()?;
                Place::First
            }
            Place::Key => {
                let key = match cursor.takes(quote)? {
                    true => cursor.until(quote)?,
                    false => {
                        let key = cursor.until(":")?.trim();
                        cursor.at -= 1;
                        key
                    }
                };
                cursor.space();
                cursor.expect(":")?;
                if key.is_empty() {
                    return Err(Stop::Wrong);
                }
                last(calls)?.key(key);
                Place::Value
            }
            Place::Value => match next {
                '{' | '[' => Place::Nested(Nested::default()),
                '"' => Place::Quoted(1, false),
                _ if cursor.takes(quote)? => {
                    Place::Text(Marked::begin(cursor.at, true, last(calls)?))
                }
                _ => {
                    let end = cursor.rest().find([',', '}', ']']).ok_or(Stop::More)?;
                    let value = gemma::value(&cursor.rest()[..=end], quote).ok_or(Stop::Wrong)?;
                    last(calls)?.value(&value);
                    cursor.at += end;
                    Place::After
                }
            },
            Place::Quoted(at, is_escaped) => {
                let bytes = cursor.rest().as_bytes();
                while let Some(byte) = bytes.get(*at).filter(|byte| **byte != b'"' || *is_escaped) {
                    *is_escaped = *byte == b'\\' && !*is_escaped;
                    *at += 1;
                }
                let text = cursor.rest().get(..*at + 1).ok_or(Stop::More)?;
                let value: Value = serde_json::from_str(text).map_err(|_| Stop::Wrong)?;
                last(calls)?.value(&value);
                cursor.at += text.len();
                Place::After
            }
            Place::Nested(nested) => {
                let end = nested.end(cursor.rest(), quote)?;
                let value = gemma::value(&cursor.rest()[..end], quote).ok_or(Stop::Wrong)?;
                last(calls)?.value(&value);
                cursor.at += end;
                Place::After
            }
            Place::Text(_) => return Err(Stop::Wrong),
        };
        self.at = cursor.at;
        Ok(())
    }
}

impl Read for Members {
    fn read(&mut self, body: &str, calls: &mut Vec<Begun>, _: &Offer) -> Step<Infallible> {
        loop {
            self.step(body, calls)?;
        }
    }
}
