//! Sliding windows in GGUF metadata.

use forebay_format::{Array, Value};

use super::gguf_keys::Keys;
use crate::ModelError;

pub(super) const WINDOW: &str = "attention.sliding_window";
const PATTERN: &str = "attention.sliding_window_pattern";

/// Returns which layers have a window: from a list with a flag for each, or from a number, which means that every so many layers the
/// last one has none (0: all have one).
pub(super) fn pattern(keys: &Keys<'_>, count: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(value) = keys.get(PATTERN) else { return Ok(None) };
    let wrong = || {
        let expected =
            format!("it must be a number or a list with a flag for each of {count} layers");
        keys.wrong(PATTERN, value.describe(), &expected)
    };
    let flags: Vec<bool> = match (value, value.as_u64()) {
        (_, Some(0)) => vec![true; count],
        (_, Some(period)) => {
            (0..count as u64).map(|index| !(index + 1).is_multiple_of(period)).collect()
        }
        (Value::Array(Array::Bool(flags)), _) => flags.clone(),
        (Value::Array(list), _) => {
            let numbers = list.to_i64s().ok_or_else(wrong)?;
            numbers.into_iter().map(|number| number != 0).collect()
        }
        _ => return Err(wrong()),
    };
    if flags.len() < count { Err(wrong()) } else { Ok(Some(flags)) }
}
