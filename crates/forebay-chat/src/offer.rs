//! Tools that a request offers to the model.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

/// What is known about the tools that the model may call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Offer {
    /// Nothing is known. Calls with marks count, calls without marks are text.
    #[default]
    Unknown,
    /// There are no tools. Everything is text.
    Nothing,
    /// The tools by name.
    Tools(Arc<BTreeMap<String, Tool>>),
}

/// A tool that is offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tool {
    /// Parameters by name, and whether they are texts.
    texts: BTreeMap<String, bool>,
    /// JSON schema of the arguments.
    schema: Value,
}

impl Offer {
    /// Reads a list of `{"type": "function", "function": {"name": ..., "parameters": {...}}}`.
    pub fn of(tools: Option<&Value>) -> Offer {
        let functions = tools.and_then(Value::as_array).into_iter().flatten();
        let named = functions.filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?;
            let properties = function.pointer("/parameters/properties").and_then(Value::as_object);
            let parameters = properties.into_iter().flatten();
            let typed =
                parameters.filter_map(|(key, schema)| Some((key.clone(), is_text(schema)?)));
            let schema = function.get("parameters").cloned().unwrap_or_default();
            Some((name.to_owned(), Tool { texts: typed.collect(), schema }))
        });
        let tools: BTreeMap<String, Tool> = named.collect();
        match tools.is_empty() {
            true => Offer::Nothing,
            false => Offer::Tools(Arc::new(tools)),
        }
    }

    /// Returns true if the tool is offered.
    pub fn names(&self, tool: &str) -> bool {
        matches!(self, Offer::Tools(tools) if tools.contains_key(tool))
    }

    /// Returns true if the parameter is a text, false if it is of another type, and `None` if the schema leaves it open.
    pub fn is_text(&self, tool: &str, parameter: &str) -> Option<bool> {
        let Offer::Tools(tools) = self else { return None };
        tools.get(tool)?.texts.get(parameter).copied()
    }

    /// Returns the JSON schema of a tool's arguments.
    pub fn schema(&self, tool: &str) -> Option<&Value> {
        let Offer::Tools(tools) = self else { return None };
        tools.get(tool).map(|tool| &tool.schema)
    }
}

/// Returns true if a schema allows only texts, and false if it allows none.
pub(crate) fn is_text(schema: &Value) -> Option<bool> {
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        let texts = values.iter().filter(|value| value.is_string()).count();
        return match texts {
            0 => Some(false),
            all if all == values.len() => Some(true),
            _ => None,
        };
    }
    Some(schema.get("type")?.as_str()? == "string")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_of_parameters() {
        let properties = json!({
            "a": { "type": "string" }, "b": { "type": "integer" }, "c": { "enum": ["x", "y"] },
            "d": { "enum": ["x", 1] }, "e": { "type": ["string", "null"] }, "f": {},
        });
        let tools = json!([{ "type": "function", "function": {
            "name": "t", "parameters": { "type": "object", "properties": properties },
        } }]);
        let offer = Offer::of(Some(&tools));
        let types = ["a", "b", "c", "d", "e", "f", "g"].map(|key| offer.is_text("t", key));
        assert_eq!(types, [Some(true), Some(false), Some(true), None, None, None, None]);
        assert!(offer.names("t") && !offer.names("u"));
        assert_eq!(Offer::of(Some(&json!([]))), Offer::Nothing);
        assert_eq!(Offer::of(None), Offer::Nothing);
    }
}
