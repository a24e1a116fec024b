//! Downloads, copies and removals of models in the form of Ollama.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use forebay_library::{Error, Library, Name, Progress};
use forebay_options::OptionName;
use forebay_requests::fields::{OLLAMA_COPY, OLLAMA_NAME};
use futures_util::stream::unfold;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

use super::Failure;
use crate::app::App;
use crate::body::{Received, read};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::models::PullError;
use crate::stream;

/// Fewest milliseconds between two reports of a download.
const REPORT_EVERY_MS: u64 = 200;
/// Most pulls at a time. Each has a thread and several connections.
pub const PULLS_MAX: usize = 4;
/// Reports that wait for a slow client. More are dropped.
const REPORTS_MAX: usize = 16;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    pub model: Option<String>,
    stream: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Copied {
    source: String,
    destination: String,
}

impl Named {
    fn name(self) -> Result<String, ApiError> {
        self.model.ok_or_else(|| ApiError::bad("model is missing"))
    }
}

fn library(app: &App) -> Result<Library, ApiError> {
    app.models.library().ok_or_else(|| {
        let start = OptionName::Models.with("DIR");
        let why = format!("this server has no library: start it with {start}, or without a model");
        ApiError::new(StatusCode::NOT_IMPLEMENTED, why)
    })
}

fn not_pulled(error: PullError) -> ApiError {
    match error {
        PullError::Library(error) => refused(error),
        // The machine understands the model's files, and cannot use them.
        PullError::CannotRun(why) => ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, why),
    }
}

fn refused(error: Error) -> ApiError {
    let status = match &error {
        Error::NotFound { .. } | Error::NoSuchName { .. } | Error::NoOwner { .. } => {
            StatusCode::NOT_FOUND
        }
        Error::Missing { .. } | Error::NoModel { .. } => StatusCode::NOT_FOUND,
        Error::BadName { .. } | Error::Ambiguous { .. } | Error::Choice { .. } => {
            StatusCode::BAD_REQUEST
        }
        Error::Exists { .. } | Error::Locked { .. } => StatusCode::CONFLICT,
        Error::Denied { .. } => StatusCode::FORBIDDEN,
        Error::Space { .. } => StatusCode::INSUFFICIENT_STORAGE,
        Error::Status { .. }
        | Error::Network { .. }
        | Error::Unreachable { .. }
        | Error::BadListing { .. } => StatusCode::BAD_GATEWAY,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let mut message = error.to_string();
    if let Error::Io { source, .. } = &error {
        message = format!("{message}: {source}");
    }
    ApiError::new(status, message)
}

/// Returns true if this server has a model of this name, and nothing newer can be pulled.
async fn is_here(app: &Arc<App>, caller: &Caller, name: &str) -> Result<bool, ApiError> {
    if name.contains('/') {
        return Ok(false);
    }
    let (own, name) = (app.clone(), name.to_owned());
    app.work(caller, move || Ok(own.models.entry(Some(&name)).is_ok())).await
}

/// Returns the answer to a pull of a model that is here. Codex pulls `NAME` if the list has only `NAME:latest`.
fn nothing_to_pull(streams: bool) -> Response {
    let done = json!({ "status": "success" });
    if !streams {
        return Json(done).into_response();
    }
    let mut line = String::new();
    stream::line(&done, &mut line);
    stream::of_parts(stream::LINES, Body::from(line))
}

/// `POST /api/pull`. A client that goes ends the pull, and the next pull of the name goes on where it ended.
pub async fn pull(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Response, Failure> {
    let body: Named = read(&OLLAMA_NAME, &body)?;
    let streams = body.stream.unwrap_or(true);
    let name = body.name()?;
    if is_here(&app, &caller, &name).await? {
        return Ok(nothing_to_pull(streams));
    }
    let name: Name = name.parse().map_err(refused)?;
    if !name.has_owner() {
        return Err(refused(Error::NoOwner { name: name.to_string() }).into());
    }
    let library = library(&app)?;
    let (reports, mut updates) = mpsc::channel::<Value>(REPORTS_MAX);
    let pulling = start(&app, &caller, {
        let app = app.clone();
        move || pull_and_report(&app, &library, &name, &reports)
    })?;
    if !streams {
        // The reports' receiver lives as long as the client waits.
        while updates.recv().await.is_some() {}
        let pulled = pulling.await.map_err(|_| ApiError::stopped())?;
        pulled.map_err(not_pulled)?;
        return Ok(Json(json!({ "status": "success" })).into_response());
    }
    let lines = unfold((updates, Some(pulling)), |(mut updates, mut pulling)| async move {
        let value = match updates.recv().await {
            Some(report) => report,
            None => match pulling.take()?.await {
                Ok(Ok(())) => json!({ "status": "success" }),
                Ok(Err(error)) => json!({ "error": not_pulled(error).message }),
                Err(_) => json!({ "error": ApiError::stopped().message }),
            },
        };
        let mut line = String::new();
        stream::line(&value, &mut line);
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), (updates, pulling)))
    });
    Ok(stream::of_parts(stream::LINES, Body::from_stream(lines)))
}

/// Runs a pull on a thread of its own, because it may take hours: threads that prepare requests are few.
fn start(
    app: &App,
    caller: &Caller,
    pull: impl FnOnce() -> Result<(), PullError> + Send + 'static,
) -> Result<oneshot::Receiver<Result<(), PullError>>, ApiError> {
    let place = app.pulls.take_one(caller)?;
    let (sender, pulled) = oneshot::channel();
    let run = move || {
        // If nobody waits for the result, the client is gone.
        let _ = sender.send(pull());
        drop(place);
    };
    let started = thread::Builder::new().name("pull".into()).spawn(run);
    started.map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    Ok(pulled)
}

/// Pulls a model that can run here and reports how far it is, until nobody listens.
fn pull_and_report(
    app: &App,
    library: &Library,
    name: &Name,
    reports: &mpsc::Sender<Value>,
) -> Result<(), PullError> {
    let _ = reports.try_send(json!({ "status": "pulling manifest" }));
    let (repository, model) = app.models.offer(name)?;
    let (started, reported_ms) = (Instant::now(), AtomicU64::new(0));
    let progress = |progress: Progress| {
        let (status, done_bytes, total_bytes) = match progress {
            Progress::Listing => return,
            Progress::Downloading { done_bytes, total_bytes } => {
                ("pulling", done_bytes, total_bytes)
            }
            Progress::Verifying { done_bytes, total_bytes } => {
                ("verifying sha256 digest", done_bytes, total_bytes)
            }
        };
        let now_ms = started.elapsed().as_millis() as u64 + 1;
        let is_due = now_ms >= reported_ms.load(Ordering::Relaxed) + REPORT_EVERY_MS;
        if is_due || done_bytes == 0 || done_bytes == total_bytes {
            reported_ms.store(now_ms, Ordering::Relaxed);
            let _ = reports.try_send(json!({
                "status": format!("{status} {name}"),
                "digest": name.to_string(),
                "total": total_bytes,
                "completed": done_bytes,
            }));
        }
    };
    let entry = repository.pull(library, &model, &progress, &|| reports.is_closed())?;
    tracing::info!(model = entry.name, "pulled");
    Ok(())
}

/// `DELETE /api/delete`. A loaded model leaves memory when its requests have ended.
pub async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<StatusCode, Failure> {
    let name = read::<Named>(&OLLAMA_NAME, &body)?.name()?;
    let library = library(&app)?;
    let entry = app.models.entry(Some(&name)).ok();
    let is_known = entry.is_some();
    app.work(&caller, move || {
        let is_file =
            |error: &Error| error.is_not_found() || matches!(error, Error::BadName { .. });
        library.remove(&name).map_err(|error| match is_known && is_file(&error) {
            true => {
                let why = format!("{name} was not pulled: delete its file, or end the server");
                ApiError::new(StatusCode::FORBIDDEN, why)
            }
            false => refused(error),
        })
    })
    .await?;
    if let Some(entry) = entry {
        app.models.unload(&entry).await;
    }
    Ok(StatusCode::OK)
}

/// `POST /api/copy`: a second name for the same files.
pub async fn copy(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<StatusCode, Failure> {
    let Copied { source, destination } = read(&OLLAMA_COPY, &body)?;
    let library = library(&app)?;
    app.work(&caller, move || library.copy(&source, &destination).map_err(refused)).await?;
    Ok(StatusCode::OK)
}
