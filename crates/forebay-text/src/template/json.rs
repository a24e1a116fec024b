//! Conversion of JSON to template values, and back to JSON as Python's `json.dumps` writes it.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use crate::content::unmarked;

/// Largest indentation in characters.
pub const INDENT_MAX: usize = 64;

/// Limits of the nesting and the length of written JSON. Templates can build both without end.
const DEPTH_MAX: usize = 128;
const OUTPUT_BYTES_MAX: usize = 64 << 20;

/// Converts a JSON value to a template value. Objects keep their order.
pub fn to_template_value(value: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match value {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (_, Some(integer)) => Value::from(integer),
            _ => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(to_template_value).collect(),
        Json::Object(entries) => Value::from_pairs(
            entries.iter().map(|(key, value)| (key.as_str(), to_template_value(value))),
        ),
    }
}

/// Returns the number of values, including those inside others.
pub fn count(value: &serde_json::Value) -> u64 {
    use serde_json::Value as Json;
    1 + match value {
        Json::Array(items) => items.iter().map(count).sum(),
        Json::Object(entries) => entries.values().map(count).sum(),
        _ => 0,
    }
}

/// Text layout of `json.dumps`.
pub struct Style {
    /// Indentation of one level. If set, every item is on its own line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Style {
    /// Creates a style. `separators` are the texts after items and after keys. Python's defaults
    /// are `, ` and `: `. If items are on separate lines, the first default is `,`.
    pub fn new(
        indent: Option<String>,
        separators: Option<(String, String)>,
        sort_keys: bool,
        ensure_ascii: bool,
    ) -> Self {
        let item = if indent.is_some() { "," } else { ", " };
        let own = || (item.to_owned(), ": ".to_owned());
        let (item_separator, key_separator) = separators.unwrap_or_else(own);
        Self { indent, item_separator, key_separator, sort_keys, ensure_ascii }
    }

    /// Returns `value` as JSON text.
    ///
    /// # Errors
    /// Returns an error if JSON cannot represent a value, or if the nesting or the text exceeds its
    /// limit.
    pub fn dump(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Ok(out)
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_MAX || out.len() > OUTPUT_BYTES_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, "the value is too large for JSON"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(&items, ['[', ']'], depth, out, |item, out| {
                    self.write(item, depth + 1, out)
                })?;
            }
            ValueKind::Map => self.write_map(value, depth, out)?,
            other => {
                let message = format!("a value of kind {other} is not JSON serializable");
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
        }
        Ok(())
    }

    fn write_map(&self, map: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in map.try_iter()? {
            let text = match key.kind() {
                ValueKind::String => key.to_string(),
                ValueKind::None | ValueKind::Bool | ValueKind::Number => self.dump(&key)?,
                other => {
                    let message = format!("a key of kind {other} is not JSON serializable");
                    return Err(Error::new(ErrorKind::NonKey, message));
                }
            };
            entries.push((text, map.get_item(&key)?));
        }
        if self.sort_keys {
            entries.sort_by(|a, b| a.0.chars().map(unmarked).cmp(b.0.chars().map(unmarked)));
        }
        self.write_items(&entries, ['{', '}'], depth, out, |(key, value), out| {
            self.write_text(key, out);
            out.push_str(&self.key_separator);
            self.write(value, depth + 1, out)
        })
    }

    fn write_items<T>(
        &self,
        items: &[T],
        [open, close]: [char; 2],
        depth: usize,
        out: &mut String,
        write: impl Fn(&T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.start_line(depth + 1, out);
            write(item, out)?;
        }
        if !items.is_empty() {
            self.start_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn start_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_text(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            // What stands for a character of a message is written as that character is.
            match unmarked(character) {
                '"' | '\\' => out.extend(['\\', character]),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..' ' => push_escape(character as u16, out),
                plain @ '\u{80}'.. if self.ensure_ascii => {
                    for unit in plain.encode_utf16(&mut [0; 2]) {
                        push_escape(*unit, out);
                    }
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }
}

fn push_escape(unit: u16, out: &mut String) {
    out.push_str(&format!("\\u{unit:04x}"));
}

/// Formats a float as Python's `repr` does: the shortest digits that read back to the same number,
/// with an exponent below 1e-4 and from 1e16 on.
pub fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value == 0.0 || (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_python_writes_them() {
        let cases = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
            (f64::INFINITY, "Infinity"),
        ];
        for (value, expected) in cases {
            assert_eq!(float(value), expected);
        }
    }

    #[test]
    fn layouts_as_python_writes_them() {
        let value = to_template_value(&serde_json::json!({
            "b": [1, 2.0, null, true], "a": {"é": "<'&\"\\\n\u{1}\u{7f}\u{1f600}"}, "e": {}, "l": []
        }));
        let plain = Style::new(None, None, false, false).dump(&value).unwrap();
        assert_eq!(
            plain,
            "{\"b\": [1, 2.0, null, true], \"a\": {\"é\": \"<'&\\\"\\\\\\n\\u0001\u{7f}😀\"}, \"e\": {}, \"l\": []}"
        );
        let separators = Some((",".to_owned(), ":".to_owned()));
        let ascii = Style::new(None, separators, true, true).dump(&value).unwrap();
        assert_eq!(
            ascii,
            "{\"a\":{\"\\u00e9\":\"<'&\\\"\\\\\\n\\u0001\u{7f}\\ud83d\\ude00\"},\"b\":[1,2.0,null,true],\"e\":{},\"l\":[]}"
        );
        let lines = Style::new(Some("  ".into()), None, false, false);
        let short = to_template_value(&serde_json::json!({"a": [1, {}], "b": []}));
        assert_eq!(
            lines.dump(&short).unwrap(),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}"
        );
    }
}
