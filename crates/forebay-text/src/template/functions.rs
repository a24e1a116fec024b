//! Functions, filters and tests that transformers adds to Jinja.

use std::fmt;

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};

use super::{CivilTime, json};

/// Message of `raise_exception`. It passes through the engine as the cause of the engine's error.
#[derive(Debug)]
pub struct Refusal(pub String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// Adds `raise_exception` and `tojson`, and the test `iterable` with Jinja's meaning.
pub fn install(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("tojson", tojson);
    environment.add_test("iterable", is_iterable);
}

/// Adds `strftime_now`.
pub fn install_clock(environment: &mut Environment<'static>, now: Option<CivilTime>) {
    environment.add_function("strftime_now", move |format: &str| {
        now.unwrap_or_else(CivilTime::now).format(format)
    });
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
