//! OpenAI's interface of files. They are the inputs and outputs of batches.

mod folder;
mod paging;
mod store;
mod upload;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde_json::{Value, json};

pub use self::folder::{Incoming, StoreError};
pub use self::paging::Query as ListQuery;
pub use self::store::{Disk, FileRecord, FilesOptions, Naming, Storage};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::openai::Failure;

/// Purpose of the files that clients send.
pub const PURPOSE: &str = "batch";
/// Purpose of the files that batches make.
pub const PURPOSE_OF_OUTPUT: &str = "batch_output";

/// Most files of a page, and how many a page usually has.
const PAGE_MAX: usize = 10_000;
/// Bytes that are read at a time.
const PIECE_BYTES: u64 = 256 << 10;
/// Least and most seconds that a file may be asked to stay.
const STAY: std::ops::RangeInclusive<u64> = 3600..=2_592_000;

/// Checks the time that a file should stay.
///
/// # Errors
/// Returns an error if it is too short or too long.
pub fn check_stay(seconds: u64) -> Result<u64, ApiError> {
    match STAY.contains(&seconds) {
        true => Ok(seconds),
        false => Err(ApiError {
            param: Some("expires_after".into()),
            ..ApiError::bad(format!(
                "expires_after.seconds must be between {} and {}",
                STAY.start(),
                STAY.end()
            ))
        }),
    }
}

/// Describes a file.
fn object(file: &FileRecord) -> Value {
    json!({
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": null,
    })
}

/// Runs work on the files, beside the threads that talk to clients.
pub async fn on_disk<T: Send + 'static>(
    app: &Arc<App>,
    caller: &Caller,
    work: impl FnOnce(&Arc<Disk>) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let own = app.clone();
    app.work(caller, move || work(&own.storage.disk()?)).await
}

/// `POST /v1/files`.
pub async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    request: Request,
) -> Result<Json<Value>, Failure> {
    let disk = on_disk(&app, &caller, |disk| Ok(disk.clone())).await?;
    let file = upload::receive(&app, &caller, disk, request).await?;
    Ok(Json(object(&file)))
}

/// `GET /v1/files`.
pub async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: ListQuery,
) -> Result<Json<Value>, Failure> {
    let own = caller.clone();
    let page = move |disk: &Arc<Disk>| {
        let mut files = disk.files(own.owner());
        files.retain(|file| query.purpose.as_ref().is_none_or(|purpose| *purpose == file.purpose));
        let files = files.iter().map(|file| (file.id.clone(), object(file))).collect();
        query.page(files, PAGE_MAX, PAGE_MAX)
    };
    Ok(Json(on_disk(&app, &caller, page).await?))
}

/// `GET /v1/files/{id}`.
pub async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    let own = caller.clone();
    let find = move |disk: &Arc<Disk>| Ok(object(&disk.file(own.owner(), &id)?));
    Ok(Json(on_disk(&app, &caller, find).await?))
}

/// `DELETE /v1/files/{id}`.
pub async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    let own = caller.clone();
    let delete = move |disk: &Arc<Disk>| {
        disk.delete(own.owner(), &id)?;
        Ok(json!({ "id": id, "object": "file", "deleted": true }))
    };
    Ok(Json(on_disk(&app, &caller, delete).await?))
}

/// `GET /v1/files/{id}/content`.
pub async fn content(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let own = caller.clone();
    let open = move |disk: &Arc<Disk>| {
        let file = disk.file(own.owner(), &id)?;
        Ok((disk.content(&id)?, file.bytes))
    };
    let (file, bytes) = on_disk(&app, &caller, open).await?;
    let pieces = futures_util::stream::try_unfold((Arc::new(file), 0), move |(file, at)| {
        let (app, caller) = (app.clone(), caller.clone());
        async move {
            let length = PIECE_BYTES.min(bytes - at);
            if length == 0 {
                return Ok::<_, ApiError>(None);
            }
            let own = file.clone();
            let piece = app.work(&caller, move || read_at(&own, at, length)).await?;
            Ok(Some((Bytes::from(piece), (file, at + length))))
        }
    });
    let mut response = Response::new(Body::from_stream(pieces));
    let own = response.headers_mut();
    own.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    own.insert(header::CONTENT_LENGTH, HeaderValue::from(bytes));
    Ok(response)
}

/// Reads bytes of a file.
///
/// # Errors
/// Returns an error if the file cannot be read or is shorter.
pub fn read_at(file: &File, at: u64, length: u64) -> Result<Vec<u8>, ApiError> {
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, at).map_err(|error| {
        tracing::error!("a file cannot be read: {error}");
        ApiError::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, "the file cannot be read")
    })?;
    Ok(bytes)
}
