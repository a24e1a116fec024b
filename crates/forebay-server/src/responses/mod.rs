//! OpenAI's interface of responses, which Codex and the newer libraries use.

mod custom;
mod events;
mod items;
mod request;
mod store;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use forebay_chat::Message;
use forebay_requests::fields::RESPONSES;
use forebay_requests::{Update, Wanted};
use serde_json::{Value, json};

use self::events::Writer;
use self::request::Body;
pub use self::store::Store;
use self::store::{Owner, Stored};
use crate::app::App;
use crate::body::{Received, Segment, read};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::models::{Entry, Lease};
use crate::openai::Failure;
use crate::remarks;
use crate::run::Answers;
use crate::statistics;
use crate::stream::{self, Encode};

/// `POST /v1/responses`.
pub async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Response, Failure> {
    let (own, asking, unique) = (app.clone(), caller.clone(), stream::unique());
    let id = format!("resp_{unique}");
    let read = move || {
        let body: Body = read(&RESPONSES, &body)?;
        let entry = own.models.entry(body.model.as_deref())?;
        let messages = conversation(&own, asking.owner(), &body)?;
        let head = head(&id, &entry.name, &body);
        let custom = custom::names(&body.tools);
        let asks = !messages.is_empty() || body.instructions.is_some();
        let wanted = body.wanted(messages.clone())?;
        let (stores, caller) = (body.store != Some(false), asking);
        let input = input_items(&id, body.input);
        let asked =
            Asked { unique, caller, id, entry, head, custom, messages, input, stores, asks };
        Ok((asked, wanted))
    };
    let (asked, wanted) = app.work(&caller, read).await?;
    let ping = app.ping.filter(|_| wanted.stream);
    Ok(stream::with_pings(ping, begin(app, asked, wanted), failed_late).await?)
}

/// Returns the messages of a request, behind those of the response that it continues.
fn conversation(app: &App, owner: &str, body: &Body) -> Result<Vec<Message>, ApiError> {
    let mut messages = match &body.previous_response_id {
        None => Vec::new(),
        Some(id) => app.responses.get(owner, id).ok_or_else(|| unknown(id))?.messages,
    };
    messages.extend(body.messages()?);
    Ok(messages)
}

/// Returns the items of a request, with ids.
fn input_items(id: &str, input: Value) -> Vec<Value> {
    let items = match input {
        Value::Array(items) => items,
        Value::String(text) if !text.is_empty() => {
            let content = json!([{ "type": "input_text", "text": text }]);
            vec![json!({ "type": "message", "role": "user", "content": content })]
        }
        _ => Vec::new(),
    };
    let with_id = |(mut item, number): (Value, usize)| {
        if item.get("id").is_none() {
            item["id"] = format!("item_{}_{number}", id.trim_start_matches("resp_")).into();
        }
        item
    };
    items.into_iter().zip(0..).map(with_id).collect()
}

/// `POST /v1/responses/input_tokens`: the number of tokens of a request's prompt.
pub async fn input_tokens(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, Failure> {
    let (own, asking) = (app.clone(), caller.clone());
    let read = move || {
        let body: Body = read(&RESPONSES, &body)?;
        let entry = own.models.entry(body.model.as_deref())?;
        Ok((entry, body.wanted(conversation(&own, asking.owner(), &body)?)?))
    };
    let count = app.count_tokens(&caller, read).await?;
    Ok(Json(json!({ "object": "response.input_tokens", "input_tokens": count })))
}

/// `GET /v1/responses/{id}/input_items`: the items of the request of a stored response, the last one first.
pub async fn input_items_of(
    State(app): State<Arc<App>>,
    caller: Caller,
    Segment(id): Segment,
    Query(page): Query<HashMap<String, String>>,
) -> Result<Json<Value>, Failure> {
    let found = app.responses.get(caller.owner(), &id);
    let mut items = found.ok_or_else(|| unknown(&id))?.input;
    if page.get("order").is_none_or(|order| order != "asc") {
        items.reverse();
    }
    if let Some(after) = page.get("after") {
        let at = items.iter().position(|item| item["id"] == after.as_str());
        items.drain(..at.map_or(0, |at| at + 1));
    }
    let limit = page.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(20);
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id_of = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    Ok(Json(json!({
        "object": "list",
        "first_id": id_of(items.first()),
        "last_id": id_of(items.last()),
        "has_more": has_more,
        "data": items,
    })))
}

/// What is known of a request before its model is loaded.
struct Asked {
    unique: String,
    caller: Caller,
    id: String,
    entry: Entry,
    head: Value,
    /// Names of the custom tools.
    custom: BTreeSet<String>,
    messages: Vec<Message>,
    /// The items of the request.
    input: Vec<Value>,
    stores: bool,
    /// True if the request has input.
    asks: bool,
}

/// Writes an error that comes after the first comments of a stream.
fn failed_late(error: &ApiError, out: &mut String) {
    let event = json!({ "type": "error", "sequence_number": 0, "code": error.code.unwrap_or("server_error"),
        "message": error.message, "param": error.param });
    stream::event("error", &event, out);
}

/// Begins a stream, or returns the whole response.
async fn begin(app: Arc<App>, asked: Asked, wanted: Wanted) -> Result<Response, ApiError> {
    let Asked { unique, caller, id, entry, head, custom, messages, input, stores, asks } = asked;
    let (streams, statistics, ping) = (wanted.stream, wanted.statistics, app.ping);
    let lease = match asks {
        true => Some(app.models.get(&caller, entry, None).await?),
        false => None,
    };
    let owner = caller.owner().to_owned();
    let keep = stores.then_some(Keep { owner, id, messages, input });
    let writer = Writer::new(unique, head, custom);
    let mut parts =
        Parts { app: app.clone(), lease: lease.clone(), writer, keep, statistics, failed: None };
    let Some(lease) = lease else {
        // A request without input asks whether the endpoint is there.
        let mut out = String::new();
        parts.writer.begin(&mut out);
        let response = parts.finish(&mut out);
        return Ok(match streams {
            true => stream::of_parts(stream::EVENTS, out.into()),
            false => Json(response).into_response(),
        });
    };
    let prepared = app.prepared(&caller, &lease, wanted).await?;
    let mut answers = Answers::start(&caller, &lease, &prepared).await?;
    if streams {
        return Ok(remarks::add(&prepared.remarks, stream::response(answers, parts, ping)));
    }
    let mut unsent = String::new();
    while let Some(update) = answers.next().await {
        parts.update(update, &mut unsent);
        unsent.clear();
    }
    let response = parts.finish(&mut unsent);
    match parts.failed {
        Some(error) => Err(error),
        None => Ok(remarks::add(&prepared.remarks, Json(response).into_response())),
    }
}

/// `GET /v1/responses/{id}`.
pub async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Segment(id): Segment,
) -> Result<Json<Value>, Failure> {
    let found = app.responses.get(caller.owner(), &id);
    Ok(Json(found.ok_or_else(|| unknown(&id))?.response))
}

/// `DELETE /v1/responses/{id}`.
pub async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Segment(id): Segment,
) -> Result<Json<Value>, Failure> {
    match app.responses.remove(caller.owner(), &id) {
        true => Ok(Json(json!({ "id": id, "object": "response", "deleted": true }))),
        false => Err(unknown(&id).into()),
    }
}

fn unknown(id: &str) -> ApiError {
    let why =
        format!("there is no response {id:?}: it was not stored, or had to give way to newer ones");
    ApiError {
        param: Some("previous_response_id".into()),
        code: Some("previous_response_not_found"),
        ..ApiError::new(StatusCode::NOT_FOUND, why)
    }
}

/// Returns the fields of a response that its request decides.
fn head(id: &str, model: &str, body: &Body) -> Value {
    let text = body.text.clone().unwrap_or_else(|| json!({ "format": { "type": "text" } }));
    json!({
        "id": id,
        "object": "response",
        "created_at": stream::now(),
        "status": "in_progress",
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls != Some(false),
        "previous_response_id": body.previous_response_id,
        "reasoning": body.reasoning.clone().unwrap_or_else(|| json!({ "effort": null, "summary": null })),
        "store": body.store != Some(false),
        "temperature": body.temperature.unwrap_or(1.0),
        "text": text,
        "tool_choice": body.tool_choice.clone().unwrap_or_else(|| "auto".into()),
        "tools": body.tools,
        "top_p": body.top_p.unwrap_or(1.0),
        "truncation": "disabled",
        "usage": null,
        "metadata": body.metadata.clone().unwrap_or_else(|| json!({})),
    })
}

/// Adds an answer to a conversation. One that continues the last message is a part of it.
fn add_answer(messages: &mut Vec<Message>, answer: Option<Message>) {
    let Some(answer) = answer else { return };
    let Some(last) = messages.last_mut().filter(|last| last.role == "assistant") else {
        return messages.push(answer);
    };
    if last.tool_calls.is_empty() {
        if let Some(more) = &answer.reasoning {
            last.reasoning.get_or_insert_default().push_str(more);
        }
        last.content += &answer.content;
        last.tool_calls = answer.tool_calls;
    } else {
        messages.push(answer);
    }
}

/// What is kept for later requests.
struct Keep {
    owner: Owner,
    id: String,
    messages: Vec<Message>,
    input: Vec<Value>,
}

/// A response that is being written.
struct Parts {
    app: Arc<App>,
    /// The model. `None` if the request has no input.
    lease: Option<Lease>,
    writer: Writer,
    keep: Option<Keep>,
    /// True to add statistics to the response.
    statistics: bool,
    failed: Option<ApiError>,
}

impl Parts {
    /// Writes the end, and keeps the response if it did not fail.
    fn finish(&mut self, out: &mut String) -> Value {
        if let (true, Some(lease), Some(choice)) =
            (self.statistics, &self.lease, self.writer.choice())
        {
            let statistics = statistics::of(lease, choice);
            self.writer.add_to_head("statistics", statistics);
        }
        let response = self.writer.end(self.failed.as_ref(), out);
        if self.failed.is_none()
            && let Some(Keep { owner, id, mut messages, input }) = self.keep.take()
        {
            add_answer(&mut messages, self.writer.message());
            let stored = Stored { id, messages, input, response: response.clone() };
            self.app.responses.insert(owner, stored);
        }
        response
    }
}

impl Encode for Parts {
    const TYPE: &'static str = stream::EVENTS;

    fn begin(&mut self, out: &mut String) {
        self.writer.begin(out);
    }

    fn update(&mut self, update: Update, out: &mut String) {
        self.writer.update(update, out);
        let choice = self.writer.choice().filter(|choice| choice.has_failed());
        if let (Some(choice), Some(lease)) = (choice, &self.lease) {
            self.failed = Some(lease.failure_of(std::slice::from_ref(choice)));
        }
    }

    fn end(&mut self, out: &mut String) {
        if self.writer.choice().is_none() {
            self.failed = Some(ApiError::stopped());
        }
        self.finish(out);
    }
}
