//! Functions, filters and tests that transformers adds to Jinja.

use std::fmt;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

use super::{CivilTime, json};
use crate::content::unmarked;

/// Message of `raise_exception`. It passes through the engine as the cause of the engine's error.
#[derive(Debug)]
pub struct Refusal(pub String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// Adds `raise_exception`, `tojson`, `string` and `escape`, and the test `iterable` with Jinja's meaning.
pub fn install(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("tojson", tojson);
    environment.add_test("iterable", is_iterable);
    environment.add_filter("string", string);
    for name in ["e", "escape", "forceescape"] {
        environment.add_filter(name, escape);
    }
}

/// Adds `strftime_now`.
pub fn install_clock(environment: &mut Environment<'static>, now: Option<CivilTime>) {
    environment.add_function("strftime_now", move |format: &str| {
        now.unwrap_or_else(CivilTime::now).format(format)
    });
}

/// Prints a value. Floats are printed as in Python.
pub fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        return out.write_str(&float(value)?).map_err(Error::from);
    }
    minijinja::escape_formatter(out, state, value)
}

fn float(value: &Value) -> Result<String, Error> {
    let number = f64::try_from(value.clone())?;
    Ok(match number {
        number if number.is_nan() => "nan".to_owned(),
        f64::INFINITY => "inf".to_owned(),
        f64::NEG_INFINITY => "-inf".to_owned(),
        number => json::float(number),
    })
}

/// Implements `string`.
fn string(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.clone()),
        ValueKind::Number if !value.is_integer() => float(value).map(Value::from),
        _ => Ok(Value::from(value.to_string())),
    }
}

/// Implements `escape` with the entities of Jinja.
fn escape(value: &Value) -> String {
    let mut out = String::new();
    for character in value.to_string().chars() {
        match unmarked(character) {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(character),
        }
    }
    out
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let refusal = Refusal(message.to_string());
    Err(Error::new(ErrorKind::InvalidOperation, "the template raised an exception")
        .with_source(refusal))
}

/// Implements the test `iterable`. MiniJinja treats none as an empty sequence. In Python it is not
/// a sequence at all, and templates test `tools is iterable and tools | length > 0`.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Implements Python's `json.dumps` with `ensure_ascii=False`. transformers uses it in place of
/// Jinja's own filter, so nothing is escaped for HTML.
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(json::INDENT_MAX)),
        }),
    };
    let separators: Option<Value> = options.get("separators")?;
    let separators = match separators.filter(|separators| !separators.is_none()) {
        None => None,
        Some(pair) => {
            let part = |index| pair.get_item_by_index(index).map(|part| part.to_string());
            Some((part(0)?, part(1)?))
        }
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    options.assert_all_used()?;
    json::Style::new(indent, separators, sort_keys, ensure_ascii).dump(value)
}
