//! Calls in the form of Python. Texts are sent as they come, other values when they are complete.

use std::convert::Infallible;

use super::super::python;
use super::super::value_end::ValueEnd;
use super::{Begun, Cursor, Read, Step, Stop, last};
use crate::offer::Offer;

/// Reader of `[f(a=1, b="x"), g()]`, or of such calls without a list around them.
#[derive(Default)]
pub struct Calls {
    at: usize,
    place: Place,
    in_list: bool,
}

#[derive(Default)]
enum Place {
    #[default]
    Begin,
    Call,
    /// The first argument, or the end of the call.
    First,
    /// Behind an argument.
    After,
    Key,
    /// A value. `false` says that it is no text by the schema.
    Value(Option<bool>),
    Text(char),
    Nested(ValueEnd),
    BehindCall,
}

impl Calls {
    fn step(&mut self, body: &str, calls: &mut Vec<Begun>, offer: &Offer) -> Step<()> {
        let mut cursor = Cursor { body, at: self.at };
        if let Place::Text(quote) = self.place {
            return self.text(body, quote, last(calls)?);
        }
        let next = cursor.next()?;
        self.place = match &mut self.place {
            Place::Begin => {
                self.in_list = cursor.takes("[")?;
                Place::Call
            }
            Place::Call => {
                let name = cursor.until("(")?.trim();
                if !python::is_name(name) {
                    return Err(Stop::Wrong);
                }
                calls.push(Begun::named(name));
                Place::First
            }
            Place::First | Place::After if next == ')' => {
                cursor.at += 1;
                last(calls)?.end();
                Place::BehindCall
            }
            Place::First => Place::Key,
            Place::After => {
                cursor.expect(",")?;
                // A comma may be behind the last argument, too.
                Place::First
            }
            Place::Key => {
                let key = cursor.until("=")?.trim();
                if !python::is_name(key) {
                    return Err(Stop::Wrong);
                }
                let call = last(calls)?;
                call.key(key);
                Place::Value(offer.is_text(call.name.as_deref().unwrap_or_default(), key))
            }
            Place::Value(is_text) => match next {
                '"' | '\'' if *is_text != Some(false) => {
                    last(calls)?.quote();
                    cursor.at += 1;
                    Place::Text(next)
                }
                // The schema decides what the text of another value is.
                '"' | '\'' => return Err(Stop::Wrong),
                '[' | '{' => {
                    self.at = cursor.at;
                    Place::Nested(ValueEnd::new(b"\"'", None))
                }
                _ => {
                    let end = cursor.rest().find([',', ')']).ok_or(Stop::More)?;
                    let value = python::value(&cursor.rest()[..=end]).ok_or(Stop::Wrong)?;
                    last(calls)?.value(&value);
                    cursor.at += end;
                    Place::After
                }
            },
            Place::Nested(end) => {
                let end = end.find(&body[self.at..]).ok_or(Stop::More)?;
                let value = python::value(&body[self.at..self.at + end]).ok_or(Stop::Wrong)?;
                last(calls)?.value(&value);
                cursor.at = self.at + end;
                Place::After
            }
            Place::BehindCall => match (next, self.in_list) {
                (',', _) => {
                    cursor.at += 1;
                    Place::Call
                }
                (_, true) => return Err(Stop::Wrong),
                // Calls without a list are in lines of their own.
                _ if body[self.at..cursor.at].contains('\n') => Place::Call,
                _ => return Err(Stop::Wrong),
            },
            Place::Text(_) => return Err(Stop::Wrong),
        };
        self.at = cursor.at;
        Ok(())
    }

    /// Sends a text up to its quotation mark.
    fn text(&mut self, body: &str, quote: char, call: &mut Begun) -> Step<()> {
        let mut text = String::new();
        let found = loop {
            let rest = &body[self.at..];
            let end = rest.find([quote, '\\']).unwrap_or(rest.len());
            text += &rest[..end];
            self.at += end;
            let rest = &rest[end..];
            if rest.starts_with(quote) {
                break Ok(());
            }
            match python::escape(rest) {
                _ if rest.is_empty() => break Err(Stop::More),
                Ok(Some((escaped, length))) => {
                    text += &escaped;
                    self.at += length;
                }
                Ok(None) => break Err(Stop::More),
                Err(()) => break Err(Stop::Wrong),
            }
        };
        call.text(&text);
        found?;
        call.quote();
        self.at += quote.len_utf8();
        self.place = Place::After;
        Ok(())
    }
}

impl Read for Calls {
    fn read(&mut self, body: &str, calls: &mut Vec<Begun>, offer: &Offer) -> Step<Infallible> {
        loop {
            self.step(body, calls, offer)?;
        }
    }
}
