//! Reads the windows and other lists of flags of GGUF metadata.

use forebay_format::{Array, Value};

use super::architecture::Layer;
use super::family::{Family, Windows};
use super::gguf_keys::Keys;
use super::unrotated::{Chunks, Unrotated, is_last, without_window};
use crate::ModelError;

const WINDOW: &str = "attention.sliding_window";
const PATTERN: &str = "attention.sliding_window_pattern";

/// Returns the window of each layer, if it has one.
pub(super) fn windows(
    keys: &Keys<'_>,
    family: &Family,
    count: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    let said = keys.optional_count(WINDOW)?.or(family.attention.window);
    let window = said.filter(|window| *window > 0);
    let slides = pattern(keys, count)?;
    if let (Windows::NotInGguf, Some(window)) = (family.attention.windows, window) {
        if window < keys.count("context_length")? {
            let expected = "forebay knows windows of this family from Hugging Face folders only";
            return Err(keys.wrong(WINDOW, window, expected));
        }
        return Ok(vec![None; count]);
    }
    let slides = |index: usize| match &slides {
        Some(flags) => flags[index],
        None => family.attention.windows.slides(index, count),
    };
    Ok((0..count).map(|index| window.filter(|_| slides(index))).collect())
}

/// Returns which layers have a window: from a list with a flag for each, or from a number, which means that every so many layers the
/// last one has none (0: all have one).
fn pattern(keys: &Keys<'_>, count: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(period) = keys.get(PATTERN).and_then(Value::as_u64) else {
        return flags(keys, PATTERN, count, "a number or ");
    };
    let slides = |index: u64| period == 0 || !(index + 1).is_multiple_of(period);
    Ok(Some((0..count as u64).map(slides).collect()))
}

/// Returns a list with a flag for each layer. `or` says what else the key may hold.
fn flags(
    keys: &Keys<'_>,
    key: &str,
    count: usize,
    or: &str,
) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(value) = keys.get(key) else { return Ok(None) };
    let wrong = || {
        let expected = format!("it must be {or}a list with a flag for each of {count} layers");
        keys.wrong(key, value.describe(), &expected)
    };
    let flags: Vec<bool> = match value {
        Value::Array(Array::Bool(flags)) => flags.clone(),
        Value::Array(list) => {
            let numbers = list.to_i64s().ok_or_else(wrong)?;
            numbers.into_iter().map(|number| number != 0).collect()
        }
        _ => return Err(wrong()),
    };
    if flags.len() < count { Err(wrong()) } else { Ok(Some(flags)) }
}

/// Returns layer `index` of a GGUF file without its rotation, or with its chunks. GGUF files give no period and no length.
///
/// # Errors
/// Returns an error if the metadata gives another length of chunks than the usual one.
pub(super) fn unrotate(
    keys: &Keys<'_>,
    which: Unrotated,
    layer: Layer,
    (index, windows): (usize, &[Option<usize>]),
) -> Result<Layer, ModelError> {
    match which {
        Unrotated::WithoutWindow | Unrotated::ByBase(_) => Ok(without_window(layer, windows)),
        Unrotated::AsSaid => {
            let rotates = flags(keys, "attention.rope_pattern", windows.len(), "")?;
            let rope = layer.rope.filter(|_| rotates.is_none_or(|flags| flags[index]));
            Ok(Layer { rope, ..layer })
        }
        Unrotated::Every(period) => {
            Ok(Layer { rope: layer.rope.filter(|_| !is_last(index, period)), ..layer })
        }
        Unrotated::BesideChunks(Chunks { period, length, .. }) => {
            match keys.optional_count(WINDOW)? {
                // Such models have no chunks.
                Some(0) => return Ok(Layer { window: None, ..layer }),
                Some(other) if other != length => {
                    let expected = format!("forebay knows chunks of {length} positions");
                    return Err(keys.wrong(WINDOW, other, &expected));
                }
                _ => {}
            }
            let is_chunked = match pattern(keys, windows.len())? {
                Some(flags) => flags[index],
                None => !is_last(index, period),
            };
            let chunk = is_chunked.then_some(length);
            let rope = layer.rope.filter(|_| chunk.is_some());
            Ok(Layer { window: chunk, chunked: chunk.is_some(), rope, ..layer })
        }
    }
}
