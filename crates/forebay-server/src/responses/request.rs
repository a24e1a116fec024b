//! Requests of the Responses API.
//!
//! Source: the OpenAI API reference, "Create a model response". Custom tools are functions with one text.

use forebay_chat::Message;
use forebay_grammar::Rules;
use forebay_model::sampling::Sampling;
use forebay_requests::{Choosing, Input, Wanted, choosing, effort};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::custom;
use super::items::{self, bad};
use crate::error::ApiError;

/// The fields that are followed. The table of fields has removed the others.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Body {
    pub model: Option<String>,
    #[serde(default)]
    pub input: Value,
    pub instructions: Option<String>,
    #[serde(default)]
    pub tools: Vec<Value>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub max_output_tokens: Option<usize>,
    #[serde(default)]
    pub stream: bool,
    pub store: Option<bool>,
    pub previous_response_id: Option<String>,
    pub reasoning: Option<Value>,
    pub text: Option<Value>,
    pub metadata: Option<Value>,
    #[serde(default)]
    pub include_statistics: bool,
}

impl Body {
    /// Returns the messages of the request without its instructions, which apply to this answer alone.
    ///
    /// # Errors
    /// Returns an error if an item is broken.
    pub fn messages(&self) -> Result<Vec<Message>, ApiError> {
        match &self.input {
            Value::String(text) if !text.is_empty() => Ok(vec![Message::new("user", text)]),
            Value::Array(items) => items::messages(items),
            _ => Ok(Vec::new()),
        }
    }

    /// Returns the request in the common form.
    ///
    /// # Errors
    /// Returns an error if a field cannot be followed.
    pub fn wanted(&self, history: Vec<Message>) -> Result<Wanted, ApiError> {
        for (name, value, most) in
            [("temperature", self.temperature, 2.0), ("top_p", self.top_p, 1.0)]
        {
            if value.is_some_and(|value| !(0.0..=most).contains(&value)) {
                return Err(bad(name, format!("{name} must be between 0 and {most}")));
            }
        }
        if self.max_output_tokens == Some(0) {
            return Err(bad("max_output_tokens", "max_output_tokens must be at least 1"));
        }
        let instructions = self.instructions.as_deref().filter(|text| !text.is_empty());
        let instructions = instructions.map(|text| Message::new("system", text));
        let messages = instructions.into_iter().chain(history).collect();
        let Choosing { tools, must_call, .. } =
            choosing(self.functions(), self.tool_choice.clone())?;
        let wanted = self.reasoning.as_ref().and_then(|reasoning| reasoning.get("effort"));
        let think = wanted.and_then(Value::as_str).map(effort::think).transpose();
        let think =
            think.map_err(|why| bad("reasoning.effort", format!("reasoning.effort {why}")))?;
        Ok(Wanted {
            input: Input::Chat { messages, tools, think, variables: Map::new() },
            max_tokens: self.max_output_tokens,
            sampling: Sampling {
                temperature: self.temperature.unwrap_or(1.0),
                top_p: self.top_p.unwrap_or(1.0),
                top_k: 0,
                min_p: 0.0,
                ..Sampling::default()
            },
            rules: self.rules()?,
            must_call,
            parallel_calls: self.parallel_tool_calls != Some(false),
            stream: self.stream,
            statistics: self.include_statistics,
            model: self.model.clone(),
            ..Wanted::default()
        })
    }

    /// Returns the functions and custom tools in the form that chat templates expect.
    fn functions(&self) -> Option<Value> {
        let of = |tool: &Value| {
            if custom::is_custom(tool) {
                return custom::function(tool);
            }
            let function = json!({
                "name": tool["name"],
                "description": tool.get("description").and_then(Value::as_str).unwrap_or(""),
                "parameters": tool.get("parameters").filter(|schema| schema.is_object()).cloned()
                    .unwrap_or_else(|| json!({ "type": "object", "properties": {} })),
            });
            Some(json!({ "type": "function", "function": function }))
        };
        let functions: Vec<Value> = self.tools.iter().filter_map(of).collect();
        (!functions.is_empty()).then(|| functions.into())
    }

    /// Returns the form that the answer must have.
    fn rules(&self) -> Result<Option<Rules>, ApiError> {
        let format = self.text.as_ref().and_then(|text| text.get("format"));
        let kind = format.and_then(|format| format.get("type")).and_then(Value::as_str);
        match (kind, format.and_then(|format| format.get("schema"))) {
            (Some("json_object"), _) => Ok(Some(Rules::JsonObject)),
            (Some("json_schema"), Some(schema)) => Ok(Some(Rules::JsonSchema(schema.clone()))),
            (Some("json_schema"), None) => Err(bad("text.format", "text.format has no schema")),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_requests::fields::RESPONSES;

    use super::*;

    fn body(value: Value) -> Result<Body, ApiError> {
        Ok(RESPONSES.read(value)?)
    }

    #[test]
    fn items_become_messages() {
        let input = json!([
            { "role": "developer", "content": "Be brief." },
            { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "Hi" }] },
            { "type": "reasoning", "summary": [], "content": [{ "type": "reasoning_text", "text": "Hm" }] },
            { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "Yes" }] },
            { "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}" },
            { "type": "web_search_call", "id": "w" },
            { "type": "function_call_output", "call_id": "c", "output": "42" },
        ]);
        let messages = body(json!({ "input": input })).unwrap().messages().unwrap();
        let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool"]);
        let answer = &messages[2];
        assert_eq!((answer.content.as_str(), answer.reasoning.as_deref()), ("Yes", Some("Hm")));
        assert_eq!(answer.tool_calls[0].name, "f");
        assert_eq!(messages[3].tool_call_id.as_deref(), Some("c"));
        for wrong in [
            json!([{ "role": "king", "content": "x" }]),
            json!([{ "content": "x" }]),
            json!([{ "role": "user", "content": [{ "type": "input_image" }] }]),
            json!([{ "type": "function_call", "name": "f" }]),
            json!([{ "type": "hologram" }]),
            json!(7),
        ] {
            let error = body(json!({ "input": wrong })).err().unwrap();
            assert!(error.param.as_deref().unwrap().starts_with("input"), "{error}");
        }
        assert!(body(json!({})).unwrap().messages().unwrap().is_empty());
    }

    #[test]
    fn tools_of_other_kinds_are_left_out() {
        let tools = json!([
            { "type": "web_search" },
            { "type": "custom", "name": "patch" },
            { "type": "function", "name": "shell", "parameters": { "type": "object" } },
        ]);
        let all = body(json!({ "tools": tools })).unwrap();
        let wanted = all.wanted(Vec::new()).unwrap();
        let Input::Chat { tools: Some(found), .. } = wanted.input else { panic!() };
        let names: Vec<_> =
            found.as_array().unwrap().iter().map(|of| &of["function"]["name"]).collect();
        assert_eq!(names, ["patch", "shell"]);
    }
}
