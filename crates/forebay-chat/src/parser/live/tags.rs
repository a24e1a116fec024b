//! Calls whose arguments are between tags. Texts are sent as they come, other values when they are complete.

use std::convert::Infallible;

use super::super::tools::typed;
use super::{Begun, Cursor, Marked, Read, Step, Stop, last, name};
use crate::offer::Offer;

/// The tags of a syntax.
#[derive(Clone, Copy)]
pub enum Form {
    /// `<function=f><parameter=k>v</parameter></function>`
    Function,
    /// `f<arg_key>k</arg_key><arg_value>v</arg_value>`
    Argument,
    /// `<invoke name="f"><parameter name="k">v</parameter></invoke>`
    Invoke(&'static Invoke),
}

/// Beginnings and ends of the tags of calls of the form [`Form::Invoke`].
pub struct Invoke {
    call: &'static str,
    call_end: &'static str,
    parameter: &'static str,
    parameter_end: &'static str,
}

pub const DSML: Form = Form::Invoke(&Invoke {
    call: "<｜DSML｜invoke name=\"",
    call_end: "</｜DSML｜invoke>",
    parameter: "<｜DSML｜parameter name=\"",
    parameter_end: "</｜DSML｜parameter>",
});

pub const MINIMAX: Form = Form::Invoke(&Invoke {
    call: "<invoke name=\"",
    call_end: "</invoke>",
    parameter: "<parameter name=\"",
    parameter_end: "</parameter>",
});

/// Reader of such calls.
pub struct Tags {
    form: Form,
    at: usize,
    place: Place,
}

enum Place {
    Call,
    Member,
    /// A value whose type by the schema is known or not.
    Value(Option<bool>, Option<Marked>),
}

impl Tags {
    pub fn new(form: Form) -> Tags {
        Tags { form, at: 0, place: Place::Call }
    }

    fn step(&mut self, body: &str, calls: &mut Vec<Begun>, offer: &Offer) -> Step<()> {
        let mut cursor = Cursor { body, at: self.at };
        self.place = match &mut self.place {
            Place::Call => {
                calls.push(Begun::named(call(self.form, &mut cursor)?));
                Place::Member
            }
            Place::Member => match member(self.form, &mut cursor)? {
                Some((key, is_text)) => {
                    let call = last(calls)?;
                    call.key(key);
                    let name = call.name.as_deref().unwrap_or_default();
                    Place::Value(is_text.or_else(|| offer.is_text(name, key)), None)
                }
                None => {
                    last(calls)?.end();
                    Place::Call
                }
            },
            Place::Value(is_text, marked) => {
                let (mark, strip) = match self.form {
                    Form::Function => ("</parameter>", true),
                    Form::Argument => ("</arg_value>", false),
                    Form::Invoke(tags) => (tags.parameter_end, false),
                };
                let call = last(calls)?;
                let marked = match marked {
                    Some(marked) => marked,
                    None => {
                        if strip {
                            cursor.takes("\n")?;
                        }
                        marked.insert(Marked::begin(cursor.at, *is_text == Some(true), call))
                    }
                };
                let (text, end) = marked.read(body, mark, strip, call)?;
                if *is_text != Some(true) {
                    call.value(&typed(text, *is_text));
                }
                cursor.at = end;
                Place::Member
            }
        };
        self.at = cursor.at;
        Ok(())
    }
}

/// Reads the beginning of a call. Returns its name.
fn call<'a>(form: Form, cursor: &mut Cursor<'a>) -> Step<&'a str> {
    match form {
        Form::Function => {
            cursor.space();
            cursor.expect("<function=")?;
            Ok(cursor.until(">")?.trim())
        }
        Form::Argument => {
            let text = cursor.until("<arg_key>")?;
            cursor.at -= "<arg_key>".len();
            name(text)
        }
        Form::Invoke(tags) => {
            cursor.space();
            cursor.expect(tags.call)?;
            cursor.until("\">")
        }
    }
}

/// Reads up to the value of the next parameter. Returns its key, and whether the tag says that it is a text; or `None` at the end
/// of the call.
fn member<'a>(form: Form, cursor: &mut Cursor<'a>) -> Step<Option<(&'a str, Option<bool>)>> {
    match form {
        Form::Function => {
            cursor.until("<parameter=")?;
            Ok(Some((cursor.until(">")?.trim(), None)))
        }
        Form::Argument => {
            cursor.until("<arg_key>")?;
            let key = cursor.until("</arg_key>")?.trim();
            cursor.until("<arg_value>")?;
            Ok(Some((key, None)))
        }
        Form::Invoke(tags) => {
            cursor.space();
            if cursor.takes(tags.call_end)? {
                return Ok(None);
            }
            cursor.expect(tags.parameter)?;
            let head = cursor.until(">")?;
            let (key, attributes) = head.split_once('"').ok_or(Stop::Wrong)?;
            let is_text = match attributes.trim() {
                "string=\"true\"" => Some(true),
                "string=\"false\"" => Some(false),
                _ => None,
            };
            Ok(Some((key, is_text)))
        }
    }
}

impl Read for Tags {
    fn read(&mut self, body: &str, calls: &mut Vec<Begun>, offer: &Offer) -> Step<Infallible> {
        loop {
            self.step(body, calls, offer)?;
        }
    }
}
