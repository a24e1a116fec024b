//! Tools that a request offers to the model.

use std::collections::BTreeMap;
use std::iter::successors;
use std::sync::Arc;

use serde_json::Value;

/// Tools that the model may call, as far as they are known. They decide which calls of an answer count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Offer {
    /// Nothing is known. Calls with marks count, calls without marks are text.
    #[default]
    Unknown,
    /// There are no tools. Everything is text.
    Nothing,
    /// JSON schemas of the arguments, by the name of the tool.
    Tools(Arc<BTreeMap<String, Value>>),
}

/// Longest chain of references that is followed.
const REFERENCES_MAX: usize = 8;

impl Offer {
    /// Reads a list of `{"type": "function", "function": {"name": ..., "parameters": {...}}}`.
    pub fn of(tools: Option<&Value>) -> Offer {
        let functions = tools.and_then(Value::as_array).into_iter().flatten();
        let named = functions.filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?;
            let schema = function.get("parameters").cloned().unwrap_or_default();
            Some((name.to_owned(), schema))
        });
        let tools: BTreeMap<String, Value> = named.collect();
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
        let whole = self.schema(tool)?;
        is_text(referenced(whole, whole.get("properties")?.get(parameter)?))
    }

    /// Returns the JSON schema of a tool's arguments.
    pub fn schema(&self, tool: &str) -> Option<&Value> {
        let Offer::Tools(tools) = self else { return None };
        tools.get(tool)
    }
}

/// Returns the schema that a schema refers to, if it does. `whole` is the schema of all arguments.
pub(crate) fn target<'a>(whole: &'a Value, schema: &Value) -> Option<&'a Value> {
    whole.pointer(schema.get("$ref")?.as_str()?.strip_prefix('#')?)
}

/// Returns the schema at the end of a schema's references. A reference that leads nowhere is the end.
pub(crate) fn referenced<'a>(whole: &'a Value, schema: &'a Value) -> &'a Value {
    let chain = successors(Some(schema), |schema| target(whole, schema));
    chain.take(REFERENCES_MAX + 1).last().unwrap_or(schema)
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

    fn offer(parameters: Value) -> Offer {
        let function = json!({ "name": "t", "parameters": parameters });
        Offer::of(Some(&json!([{ "type": "function", "function": function }])))
    }

    #[test]
    fn types_of_parameters() {
        let properties = json!({
            "a": { "type": "string" }, "b": { "type": "integer" }, "c": { "enum": ["x", "y"] },
            "d": { "enum": ["x", 1] }, "e": { "type": ["string", "null"] }, "f": {},
        });
        let offer = offer(json!({ "type": "object", "properties": properties }));
        let types = ["a", "b", "c", "d", "e", "f", "g"].map(|key| offer.is_text("t", key));
        assert_eq!(types, [Some(true), Some(false), Some(true), None, None, None, None]);
        assert!(offer.names("t") && !offer.names("u"));
        assert_eq!(Offer::of(Some(&json!([]))), Offer::Nothing);
        assert_eq!(Offer::of(None), Offer::Nothing);
    }

    #[test]
    fn types_of_parameters_by_reference() {
        let properties = json!({
            "text": { "$ref": "#/$defs/zip" }, "number": { "$ref": "#/$defs/days" }, "far": { "$ref": "#/$defs/far" },
            "nowhere": { "$ref": "#/$defs/none" }, "elsewhere": { "$ref": "https://example.com/schema.json" },
            "itself": { "$ref": "#/properties/itself" }, "none": { "$ref": 7 },
        });
        let offer = offer(json!({ "type": "object", "properties": properties, "$defs": {
            "zip": { "type": "string" }, "days": { "type": "integer" }, "far": { "$ref": "#/$defs/zip" },
        } }));
        let keys = ["text", "number", "far", "nowhere", "elsewhere", "itself", "none"];
        let types = keys.map(|key| offer.is_text("t", key));
        assert_eq!(types, [Some(true), Some(false), Some(true), None, None, None, None]);
    }
}
