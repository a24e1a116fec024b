//! Fields of comma-separated values.

/// Quotes a field if it needs quotes (RFC 4180).
pub fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}
