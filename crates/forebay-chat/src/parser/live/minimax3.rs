//! Calls of MiniMax M3. Texts are sent as they come, other values when they are complete.

use std::convert::Infallible;

use serde_json::Value;

use super::super::minimax3;
use super::{Begun, Cursor, Marked, Read, Step, Stop, last};
use crate::offer::{Offer, is_text, referenced};
use crate::syntax::MINIMAX3;

/// Reader of `@<invoke name="f">@<city>Bern@</city>@</invoke>`, with `@` for the mark.
#[derive(Default)]
pub struct Elements {
    at: usize,
    place: Place,
    /// An element that may be repeated, which makes a list of it.
    held: Option<(String, Value)>,
}

#[derive(Default)]
enum Place {
    #[default]
    Call,
    Member,
    Text(String, Marked),
    Element(String, Depth),
}

/// The search for the end of an element.
struct Depth {
    /// Bytes of the body that were searched.
    at: usize,
    open: usize,
}

impl Depth {
    /// Returns where the tag ends that closes the element.
    fn end(&mut self, body: &str) -> Step<usize> {
        loop {
            let Some(found) = body[self.at..].find(MINIMAX3) else {
                let searched = body.len().saturating_sub(MINIMAX3.len());
                self.at = body.floor_char_boundary(searched.max(self.at));
                return Err(Stop::More);
            };
            let mut cursor = Cursor { body, at: self.at + found };
            match tag(&mut cursor)?.starts_with('/') {
                true => self.open -= 1,
                false => self.open += 1,
            }
            self.at = cursor.at;
            if self.open == 0 {
                return Ok(self.at);
            }
        }
    }
}

/// Takes a tag and the mark before it. Returns the text between `<` and `>`.
fn tag<'a>(cursor: &mut Cursor<'a>) -> Step<&'a str> {
    cursor.space();
    cursor.expect(MINIMAX3)?;
    cursor.space();
    cursor.expect("<")?;
    cursor.until(">")
}

impl Elements {
    fn step(&mut self, body: &str, calls: &mut Vec<Begun>, offer: &Offer) -> Step<()> {
        let mut cursor = Cursor { body, at: self.at };
        self.place = match &mut self.place {
            Place::Call => {
                let name = tag(&mut cursor)?.strip_prefix("invoke name=\"");
                let name = name.and_then(|name| name.strip_suffix('"')).ok_or(Stop::Wrong)?;
                calls.push(Begun::named(name));
                Place::Member
            }
            Place::Member => {
                let tag = tag(&mut cursor)?;
                let call = last(calls)?;
                if tag.is_empty() || tag.starts_with('/') && tag[1..].trim() != "invoke" {
                    return Err(Stop::Wrong);
                }
                if let Some((key, value)) = self.held.take_if(|(key, _)| key != tag) {
                    call.key(&key);
                    call.value(&value);
                }
                match tag.starts_with('/') {
                    true => {
                        call.end();
                        Place::Call
                    }
                    false if is_declared_text(call, tag, offer) => {
                        call.key(tag);
                        Place::Text(tag.to_owned(), Marked::begin(cursor.at, true, call))
                    }
                    false => Place::Element(tag.to_owned(), Depth { at: cursor.at, open: 1 }),
                }
            }
            Place::Text(key, marked) => {
                let call = last(calls)?;
                // The tag behind the text must be there before the quotation mark is sent.
                if let Some(found) = body[marked.searched..].find(MINIMAX3) {
                    let mut cursor = Cursor { body, at: marked.searched + found };
                    let tag = tag(&mut cursor)?;
                    if tag.strip_prefix('/').is_none_or(|closed| closed.trim() != key) {
                        return Err(Stop::Wrong);
                    }
                }
                let (_, end) = marked.read(body, MINIMAX3, false, call)?;
                cursor.at = end - MINIMAX3.len();
                tag(&mut cursor)?;
                Place::Member
            }
            Place::Element(key, depth) => {
                cursor.at = depth.end(body)?;
                let call = last(calls)?;
                let name = call.name.as_deref().unwrap_or_default();
                let text = &body[self.at..cursor.at];
                let value = minimax3::member(text, key, name, offer).ok_or(Stop::Wrong)?;
                match &mut self.held {
                    Some((_, first)) => minimax3::add(first, value),
                    held => *held = Some((std::mem::take(key), value)),
                }
                Place::Member
            }
        };
        self.at = cursor.at;
        Ok(())
    }
}

fn is_declared_text(call: &Begun, key: &str, offer: &Offer) -> bool {
    let whole = call.name.as_deref().and_then(|name| offer.schema(name));
    let schema = whole.and_then(|whole| Some((whole, whole.get("properties")?.get(key)?)));
    schema.is_some_and(|(whole, schema)| is_text(referenced(whole, schema)) == Some(true))
}

impl Read for Elements {
    fn read(&mut self, body: &str, calls: &mut Vec<Begun>, offer: &Offer) -> Step<Infallible> {
        loop {
            self.step(body, calls, offer)?;
        }
    }
}
