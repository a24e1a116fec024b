//! The interface of Anthropic: messages and their numbers of tokens.
//!
//! Source: the Anthropic API reference, "Create a message", "Streaming messages" and "Count tokens". Fields and blocks that mean
//! nothing here are ignored; images and documents are refused.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_chat::{Message, Think, ToolCall};
use forebay_engine::engine::{RequestEnd, RequestStatistics};
use forebay_grammar::Rules;
use forebay_model::sampling::Sampling;
use forebay_requests::answer::call_id;
use forebay_requests::{Choice, Input, MustCall, Piece, Update, Wanted};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::app::App;
use crate::body::{Received, read};
use crate::caller::Caller;
use crate::error::{self, ApiError, ErrorForm};
use crate::models::{Entry, Lease};
use crate::remarks;
use crate::run::Answers;
use crate::statistics;
use crate::stream::{self, Encode};

/// The form of errors of the Anthropic API.
pub struct Form;

impl ErrorForm for Form {
    fn body(error: &ApiError) -> Value {
        error_body(error)
    }
}

/// An error in this form.
pub type Failure = error::Failure<Form>;

/// Returns an error in the form of the Anthropic API.
pub fn error_body(error: &ApiError) -> Value {
    json!({ "type": "error", "error": { "type": error.anthropic_kind(), "message": error.message } })
}

#[derive(Deserialize, ToSchema)]
#[schema(as = AnthropicRequest)]
pub struct Body {
    model: Option<String>,
    max_tokens: Option<usize>,
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
    output_config: Option<OutputConfig>,
    thinking: Option<Thinking>,
    /// True to report what the request needed of the weights, and how long it waited.
    #[serde(default)]
    include_statistics: bool,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = AnthropicTurn)]
pub struct Turn {
    role: String,
    content: Content,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
    },
    ToolUse {
        id: String,
        name: String,
        input: Value,
    },
    ToolResult {
        tool_use_id: String,
        content: Option<Content>,
    },
    Image {},
    Document {},
    #[serde(other)]
    Other,
}

/// A tool. Those that Anthropic's own servers run have a type and no schema.
#[derive(Deserialize, ToSchema)]
#[schema(as = AnthropicTool)]
pub struct Tool {
    name: Option<String>,
    description: Option<String>,
    input_schema: Option<Value>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = AnthropicToolChoice)]
pub struct ToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: bool,
}

/// Form of the answer.
#[derive(Deserialize, ToSchema)]
#[schema(as = AnthropicOutputFormat)]
pub struct OutputFormat {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Value>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = AnthropicOutputConfig)]
pub struct OutputConfig {
    format: Option<OutputFormat>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = AnthropicThinking)]
pub struct Thinking {
    #[serde(rename = "type")]
    kind: String,
}

/// Reads the body of a request.
fn request(body: &[u8]) -> Result<(Body, Wanted), ApiError> {
    let body: Body = read(body)?;
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
    let must_call = match (choice, body.tool_choice.as_ref().and_then(|choice| choice.name.clone()))
    {
        ("auto" | "none", _) => None,
        ("any", _) => Some(MustCall::Any),
        ("tool", Some(name)) => Some(MustCall::Named(name)),
        ("tool", None) => return Err(ApiError::bad("tool_choice.name is missing")),
        _ => return Err(ApiError::bad("tool_choice.type must be auto, any, tool or none")),
    };
    let format = body.output_config.as_ref().and_then(|config| config.format.as_ref());
    let rules = match format.or(body.output_format.as_ref()) {
        None => None,
        Some(OutputFormat { kind, schema: Some(schema) }) if kind == "json_schema" => {
            Some(Rules::JsonSchema(schema.clone()))
        }
        Some(_) => {
            return Err(ApiError::bad(
                "output_config.format must be of type json_schema with a schema",
            ));
        }
    };
    let think = match body.thinking.as_ref().map(|thinking| thinking.kind.as_str()) {
        None | Some("disabled") => Think::Off,
        Some(_) => Think::On,
    };
    Ok(Wanted {
        input: Input::Chat { messages, tools, think: Some(think), variables: Map::new() },
        max_tokens: body.max_tokens,
        sampling: Sampling {
            temperature: body.temperature.unwrap_or(1.0),
            top_p: body.top_p.unwrap_or(1.0),
            top_k: body.top_k.unwrap_or(0),
            min_p: 0.0,
            ..Sampling::default()
        },
        stops: body.stop_sequences.clone(),
        choices: 1,
        rules,
        must_call,
        parallel_calls: !body.tool_choice.as_ref().is_some_and(|c| c.disable_parallel_tool_use),
        stream: body.stream,
        statistics: body.include_statistics,
        model: body.model.clone(),
        ..Wanted::default()
    })
}

/// Returns the tools in the form that chat templates expect.
fn tools(tools: &[Tool]) -> Option<Value> {
    let functions: Vec<Value> = tools
        .iter()
        .filter_map(|tool| {
            let function = json!({
                "name": tool.name.as_ref()?,
                "description": tool.description.as_deref().unwrap_or(""),
                "parameters": tool.input_schema.as_ref()?,
            });
            Some(json!({ "type": "function", "function": function }))
        })
        .collect();
    (!functions.is_empty()).then(|| functions.into())
}

/// Adds the messages of a turn: tools' results come before the user's text.
fn add_turn(turn: &Turn, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    if !["user", "assistant", "system"].contains(&turn.role.as_str()) {
        return Err(ApiError::bad(format!("role {:?} must be user or assistant", turn.role)));
    }
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
        has_own |= !matches!(block, Block::ToolResult { .. } | Block::Other);
        match block {
            Block::Text { text } => message.content.push_str(text),
            Block::Thinking { thinking } => {
                message.reasoning.get_or_insert_default().push_str(thinking);
            }
            Block::ToolUse { id, name, input } => message.tool_calls.push(ToolCall {
                id: Some(id.clone()),
                name: name.clone(),
                arguments: ToolCall::text_of(input),
            }),
            Block::ToolResult { tool_use_id, content } => {
                let content = content.as_ref().map(text).transpose()?.unwrap_or_default();
                messages.push(Message {
                    tool_call_id: Some(tool_use_id.clone()),
                    ..Message::new("tool", content)
                });
            }
            Block::Image {} | Block::Document {} => return Err(no_images()),
            Block::Other => {}
        }
    }
    if has_own {
        messages.push(message);
    }
    Ok(())
}

/// Returns the text of content that can only be text.
fn text(content: &Content) -> Result<String, ApiError> {
    match content {
        Content::Text(text) => Ok(text.clone()),
        Content::Blocks(blocks) => {
            let texts: Result<Vec<&str>, ApiError> = blocks
                .iter()
                .map(|block| match block {
                    Block::Text { text } => Ok(text.as_str()),
                    Block::Image {} | Block::Document {} => Err(no_images()),
                    _ => Ok(""),
                })
                .collect();
            Ok(texts?.concat())
        }
    }
}

fn no_images() -> ApiError {
    ApiError::bad("this model reads text only: images and documents are not supported")
}

/// `POST /v1/messages/count_tokens`.
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let prepare = move || {
        let (_, wanted) = request(&body)?;
        let entry = own.models.entry(wanted.model.as_deref())?;
        Ok(own.models.text(&entry)?.prepare(wanted, None)?)
    };
    let prepared = app.prepare(&caller, prepare).await?;
    Ok(Json(json!({ "input_tokens": prepared.request.prompt.len() })))
}

/// `POST /v1/messages`.
pub async fn messages(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Response, Failure> {
    let own = app.clone();
    let read = move || {
        let (body, wanted) = request(&body)?;
        let entry = own.models.entry(wanted.model.as_deref())?;
        if body.max_tokens.is_none_or(|most| most == 0) {
            return Err(ApiError::bad("max_tokens must be at least 1"));
        }
        Ok((entry, wanted))
    };
    let (entry, wanted) = app.work(&caller, read).await?;
    Ok(match wanted.stream {
        true => {
            let failed: fn(&ApiError, &mut String) =
                |error, out| stream::event("error", &error_body(error), out);
            stream::with_pings(app.ping, begin(app.clone(), caller, entry, wanted), failed).await?
        }
        false => begin(app, caller, entry, wanted).await?,
    })
}

/// Begins a stream, or returns the whole answer.
async fn begin(
    app: Arc<App>,
    caller: Caller,
    entry: Entry,
    wanted: Wanted,
) -> Result<Response, ApiError> {
    let (streams, stops, statistics) = (wanted.stream, wanted.stops.clone(), wanted.statistics);
    let lease = app.models.get(&caller, entry, None).await?;
    let prepared = app.prepared(&caller, &lease, wanted).await?;
    let input_tokens = prepared.request.prompt.len();
    let answers = Answers::start(&caller, &lease, &prepared).await?;
    let unique = stream::unique();
    if streams {
        let (index, open, ended) = (0, None, false);
        let events = Events { lease, unique, stops, input_tokens, statistics, index, open, ended };
        return Ok(remarks::add(&prepared.remarks, stream::response(answers, events, app.ping)));
    }
    let choices = answers.all().await?;
    let choice = choices.first().ok_or_else(ApiError::stopped)?;
    let mut answer = message(&lease.name, &unique, usage(&choice.statistics));
    answer["content"] = content(&unique, &choice.message).into();
    (answer["stop_reason"], answer["stop_sequence"]) = stop(choice, &stops);
    if statistics {
        answer["statistics"] = statistics::of(&lease, choice);
    }
    Ok(remarks::add(&prepared.remarks, Json(answer).into_response()))
}

/// Returns an answer without content.
fn message(model: &str, unique: &str, usage: Value) -> Value {
    json!({
        "id": format!("msg_{unique}"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": usage,
    })
}

fn usage(statistics: &RequestStatistics) -> Value {
    json!({
        "input_tokens": statistics.prompt_tokens - statistics.cached_tokens,
        "cache_read_input_tokens": statistics.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": statistics.generated_tokens,
    })
}

/// Returns the blocks of an answer.
fn content(unique: &str, message: &Message) -> Vec<Value> {
    let mut blocks = Vec::new();
    if let Some(thinking) = message.reasoning.as_deref().filter(|text| !text.is_empty()) {
        blocks.push(json!({ "type": "thinking", "thinking": thinking, "signature": SIGNATURE }));
    }
    if !message.content.is_empty() {
        blocks.push(json!({ "type": "text", "text": message.content }));
    }
    for (number, call) in message.tool_calls.iter().enumerate() {
        let input = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
        let id = call.id.clone().unwrap_or_else(|| call_id(unique, 0, number));
        blocks.push(json!({ "type": "tool_use", "id": id, "name": call.name, "input": input }));
    }
    blocks
}

/// Signature of thinking blocks. Clients send it back, and nobody checks it.
const SIGNATURE: &str = "forebay";

/// Returns why the answer ended, and the stop sequence that ended it.
fn stop(choice: &Choice, stops: &[String]) -> (Value, Value) {
    match choice.end {
        RequestEnd::MaxTokens | RequestEnd::ContextFull => ("max_tokens".into(), Value::Null),
        _ if !choice.message.tool_calls.is_empty() => ("tool_use".into(), Value::Null),
        _ => match choice.stop.and_then(|index| stops.get(index)) {
            Some(stop) => ("stop_sequence".into(), stop.as_str().into()),
            None => ("end_turn".into(), Value::Null),
        },
    }
}

/// The kind of a block of the answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    Tool(usize),
}

/// The events of a streamed answer.
struct Events {
    lease: Lease,
    unique: String,
    stops: Vec<String>,
    input_tokens: usize,
    statistics: bool,
    /// Number of the next block.
    index: usize,
    open: Option<Kind>,
    ended: bool,
}

impl Events {
    /// Sends a piece, in a block of its kind.
    fn piece(&mut self, piece: &Piece, out: &mut String) {
        let (kind, delta) = match piece {
            Piece::Reasoning(text) => {
                (Kind::Thinking, json!({ "type": "thinking_delta", "thinking": text }))
            }
            Piece::Content(text) => (Kind::Text, json!({ "type": "text_delta", "text": text })),
            Piece::ToolCall { index, name } => {
                let id = call_id(&self.unique, 0, *index);
                let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                self.begin(Kind::Tool(*index), block, out);
                return;
            }
            Piece::Arguments { index, text } => {
                let delta = json!({ "type": "input_json_delta", "partial_json": text });
                (Kind::Tool(*index), delta)
            }
        };
        if self.open != Some(kind) {
            let block = match kind {
                Kind::Thinking => json!({ "type": "thinking", "thinking": "", "signature": "" }),
                _ => json!({ "type": "text", "text": "" }),
            };
            self.begin(kind, block, out);
        }
        self.delta(&delta, out);
    }

    fn begin(&mut self, kind: Kind, block: Value, out: &mut String) {
        self.end_block(out);
        let start =
            json!({ "type": "content_block_start", "index": self.index, "content_block": block });
        stream::event("content_block_start", &start, out);
        self.open = Some(kind);
    }

    fn delta(&self, delta: &Value, out: &mut String) {
        let delta = json!({ "type": "content_block_delta", "index": self.index, "delta": delta });
        stream::event("content_block_delta", &delta, out);
    }

    fn end_block(&mut self, out: &mut String) {
        let Some(kind) = self.open.take() else { return };
        if kind == Kind::Thinking {
            self.delta(&json!({ "type": "signature_delta", "signature": SIGNATURE }), out);
        }
        let stop = json!({ "type": "content_block_stop", "index": self.index });
        stream::event("content_block_stop", &stop, out);
        self.index += 1;
    }

    fn failed(&mut self, error: &ApiError, out: &mut String) {
        self.ended = true;
        stream::event("error", &error_body(error), out);
    }
}

impl Encode for Events {
    const TYPE: &'static str = stream::EVENTS;

    fn begin(&mut self, out: &mut String) {
        let usage = json!({ "input_tokens": self.input_tokens, "output_tokens": 0 });
        let message = message(&self.lease.name, &self.unique, usage);
        let start = json!({ "type": "message_start", "message": message });
        stream::event("message_start", &start, out);
        stream::event("ping", &json!({ "type": "ping" }), out);
    }

    fn update(&mut self, update: Update, out: &mut String) {
        match update {
            Update::Token { pieces, .. } => {
                pieces.iter().for_each(|piece| self.piece(piece, out));
            }
            Update::Done { pieces, answer, .. } => {
                pieces.iter().for_each(|piece| self.piece(piece, out));
                self.end_block(out);
                if answer.has_failed() {
                    let error = self.lease.failure_of(std::slice::from_ref(&*answer));
                    return self.failed(&error, out);
                }
                let (reason, sequence) = stop(&answer, &self.stops);
                let delta = json!({
                    "type": "message_delta",
                    "delta": { "stop_reason": reason, "stop_sequence": sequence },
                    "usage": usage(&answer.statistics),
                });
                stream::event("message_delta", &delta, out);
                let mut last = json!({ "type": "message_stop" });
                if self.statistics {
                    last["statistics"] = statistics::of(&self.lease, &answer);
                }
                stream::event("message_stop", &last, out);
                self.ended = true;
            }
        }
    }

    fn end(&mut self, out: &mut String) {
        if !self.ended {
            self.failed(&ApiError::stopped(), out);
        }
    }
}
