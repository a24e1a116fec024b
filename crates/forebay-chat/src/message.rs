//! A message of a conversation, and its JSON form.

use std::io::{self, Write};

use serde::Serialize as _;
use serde_json::ser::Formatter;
use serde_json::{Map, Value, json};

use crate::ChatError;

/// One message. Its parts are the author's text, without the marks that a family of models puts
/// around them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    pub role: String,
    pub content: String,
    /// Reasoning that the model wrote before its answer.
    pub reasoning: Option<String>,
    pub tool_calls: Vec<ToolCall>,
    /// Id of the call that a `tool` message answers.
    pub tool_call_id: Option<String>,
    /// Name of the tool that a `tool` message comes from.
    pub name: Option<String>,
}

/// A function that the model asks its caller to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    pub id: Option<String>,
    pub name: String,
    /// JSON as the model wrote it. It is an object if the model followed its format.
    pub arguments: String,
}

impl ToolCall {
    /// Returns arguments as text in the form that models write: JSON with a space behind each comma and colon.
    pub fn text_of(arguments: &Value) -> String {
        let mut text = Vec::new();
        let mut serializer = serde_json::Serializer::with_formatter(&mut text, Spaced);
        match arguments.serialize(&mut serializer) {
            Ok(()) => String::from_utf8_lossy(&text).into_owned(),
            Err(_) => arguments.to_string(),
        }
    }
}

/// Writes JSON as `json.dumps` of Python does.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        to.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        to.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }
}

impl Message {
    /// Creates a message that has only a role and content.
    pub fn new(role: &str, content: impl Into<String>) -> Message {
        Message { role: role.to_owned(), content: content.into(), ..Message::default() }
    }

    /// Returns true if the message is a standing instruction and not part of a turn.
    pub fn is_instruction(&self) -> bool {
        self.role == "system" || self.role == "developer"
    }

    /// Returns the message in the form of the OpenAI chat completion API, with `reasoning_content`
    /// beside `content`.
    pub fn to_json(&self) -> Value {
        let mut object = Map::new();
        object.insert("role".into(), json!(self.role));
        object.insert("content".into(), json!(self.content));
        if let Some(reasoning) = &self.reasoning {
            object.insert("reasoning_content".into(), json!(reasoning));
        }
        if !self.tool_calls.is_empty() {
            object.insert("tool_calls".into(), tool_calls(&self.tool_calls));
        }
        if let Some(id) = &self.tool_call_id {
            object.insert("tool_call_id".into(), json!(id));
        }
        if let Some(name) = &self.name {
            object.insert("name".into(), json!(name));
        }
        Value::Object(object)
    }

    /// Reads the output of [`Message::to_json`] and the messages that clients of the OpenAI API
    /// send. `content` may be null or a list of text parts, and `arguments` may be an object.
    /// `number` is the message's number from 1 for the error.
    ///
    /// # Errors
    /// Returns [`ChatError::Message`] with the field that is wrong.
    pub fn from_json(value: &Value, number: usize) -> Result<Message, ChatError> {
        let wrong = |reason: &str| ChatError::Message { number, reason: reason.to_owned() };
        let object = value.as_object().ok_or_else(|| wrong("must be a JSON object"))?;
        let text = |name: &str| match object.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(wrong(&format!("`{name}` must be text"))),
        };
        let mut role = text("role")?.ok_or_else(|| wrong("`role` is missing"))?.to_lowercase();
        if role == "function" {
            // The form from before tools.
            "tool".clone_into(&mut role);
        }
        if !["system", "developer", "user", "assistant", "tool"].contains(&role.as_str()) {
            return Err(wrong("`role` must be system, developer, user, assistant or tool"));
        }
        let mut content = content(object.get("content")).map_err(wrong)?;
        if let Some(refusal) = text("refusal")? {
            content.push_str(&refusal);
        }
        let reasoning = match text("reasoning_content")? {
            None => text("reasoning")?,
            found => found,
        };
        let mut calls = match object.get("tool_calls") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(calls)) => {
                let read: Option<Vec<ToolCall>> = calls.iter().map(tool_call).collect();
                read.ok_or_else(|| {
                    wrong("each of `tool_calls` needs `function` with `name` and `arguments`")
                })?
            }
            Some(_) => return Err(wrong("`tool_calls` must be a list")),
        };
        if let Some(call) = object.get("function_call").filter(|call| !call.is_null()) {
            let read = tool_call(call);
            let why = "`function_call` needs `name` and `arguments`";
            calls.push(read.ok_or_else(|| wrong(why))?);
        }
        Ok(Message {
            role,
            content,
            reasoning,
            tool_calls: calls,
            tool_call_id: text("tool_call_id")?,
            name: text("name")?,
        })
    }

    /// Reads a list of messages, or an object that has the list as `messages`.
    ///
    /// # Errors
    /// Returns the errors of [`Message::from_json`], and [`ChatError::NoMessages`] if there is no
    /// list.
    pub fn list_from_json(value: &Value) -> Result<Vec<Message>, ChatError> {
        let list = match value {
            Value::Array(list) => Some(list),
            Value::Object(object) => object.get("messages").and_then(Value::as_array),
            _ => None,
        };
        let missing = "neither a list of messages nor an object with a list `messages`";
        let list = list.ok_or(ChatError::NoMessages(missing))?;
        list.iter().zip(1..).map(|(value, number)| Message::from_json(value, number)).collect()
    }
}

/// Returns tool calls in the form of the OpenAI API, in which `arguments` is text.
fn tool_calls(calls: &[ToolCall]) -> Value {
    calls
        .iter()
        .map(|call| {
            let mut object = Map::new();
            if let Some(id) = &call.id {
                object.insert("id".into(), json!(id));
            }
            object.insert("type".into(), json!("function"));
            let function = json!({ "name": call.name, "arguments": call.arguments });
            object.insert("function".into(), function);
            Value::Object(object)
        })
        .collect()
}

fn tool_call(value: &Value) -> Option<ToolCall> {
    let function = value.get("function").unwrap_or(value);
    let arguments = match function.get("arguments")? {
        Value::String(text) => text.clone(),
        other => ToolCall::text_of(other),
    };
    Some(ToolCall {
        id: value.get("id").and_then(Value::as_str).map(str::to_owned),
        name: function.get("name")?.as_str()?.to_owned(),
        arguments,
    })
}

/// Error of a message with an image or a file.
const ONLY_TEXT: &str =
    "`content` may hold only parts of type text: images, sound and files are not supported";

fn content(value: Option<&Value>) -> Result<String, &'static str> {
    match value {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let texts: Option<Vec<&str>> = parts
                .iter()
                .map(|part| match part.get("type").and_then(Value::as_str) {
                    Some("text" | "input_text" | "output_text") => {
                        part.get("text").and_then(Value::as_str)
                    }
                    Some("refusal") => part.get("refusal").and_then(Value::as_str),
                    _ => None,
                })
                .collect();
            texts.map(|texts| texts.concat()).ok_or(ONLY_TEXT)
        }
        Some(_) => Err("`content` must be text"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_back() {
        let message = Message {
            role: "assistant".into(),
            content: "Let me look.".into(),
            reasoning: Some("The user wants the weather.".into()),
            tool_calls: vec![ToolCall {
                id: Some("call_1".into()),
                name: "weather".into(),
                arguments: "{\"city\":  \"Bern\"}".into(),
            }],
            ..Message::default()
        };
        let value = message.to_json();
        assert_eq!(value["tool_calls"][0]["function"]["arguments"], "{\"city\":  \"Bern\"}");
        assert_eq!(Message::from_json(&value, 1).unwrap(), message);
    }

    #[test]
    fn forms_that_clients_send() {
        let read = |value: Value| Message::from_json(&value, 3);
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(read(json!({"role": "User", "content": parts})).unwrap().content, "ab");
        let parts =
            json!([{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]);
        let message = read(json!({"role": "assistant", "content": parts, "refusal": "c"})).unwrap();
        assert_eq!(message.content, "abc");
        let call = json!({"name": "f", "arguments": "{}"});
        let message = read(json!({"role": "assistant", "function_call": call})).unwrap();
        assert_eq!(message.tool_calls[0].name, "f");
        let result = read(json!({"role": "function", "name": "f", "content": "1"})).unwrap();
        assert_eq!((result.role.as_str(), result.name.as_deref()), ("tool", Some("f")));
        let call = json!([{"function": {"name": "f", "arguments": {"x": 1}}}]);
        let message = json!({"role": "assistant", "content": null, "tool_calls": call});
        assert_eq!(read(message).unwrap().tool_calls[0].arguments, "{\"x\": 1}");
        for wrong in [
            json!(1),
            json!({"content": "x"}),
            json!({"role": "king", "content": "x"}),
            json!({"role": "user", "content": 1}),
            json!({"role": "user", "content": [{"type": "image_url"}]}),
            json!({"role": "assistant", "tool_calls": [{}]}),
        ] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.starts_with("message 3: "), "{error}");
        }
        assert!(Message::list_from_json(&json!({"messages": 1})).is_err());
        assert_eq!(Message::list_from_json(&json!([])).unwrap(), []);
    }
}
