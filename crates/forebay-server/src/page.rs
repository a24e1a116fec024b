//! The web page: a chat, and a view of what the machine does. Its files are part of the program.

use axum::http::header::{ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, VARY};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};

use crate::body::Segment;
use crate::error::ApiError;
use crate::openai::Failure;

/// The page loads nothing from other hosts, and runs no script but its own files.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

macro_rules! script {
    ($name:literal) => {
        ($name, "text/javascript", include_str!(concat!("../page/", $name)))
    };
}

/// Name, type and text of every file.
const FILES: &[(&str, &str, &str)] = &[
    ("page.css", "text/css", include_str!("../page/page.css")),
    ("icon.svg", "image/svg+xml", include_str!("../page/icon.svg")),
    script!("answer.js"),
    script!("api.js"),
    script!("chat.js"),
    script!("highlight.js"),
    script!("kept.js"),
    script!("list.js"),
    script!("live.js"),
    script!("main.js"),
    script!("markdown.js"),
    script!("math.js"),
    script!("message.js"),
    script!("moved.js"),
    script!("records.js"),
    script!("settings.js"),
    script!("store.js"),
    script!("ui.js"),
    ("temml.min.js", "text/javascript", include_str!("../page/temml/temml.min.js")),
    ("temml.css", "text/css", include_str!("../page/temml/temml.css")),
    ("temml-license.txt", "text/plain", include_str!("../page/temml/LICENSE")),
];

/// `GET /`: the page for browsers. Clients of Ollama look for other words.
pub async fn root(headers: HeaderMap) -> Response {
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if accept.contains("text/html") {
        file("text/html", include_str!("../page/index.html"))
    } else {
        ([(VARY, "Accept")], "Ollama is running").into_response()
    }
}

/// `GET /page/{name}`: a file of the page.
pub async fn asset(Segment(name): Segment) -> Response {
    match FILES.iter().find(|(known, ..)| *known == name) {
        Some((_, kind, text)) => file(kind, text),
        None => {
            let why = format!("the page has no file {name:?}");
            Failure::from(ApiError::new(StatusCode::NOT_FOUND, why)).into_response()
        }
    }
}

/// Returns true if a path needs no key: the page asks its user for one.
pub fn is_public(path: &str) -> bool {
    path == "/" || path.starts_with("/page/")
}

fn file(kind: &str, text: &'static str) -> Response {
    let headers = [
        (CONTENT_TYPE, format!("{kind}; charset=utf-8")),
        (CONTENT_SECURITY_POLICY, POLICY.to_owned()),
        (CACHE_CONTROL, "no-cache".to_owned()),
        (VARY, "Accept".to_owned()),
    ];
    (headers, text).into_response()
}
