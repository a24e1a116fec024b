//! The bytes of a request.

use std::sync::Arc;

use axum::RequestExt as _;
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::header::{CONTENT_LENGTH, EXPECT};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use forebay_format::at_most;
use forebay_options::OptionName;
use forebay_requests::fields::Form;
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::access;
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::quota::Held;

/// Most bytes of a request that is too large, which are read all the same: most clients read no answer before they have sent all.
const DISCARDED_MAX: usize = 1 << 30;

/// Reads a body by the table of fields.
///
/// # Errors
/// Returns an error if it is not JSON, or names the field that is missing, unknown, of the wrong kind, or cannot be followed.
pub fn read<T: DeserializeOwned>(form: &Form, body: &[u8]) -> Result<T, ApiError> {
    Ok(form.read(json(body)?)?)
}

/// Reads a body as JSON.
///
/// # Errors
/// Returns an error if it is not JSON.
pub fn json(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body)
        .map_err(|error| ApiError::bad(format!("the body is not JSON: {error}")))
}

/// The variable part of a path, or an error in the form of the interface to which the path belongs.
pub struct Segment(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Segment, Response> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        path.map(|Path(text)| Segment(text)).map_err(|rejection| {
            let error = ApiError::new(rejection.status(), rejection.body_text());
            access::refused(parts.uri.path(), error)
        })
    }
}

/// Most bytes of a request, which every request has with it.
#[derive(Clone, Copy)]
pub struct BodyLimit(pub usize);

/// The body of a request, or an error in the form of the interface to which the path belongs.
pub struct Received(pub Bytes);

impl FromRequest<Arc<App>> for Received {
    type Rejection = Response;

    async fn from_request(mut request: Request, app: &Arc<App>) -> Result<Received, Response> {
        let caller = request.extract_parts::<Caller>().await?;
        let path = request.uri().path().to_owned();
        let body = receive(request, app, &caller).await;
        body.map(|body| Received(Bytes::from_owner(body)))
            .map_err(|error| access::refused(&path, error))
    }
}

/// A body in memory, which counts as its caller's as long as it is there.
struct Body {
    bytes: Bytes,
    _held: Held,
}

impl AsRef<[u8]> for Body {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a body. One that is too large is read to its end before it is refused, because a connection that is closed with unread
/// bytes loses the answer.
async fn receive(request: Request, app: &App, caller: &Caller) -> Result<Body, ApiError> {
    let limit = request.extensions().get::<BodyLimit>().map_or(usize::MAX, |limit| limit.0);
    let waits = request.headers().get(EXPECT) == Some(&HeaderValue::from_static("100-continue"));
    // The body itself does not tell its length, because it is wrapped in a limit of time.
    let length = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    let announced: u64 = length.and_then(|length| length.parse().ok()).unwrap_or(0);
    let body = request.into_body();
    let too_large = || {
        let allowed = at_most(limit as u64);
        let why = format!("the request is too large: {} allows {allowed}", OptionName::MaxBody);
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, why)
    };
    if announced > limit as u64 && (waits || announced > DISCARDED_MAX as u64) {
        // The client sends nothing before it is told to, or more than is worth reading.
        return Err(too_large());
    }
    let mut stream = body.into_data_stream();
    let (mut parts, mut bytes, mut held) = (Vec::new(), 0, app.body_bytes.nothing(caller));
    while let Some(part) = stream.next().await {
        let part = part.map_err(|error| {
            ApiError::bad(format!("the body of the request could not be read: {error}"))
        })?;
        bytes += part.len();
        match bytes {
            _ if bytes <= limit => {
                held.add(part.len())?;
                parts.push(part);
            }
            _ if bytes > limit.saturating_add(DISCARDED_MAX) => break,
            _ => {
                parts.clear();
                held = app.body_bytes.nothing(caller);
            }
        }
        // A large body that comes as fast as it is read would hold up all other connections of this thread.
        tokio::task::yield_now().await;
    }
    match parts.len() {
        _ if bytes > limit => Err(too_large()),
        1 => Ok(Body { bytes: parts.remove(0), _held: held }),
        _ => {
            let join = move || Ok(Body { bytes: Bytes::from(parts.concat()), _held: held });
            app.work(caller, join).await
        }
    }
}
