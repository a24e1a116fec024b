//! Endpoints for those who run the server, and for tools that work with tokens and templates.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use forebay_chat::Message;
use forebay_requests::{Input, Text, Wanted};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::app::App;
use crate::body::{Received, read};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::models::Status;
use crate::openai::Failure;

/// `GET /metrics`.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    match app.models.metrics() {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(CONTENT_TYPE, kind)], text).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// `POST /rerank` and `/v1/rerank`, which need a model that scores pairs of texts.
pub async fn rerank() -> Failure {
    let why =
        "this server has no model that ranks texts: compare embeddings of /v1/embeddings instead";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, why).into()
}

/// `GET /slots`: the requests that run and wait, in all and by model.
pub async fn slots(State(app): State<Arc<App>>) -> Json<Value> {
    let loaded = app.models.loaded();
    let of_model = |status: &Status| {
        let report = &status.report;
        json!({
            "model": status.name,
            "running": report.running,
            "waiting": report.waiting,
            "running_most": report.running_most,
            "context": status.context,
            "statistics": report.session,
        })
    };
    Json(json!({
        "running": loaded.iter().map(|status| status.report.running).sum::<usize>(),
        "waiting": loaded.iter().map(|status| status.report.waiting).sum::<usize>(),
        "waiting_for_models": app.models.waiting(),
        "models": loaded.iter().map(of_model).collect::<Value>(),
        "uptime_seconds": app.started.elapsed().as_secs_f64(),
    }))
}

/// Returns the text of the model that a request names. The model need not be loaded.
fn text(app: &App, model: Option<&str>) -> Result<Arc<Text>, ApiError> {
    app.models.text(&app.models.entry(model)?)
}

#[derive(Deserialize, ToSchema)]
pub struct Tokenize {
    model: Option<String>,
    content: Option<String>,
    prompt: Option<String>,
    #[serde(default)]
    add_special: bool,
    #[serde(default = "yes")]
    parse_special: bool,
}

fn yes() -> bool {
    true
}

/// `POST /tokenize`: a text's token ids.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let encode = move || {
        let asked: Tokenize = read(&body)?;
        let content =
            asked.content.or(asked.prompt).ok_or_else(|| ApiError::bad("content is missing"))?;
        let tokenizer = &text(&own, asked.model.as_deref())?.tokenizer;
        let ids = tokenizer.encode(&content, asked.add_special, asked.parse_special);
        ids.map_err(|error| ApiError::bad(error.to_string()))
    };
    let ids = app.prepare(&caller, encode).await?;
    Ok(Json(json!({ "tokens": ids, "count": ids.len() })))
}

#[derive(Deserialize, ToSchema)]
pub struct Detokenize {
    model: Option<String>,
    tokens: Vec<u32>,
}

/// `POST /detokenize`: the text of token ids.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let decode = move || {
        let Detokenize { model, tokens } = read(&body)?;
        let tokenizer = &text(&own, model.as_deref())?.tokenizer;
        let size = tokenizer.vocab_size();
        if let Some(id) = tokens.iter().find(|id| **id as usize >= size) {
            return Err(ApiError::bad(format!("token {id} is not in the vocabulary of {size}")));
        }
        Ok(tokenizer.decode(&tokens, true))
    };
    Ok(Json(json!({ "content": app.prepare(&caller, decode).await? })))
}

/// `POST /apply-template`: the prompt of a conversation.
pub async fn apply_template(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let prepare = move || {
        let body: Value = read(&body)?;
        let messages = Message::list_from_json(&body).map_err(|e| ApiError::bad(e.to_string()))?;
        let tools = body.get("tools").filter(|tools| tools.is_array()).cloned();
        let input = Input::Chat { messages, tools, think: None, variables: Map::new() };
        let text = text(&own, body.get("model").and_then(Value::as_str))?;
        Ok(text.prepare(Wanted { input, ..Wanted::default() }, None)?)
    };
    let prepared = app.prepare(&caller, prepare).await?;
    let ids = prepared.request.prompt;
    Ok(Json(json!({ "prompt": prepared.text, "tokens": ids.len(), "ids": ids })))
}
