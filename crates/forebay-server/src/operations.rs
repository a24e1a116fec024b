//! Endpoints for those who run the server, and for tools that work with tokens and templates.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use forebay_requests::fields::{DETOKENIZE, TOKENIZE};
use forebay_requests::{Endpoint, Text, wanted};
use forebay_text::Tokenizer;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::body::{self, Received, read};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::models::Status;
use crate::openai::Failure;

/// `GET /props`: settings of the server and of the model for requests that name none, as llama.cpp's server names them.
pub async fn props(State(app): State<Arc<App>>, caller: Caller) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let describe = move || {
        let entry = own.models.entry(None)?;
        let text = own.models.text(&entry)?;
        let loaded = own.models.loaded();
        let status = loaded.iter().find(|status| status.name == entry.name);
        let tokenizer = &text.tokenizer;
        Ok(json!({
            "default_generation_settings": {
                "n_ctx": status.map_or(text.info.context_trained, |status| status.context),
                "params": { "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "n_predict": -1 },
            },
            "total_slots": status.map_or(1, |status| status.report.running_max),
            "model_alias": entry.name,
            "model_path": entry.name,
            "modalities": { "vision": false, "audio": false },
            "chat_template": text.template.source(),
            "bos_token": token_text(tokenizer, tokenizer.bos_id()).unwrap_or_default(),
            "eos_token": token_text(tokenizer, tokenizer.eos_id()).unwrap_or_default(),
            "build_info": concat!("forebay ", env!("CARGO_PKG_VERSION")),
            "is_sleeping": status.is_none(),
        }))
    };
    Ok(Json(app.prepare(&caller, describe).await?))
}

/// Returns the text of a special token.
fn token_text(tokenizer: &Tokenizer, id: Option<u32>) -> Option<String> {
    id.map(|id| String::from_utf8_lossy(&tokenizer.token_bytes(id, true)).into_owned())
}

/// `GET /tokenizer_info`: special tokens and chat template of the model for requests that name none, as vLLM's server names them.
/// lm-evaluation-harness asks for them, and then counts tokens by `/tokenize`.
pub async fn tokenizer_info(
    State(app): State<Arc<App>>,
    caller: Caller,
) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let describe = move || {
        let text = text(&own, None)?;
        let tokenizer = &text.tokenizer;
        Ok(json!({
            "bos_token": token_text(tokenizer, tokenizer.bos_id()),
            "eos_token": token_text(tokenizer, tokenizer.eos_id()),
            "chat_template": text.template.source(),
        }))
    };
    Ok(Json(app.prepare(&caller, describe).await?))
}

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
            "running_max": report.running_max,
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tokenize {
    model: Option<String>,
    content: Option<String>,
    #[serde(default)]
    add_special: bool,
    #[serde(default = "yes")]
    parse_special: bool,
    /// True to send the text of each token, too.
    #[serde(default)]
    with_pieces: bool,
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
        let asked: Tokenize = read(&TOKENIZE, &body)?;
        let content = asked.content.ok_or_else(|| ApiError::bad("content is missing"))?;
        let tokenizer = &text(&own, asked.model.as_deref())?.tokenizer;
        let ids = tokenizer.encode(&content, asked.add_special, asked.parse_special);
        let ids = ids.map_err(|error| ApiError::bad(error.to_string()))?;
        let tokens: Value = match asked.with_pieces {
            false => json!(ids),
            true => ids.iter().map(|id| piece(*id, &tokenizer.token_bytes(*id, true))).collect(),
        };
        Ok(json!({ "tokens": tokens, "count": ids.len() }))
    };
    Ok(Json(app.prepare(&caller, encode).await?))
}

/// Returns a token with its text, or with its bytes if they are no text.
fn piece(id: u32, bytes: &[u8]) -> Value {
    match str::from_utf8(bytes) {
        Ok(text) => json!({ "id": id, "piece": text }),
        Err(_) => json!({ "id": id, "piece": bytes }),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Detokenize {
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
        let Detokenize { model, tokens } = read(&DETOKENIZE, &body)?;
        let tokenizer = &text(&own, model.as_deref())?.tokenizer;
        let size = tokenizer.vocab_size();
        if let Some(id) = tokens.iter().find(|id| **id as usize >= size) {
            return Err(ApiError::bad(format!("token {id} is not in the vocabulary of {size}")));
        }
        Ok(tokenizer.decode(&tokens, true))
    };
    let content = app.prepare(&caller, decode).await?;
    // llama.cpp's server and vLLM's have different names for the text.
    Ok(Json(json!({ "content": content, "prompt": content })))
}

/// `POST /apply-template`: the prompt of a conversation.
pub async fn apply_template(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let prepare = move || {
        let wanted = wanted(Endpoint::Chat, &body::json(&body)?)?;
        let text = text(&own, wanted.model.as_deref())?;
        Ok(text.prepare(wanted.without_form(), None)?)
    };
    let prepared = app.prepare(&caller, prepare).await?;
    let ids = prepared.request.prompt;
    Ok(Json(json!({ "prompt": prepared.text, "tokens": ids.len(), "ids": ids })))
}
