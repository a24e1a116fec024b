//! The interface of Anthropic: messages and their numbers of tokens.
//!
//! Source: the Anthropic API reference, "Create a message", "Streaming messages" and "Count tokens".

mod request;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_chat::Message;
use forebay_engine::engine::{RequestEnd, RequestStatistics};
use forebay_requests::answer::call_id;
use forebay_requests::{Choice, Piece, Update, Wanted};
use serde_json::{Value, json};

use self::request::request;
use crate::app::App;
use crate::body::Received;
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

/// `POST /v1/messages/count_tokens`.
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let read = move || {
        let (_, wanted) = request(&body)?;
        Ok((own.models.entry(wanted.model.as_deref())?, wanted))
    };
    Ok(Json(json!({ "input_tokens": app.count_tokens(&caller, read).await? })))
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
        match body.max_tokens {
            None => return Err(ApiError::bad("max_tokens is missing")),
            Some(most) if most < 1 => return Err(ApiError::bad("max_tokens must be at least 1")),
            Some(_) => {}
        }
        Ok((entry, wanted))
    };
    let (entry, wanted) = app.work(&caller, read).await?;
    let failed: fn(&ApiError, &mut String) =
        |error, out| stream::event("error", &error_body(error), out);
    let ping = app.ping.filter(|_| wanted.stream);
    Ok(stream::with_pings(ping, begin(app, caller, entry, wanted), failed).await?)
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
