//! Requests of Anthropic's interface.

use forebay_chat::{Message, Think, ToolCall};
use forebay_grammar::Rules;
use forebay_model::sampling::Sampling;
use forebay_requests::fields::ANTHROPIC;
use forebay_requests::{Input, MustCall, Wanted, effort};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::body::read;
use crate::error::ApiError;

/// The fields that are followed. The table of fields has removed the others.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Body {
    model: Option<String>,
    pub max_tokens: Option<i64>,
    messages: Vec<Turn>,
    system: Option<Content>,
    #[serde(default)]
    stream: bool,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    #[serde(default)]
    stop_sequences: Vec<String>,
    #[serde(default)]
    tools: Vec<Tool>,
    tool_choice: Option<ToolChoice>,
    output_format: Option<OutputFormat>,
    #[serde(default)]
    output_config: OutputConfig,
    thinking: Option<Thinking>,
    #[serde(default)]
    include_statistics: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    role: String,
    content: Content,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

/// A block of the kinds that are followed.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
    },
    #[serde(alias = "server_tool_use", alias = "mcp_tool_use")]
    ToolUse {
        id: String,
        name: String,
        input: Value,
    },
    #[serde(alias = "mcp_tool_result")]
    ToolResult {
        tool_use_id: String,
        content: Option<Content>,
    },
    SearchResult {
        source: Option<String>,
        title: Option<String>,
        content: Content,
    },
    #[serde(
        alias = "web_fetch_tool_result",
        alias = "code_execution_tool_result",
        alias = "bash_code_execution_tool_result",
        alias = "text_editor_code_execution_tool_result",
        alias = "tool_search_tool_result"
    )]
    WebSearchToolResult {
        tool_use_id: String,
        content: Option<Value>,
    },
}

/// A tool that the client runs.
#[derive(Deserialize)]
struct Tool {
    name: String,
    description: Option<String>,
    input_schema: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: bool,
}

/// Form of the answer, which is JSON.
#[derive(Deserialize)]
struct OutputFormat {
    schema: Value,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct OutputConfig {
    format: Option<OutputFormat>,
    effort: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
}

/// Reads the body of a request.
///
/// # Errors
/// Returns an error if a field cannot be followed.
pub fn request(body: &[u8]) -> Result<(Body, Wanted), ApiError> {
    let body: Body = read(&ANTHROPIC, body)?;
    let wanted = wanted(&body)?;
    Ok((body, wanted))
}

fn wanted(body: &Body) -> Result<Wanted, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = &body.system {
        messages.push(Message::new("system", text(system)?));
    }
    for turn in &body.messages {
        add_turn(turn, &mut messages)?;
    }
    if body.messages.is_empty() {
        return Err(ApiError::bad("messages: there is no message"));
    }
    for (name, value) in [("temperature", body.temperature), ("top_p", body.top_p)] {
        if value.is_some_and(|value| !(0.0..=1.0).contains(&value)) {
            return Err(ApiError::bad(format!("{name} must be between 0 and 1")));
        }
    }
    let choice = body.tool_choice.as_ref().map_or("auto", |choice| choice.kind.as_str());
    let tools = tools(&body.tools).filter(|_| choice != "none");
    let named = body.tool_choice.as_ref().and_then(|choice| choice.name.clone());
    let must_call = match (choice, named) {
        ("any", _) => Some(MustCall::Any),
        ("tool", Some(name)) => Some(MustCall::Named(name)),
        ("tool", None) => return Err(ApiError::bad("tool_choice.name is missing")),
        _ => None,
    };
    let format = body.output_config.format.as_ref().or(body.output_format.as_ref());
    Ok(Wanted {
        input: Input::Chat { messages, tools, think: Some(think(body)?), variables: Map::new() },
        max_tokens: body.max_tokens.and_then(|most| usize::try_from(most).ok()),
        sampling: Sampling {
            temperature: body.temperature.unwrap_or(1.0),
            top_p: body.top_p.unwrap_or(1.0),
            top_k: body.top_k.unwrap_or(0),
            min_p: 0.0,
            ..Sampling::default()
        },
        stops: body.stop_sequences.clone(),
        choices: 1,
        rules: format.map(|format| Rules::JsonSchema(format.schema.clone())),
        must_call,
        parallel_calls: !body.tool_choice.as_ref().is_some_and(|c| c.disable_parallel_tool_use),
        stream: body.stream,
        statistics: body.include_statistics,
        model: body.model.clone(),
        ..Wanted::default()
    })
}

/// Returns how much the model thinks: by the effort, unless thinking is off or left out.
fn think(body: &Body) -> Result<Think, ApiError> {
    let effort = body.output_config.effort.as_deref().map(effort::think).transpose();
    let effort = effort.map_err(|why| ApiError::bad(format!("output_config.effort {why}")))?;
    Ok(match body.thinking.as_ref().map(|thinking| thinking.kind.as_str()) {
        None | Some("disabled") => Think::Off,
        Some(_) => effort.unwrap_or(Think::On),
    })
}

/// Returns the tools in the form that chat templates expect.
fn tools(tools: &[Tool]) -> Option<Value> {
    let of = |tool: &Tool| {
        let function = json!({
            "name": tool.name,
            "description": tool.description.as_deref().unwrap_or(""),
            "parameters": tool.input_schema.clone()
                .unwrap_or_else(|| json!({ "type": "object", "properties": {} })),
        });
        json!({ "type": "function", "function": function })
    };
    let functions: Vec<Value> = tools.iter().map(of).collect();
    (!functions.is_empty()).then(|| functions.into())
}

/// Adds the messages of a turn: tools' results come before the user's text.
fn add_turn(turn: &Turn, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let blocks = match &turn.content {
        Content::Text(text) => {
            messages.push(Message::new(&turn.role, text.clone()));
            return Ok(());
        }
        Content::Blocks(blocks) => blocks,
    };
    let mut message = Message::new(&turn.role, "");
    let mut has_own = blocks.is_empty();
    for block in blocks {
        let (id, result) = match block {
            Block::ToolResult { tool_use_id, content } => {
                (tool_use_id, content.as_ref().map(text).transpose()?.unwrap_or_default())
            }
            Block::WebSearchToolResult { tool_use_id, content } => {
                (tool_use_id, readable(content.as_ref()))
            }
            block => {
                has_own = true;
                add_block(block, &mut message)?;
                continue;
            }
        };
        let id = Some(id.clone());
        // The result of a tool that Anthropic's servers run follows its call, in the middle of an answer.
        if turn.role == "assistant" && has_own {
            let next = Message::new(&turn.role, "");
            messages.push(std::mem::replace(&mut message, next));
            has_own = false;
        }
        messages.push(Message { tool_call_id: id, ..Message::new("tool", result) });
    }
    if has_own {
        messages.push(message);
    }
    Ok(())
}

/// Adds a block to its message.
fn add_block(block: &Block, message: &mut Message) -> Result<(), ApiError> {
    match block {
        Block::Thinking { thinking } => {
            message.reasoning.get_or_insert_default().push_str(thinking);
        }
        Block::ToolUse { id, name, input } => message.tool_calls.push(ToolCall {
            id: Some(id.clone()),
            name: name.clone(),
            arguments: ToolCall::text_of(input),
        }),
        block => message.content.push_str(&text_of_block(block)?),
    }
    Ok(())
}

/// Returns the text of a block in a place that has only text.
fn text_of_block(block: &Block) -> Result<String, ApiError> {
    match block {
        Block::Text { text } => Ok(text.clone()),
        Block::SearchResult { source, title, content } => {
            let head = [title, source].into_iter().flatten();
            let head: String = head.map(|line| format!("{line}\n")).collect();
            Ok(format!("{head}{}\n", text(content)?))
        }
        _ => Err(ApiError::bad("only blocks of type text or search_result may be here")),
    }
}

/// Returns the text of content that can only be text.
fn text(content: &Content) -> Result<String, ApiError> {
    match content {
        Content::Text(text) => Ok(text.clone()),
        Content::Blocks(blocks) => blocks.iter().map(text_of_block).collect(),
    }
}

/// Returns the result of a tool of Anthropic's servers as text, without what only they can read.
fn readable(content: Option<&Value>) -> String {
    fn without_secrets(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.retain(|name, value| !name.starts_with("encrypted_") && !value.is_null());
                fields.values_mut().for_each(without_secrets);
            }
            Value::Array(items) => items.iter_mut().for_each(without_secrets),
            _ => {}
        }
    }
    match content {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => {
            let mut value = value.clone();
            without_secrets(&mut value);
            ToolCall::text_of(&value)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(content: Value) -> Vec<Message> {
        let turn = json!({ "role": "User", "content": content });
        let body = json!({ "messages": [turn], "system": [{ "type": "text", "text": "s", "cache_control": null }] });
        let (_, wanted) = request(body.to_string().as_bytes()).unwrap();
        let Input::Chat { messages, .. } = wanted.input else { panic!() };
        messages
    }

    #[test]
    fn what_was_found_is_in_the_prompt() {
        let found = json!({ "type": "search_result", "source": "https://example.com", "title": "Foxes",
            "content": [{ "type": "text", "text": "Foxes are red." }], "citations": { "enabled": true } });
        let all = messages(json!([found, { "type": "text", "text": "Say more." }]));
        assert_eq!(all[1].content, "Foxes\nhttps://example.com\nFoxes are red.\nSay more.");
        let result = json!({ "type": "tool_result", "tool_use_id": "t", "content": [found] });
        let all = messages(json!([result]));
        assert!(all[1].role == "tool" && all[1].content.contains("Foxes are red."), "{all:?}");
        let call = json!({ "type": "server_tool_use", "id": "w", "name": "web_search", "input": { "query": "x" } });
        let pages =
            json!([{ "type": "web_search_result", "title": "T", "encrypted_content": "zzz" }]);
        let result =
            json!({ "type": "web_search_tool_result", "tool_use_id": "w", "content": pages });
        let all = messages(json!([call, result, { "type": "text", "text": "So." }]));
        assert!(
            all.iter()
                .any(|m| m.role == "tool" && m.content.contains('T') && !m.content.contains("zzz"))
        );
        assert!(all.iter().any(|m| m.tool_calls.iter().any(|call| call.name == "web_search")));
        for refused in ["image", "document", "hologram"] {
            let turn = json!({ "role": "user", "content": [{ "type": refused }] });
            let body = json!({ "messages": [turn] }).to_string();
            let error = request(body.as_bytes()).err().unwrap().message;
            assert!(
                error.contains(refused) && error.starts_with("messages[0].content[0].type"),
                "{error}"
            );
        }
    }

    #[test]
    fn effort_says_how_much_the_model_thinks() {
        let of = |more: Value| {
            let mut body = json!({ "messages": [{ "role": "user", "content": "x" }] });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let (_, wanted) = request(body.to_string().as_bytes()).unwrap();
            let Input::Chat { think, .. } = wanted.input else { panic!() };
            think.unwrap()
        };
        let effort = json!({ "effort": "max" });
        assert_eq!(of(json!({ "output_config": effort })), Think::Off);
        assert_eq!(
            of(json!({ "output_config": effort, "thinking": { "type": "adaptive" } })),
            Think::High
        );
        assert_eq!(
            of(json!({ "thinking": { "type": "enabled", "budget_tokens": 1024 } })),
            Think::On
        );
    }
}
