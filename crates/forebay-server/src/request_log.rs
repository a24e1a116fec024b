//! Gives every request an id, and logs and counts it.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use jiff::Timestamp;

use crate::access;
use crate::access_log::{AccessLog, Record};
use crate::app::App;
use crate::quota::Held;
use crate::stream;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The same as Anthropic's libraries name it.
const SHORT_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// Seconds after which a client should try again if too many requests wait, and if the server or a model is not ready.
const QUEUE_AGAIN: &str = "1";
const READY_AGAIN: &str = "2";
/// Most bytes of an id that a client chooses.
const ID_BYTES_MAX: usize = 128;
/// Most characters of a path in the log.
const PATH_MAX: usize = 256;

/// Address of the client, which every connection adds to its requests. A program that uses a Unix socket has none.
#[derive(Clone, Copy)]
pub struct Remote(pub Option<SocketAddr>);

/// What the log needs beside the request.
pub struct Logging {
    pub app: Arc<App>,
    pub access_log: Option<Arc<AccessLog>>,
}

/// Gives a request an id and its [`Caller`](crate::caller::Caller), counts its answer, and logs it: when the answer begins on standard error, and when it ends in the
/// access log.
pub async fn log(
    State(logging): State<Arc<Logging>>,
    Extension(Remote(remote)): Extension<Remote>,
    mut request: Request,
    next: Next,
) -> Response {
    let started = Instant::now();
    let id = request_id(request.headers());
    let caller = logging.app.rules.caller(request.headers(), remote.map(|remote| remote.ip()));
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut record = Record {
        log: logging.access_log.clone(),
        note: caller.note().clone(),
        id: id.clone(),
        method: method.to_string(),
        path: path.chars().take(PATH_MAX).collect(),
        key: access::key_hash(request.headers()),
        remote: remote.map(|remote| remote.to_string()),
        status: None,
        bytes: 0,
        time: Timestamp::now(),
        started,
    };
    let is_public = access::is_public(&path);
    let held = if is_public { Ok(None) } else { logging.app.requests.take_one(&caller).map(Some) };
    request.extensions_mut().insert(caller);
    let (mut response, held) = match held {
        Ok(held) => (next.run(request).await, held),
        Err(error) => (access::refused(&path, error), None),
    };
    let response_status = response.status();
    let status = response_status.as_u16();
    record.status = Some(status);
    logging.app.models.note_response(status);
    tracing::info!(
        %method,
        path,
        status,
        seconds = started.elapsed().as_secs_f64(),
        request = id,
        "answer begins"
    );
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(SHORT_REQUEST_ID, id.clone());
        headers.insert(REQUEST_ID, id);
    }
    let again = match response_status {
        StatusCode::TOO_MANY_REQUESTS => Some(QUEUE_AGAIN),
        StatusCode::SERVICE_UNAVAILABLE => Some(READY_AGAIN),
        _ => None,
    };
    if let Some(seconds) = again {
        headers.entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static(seconds));
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response.map(|body| Body::new(Logged { body, record, _held: held }))
}

/// Returns the id that the client sent, if it is short and harmless, or a new one.
fn request_id(headers: &HeaderMap) -> String {
    let is_harmless = |id: &&str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/+=".contains(&byte);
        (1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(allowed)
    };
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(is_harmless);
    given.map_or_else(|| format!("req_{}", stream::unique()), str::to_owned)
}

/// The body of an answer, which is logged when it ends or the client goes. Until then, the request counts as its caller's.
struct Logged {
    body: Body,
    record: Record,
    _held: Option<Held>,
}

impl HttpBody for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            self.record.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_clients_are_kept_if_they_are_harmless() {
        let of = |id: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(id.as_bytes()).unwrap());
            request_id(&headers)
        };
        for kept in ["a", "req-1_2.3:4", &"x".repeat(128)] {
            assert_eq!(of(kept), kept);
        }
        for replaced in ["", "two words", "{\"a\":1}", "ä", &"x".repeat(129)] {
            assert!(of(replaced).starts_with("req_"), "{replaced}");
        }
        assert_ne!(request_id(&HeaderMap::new()), request_id(&HeaderMap::new()));
    }
}
