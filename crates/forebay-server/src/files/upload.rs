//! Uploads: forms whose file goes to the disk as it comes.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::multipart::{Field, Multipart, MultipartError};
use axum::extract::{FromRequest as _, Request};
use axum::http::StatusCode;
use forebay_format::at_most;
use forebay_options::OptionName;
use futures_util::StreamExt as _;

use super::folder::Incoming;
use super::store::{Disk, FileRecord, Naming};
use super::{PURPOSE, check_stay};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::stream;

/// Bytes that are collected before they are written.
const PIECE_BYTES: usize = 1 << 20;
/// Most bytes of a field that is not the file.
const FIELD_BYTES_MAX: usize = 4096;
/// Most bytes of the form around its file: boundaries, headers, fields, and what was read ahead.
const AROUND_BYTES_MAX: u64 = 4 << 20;
/// Most characters of a file's name.
const NAME_CHARACTERS_MAX: usize = 255;
/// Time for an upload.
const UPLOAD_TIME: Duration = Duration::from_secs(3600);

/// The fields of a form.
#[derive(Default)]
struct Form {
    file: Option<(Incoming, String)>,
    purpose: Option<String>,
    anchor: Option<String>,
    seconds: Option<String>,
}

/// Receives a form with a file, and keeps the file. A form that is wrong or does not come to its end leaves nothing.
///
/// # Errors
/// Returns what is wrong with the form.
pub async fn receive(
    app: &App,
    caller: &Caller,
    disk: Arc<Disk>,
    request: Request,
) -> Result<FileRecord, ApiError> {
    let to = Destination { app, caller, disk: &disk };
    let form = tokio::time::timeout(UPLOAD_TIME, read(&to, request)).await;
    let form = form.map_err(|_| {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "the upload did not end within an hour")
    })??;
    let wrong = |param: &'static str, why: &str| ApiError {
        param: Some(param.into()),
        ..ApiError::bad(why)
    };
    match form.purpose.as_deref() {
        Some(PURPOSE) => {}
        Some(_) => return Err(wrong("purpose", "purpose must be batch: files are for batches")),
        None => return Err(wrong("purpose", "purpose is missing: it must be batch")),
    }
    let (incoming, filename) = form.file.ok_or_else(|| wrong("file", "file is missing"))?;
    let stays = match (form.anchor.as_deref(), form.seconds) {
        (None, None) => None,
        (Some("created_at"), Some(seconds)) => {
            let seconds = seconds.parse().ok();
            Some(check_stay(seconds.unwrap_or(0))?)
        }
        _ => {
            let why = "expires_after needs the anchor created_at and seconds";
            return Err(wrong("expires_after", why));
        }
    };
    let id = format!("file-{}", stream::unique());
    let owner = caller.owner().to_owned();
    let naming = Naming { id, owner, filename, purpose: PURPOSE, stays };
    app.work(caller, move || disk.keep(incoming, naming)).await
}

/// Where an upload goes, and whose it is.
struct Destination<'a> {
    app: &'a App,
    caller: &'a Caller,
    disk: &'a Arc<Disk>,
}

async fn read(to: &Destination<'_>, request: Request) -> Result<Form, ApiError> {
    // The parser keeps what it reads until it finds the end of a part's head, so bytes that do not belong to the file are counted.
    let (parts, body) = request.into_parts();
    let taken = Arc::new(AtomicU64::new(0));
    let (own, mut received) = (taken.clone(), 0);
    let body = body.into_data_stream().map(move |piece| {
        let piece = piece.map_err(|error| error.to_string())?;
        received += piece.len() as u64;
        match received > own.load(Ordering::Relaxed) + AROUND_BYTES_MAX {
            true => Err("the form is too large around its file".to_owned()),
            false => Ok(piece),
        }
    });
    let request = Request::from_parts(parts, Body::from_stream(body));
    let form = Multipart::from_request(request, &()).await;
    let mut form = form.map_err(|error| ApiError::new(error.status(), error.body_text()))?;
    let mut found = Form::default();
    while let Some(field) = form.next_field().await.map_err(broken)? {
        let name = field.name().unwrap_or_default().to_owned();
        match name.as_str() {
            "file" if found.file.is_some() => {
                return Err(ApiError::bad("the form has more than one file"));
            }
            "file" => found.file = Some(write(to, field, &taken).await?),
            "purpose" => found.purpose = Some(text(field).await?),
            "expires_after[anchor]" => found.anchor = Some(text(field).await?),
            "expires_after[seconds]" => found.seconds = Some(text(field).await?),
            _ => {
                let name: String = name.chars().take(64).collect();
                return Err(ApiError::bad(format!("the form has the unknown field {name:?}")));
            }
        }
    }
    Ok(found)
}

/// Writes the file of a form under a temporary name.
async fn write(
    to: &Destination<'_>,
    mut field: Field<'_>,
    taken: &AtomicU64,
) -> Result<(Incoming, String), ApiError> {
    let name = field.file_name().unwrap_or_default().chars();
    let name = name.filter(|c| !c.is_control()).take(NAME_CHARACTERS_MAX).collect();
    let Destination { app, caller, disk } = to;
    let bytes_max = app.storage.options.file_bytes_max;
    let (folder, owner) = (disk.folder.clone(), caller.owner().to_owned());
    let mut incoming = app.work(caller, move || Ok(folder.begin(&owner)?)).await?;
    let mut piece = Vec::with_capacity(PIECE_BYTES);
    loop {
        let more = field.chunk().await.map_err(broken)?;
        if let Some(more) = &more {
            taken.fetch_add(more.len() as u64, Ordering::Relaxed);
            piece.extend_from_slice(more);
        }
        if incoming.bytes() + piece.len() as u64 > bytes_max {
            let why =
                format!("the file has more than {} ({})", at_most(bytes_max), OptionName::FileSize);
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, why));
        }
        if piece.len() >= PIECE_BYTES || (more.is_none() && !piece.is_empty()) {
            let write = move || {
                incoming.write(&piece)?;
                piece.clear();
                Ok((incoming, piece))
            };
            (incoming, piece) = app.work(caller, write).await?;
        }
        if more.is_none() {
            return Ok((incoming, name));
        }
    }
}

async fn text(mut field: Field<'_>) -> Result<String, ApiError> {
    let mut bytes = Vec::new();
    while let Some(more) = field.chunk().await.map_err(broken)? {
        bytes.extend_from_slice(&more);
        if bytes.len() > FIELD_BYTES_MAX {
            return Err(ApiError::bad("a field of the form is too long"));
        }
    }
    String::from_utf8(bytes).map_err(|_| ApiError::bad("a field of the form is not UTF-8"))
}

/// Says what is wrong with a form. A body that cannot be read to its end is the client's failure, too.
fn broken(error: MultipartError) -> ApiError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = error.source();
    let mut why = error.body_text();
    while let Some(inner) = cause {
        why = inner.to_string();
        cause = inner.source();
    }
    let status = match error.status() {
        status if status.is_server_error() => StatusCode::BAD_REQUEST,
        status => status,
    };
    ApiError::new(status, format!("the form is damaged: {why}"))
}
