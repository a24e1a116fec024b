//! The bytes of a request.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use serde::de::DeserializeOwned;

use crate::access;
use crate::error::ApiError;

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

impl<S: Send + Sync> FromRequest<S> for Received {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Received, Response> {
        let path = request.uri().path().to_owned();
        let bytes = Bytes::from_request(request, state).await;
        bytes.map(Received).map_err(|rejection| {
            let why = match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => "the request is too large".to_owned(),
                _ => rejection.body_text(),
            };
            access::refused(&path, ApiError::new(rejection.status(), why))
        })
    }
}
