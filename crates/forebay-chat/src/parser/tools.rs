//! Parsing of the bodies of tool calls.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::ToolSyntax;

/// Tags around the tool calls of a family.
pub struct Tags {
    pub open: &'static str,
    pub close: &'static str,
    /// Tags around all calls of an answer. They carry no information.
    pub wrappers: &'static [&'static str],
    /// Tags within a call.
    pub inner: &'static [&'static str],
}

const TOOL_CALL: Tags =
    Tags { open: "<tool_call>", close: "</tool_call>", wrappers: &[], inner: &[] };

impl ToolSyntax {
    pub(crate) fn tags(self) -> Tags {
        match self {
            ToolSyntax::DeepSeek => Tags {
                open: "<｜tool▁call▁begin｜>",
                close: "<｜tool▁call▁end｜>",
                wrappers: &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
                inner: &["<｜tool▁sep｜>"],
            },
            ToolSyntax::ArgumentTags => Tags {
                inner: &["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
                ..TOOL_CALL
            },
            ToolSyntax::Json | ToolSyntax::FunctionTags => TOOL_CALL,
        }
    }

    /// Returns the name and arguments of the call in `body`, or `None` if it is not a call.
    pub(crate) fn parse(self, body: &str) -> Option<(String, String)> {
        match self {
            ToolSyntax::Json => json(body),
            ToolSyntax::FunctionTags => function_tags(body),
            ToolSyntax::ArgumentTags => argument_tags(body),
            ToolSyntax::DeepSeek => deepseek(body),
        }
    }
}

#[derive(Deserialize)]
struct Call<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

/// Parses `{"name": "f", "arguments": {...}}`. The arguments stay as the model wrote them.
fn json(body: &str) -> Option<(String, String)> {
    let call: Call<'_> = serde_json::from_str(body.trim()).ok()?;
    let arguments = call.arguments.map_or("{}", RawValue::get);
    // Some models write the object as text.
    let inner = serde_json::from_str::<String>(arguments);
    Some((call.name, inner.unwrap_or_else(|_| arguments.to_owned())))
}

/// Parses `<function=f><parameter=k>v</parameter></function>`.
fn function_tags(body: &str) -> Option<(String, String)> {
    let rest = body.trim().strip_prefix("<function=")?;
    let (name, mut rest) = rest.split_once('>')?;
    let mut arguments = Map::new();
    while let Some((_, found)) = rest.split_once("<parameter=") {
        let (key, behind) = found.split_once('>')?;
        let (value, behind) = behind.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.trim().to_owned(), typed(value));
        rest = behind;
    }
    Some((name.trim().to_owned(), Value::Object(arguments).to_string()))
}

/// Parses `f<arg_key>k</arg_key><arg_value>v</arg_value>`.
fn argument_tags(body: &str) -> Option<(String, String)> {
    let (name, mut rest) = body.split_at(body.find("<arg_key>").unwrap_or(body.len()));
    let name = name.trim();
    if name.is_empty() || name.contains(char::is_whitespace) {
        return None;
    }
    let mut arguments = Map::new();
    while let Some((_, found)) = rest.split_once("<arg_key>") {
        let (key, behind) = found.split_once("</arg_key>")?;
        let (_, behind) = behind.split_once("<arg_value>")?;
        let (value, behind) = behind.split_once("</arg_value>")?;
        arguments.insert(key.trim().to_owned(), typed(value));
        rest = behind;
    }
    Some((name.to_owned(), Value::Object(arguments).to_string()))
}

/// Parses the calls of DeepSeek. V3.1 writes `f<｜tool▁sep｜>{...}`. V3 and R1 write
/// `function<｜tool▁sep｜>f`, then a code block of JSON.
fn deepseek(body: &str) -> Option<(String, String)> {
    let (head, rest) = body.split_once("<｜tool▁sep｜>")?;
    if let Some((name, block)) = rest.split_once("```json") {
        let arguments = block.trim().trim_end_matches("```").trim();
        return Some((name.trim().to_owned(), arguments.to_owned()));
    }
    let name = head.trim();
    (!name.is_empty()).then(|| (name.to_owned(), rest.trim().to_owned()))
}

/// Converts a value between tags, which has no type. Valid JSON becomes JSON, and everything else
/// becomes text.
fn typed(value: &str) -> Value {
    match serde_json::from_str(value.trim()) {
        Ok(Value::String(_)) | Err(_) => Value::String(value.to_owned()),
        Ok(other) => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(syntax: ToolSyntax, body: &str) -> (String, String) {
        syntax.parse(body).unwrap_or_else(|| panic!("not a call: {body}"))
    }

    fn call(name: &str, arguments: &str) -> (String, String) {
        (name.to_owned(), arguments.to_owned())
    }

    #[test]
    fn every_syntax() {
        let body = "\n{\"name\": \"f\", \"arguments\": {\"x\":  1}}\n";
        assert_eq!(parse(ToolSyntax::Json, body), call("f", "{\"x\":  1}"));
        let body = "{\"name\": \"f\", \"parameters\": \"{\\\"x\\\": 1}\"}";
        assert_eq!(parse(ToolSyntax::Json, body), call("f", "{\"x\": 1}"));
        assert_eq!(parse(ToolSyntax::Json, "{\"name\": \"f\"}"), call("f", "{}"));

        let body = "\n<function=f>\n<parameter=text>\na\nb\n</parameter>\n<parameter=n>\n5\n\
                    </parameter>\n</function>\n";
        let arguments = "{\"text\":\"a\\nb\",\"n\":5}";
        assert_eq!(parse(ToolSyntax::FunctionTags, body), call("f", arguments));

        let body = "f\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n\
                    <arg_value>[1, 2]</arg_value>\n";
        let arguments = "{\"city\":\"Bern\",\"days\":[1,2]}";
        assert_eq!(parse(ToolSyntax::ArgumentTags, body), call("f", arguments));

        let body = "f<｜tool▁sep｜>{\"x\": 1}";
        assert_eq!(parse(ToolSyntax::DeepSeek, body), call("f", "{\"x\": 1}"));
        let body = "function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```";
        assert_eq!(parse(ToolSyntax::DeepSeek, body), call("f", "{\"x\": 1}"));
    }

    #[test]
    fn other_text_is_no_call() {
        assert!(ToolSyntax::Json.parse("{\"name\": \"f\", \"arguments\": {").is_none());
        assert!(ToolSyntax::Json.parse("like this").is_none());
        assert!(ToolSyntax::FunctionTags.parse("<function=f><parameter=x>1").is_none());
        assert!(ToolSyntax::ArgumentTags.parse("two words").is_none());
        assert!(ToolSyntax::DeepSeek.parse("f").is_none());
    }
}
