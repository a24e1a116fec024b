//! Requests of the Responses API.
//!
//! Source: the OpenAI API reference, "Create a model response". Custom tools are functions with one text. Tools that only OpenAI's own servers run are left out, because
//! clients send them to every model.

use forebay_chat::{Message, ToolCall};
use forebay_grammar::Rules;
use forebay_model::sampling::Sampling;
use forebay_requests::{Input, MustCall, Wanted, effort};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::custom;
use crate::error::ApiError;

#[derive(Deserialize, ToSchema)]
#[schema(as = ResponsesRequest)]
pub struct Body {
    pub model: Option<String>,
    #[serde(default)]
    input: Value,
    pub instructions: Option<String>,
    #[serde(default)]
    pub tools: Vec<Value>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub max_output_tokens: Option<usize>,
    pub stream: Option<bool>,
    pub store: Option<bool>,
    pub previous_response_id: Option<String>,
    pub reasoning: Option<Value>,
    pub text: Option<Value>,
    pub metadata: Option<Value>,
    top_logprobs: Option<usize>,
    background: Option<bool>,
    /// True to report what the request needed of the weights, and how long it waited.
    pub include_statistics: Option<bool>,
}

impl Body {
    /// Returns the messages of the request without its instructions, which apply to this answer alone.
    ///
    /// # Errors
    /// Returns an error if an item is broken or an image.
    pub fn messages(&self) -> Result<Vec<Message>, ApiError> {
        let items = match &self.input {
            Value::Null => return Ok(Vec::new()),
            Value::String(text) if text.is_empty() => return Ok(Vec::new()),
            Value::String(text) => return Ok(vec![Message::new("user", text)]),
            Value::Array(items) => items,
            _ => return Err(bad("input", "input must be a text or a list")),
        };
        let mut messages = Vec::new();
        for item in items {
            add_item(item, &mut messages)?;
        }
        Ok(messages)
    }

    /// Returns the request in the common form.
    ///
    /// # Errors
    /// Returns an error if a field cannot be followed.
    pub fn wanted(&self, history: Vec<Message>) -> Result<Wanted, ApiError> {
        if self.background == Some(true) {
            return Err(bad("background", "background is not supported: leave it out"));
        }
        if self.top_logprobs.is_some_and(|count| count > 0) {
            let why = "top_logprobs is for /v1/chat/completions";
            return Err(bad("top_logprobs", why));
        }
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
        let (is_none, must_call) = self.choice()?;
        let wanted = self.reasoning.as_ref().and_then(|reasoning| reasoning.get("effort"));
        let think = wanted.and_then(Value::as_str).map(effort::think).transpose();
        let think = think.map_err(|why| bad("reasoning", format!("effort {why}")))?;
        Ok(Wanted {
            input: Input::Chat {
                messages,
                tools: self.functions().filter(|_| !is_none),
                think,
                variables: Map::new(),
            },
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
            stream: self.stream == Some(true),
            statistics: self.include_statistics == Some(true),
            model: self.model.clone(),
            ..Wanted::default()
        })
    }

    /// Returns the functions and custom tools in the form that chat templates expect.
    fn functions(&self) -> Option<Value> {
        let is_function = |tool: &&Value| {
            custom::is_custom(tool) || tool.get("type").is_some_and(|kind| kind == "function")
        };
        let functions = self.tools.iter().filter(is_function).filter_map(|tool| {
            if custom::is_custom(tool) {
                return custom::function(tool);
            }
            let function = json!({
                "name": tool.get("name")?.as_str()?,
                "description": tool.get("description").and_then(Value::as_str).unwrap_or(""),
                "parameters": tool.get("parameters").filter(|schema| schema.is_object()).cloned()
                    .unwrap_or_else(|| json!({ "type": "object", "properties": {} })),
            });
            Some(json!({ "type": "function", "function": function }))
        });
        let functions: Vec<Value> = functions.collect();
        (!functions.is_empty()).then(|| functions.into())
    }

    /// Returns whether no tool may be called, and what must be called.
    fn choice(&self) -> Result<(bool, Option<MustCall>), ApiError> {
        let wrong = || bad("tool_choice", "tool_choice must be none, auto, required or a function");
        match &self.tool_choice {
            None | Some(Value::Null) => Ok((false, None)),
            Some(Value::String(choice)) => match choice.as_str() {
                "none" => Ok((true, None)),
                "auto" => Ok((false, None)),
                "required" => Ok((false, Some(MustCall::Any))),
                _ => Err(wrong()),
            },
            Some(choice)
                if custom::is_custom(choice)
                    || choice.get("type").is_some_and(|kind| kind == "function") =>
            {
                let name = choice.get("name").and_then(Value::as_str).ok_or_else(wrong)?;
                Ok((false, Some(MustCall::Named(name.to_owned()))))
            }
            Some(_) => Err(wrong()),
        }
    }

    /// Returns the form that the answer must have.
    fn rules(&self) -> Result<Option<Rules>, ApiError> {
        let Some(format) = self.text.as_ref().and_then(|text| text.get("format")) else {
            return Ok(None);
        };
        match format.get("type").and_then(Value::as_str) {
            Some("text") => Ok(None),
            Some("json_object") => Ok(Some(Rules::JsonObject)),
            Some("json_schema") => match format.get("schema") {
                Some(schema) => Ok(Some(Rules::JsonSchema(schema.clone()))),
                None => Err(bad("text", "text.format has no schema")),
            },
            _ => Err(bad("text", "text.format.type must be text, json_object or json_schema")),
        }
    }
}

/// Creates the error of a field.
pub fn bad(param: &'static str, why: impl Into<String>) -> ApiError {
    ApiError { param: Some(param), ..ApiError::bad(why) }
}

/// Adds an item of the input. An answer's reasoning, text and calls become one message.
fn add_item(item: &Value, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let field = |name: &str| item.get(name).and_then(Value::as_str);
    match field("type").unwrap_or("message") {
        "message" => {
            let role = field("role").ok_or_else(|| bad("input", "a message has no role"))?;
            if !["user", "assistant", "system", "developer"].contains(&role) {
                return Err(bad("input", format!("role {role:?} is not known")));
            }
            let text = text(item.get("content").unwrap_or(&Value::Null))?;
            match role {
                "assistant" => answer(messages).content.push_str(&text),
                "developer" => messages.push(Message::new("system", text)),
                _ => messages.push(Message::new(role, text)),
            }
        }
        "reasoning" => {
            let content = item.get("content").and_then(Value::as_array).into_iter().flatten();
            let texts = content.filter_map(|part| part.get("text").and_then(Value::as_str));
            let reasoning: String = texts.collect();
            if !reasoning.is_empty() {
                answer(messages).reasoning.get_or_insert_default().push_str(&reasoning);
            }
        }
        "function_call" => {
            let missing = || bad("input", "a function_call needs call_id, name and arguments");
            let call = ToolCall {
                id: Some(field("call_id").ok_or_else(missing)?.to_owned()),
                name: field("name").ok_or_else(missing)?.to_owned(),
                arguments: field("arguments").ok_or_else(missing)?.to_owned(),
            };
            answer(messages).tool_calls.push(call);
        }
        "function_call_output" => {
            let id = field("call_id").ok_or_else(|| bad("input", "an output has no call_id"))?;
            let output = text(item.get("output").unwrap_or(&Value::Null))?;
            messages.push(Message {
                tool_call_id: Some(id.to_owned()),
                ..Message::new("tool", output)
            });
        }
        "item_reference" => {
            return Err(bad("input", "item_reference is not supported: send the item itself"));
        }
        // Items of tools that only OpenAI's servers run.
        _ => {}
    }
    Ok(())
}

/// Returns the message that an item of an answer belongs to: the last one, or a new one.
fn answer(messages: &mut Vec<Message>) -> &mut Message {
    if messages.last().is_none_or(|message| message.role != "assistant") {
        messages.push(Message::new("assistant", ""));
    }
    messages.last_mut().expect("one was added")
}

/// Returns the text of content.
fn text(content: &Value) -> Result<String, ApiError> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let mut all = String::new();
            for part in parts {
                match part.get("type").and_then(Value::as_str) {
                    Some("input_text" | "output_text" | "text" | "refusal") => {
                        let text = part.get("text").or_else(|| part.get("refusal"));
                        all.push_str(text.and_then(Value::as_str).unwrap_or_default());
                    }
                    _ => {
                        let why = "this model reads text only: images and files are not supported";
                        return Err(bad("input", why));
                    }
                }
            }
            Ok(all)
        }
        _ => Err(bad("input", "content must be a text or a list")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(value: Value) -> Body {
        serde_json::from_value(value).unwrap()
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
        let messages = body(json!({ "input": input })).messages().unwrap();
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
            json!(7),
        ] {
            assert_eq!(
                body(json!({ "input": wrong })).messages().unwrap_err().param,
                Some("input")
            );
        }
        assert!(body(json!({})).messages().unwrap().is_empty());
    }

    #[test]
    fn tools_of_other_kinds_are_left_out() {
        let tools = json!([
            { "type": "web_search" },
            { "type": "custom", "name": "patch" },
            { "type": "function", "name": "shell", "parameters": { "type": "object" } },
        ]);
        let all = body(json!({ "tools": tools }));
        let wanted = all.wanted(Vec::new()).unwrap();
        let Input::Chat { tools: Some(found), .. } = wanted.input else { panic!() };
        let names: Vec<_> =
            found.as_array().unwrap().iter().map(|of| &of["function"]["name"]).collect();
        assert_eq!(names, ["patch", "shell"]);
    }
}
