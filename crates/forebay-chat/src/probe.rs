//! Finds what a chat template does with a conversation, by rendering small ones.

use forebay_text::{ChatTemplate, RenderInput};
use serde_json::{Value, json};

/// Returns the prompt of a user's message and an answer with calls of the tools `probe0`, `probe1` and so on, or `None`
/// if the template refuses it.
pub(crate) fn prompt_of_calls(
    template: &ChatTemplate,
    arguments: &Value,
    count: usize,
) -> Option<String> {
    render(template, &[user(), calls(arguments, count)])
}

/// Returns true if the template writes the text of a tool call's arguments as it is. Some templates do. Others turn a
/// value into JSON and would quote a text, and some iterate over an object.
pub(crate) fn writes_arguments_verbatim(template: &ChatTemplate) -> bool {
    const ARGUMENTS: &str = "{\"needle\":  1}";
    prompt_of_calls(template, &json!(ARGUMENTS), 1).is_some_and(|prompt| prompt.contains(ARGUMENTS))
}

/// Returns true if the template takes messages with one call, but not with two.
pub(crate) fn has_single_calls(template: &ChatTemplate) -> bool {
    let takes = |count| prompt_of_calls(template, &json!({ "needle": 1 }), count).is_some();
    takes(1) && !takes(2)
}

/// Returns true if the template writes tool calls.
pub(crate) fn writes_calls(template: &ChatTemplate) -> bool {
    prompt_of_calls(template, &json!({ "needle": 1 }), 1)
        .is_some_and(|prompt| prompt.contains("probe0"))
}

/// Returns true if the template writes the text of a message with calls.
pub(crate) fn writes_text_of_calls(template: &ChatTemplate) -> bool {
    let mut calls = calls(&json!({ "x": 1 }), 1);
    calls["content"] = json!("needle");
    render(template, &[user(), calls]).is_some_and(|prompt| prompt.contains("needle"))
}

/// Returns true if the prompt contains the text of a system message.
pub(crate) fn takes_system(template: &ChatTemplate) -> bool {
    let system = json!({ "role": "system", "content": "needle" });
    match render(template, &[system, user()]) {
        Some(prompt) => prompt.contains("needle"),
        // A template that takes no conversation at all says nothing about system messages.
        None => render(template, &[user()]).is_none(),
    }
}

/// Returns true if the prompt describes tools.
pub(crate) fn describes_tools(template: &ChatTemplate) -> bool {
    let parameters = json!({ "type": "object", "properties": { "x": { "type": "integer" } } });
    let function = json!({ "name": "needle", "description": "d", "parameters": parameters });
    let input = RenderInput {
        messages: json!([user()]),
        tools: Some(json!([{ "type": "function", "function": function }])),
        ..RenderInput::default()
    };
    template.render(&input).is_ok_and(|prompt| prompt.contains("needle"))
}

/// Returns true if the template of Gemma 4 reads results of tools from messages with the role `tool`.
pub(crate) fn reads_tool_messages(template: &ChatTemplate) -> bool {
    let result = json!({
        "role": "tool", "content": "needle", "name": "probe0", "tool_call_id": "callnum00",
    });
    let messages = [user(), calls(&json!({ "x": 1 }), 1), result];
    render(template, &messages).is_some_and(|prompt| prompt.contains("response:probe0"))
}

/// Returns true if text before a call makes the template end the model's turn behind the results of tools, so that the prompt
/// does not end where the model goes on. Some templates of Gemma 4 do.
pub(crate) fn text_ends_turn(template: &ChatTemplate) -> bool {
    let mut calls = calls(&json!({ "x": 1 }), 1);
    calls["content"] = json!("needle");
    let result = json!({
        "role": "tool", "content": "y", "name": "probe0", "tool_call_id": "callnum00",
    });
    let input = RenderInput {
        messages: json!([user(), calls, result]),
        add_generation_prompt: true,
        ..RenderInput::default()
    };
    template.render(&input).is_ok_and(|prompt| prompt.trim_end().ends_with("<turn|>"))
}

fn user() -> Value {
    json!({ "role": "user", "content": "x" })
}

fn calls(arguments: &Value, count: usize) -> Value {
    let call = |number: usize| {
        json!({
            "type": "function",
            "id": format!("callnum{number:02}"),
            "function": { "name": format!("probe{number}"), "arguments": arguments },
        })
    };
    let calls: Vec<Value> = (0..count).map(call).collect();
    json!({ "role": "assistant", "content": "", "tool_calls": calls })
}

fn render(template: &ChatTemplate, messages: &[Value]) -> Option<String> {
    let input = RenderInput { messages: Value::Array(messages.to_vec()), ..RenderInput::default() };
    template.render(&input).ok()
}
