//! Calls whose arguments are between tags. Texts are sent as they come, other values when they are complete.

use std::borrow::Cow;
use std::convert::Infallible;

use super::super::kimi3;
use super::super::tools::typed;
use super::{Begun, Cursor, Marked, Read, Step, Stop, last};
use crate::DsmlNames;
use crate::offer::Offer;
use crate::suffixed::ArgumentMarks;

/// The tags of a syntax.
#[derive(Clone, Copy)]
pub enum Form {
    /// `<function=f><parameter=k>v</parameter></function>`. `in_lines` says that a line end before and behind a value
    /// is no part of it.
    Function { in_lines: bool },
    /// `f<arg_key>k</arg_key><arg_value>v</arg_value>`
    Argument(&'static ArgumentMarks),
    /// `<invoke name="f"><parameter name="k">v</parameter></invoke>`
    Invoke(&'static Invoke),
    /// `<|open|>call tool="f"<|sep|><|open|>argument key="k"
    /// type="string"<|sep|>v<|close|>argument<|sep|><|close|>call<|sep|>`
    Kimi3,
}

/// Beginnings and ends of the tags of calls of the form [`Form::Invoke`].
pub struct Invoke {
    call: &'static str,
    call_end: &'static str,
    parameter: &'static str,
    parameter_end: &'static str,
}

const DSML: Form = Form::Invoke(&Invoke {
    call: "<｜DSML｜invoke name=\"",
    call_end: "</｜DSML｜invoke>",
    parameter: "<｜DSML｜parameter name=\"",
    parameter_end: "</｜DSML｜parameter>",
});

const DSML_SPACED: Form = Form::Invoke(&Invoke {
    call: "<｜DSML｜ invoke name=\"",
    call_end: "</｜DSML｜ invoke>",
    parameter: "<｜DSML｜ parameter name=\"",
    parameter_end: "</｜DSML｜ parameter>",
});

/// Returns the tags of a block of DeepSeek.
pub fn dsml(names: DsmlNames) -> Form {
    if names == DsmlNames::V41 { DSML_SPACED } else { DSML }
}

pub const ATEM: Form = Form::Invoke(&Invoke {
    call: "<atem:invoke name=\"",
    call_end: "</atem:invoke>",
    parameter: "<atem:parameter name=\"",
    parameter_end: "</atem:parameter>",
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
                calls.push(Begun::named(&call(self.form, &mut cursor)?));
                Place::Member
            }
            Place::Member => match member(self.form, &mut cursor)? {
                Some((key, is_text)) => {
                    let call = last(calls)?;
                    call.key(&key);
                    let name = call.name.as_deref().unwrap_or_default();
                    Place::Value(is_text.or_else(|| offer.is_text(name, &key)), None)
                }
                None => {
                    last(calls)?.end();
                    Place::Call
                }
            },
            Place::Value(is_text, marked) => {
                let (mark, strip) = match self.form {
                    Form::Function { in_lines } => ("</parameter>", in_lines),
                    Form::Argument(marks) => (marks.value[1], false),
                    Form::Invoke(tags) => (tags.parameter_end, false),
                    Form::Kimi3 => (kimi3::ARGUMENT_END, false),
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
fn call<'a>(form: Form, cursor: &mut Cursor<'a>) -> Step<Cow<'a, str>> {
    match form {
        Form::Function { .. } => {
            cursor.space();
            cursor.expect("<function=")?;
            Ok(cursor.until(">")?.trim().into())
        }
        Form::Argument(marks) => {
            let text = cursor.until(marks.key[0])?;
            cursor.at -= marks.key[0].len();
            marks.name(text).map(Cow::from).ok_or(Stop::Wrong)
        }
        Form::Invoke(tags) => {
            cursor.space();
            cursor.expect(tags.call)?;
            Ok(cursor.until("\">")?.into())
        }
        Form::Kimi3 => {
            cursor.space();
            cursor.expect(kimi3::CALL)?;
            let head = cursor.until(kimi3::SEPARATOR)?;
            kimi3::attribute(head, "tool").map(Cow::from).ok_or(Stop::Wrong)
        }
    }
}

/// A key, and whether the tag says that the value is a text.
type Member<'a> = (Cow<'a, str>, Option<bool>);

/// Reads up to the value of the next parameter. Returns `None` at the end of the call.
fn member<'a>(form: Form, cursor: &mut Cursor<'a>) -> Step<Option<Member<'a>>> {
    match form {
        Form::Function { .. } => {
            cursor.until("<parameter=")?;
            Ok(Some((cursor.until(">")?.trim().into(), None)))
        }
        Form::Argument(marks) => {
            cursor.until(marks.key[0])?;
            let key = cursor.until(marks.key[1])?.trim();
            cursor.until(marks.value[0])?;
            Ok(Some((key.into(), None)))
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
            Ok(Some((key.into(), is_text)))
        }
        Form::Kimi3 => {
            cursor.space();
            if cursor.takes(kimi3::CALL_END)? {
                return Ok(None);
            }
            cursor.expect(kimi3::ARGUMENT)?;
            let head = cursor.until(kimi3::SEPARATOR)?;
            let key = kimi3::attribute(head, "key").ok_or(Stop::Wrong)?;
            Ok(Some((key.into(), kimi3::is_text(head))))
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
