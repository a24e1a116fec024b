//! Items of a conversation.
//!
//! A chat template knows calls of functions only. Calls of other tools become calls of a function with the tool's name, so that
//! nothing of the conversation is lost.

use forebay_chat::{Message, ToolCall};
use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// Creates the error of a field.
pub fn bad(param: &'static str, why: impl Into<String>) -> ApiError {
    ApiError { param: Some(param.into()), ..ApiError::bad(why) }
}

/// Makes messages of items, which the table of fields has checked. An answer's reasoning, text and calls become one message.
///
/// # Errors
/// Returns an error if an item lacks what its kind needs.
pub fn messages(items: &[Value]) -> Result<Vec<Message>, ApiError> {
    let mut messages = Vec::new();
    for item in items {
        add(item, &mut messages)?;
    }
    Ok(messages)
}

fn add(item: &Value, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let field = |name: &str| item.get(name).and_then(Value::as_str);
    let kind = field("type").unwrap_or("message");
    match kind {
        "message" => {
            let text = text(item.get("content"));
            match field("role") {
                Some("assistant") => answer(messages).content.push_str(&text),
                Some("developer") => messages.push(Message::new("system", text)),
                role => messages.push(Message::new(role.unwrap_or("user"), text)),
            }
        }
        "reasoning" => {
            // A summary is all that there is of reasoning that only OpenAI's servers can read.
            let content = text(item.get("content"));
            let reasoning = if content.is_empty() { text(item.get("summary")) } else { content };
            if !reasoning.is_empty() {
                answer(messages).reasoning.get_or_insert_default().push_str(&reasoning);
            }
        }
        "function_call" | "custom_tool_call" => {
            let arguments = match field("input") {
                Some(input) => ToolCall::text_of(&json!({ "input": input })),
                None => field("arguments").unwrap_or_default().to_owned(),
            };
            call(id(item, kind)?, field("name").unwrap_or_default(), arguments, messages);
        }
        "mcp_call" | "code_interpreter_call" | "file_search_call" => {
            let id = id(item, kind)?;
            let name = field("name").map_or_else(|| tool_of(kind), str::to_owned);
            let arguments = field("arguments").map_or_else(
                || ToolCall::text_of(&some_of(item, &["code", "queries"]).into()),
                str::to_owned,
            );
            call(id.clone(), &name, arguments, messages);
            let found = some_of(item, &["output", "outputs", "results", "error"]);
            let found = match found.len() {
                1 => found.into_iter().next().map_or(Value::Null, |(_, value)| value),
                _ => found.into(),
            };
            result(id, output(Some(&found)), messages);
        }
        _ if kind.ends_with("_output") => {
            let mut output = output(item.get("output"));
            if let (true, Some(status)) = (output.is_empty(), field("status")) {
                status.clone_into(&mut output);
            }
            result(id(item, kind)?, output, messages);
        }
        // Calls of a shell, and of a patch.
        _ => {
            let arguments = some_of(item, &["action", "operation"]);
            let arguments = match arguments.into_iter().next() {
                Some((_, arguments)) => arguments,
                None => return Err(bad("input", format!("{kind} has no action and no operation"))),
            };
            let id = id(item, kind)?;
            call(id, &tool_of(kind), ToolCall::text_of(&arguments), messages);
        }
    }
    Ok(())
}

/// Returns the name of the tool of a kind of calls.
fn tool_of(kind: &str) -> String {
    kind.strip_suffix("_call").unwrap_or(kind).to_owned()
}

/// Returns the id of a call.
fn id(item: &Value, kind: &str) -> Result<String, ApiError> {
    let id = item.get("call_id").or_else(|| item.get("id")).and_then(Value::as_str);
    id.map(str::to_owned).ok_or_else(|| bad("input", format!("{kind} has no call_id")))
}

/// Returns those of the fields that an item has.
fn some_of(item: &Value, names: &[&str]) -> Map<String, Value> {
    let of = |name: &&str| Some(((*name).to_owned(), item.get(*name)?.clone()));
    names.iter().filter_map(of).collect()
}

fn call(id: String, name: &str, arguments: String, messages: &mut Vec<Message>) {
    let call = ToolCall { id: Some(id), name: name.to_owned(), arguments };
    answer(messages).tool_calls.push(call);
}

fn result(id: String, output: String, messages: &mut Vec<Message>) {
    messages.push(Message { tool_call_id: Some(id), ..Message::new("tool", output) });
}

/// Returns the message that an item of an answer belongs to: the last one, or a new one.
fn answer(messages: &mut Vec<Message>) -> &mut Message {
    if messages.last().is_none_or(|message| message.role != "assistant") {
        messages.push(Message::new("assistant", ""));
    }
    messages.last_mut().expect("one was added")
}

/// Returns the text of content.
fn text(content: Option<&Value>) -> String {
    match content {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| {
                part.get("text").or_else(|| part.get("refusal"))?.as_str().map(str::to_owned)
            };
            parts.iter().filter_map(text).collect()
        }
        _ => String::new(),
    }
}

/// Returns what a tool returned as text: its texts, or JSON if there is anything else.
fn output(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) if parts.iter().all(|part| part.get("text").is_some()) => {
            text(value)
        }
        Some(value) => ToolCall::text_of(value),
    }
}

#[cfg(test)]
mod tests {
    use forebay_requests::fields::RESPONSES;

    use super::*;

    /// Returns the messages of an item, whatever it lacks.
    fn of(item: Value) -> Vec<Message> {
        let body = RESPONSES.checked(json!({ "input": [item] })).unwrap();
        messages(body["input"].as_array().unwrap()).unwrap()
    }

    #[test]
    fn calls_of_all_tools_are_in_the_conversation() {
        for (item, name, part) in [
            (
                json!({ "type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "the fox" }),
                "patch",
                "the fox",
            ),
            (
                json!({ "type": "local_shell_call", "call_id": "c", "action": { "type": "exec", "command": ["ls", "the fox"], "env": {} }, "status": "completed" }),
                "local_shell",
                "the fox",
            ),
            (
                json!({ "type": "shell_call", "call_id": "c", "action": { "commands": ["cat fox"] } }),
                "shell",
                "cat fox",
            ),
            (
                json!({ "type": "apply_patch_call", "call_id": "c", "operation": { "type": "update_file", "path": "fox.txt", "diff": "+" } }),
                "apply_patch",
                "fox.txt",
            ),
            (
                json!({ "type": "code_interpreter_call", "id": "c", "code": "fox()", "container_id": "x", "outputs": [] }),
                "code_interpreter",
                "fox()",
            ),
            (
                json!({ "type": "mcp_call", "id": "c", "name": "look", "arguments": "{\"fox\":1}", "server_label": "s", "output": "red" }),
                "look",
                "fox",
            ),
        ] {
            let messages = of(item);
            let call = &messages[0].tool_calls[0];
            assert_eq!((call.name.as_str(), call.id.as_deref()), (name, Some("c")));
            assert!(call.arguments.contains(part), "{call:?}");
        }
        for (item, part) in [
            (
                json!({ "type": "custom_tool_call_output", "call_id": "c", "output": "the fox" }),
                "the fox",
            ),
            (
                json!({ "type": "custom_tool_call_output", "call_id": "c", "output": [{ "type": "input_text", "text": "the fox" }] }),
                "the fox",
            ),
            (
                json!({ "type": "local_shell_call_output", "id": "c", "output": "{\"stdout\":\"fox\"}" }),
                "fox",
            ),
            (
                json!({ "type": "shell_call_output", "call_id": "c", "output": [{ "stdout": "fox", "stderr": "", "outcome": { "type": "exit", "exit_code": 3 } }] }),
                "exit_code",
            ),
            (
                json!({ "type": "apply_patch_call_output", "call_id": "c", "status": "failed" }),
                "failed",
            ),
        ] {
            let messages = of(item);
            assert_eq!(
                (messages[0].role.as_str(), messages[0].tool_call_id.as_deref()),
                ("tool", Some("c"))
            );
            assert!(messages[0].content.contains(part), "{messages:?}");
        }
        let found = of(
            json!({ "type": "file_search_call", "id": "c", "queries": ["fox"], "results": [{ "text": "Foxes are red.", "filename": "a.txt" }] }),
        );
        assert!(found[1].content.contains("Foxes are red."), "{found:?}");
        let thought = of(
            json!({ "type": "reasoning", "summary": [{ "type": "summary_text", "text": "Hm" }], "encrypted_content": "zz" }),
        );
        assert_eq!(thought[0].reasoning.as_deref(), Some("Hm"));
    }
}
