//! Other names of paths, under which clients look for them.

use std::borrow::Cow;

use axum::http::Uri;

/// Paths of OpenAI's interface that clients also ask for without `/v1`.
const WITHOUT_VERSION: [&str; 8] = [
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/models",
    "/responses",
    "/messages",
    "/files",
    "/batches",
];

/// Paths that clients also ask for below `/v1`.
const WITH_VERSION: [&str; 8] = [
    "/health",
    "/ready",
    "/metrics",
    "/props",
    "/tokenize",
    "/detokenize",
    "/infill",
    "/apply-template",
];

/// Returns the path of the route for a path. A slash at the end and repeated slashes at the beginning mean nothing, and neither does
/// `/v1` where clients disagree about it.
pub fn canonical(path: &str) -> Cow<'_, str> {
    let short = path.trim_end_matches('/');
    let short = if short.is_empty() { "/" } else { short };
    let short = match short.strip_prefix("//") {
        Some(rest) => &short[short.len() - rest.trim_start_matches('/').len() - 1..],
        None => short,
    };
    // Clients whose address ends in /v1 add it once more.
    let short = if short.starts_with("/v1/v1/") { &short["/v1".len()..] } else { short };
    let is_below = |of: &&str| {
        short.strip_prefix(*of).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if WITHOUT_VERSION.iter().any(is_below) {
        return format!("/v1{short}").into();
    }
    match short.strip_prefix("/v1").filter(|rest| WITH_VERSION.contains(rest)) {
        Some(rest) => rest.into(),
        None => short.into(),
    }
}

/// Replaces the path of an address by that of its route.
pub fn make_canonical(uri: &mut Uri) {
    let path = canonical(uri.path());
    if path == uri.path() {
        return;
    }
    let whole = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.into_owned(),
    };
    // What was an address before is one now.
    if let Ok(whole) = whole.parse() {
        *uri = whole;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_other_names() {
        for (path, expected) in [
            ("/", "/"),
            ("//", "/"),
            ("/v1/models", "/v1/models"),
            ("/v1/models/", "/v1/models"),
            ("/models", "/v1/models"),
            ("/models/a/b", "/v1/models/a/b"),
            ("/modelsx", "/modelsx"),
            ("//v1/models", "/v1/models"),
            ("/v1/v1/models", "/v1/models"),
            ("/chat/completions/", "/v1/chat/completions"),
            ("/completions", "/v1/completions"),
            ("/completion", "/completion"),
            ("/messages/count_tokens", "/v1/messages/count_tokens"),
            ("/v1/health", "/health"),
            ("/v1/props/", "/props"),
            ("/api/tags/", "/api/tags"),
            ("/v1", "/v1"),
        ] {
            assert_eq!(canonical(path), expected, "{path}");
        }
    }
}
