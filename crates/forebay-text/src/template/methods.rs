//! Methods of Python's strings that templates use and that `minijinja-contrib` does not have.

use minijinja::value::{Rest, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::{comparisons, lists, strings};

/// Handles methods that the engine does not know. Methods that change a list are in `lists.rs`. Other values never change, as
/// in the sandbox of transformers.
pub fn unknown_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        if lists::changes(method) && matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
            let why = "changes only lists that the template makes, with [...] or the filter list";
            return Err(Error::new(ErrorKind::InvalidOperation, format!("{method} {why}")));
        }
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args);
    };
    if let Some(result) = comparisons::method(state, text, method, args) {
        return result;
    }
    match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let halves = split_once(text.split_once(not_empty(separator)?), separator);
            Ok(tuple(halves.unwrap_or([text, "", ""])))
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let halves = split_once(text.rsplit_once(not_empty(separator)?), separator);
            Ok(tuple(halves.unwrap_or(["", "", text])))
        }
        "rsplit" => rsplit(text, args),
        _ => match strings::method(text, method, args) {
            Some(result) => result,
            None => {
                minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
            }
        },
    }
}

pub fn tuple(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from)))
}

fn split_once<'a>(halves: Option<(&'a str, &'a str)>, separator: &'a str) -> Option<[&'a str; 3]> {
    halves.map(|(before, after)| [before, separator, after])
}

fn not_empty(separator: &str) -> Result<&str, Error> {
    if separator.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "the separator is empty"));
    }
    Ok(separator)
}

/// Implements `rsplit(separator, most splits)`, which requires a separator. Splitting at whitespace
/// from the right differs from splitting from the left only if the number of splits is limited, and
/// no template does that.
fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, rest): (&str, Option<usize>, Rest<Value>) = from_args(args)?;
    if !rest.is_empty() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let parts_max = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let mut parts: Vec<&str> = text.rsplitn(parts_max, not_empty(separator)?).collect();
    parts.reverse();
    Ok(Value::from_iter(parts))
}
