//! Calls of Kimi K3: elements whose tags are between marks.
//!
//! With `(`, `)` and `|` for `<|open|>`, `<|close|>` and `<|sep|>`: `(call tool="f" index="1"|(argument key="k"
//! type="string"|v)argument|)call|`. Instead of arguments, a call may have one element `json` with all of them.

use serde_json::{Map, Value};

use super::tools::{Call, typed};
use crate::offer::Offer;

pub const CALL: &str = "<|open|>call";
pub const CALL_END: &str = "<|close|>call<|sep|>";
pub const ARGUMENT: &str = "<|open|>argument";
pub const ARGUMENT_END: &str = "<|close|>argument<|sep|>";
pub const SEPARATOR: &str = "<|sep|>";
const JSON: &str = "<|open|>json";
const JSON_END: &str = "<|close|>json<|sep|>";

/// Parses the calls of a block.
pub fn calls(body: &str, offer: &Offer) -> Option<Vec<Call>> {
    let mut calls = Vec::new();
    let mut rest = body.trim();
    while !rest.is_empty() {
        let (head, inside) = rest.strip_prefix(CALL)?.split_once(SEPARATOR)?;
        let name = attribute(head, "tool")?;
        let (call, behind) = of(&name, inside, offer)?;
        calls.push(call);
        rest = behind.trim_start();
    }
    (!calls.is_empty()).then_some(calls)
}

/// Parses the elements of a call. Returns the text behind its end.
fn of<'a>(name: &str, inside: &'a str, offer: &Offer) -> Option<(Call, &'a str)> {
    let mut arguments = Map::new();
    let mut rest = inside.trim_start();
    loop {
        if let Some(behind) = rest.strip_prefix(CALL_END) {
            return Some((Call::of(name, arguments), behind));
        }
        if let Some(element) = rest.strip_prefix(JSON) {
            let (_, value) = element.split_once(SEPARATOR)?;
            let (object, behind) = value.split_once(JSON_END)?;
            arguments.extend(serde_json::from_str::<Map<String, Value>>(object).ok()?);
            rest = behind.trim_start();
            continue;
        }
        let (head, value) = rest.strip_prefix(ARGUMENT)?.split_once(SEPARATOR)?;
        let (value, behind) = value.split_once(ARGUMENT_END)?;
        let key = attribute(head, "key")?;
        let is_text = is_text(head).or_else(|| offer.is_text(name, &key));
        arguments.insert(key, typed(value, is_text));
        rest = behind.trim_start();
    }
}

/// Returns true if the tag of an argument says that it is a text, and `None` if it does not say its type.
pub fn is_text(head: &str) -> Option<bool> {
    attribute(head, "type").map(|kind| kind == "string")
}

/// Returns the value of an attribute in the text behind the name of a tag.
pub fn attribute(head: &str, name: &str) -> Option<String> {
    let mut rest = head;
    loop {
        let (key, value) = rest.trim_start().split_once("=\"")?;
        let (value, behind) = value.split_once('"')?;
        if key == name {
            return Some(value.replace("&quot;", "\"").replace("&amp;", "&"));
        }
        rest = behind;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Vec<(String, String)>> {
        let text = text.replace('(', "<|open|>").replace(')', "<|close|>").replace('|', "\u{1}");
        let text = text.replace("<\u{1}", "<|").replace("\u{1}>", "|>").replace('\u{1}', SEPARATOR);
        let calls = calls(&text, &Offer::Unknown)?;
        Some(calls.into_iter().map(|call| (call.name, call.arguments)).collect())
    }

    #[test]
    fn elements() {
        let call = |name: &str, arguments: &str| (name.to_owned(), arguments.to_owned());
        let text = "(call tool=\"f\" index=\"1\"|(argument key=\"a\" type=\"string\"|1 < 2)argument|\n\
                    (argument key=\"b\" type=\"array\"|[1, 2])argument|(argument type=\"null\" key=\"c\"|null)argument|)call|\n\
                    (call index=\"2\" tool=\"g&quot;&amp;\"|)call|";
        let expected = [call("f", "{\"a\":\"1 < 2\",\"b\":[1,2],\"c\":null}"), call("g\"&", "{}")];
        assert_eq!(parse(text).unwrap(), expected);
        let json = "(call tool=\"f\"|(json type=\"object\"|{\"x\": 1})json|)call|";
        assert_eq!(parse(json).unwrap(), [call("f", "{\"x\":1}")]);
    }

    #[test]
    fn other_texts() {
        for text in [
            "",
            "(call|)call|",
            "(call tool=\"f\"|",
            "(call tool=\"f\"|text)call|",
            "(call tool=\"f\"|(argument type=\"string\"|1)argument|)call|",
            "(call tool=\"f\"|(argument key=\"a\"|1)call|",
            "(call tool=\"f\"|(json|[1])json|)call|",
            "(call tool=\"f\"|)call| and",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
