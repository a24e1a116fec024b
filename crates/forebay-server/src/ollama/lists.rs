//! Lists and descriptions of models in the form of Ollama.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use forebay_engine::ModelInfo;
use forebay_requests::fields::OLLAMA_NAME;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{Failure, Named};
use crate::app::App;
use crate::body::{Received, read};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::models::{Entry, Status};

/// Version of Ollama whose interface this is: that of October 2026. Clients such as Codex refuse servers that are too old.
const VERSION: &str = "0.40.12";

/// The time of models that stay until the server ends.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// `GET /api/version`. Clients compare `version` with releases of Ollama. `forebay` is this program's own version.
pub async fn version() -> Json<Value> {
    Json(json!({ "version": VERSION, "forebay": env!("CARGO_PKG_VERSION") }))
}

/// `GET /api/tags`: all models, loaded or not.
pub async fn tags(State(app): State<Arc<App>>, caller: Caller) -> Result<Json<Value>, Failure> {
    // Descriptions that are not known yet are read from the files.
    let own = app.clone();
    let list = move || {
        let entries = own.models.list();
        Ok(entries.iter().map(|entry| tag(&own, entry)).collect::<Value>())
    };
    Ok(Json(json!({ "models": app.work(&caller, list).await? })))
}

/// Describes a model in the list of all models. One that cannot be read has no details.
fn tag(app: &App, entry: &Entry) -> Value {
    let info = app.models.info(entry);
    if let Err(why) = &info {
        tracing::debug!(model = entry.name, "the model cannot be described: {why}");
    }
    let info = info.ok();
    let modified = std::fs::metadata(&entry.path).and_then(|of| of.modified()).ok();
    let modified = modified.and_then(|time| Timestamp::try_from(time).ok()).unwrap_or_default();
    json!({
        "name": tagged(&entry.name),
        "model": tagged(&entry.name),
        "modified_at": modified.to_string(),
        "size": info.as_ref().map_or(0, |info| info.file_bytes),
        "digest": app.models.digest(&entry.path).unwrap_or_default(),
        "details": info.as_ref().map_or_else(|| json!({}), |info| details(info)),
    })
}

/// Returns a name as Ollama shows it: a name without a tag has the tag `latest`.
fn tagged(name: &str) -> String {
    if name.contains(':') { name.to_owned() } else { format!("{name}:latest") }
}

/// `GET /api/ps`: the loaded models.
pub async fn ps(State(app): State<Arc<App>>, caller: Caller) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let list = move || {
        let now = Instant::now();
        Ok(own.models.loaded().iter().map(|of| loaded(&own, of, now)).collect::<Value>())
    };
    Ok(Json(json!({ "models": app.work(&caller, list).await? })))
}

fn loaded(app: &App, status: &Status, now: Instant) -> Value {
    let seconds = status.ends.map(|end| end.saturating_duration_since(now).as_secs_f64());
    let until = status.ends.and_then(|end| {
        let left = end.saturating_duration_since(now);
        Timestamp::now().checked_add(left).ok()
    });
    let memory = status.memory;
    let entry = app.models.entry(Some(&status.name)).ok();
    json!({
        "name": tagged(&status.name),
        "model": tagged(&status.name),
        "size": status.text.info.file_bytes,
        "size_vram": memory.vram_bytes,
        "size_ram": memory.ram_bytes,
        "digest": entry.and_then(|entry| app.models.digest(&entry.path)).unwrap_or_default(),
        "details": details(&status.text.info),
        "context_length": status.context,
        "expires_at": until.map_or_else(|| NEVER.to_owned(), |time| time.to_string()),
        "expires_seconds": seconds,
        "load_seconds": status.load_seconds,
        "requests_running": status.report.running,
        "requests_waiting": status.report.waiting,
    })
}

fn details(info: &ModelInfo) -> Value {
    json!({
        "parent_model": "",
        "format": info.format,
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": format!("{:.1}B", info.parameters as f64 / 1e9),
        "quantization_level": info.quantization,
    })
}

/// `POST /api/show`. The model need not be loaded for it.
pub async fn show(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let describe = move || {
        let named: Named = read(&OLLAMA_NAME, &body)?;
        let entry = own.models.entry(named.model.as_deref())?;
        own.models.text(&entry)
    };
    let text = app.prepare(&caller, describe).await?;
    let info = &text.info;
    let family = info.architecture;
    let mut capabilities = vec!["completion"];
    if text.format.calls_tools() {
        capabilities.push("tools");
    }
    if text.tokenizer.infill().is_some() {
        capabilities.push("insert");
    }
    if text.format.reasons() {
        capabilities.push("thinking");
    }
    Ok(Json(json!({
        "modelfile": "",
        "parameters": "",
        "template": text.template.source(),
        "details": details(info),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": info.parameters,
            format!("{family}.context_length"): info.context_trained,
            format!("{family}.embedding_length"): info.hidden,
            format!("{family}.block_count"): info.layers,
            format!("{family}.attention.head_count"): info.heads,
            format!("{family}.attention.head_count_kv"): info.kv_heads,
        },
        "capabilities": capabilities,
    })))
}

/// Answers requests that this server cannot follow.
pub async fn not_implemented() -> Failure {
    let why = "this server downloads models, but it does not make or upload them";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, why).into()
}
