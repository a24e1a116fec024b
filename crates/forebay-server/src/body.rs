//! The bytes of a request.

use std::error::Error;
use std::sync::Arc;

use axum::RequestExt as _;
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use futures_util::StreamExt as _;
use http_body_util::LengthLimitError;
use serde::de::DeserializeOwned;

use crate::access;
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::quota::Held;

/// Reads a body.
///
/// # Errors
/// Returns an error if it is not JSON or has other fields.
pub fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body)
        .map_err(|error| ApiError::bad(format!("the body is not a request: {error}")))
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

/// The body of a request, or an error in the form of the interface to which the path belongs.
pub struct Received(pub Bytes);

impl FromRequest<Arc<App>> for Received {
    type Rejection = Response;

    async fn from_request(mut request: Request, app: &Arc<App>) -> Result<Received, Response> {
        let caller = request.extract_parts::<Caller>().await?;
        let path = request.uri().path().to_owned();
        let refused = |error| access::refused(&path, error);
        let mut stream = request.with_limited_body().into_body().into_data_stream();
        let (mut parts, mut held) = (Vec::new(), app.body_bytes.nothing(&caller));
        while let Some(part) = stream.next().await {
            let part = part.map_err(|error| refused(unread(error)))?;
            held.add(part.len()).map_err(refused)?;
            parts.push(part);
            // A large body that comes as fast as it is read would hold up all other connections of this thread.
            tokio::task::yield_now().await;
        }
        let bytes = match parts.len() {
            1 => Ok(Body { bytes: parts.remove(0), _held: held }),
            _ => {
                let join = move || Ok(Body { bytes: Bytes::from(parts.concat()), _held: held });
                app.work(&caller, join).await
            }
        };
        bytes.map(|body| Received(Bytes::from_owner(body))).map_err(refused)
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

/// Returns why a body could not be read.
fn unread(error: axum::Error) -> ApiError {
    let mut cause: Option<&dyn Error> = Some(&error);
    while let Some(of) = cause {
        if of.is::<LengthLimitError>() {
            return ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "the request is too large");
        }
        cause = of.source();
    }
    ApiError::bad(format!("the body of the request could not be read: {error}"))
}
