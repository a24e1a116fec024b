//! Answers that are sent in parts: server-sent events, or lines of JSON.

use std::convert::Infallible;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::Response;
use futures_util::stream::unfold;
use serde_json::Value;

use crate::run::{Answers, Update};

/// Media type of server-sent events.
pub const EVENTS: &str = "text/event-stream";
/// Media type of lines of JSON.
pub const LINES: &str = "application/x-ndjson";

/// Time without a part after which a comment tells the client, and what is between them, that the answer goes on.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

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

/// Returns a response that sends the answers as they are generated. If the client goes, they are dropped, which ends the
/// request.
pub fn response<E: Encode>(answers: Answers, encoder: E) -> Response {
    let parts = unfold((State::Begins, answers, encoder), |(state, mut answers, mut encoder)| {
        async move {
            let mut out = String::new();
            let next = loop {
                match state {
                    State::Begins => {
                        encoder.begin(&mut out);
                        break State::Runs;
                    }
                    State::Runs => {}
                    State::Ended => return None,
                }
                match tokio::time::timeout(KEEP_ALIVE, answers.next()).await {
                    Ok(Some(update)) => encoder.update(update, &mut out),
                    Ok(None) => {
                        encoder.end(&mut out);
                        break State::Ended;
                    }
                    // Lines of JSON have no comments.
                    Err(_) if E::TYPE == EVENTS => out.push_str(": keep-alive\n\n"),
                    Err(_) => {}
                }
                if !out.is_empty() {
                    break State::Runs;
                }
            };
            Some((Ok::<_, Infallible>(Bytes::from(out)), (next, answers, encoder)))
        }
    });
    let mut response = Response::new(Body::from_stream(parts));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, axum::http::HeaderValue::from_static(E::TYPE));
    headers.insert(CACHE_CONTROL, axum::http::HeaderValue::from_static("no-cache"));
    response
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
