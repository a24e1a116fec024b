//! Answers that are sent in parts: server-sent events, or lines of JSON.

use std::convert::Infallible;
use std::pin::Pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use forebay_requests::Update;
use futures_util::StreamExt as _;
use futures_util::stream::unfold;
use serde_json::Value;
use tokio::time::Instant;

use crate::error::ApiError;
use crate::run::Answers;

/// Media type of server-sent events.
pub const EVENTS: &str = "text/event-stream";
/// Media type of lines of JSON.
pub const LINES: &str = "application/x-ndjson";

/// Header by which nginx passes each part on at once.
const UNBUFFERED: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Comment that tells the client, and what is between them, that the answer goes on.
const PING: &str = ": keep-alive\n\n";

/// Writes an answer in the form of an interface.
pub trait Encode: Send + 'static {
    /// Media type.
    const TYPE: &'static str;

    /// Writes what comes before the first update.
    fn begin(&mut self, out: &mut String);

    fn update(&mut self, update: Update, out: &mut String);

    /// Writes what comes after the last update. Updates may be missing if the engine has ended.
    fn end(&mut self, out: &mut String);
}

enum State {
    Begins,
    Runs,
    Ended,
}

/// Returns a response that sends the answers as they are generated, and a comment after every time of `ping` without a part. If
/// the client goes, the answers are dropped, which ends the request.
pub fn response<E: Encode>(answers: Answers, encoder: E, ping: Option<Duration>) -> Response {
    // Lines of JSON have no comments.
    let ping = ping.filter(|_| E::TYPE == EVENTS);
    let parts = unfold(
        (State::Begins, answers, encoder),
        move |(state, mut answers, mut encoder)| async move {
            let mut out = String::new();
            let deadline = ping.map(|ping| Instant::now() + ping);
            let next = loop {
                match state {
                    State::Begins => {
                        encoder.begin(&mut out);
                        break State::Runs;
                    }
                    State::Runs => {}
                    State::Ended => return None,
                }
                match before(deadline, answers.next()).await {
                    Some(Some(update)) => encoder.update(update, &mut out),
                    Some(None) => {
                        encoder.end(&mut out);
                        break State::Ended;
                    }
                    None => out.push_str(PING),
                }
                if !out.is_empty() {
                    break State::Runs;
                }
            };
            Some((Ok::<_, Infallible>(Bytes::from(out)), (next, answers, encoder)))
        },
    );
    of_parts(E::TYPE, Body::from_stream(parts))
}

/// Returns a response that is sent in parts. Its headers keep proxies from holding the parts back: nginx follows
/// `X-Accel-Buffering`.
pub fn of_parts(kind: &'static str, body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(UNBUFFERED, HeaderValue::from_static("no"));
    response
}

/// Returns what the future gives, or `None` if it takes until the deadline.
async fn before<T>(deadline: Option<Instant>, future: impl Future<Output = T>) -> Option<T> {
    match deadline {
        None => Some(future.await),
        Some(deadline) => tokio::time::timeout_at(deadline, future).await.ok(),
    }
}

type Begins = Pin<Box<dyn Future<Output = Result<Response, ApiError>> + Send>>;

/// A response whose first comments are sent before it begins.
enum Beginning {
    /// The client gets a comment at once.
    Late(Begins),
    Waits(Begins),
    Runs(BodyDataStream),
    Ended,
}

/// Returns the response that `begins` gives. If it takes longer than `ping`, as while a model is loaded, a response in server-sent
/// events with status 200 begins before it, with comments. `failed` writes an error that comes after that. `None`, as for answers
/// that are no streams, waits for the response.
///
/// # Errors
/// Returns the errors of `begins` that come before that.
pub async fn with_pings(
    ping: Option<Duration>,
    begins: impl Future<Output = Result<Response, ApiError>> + Send + 'static,
    failed: fn(&ApiError, &mut String),
) -> Result<Response, ApiError> {
    let mut begins: Begins = Box::pin(begins);
    let Some(ping) = ping else { return begins.await };
    if let Ok(response) = tokio::time::timeout(ping, &mut begins).await {
        return response;
    }
    let parts = unfold(Beginning::Late(begins), move |state| async move {
        let mut body = match state {
            Beginning::Late(begins) => {
                return Some((Ok(Bytes::from_static(PING.as_bytes())), Beginning::Waits(begins)));
            }
            Beginning::Waits(mut begins) => match tokio::time::timeout(ping, &mut begins).await {
                Err(_) => {
                    let part = Bytes::from_static(PING.as_bytes());
                    return Some((Ok(part), Beginning::Waits(begins)));
                }
                Ok(Ok(response)) => response.into_body().into_data_stream(),
                Ok(Err(error)) => {
                    let mut out = String::new();
                    failed(&error, &mut out);
                    return Some((Ok(Bytes::from(out)), Beginning::Ended));
                }
            },
            Beginning::Runs(body) => body,
            Beginning::Ended => return None,
        };
        let part = body.next().await?;
        Some((part, Beginning::Runs(body)))
    });
    Ok(of_parts(EVENTS, Body::from_stream(parts)))
}

/// Adds an event without a name.
pub fn data(value: &Value, out: &mut String) {
    out.push_str("data: ");
    out.push_str(&value.to_string());
    out.push_str("\n\n");
}

/// Adds an event with a name.
pub fn event(name: &str, value: &Value, out: &mut String) {
    out.push_str("event: ");
    out.push_str(name);
    out.push('\n');
    data(value, out);
}

/// Adds a line of JSON.
pub fn line(value: &Value, out: &mut String) {
    out.push_str(&value.to_string());
    out.push('\n');
}

/// Returns a text that no other answer has.
pub fn unique() -> String {
    format!("{:016x}{:08x}", fastrand::u64(..), fastrand::u32(..))
}

/// Returns the seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_millis(20);

    /// Returns the body of a response that begins after `delay`, or the error before it.
    fn begun(delay: Duration, given: Result<&'static str, ApiError>) -> Result<String, ApiError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let begins = async move {
                tokio::time::sleep(delay).await;
                given.map(|text| Response::new(Body::from(text)))
            };
            let failed: fn(&ApiError, &mut String) = |error, out| out.push_str(&error.message);
            let response = with_pings(Some(INTERVAL), begins, failed).await?;
            let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
            Ok(String::from_utf8(bytes.to_vec()).unwrap())
        })
    }

    #[test]
    fn a_late_stream_begins_with_comments() {
        let late = 5 * INTERVAL;
        assert_eq!(begun(Duration::ZERO, Ok("data: x\n\n")).unwrap(), "data: x\n\n");
        let text = begun(late, Ok("data: x\n\n")).unwrap();
        let pings = text.matches(PING).count();
        assert!((2..=5).contains(&pings), "{text}");
        assert_eq!(text.replace(PING, ""), "data: x\n\n");
        // An error is a status before the first comment, and a part of the stream after it.
        let error = || Err(ApiError::bad("the disk is gone"));
        assert_eq!(begun(Duration::ZERO, error()).unwrap_err().message, "the disk is gone");
        let text = begun(late, error()).unwrap();
        assert!(text.starts_with(PING) && text.ends_with("the disk is gone"), "{text}");
    }
}
