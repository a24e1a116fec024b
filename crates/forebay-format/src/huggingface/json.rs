//! JSON as Python writes it: with `NaN` and `Infinity`, which are no JSON.

use std::path::Path;

use serde_json::Value;

use crate::FormatError;

/// Number that replaces `Infinity`. It has the same length, and as `f32` it is infinite.
const INFINITE: &[u8] = b"1.79e308";

/// Parses the bytes of a `config.json`. `Infinity` becomes a number that is infinite as `f32`, and `NaN` becomes null.
///
/// # Errors
/// Returns an error if the bytes are no JSON object.
pub fn parse_config_bytes(bytes: &[u8]) -> Result<Value, FormatError> {
    parse_object(Path::new("config.json"), bytes)
}

/// Parses an object. `path` is only used in errors.
pub(super) fn parse_object(path: &Path, bytes: &[u8]) -> Result<Value, FormatError> {
    let parsed = serde_json::from_slice(bytes).or_else(|error| match without_constants(bytes) {
        Some(plain) => serde_json::from_slice(&plain),
        None => Err(error),
    });
    let value: Value =
        parsed.map_err(|source| FormatError::Json { path: path.to_owned(), source })?;
    if value.is_object() {
        return Ok(value);
    }
    Err(FormatError::InvalidJson { path: path.to_owned(), what: "not a JSON object".into() })
}

/// Returns the text with Python's constants replaced, or `None` if it has none.
fn without_constants(text: &[u8]) -> Option<Vec<u8>> {
    let mut plain = Vec::with_capacity(text.len());
    let (mut is_text, mut is_escaped, mut is_changed) = (false, false, false);
    let mut rest = text;
    while let [byte, others @ ..] = rest {
        let constant = [(&b"Infinity"[..], INFINITE), (b"NaN", b"null")];
        let found = constant.into_iter().find(|(name, _)| !is_text && rest.starts_with(name));
        if let Some((name, value)) = found {
            plain.extend(value);
            rest = &rest[name.len()..];
            is_changed = true;
            continue;
        }
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = is_text,
            b'"' => is_text = !is_text,
            _ => {}
        }
        plain.push(*byte);
        rest = others;
    }
    is_changed.then_some(plain)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn constants_of_python() {
        let text = br#"{"limit": [0.0, Infinity], "low": -Infinity, "none": NaN, "text": "NaN \" Infinity"}"#;
        let value = parse_config_bytes(text).unwrap();
        let expected = json!({ "limit": [0.0, 1.79e308], "low": -1.79e308, "none": null, "text": "NaN \" Infinity" });
        assert_eq!(value, expected);
        assert_eq!(value["limit"][1].as_f64().unwrap() as f32, f32::INFINITY);
    }

    #[test]
    fn other_text_is_refused() {
        for text in
            ["", "[]", "1", "Infinity", "{\"a\": Infinityx}", "{NaN: 1}", "{\"a\": -NaN}", "{\"a"]
        {
            assert!(parse_config_bytes(text.as_bytes()).is_err(), "{text}");
        }
    }
}
