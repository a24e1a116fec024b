//! Calls of MiniMax M3: tags with a mark before each of them, also within lists and objects.
//!
//! With `@` for the mark: `@<invoke name="f">@<city>Bern@</city>@<days>@<item>1@</item>@</days>@</invoke>`

use serde_json::{Map, Value};

use super::tools::{Call, typed};
use crate::offer::{Offer, is_text, referenced};
use crate::syntax::MINIMAX3;

/// Deepest nesting of lists and objects.
const DEPTH_MAX: usize = 64;

/// Schema of any value.
const ANY: &Value = &Value::Null;

/// Parses the calls of a block.
pub fn calls(body: &str, offer: &Offer) -> Option<Vec<Call>> {
    let mut reader = Reader { rest: body };
    let mut calls = Vec::new();
    while !reader.rest.trim().is_empty() {
        let name = reader.tag()?.strip_prefix("invoke name=\"")?.strip_suffix('"')?;
        let node = reader.inside("invoke", 0)?;
        let members = match node {
            Node::Text(text) if text.trim().is_empty() => Vec::new(),
            Node::Text(_) => return None,
            Node::Members(members) => members,
        };
        let whole = offer.schema(name).unwrap_or(ANY);
        let arguments = object(members, whole, whole);
        calls.push(Call { name: name.to_owned(), arguments: Value::Object(arguments).to_string() });
    }
    (!calls.is_empty()).then_some(calls)
}

/// The content of an element, between its two tags.
enum Node<'a> {
    Text(&'a str),
    Members(Vec<(&'a str, Node<'a>)>),
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    /// Takes a tag and the mark before it. Returns the text between `<` and `>`.
    fn tag(&mut self) -> Option<&'a str> {
        let behind = self.rest.trim_start().strip_prefix(MINIMAX3)?;
        let (tag, rest) = behind.trim_start().strip_prefix('<')?.split_once('>')?;
        self.rest = rest;
        Some(tag)
    }

    /// Reads up to the end of the element `name`.
    fn inside(&mut self, name: &str, depth: usize) -> Option<Node<'a>> {
        if depth > DEPTH_MAX {
            return None;
        }
        let (text, _) = self.rest.split_once(MINIMAX3)?;
        self.rest = &self.rest[text.len()..];
        let mut members = Vec::new();
        loop {
            let tag = self.tag()?;
            if let Some(closed) = tag.strip_prefix('/') {
                let is_text = members.is_empty();
                let node = if is_text { Node::Text(text) } else { Node::Members(members) };
                return (closed.trim() == name).then_some(node);
            }
            // Text beside elements has no place in JSON.
            if !text.trim().is_empty() || tag.is_empty() {
                return None;
            }
            members.push((tag, self.inside(tag, depth + 1)?));
        }
    }
}

/// Converts an element. `schema` is that of its value, and `whole` that of all arguments, which references lead into.
fn value(node: Node<'_>, schema: &Value, whole: &Value) -> Value {
    let schema = referenced(whole, schema);
    let kind = schema.get("type").and_then(Value::as_str);
    match node {
        Node::Text("") if kind == Some("array") => Value::Array(Vec::new()),
        Node::Text("") if kind == Some("object") => Value::Object(Map::new()),
        Node::Text(text) => typed(text, is_text(schema)),
        Node::Members(members) => {
            let are_items = members.iter().all(|(name, _)| *name == "item");
            if are_items && kind != Some("object") {
                let items = schema.get("items").unwrap_or(ANY);
                return members.into_iter().map(|(_, node)| value(node, items, whole)).collect();
            }
            Value::Object(object(members, schema, whole))
        }
    }
}

fn object(members: Vec<(&str, Node<'_>)>, schema: &Value, whole: &Value) -> Map<String, Value> {
    let mut object = Map::new();
    let properties = schema.get("properties").unwrap_or(ANY);
    for (name, node) in members {
        let value = value(node, properties.get(name).unwrap_or(ANY), whole);
        match object.get_mut(name) {
            None => {
                object.insert(name.to_owned(), value);
            }
            Some(first) => add(first, value),
        }
    }
    object
}

/// Adds the value of a repeated element. Some answers repeat the tag of a list instead of writing items.
pub fn add(first: &mut Value, value: Value) {
    match first {
        Value::Array(list) => list.push(value),
        first => *first = Value::Array(vec![first.take(), value]),
    }
}

/// Parses the value of a parameter. `text` is the element without its first tag.
pub fn member(text: &str, key: &str, tool: &str, offer: &Offer) -> Option<Value> {
    let node = Reader { rest: text }.inside(key, 0)?;
    let whole = offer.schema(tool).unwrap_or(ANY);
    let properties = whole.get("properties").unwrap_or(ANY);
    Some(value(node, properties.get(key).unwrap_or(ANY), whole))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(text: &str, offer: &Offer) -> Option<Vec<(String, String)>> {
        let calls = calls(&text.replace('@', MINIMAX3), offer)?;
        Some(calls.into_iter().map(|call| (call.name, call.arguments)).collect())
    }

    #[test]
    fn values() {
        let text = "\n@<invoke name=\"f\">@<city>Bern <b>\n@</city>@<deep>@<list>@<item>1@</item>@<item>x@</item>@</list>\
                    @<on>true@</on>@</deep>@</invoke>\n@ <invoke name=\"g\">\n@</invoke>\n";
        let arguments = r#"{"city":"Bern <b>\n","deep":{"list":[1,"x"],"on":true}}"#;
        let expected = [("f", arguments), ("g", "{}")];
        let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(parse(text, &Offer::Unknown), Some(expected.to_vec()));
        let text = "@<invoke name=\"f\">@<a>1@</a>@<a>2@</a>@<a>3@</a>@</invoke>";
        let expected = vec![("f".to_owned(), "{\"a\":[1,2,3]}".to_owned())];
        assert_eq!(parse(text, &Offer::Unknown), Some(expected));
    }

    #[test]
    fn the_schema_decides_also_behind_references() {
        let place = json!({ "type": "object", "properties": {
            "zip": { "$ref": "#/$defs/Zip" }, "days": { "type": "integer" }, "near": { "$ref": "#/$defs/Places" },
        } });
        let places = json!({ "type": "array", "items": { "$ref": "#/$defs/Place" } });
        let parameters = json!({
            "type": "object",
            "properties": { "places": places, "zip": { "$ref": "#/$defs/Zip" }, "none": { "$ref": "#/$defs/Places" } },
            "$defs": { "Place": place, "Places": places, "Zip": { "type": "string" } },
        });
        let function = json!({ "name": "f", "parameters": parameters });
        let offer = Offer::of(Some(&json!([{ "type": "function", "function": function }])));
        let near = "@<near>@<item>@<zip>1@</zip>@</item>@</near>";
        let text = format!(
            "@<invoke name=\"f\">@<places>@<item>@<zip>3000@</zip>@<days>3@</days>{near}@</item>@</places>\
             @<zip>8000@</zip>@<none>@</none>@</invoke>"
        );
        let arguments =
            r#"{"places":[{"zip":"3000","days":3,"near":[{"zip":"1"}]}],"zip":"8000","none":[]}"#;
        assert_eq!(parse(&text, &offer), Some(vec![("f".to_owned(), arguments.to_owned())]));
    }

    #[test]
    fn the_schema_decides_also_within_objects() {
        let zips = json!({ "type": "array", "items": { "type": "string" } });
        let properties = json!({
            "zips": zips, "none": { "type": "array" }, "empty": { "type": "object" }, "text": { "type": "string" },
            "items": { "type": "object", "properties": { "item": { "type": "string" } } },
        });
        let parameters = json!({ "type": "object", "properties": properties });
        let function = json!({ "name": "f", "parameters": parameters });
        let offer = Offer::of(Some(&json!([{ "type": "function", "function": function }])));
        let text = "@<invoke name=\"f\">@<zips>@<item>3000@</item>@</zips>@<none>@</none>@<empty>@</empty>@<text>@</text>\
                    @<items>@<item>7@</item>@</items>@</invoke>";
        let arguments =
            r#"{"zips":["3000"],"none":[],"empty":{},"text":"","items":{"item":"7"}}"#.to_owned();
        assert_eq!(parse(text, &offer), Some(vec![("f".to_owned(), arguments)]));
    }

    #[test]
    fn other_texts() {
        for text in [
            "",
            "f",
            "@<invoke name=\"f\">",
            "@<invoke name=\"f\">text@</invoke>",
            "@<invoke name=\"f\">@<a>1@</b>@</invoke>",
            "@<invoke name=\"f\">@<a>1@<b>2@</b>@</a>@</invoke>",
            "@<invoke name=\"f\">@<>1@</>@</invoke>",
            "<invoke name=\"f\">@</invoke>",
            "@<invoke name=\"f\">@</invoke>text",
        ] {
            assert_eq!(parse(text, &Offer::Unknown), None, "{text}");
        }
        let deep = format!("@<invoke name=\"f\">{}", "@<a>".repeat(100_000));
        assert_eq!(parse(&deep, &Offer::Unknown), None);
    }
}
