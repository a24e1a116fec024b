//! Remarks on what an answer may not follow of its request.

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

/// Header with the remarks.
const HEADER: HeaderName = HeaderName::from_static("x-forebay-warning");

/// Most bytes of the header. Some proxies refuse long ones.
const BYTES_MAX: usize = 1024;

/// Adds the remarks to an answer, and logs them.
pub fn add(remarks: &[String], mut response: Response) -> Response {
    if remarks.is_empty() {
        return response;
    }
    let all = remarks.join("; ");
    tracing::warn!("an answer may not follow all of its request: {all}");
    let visible = |c: char| if c.is_ascii() && !c.is_ascii_control() { c } else { '?' };
    let text: String = all.chars().map(visible).take(BYTES_MAX).collect();
    if let Ok(value) = HeaderValue::from_str(&text) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remarks_are_a_header_of_bounded_length() {
        let none = add(&[], Response::default());
        assert!(none.headers().is_empty());
        let remarks = ["a: \u{e9}\n".to_owned(), "b".repeat(5000)];
        let response = add(&remarks, Response::default());
        let text = response.headers()[HEADER].to_str().unwrap();
        assert!(text.starts_with("a: ??; bb") && text.len() == BYTES_MAX);
    }
}
