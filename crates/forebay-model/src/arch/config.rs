//! Values of a Hugging Face `config.json`.

use std::rc::Rc;

use serde_json::Value;

use super::harmless;
use super::keys_read::{Held, KeysRead, may_be_about_text, may_change_answers, mention};
use crate::ModelError;

/// Objects with the parameters of a rotation. Every key in them describes computation.
pub(super) const ROTATIONS: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// Kinds of layers without a window and with one, in lists of kinds and in parameters of rotations.
pub(super) const FULL: &str = "full_attention";
pub(super) const WINDOWED: &str = "sliding_attention";
/// Kind of layers whose indexer chooses keys.
pub(super) const INDEXED: &str = "indexed_attention";

/// An object of a configuration. It records the keys that are asked for.
pub(super) struct Config<'a> {
    json: &'a Value,
    /// Path of the object with a `.` behind it; empty for the whole file.
    path: String,
    pub family: &'static str,
    read: Rc<KeysRead>,
}

impl<'a> Config<'a> {
    /// Creates the view of a whole file.
    pub fn new(json: &'a Value, family: &'static str) -> Config<'a> {
        Config { json, path: String::new(), family, read: Rc::default() }
    }

    pub fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey {
            source_name: "config.json".into(),
            key: key.into(),
            family: self.family,
        }
    }

    /// Returns the error for a value that is not what it should be.
    fn wrong(&self, key: &str, value: &Value, expected: &str) -> ModelError {
        ModelError::BadValue { key: key.into(), value: short(value), expected: expected.into() }
    }

    /// Returns what is under a key, which may be null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.read.note(&self.path, key);
        self.json.get(key)
    }

    /// Returns what is under a key. Null counts as absent, as in all other methods.
    pub fn set(&self, key: &str) -> Option<&'a Value> {
        self.get(key).filter(|value| !value.is_null())
    }

    /// Records keys of which one decides and the others are not needed.
    pub fn note(&self, keys: &[&str]) {
        keys.iter().for_each(|key| self.read.note(&self.path, key));
    }

    /// Returns the object under a key.
    pub fn object(&self, key: &str) -> Result<Option<Config<'a>>, ModelError> {
        let Some(json) = self.set(key) else { return Ok(None) };
        if !json.is_object() {
            return Err(self.wrong(key, json, "it must be an object"));
        }
        let path = format!("{}{key}.", self.path);
        Ok(Some(Config { json, path, family: self.family, read: Rc::clone(&self.read) }))
    }

    /// Returns the members of the object, all of which count as read.
    pub fn members(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        let members = self.json.as_object().into_iter().flatten();
        members.inspect(|(key, _)| self.read.note(&self.path, key))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        let wrong = |value| self.wrong(key, value, "it must be text");
        self.set(key).map(|value| value.as_str().ok_or_else(|| wrong(value))).transpose()
    }

    pub fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ModelError> {
        let wrong = |value| self.wrong(key, value, "it must be a list");
        let list = |value: &'a Value| value.as_array().map(Vec::as_slice);
        self.set(key).map(|value| list(value).ok_or_else(|| wrong(value))).transpose()
    }

    /// Returns a flag. 0 and 1 stand for false and true, too.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.set(key) else { return Ok(None) };
        match (value.as_bool(), value.as_f64()) {
            (Some(flag), _) => Ok(Some(flag)),
            (None, Some(0.0)) => Ok(Some(false)),
            (None, Some(1.0)) => Ok(Some(true)),
            _ => Err(self.wrong(key, value, "it must be true or false")),
        }
    }

    /// Returns a flag that is false if it is absent.
    pub fn is_set(&self, key: &str) -> Result<bool, ModelError> {
        Ok(self.flag(key)?.unwrap_or(false))
    }

    /// Returns a number. False counts as absent: some configurations say so that there is no factor.
    pub fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let wrong = |value| self.wrong(key, value, "it must be a number");
        let said = self.set(key).filter(|value| **value != false);
        said.map(|value| value.as_f64().ok_or_else(|| wrong(value))).transpose()
    }

    /// Returns the number under a key, or the `usual` one if the key is absent. Null means that there is none.
    pub fn float_or(&self, key: &str, usual: Option<f32>) -> Result<Option<f32>, ModelError> {
        match self.get(key) {
            None => Ok(usual),
            Some(_) => Ok(self.float(key)?.map(|number| number as f32)),
        }
    }

    /// Returns the number under the first of these keys that is present.
    pub fn first_float(&self, keys: &[&str]) -> Result<Option<f64>, ModelError> {
        self.note(keys);
        let first = keys.iter().find(|key| self.set(key).is_some());
        first.map_or(Ok(None), |key| self.float(key))
    }

    /// Returns a whole number. Some configurations have a list with one number for each layer. Equal numbers count as one.
    pub fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.set(key) else { return Ok(None) };
        let one = match value.as_array().map(Vec::as_slice) {
            Some([first, others @ ..]) if others.iter().all(|other| other == first) => first,
            _ => value,
        };
        one.as_u64().map(|count| Some(count as usize)).ok_or_else(|| {
            self.wrong(key, value, "it must be one whole number, the same for all layers")
        })
    }

    pub fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_count(key)?.ok_or_else(|| self.missing(key))
    }

    /// Returns the count under the first of these keys that is present.
    pub fn optional_first_count(&self, keys: &[&str]) -> Result<Option<usize>, ModelError> {
        self.note(keys);
        for key in keys {
            if let Some(count) = self.optional_count(key)? {
                return Ok(Some(count));
            }
        }
        Ok(None)
    }

    /// Returns a list of whole numbers. It is empty if the key is absent.
    pub fn counts(&self, key: &str) -> Result<Vec<usize>, ModelError> {
        let bad = |value: &Value| self.wrong(key, value, "it must be a list of whole numbers");
        let count = |item: &Value| item.as_u64().map(|count| count as usize);
        match self.set(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => {
                list.iter().map(|item| count(item).ok_or_else(|| bad(item))).collect()
            }
            Some(other) => Err(bad(other)),
        }
    }

    /// Returns a whole number, or the first one of a list.
    pub fn first_of(&self, key: &str) -> Result<Option<usize>, ModelError> {
        match self.set(key) {
            Some(Value::Array(_)) => Ok(self.counts(key)?.first().copied()),
            _ => self.optional_count(key),
        }
    }

    pub fn first_count(&self, keys: &[&str]) -> Result<usize, ModelError> {
        self.optional_first_count(keys)?.ok_or_else(|| self.missing(keys[0]))
    }

    /// Returns item `index` of a list with a text for each layer. Returns `None` if there is no list.
    ///
    /// # Errors
    /// Returns an error if the list has no such item or it is no text.
    pub fn text_of_layer(&self, key: &str, index: usize) -> Result<Option<&'a str>, ModelError> {
        let Some(list) = self.list(key)? else { return Ok(None) };
        match list.get(index).and_then(Value::as_str) {
            Some(text) => Ok(Some(text)),
            None => Err(ModelError::BadValue {
                key: format!("{key} of layer {index}"),
                value: list.get(index).map_or("none".into(), short),
                expected: "it must be text".into(),
            }),
        }
    }

    /// Returns item `index` of a list with a flag for each layer, which is 0 or 1. Returns `None` if the list is absent or empty, or
    /// if there is a number for all layers.
    pub fn flag_of_layer(&self, key: &str, index: usize) -> Result<Option<bool>, ModelError> {
        let list = self.set(key).and_then(Value::as_array);
        let Some(list) = list.filter(|list| !list.is_empty()) else { return Ok(None) };
        match list.get(index).and_then(Value::as_u64) {
            Some(flag @ (0 | 1)) => Ok(Some(flag == 1)),
            _ => Err(ModelError::BadValue {
                key: format!("{key} of layer {index}"),
                value: list.get(index).map_or("none".into(), short),
                expected: "it must be 0 or 1".into(),
            }),
        }
    }

    /// Checks that every key of the object, and of the objects in it that were read, was read or changes no answer.
    ///
    /// # Errors
    /// Returns an error that names the first key for which neither holds, if it may change the answer.
    pub fn finish(&self) -> Result<(), ModelError> {
        let mut unknown = Vec::new();
        check_object(self.json, &self.path, &self.read, &mut unknown)?;
        mention("config.json", self.family, &unknown);
        Ok(())
    }
}

/// Checks the keys of an object, and collects those that are unknown but change no answer.
fn check_object(
    json: &Value,
    path: &str,
    read: &KeysRead,
    unknown: &mut Vec<String>,
) -> Result<(), ModelError> {
    let is_rotation = path.split('.').any(|part| ROTATIONS.contains(&part));
    for (key, value) in json.as_object().into_iter().flatten() {
        let whole = format!("{path}{key}");
        if value.is_object() && read.has_below(&whole) {
            check_object(value, &format!("{whole}."), read, unknown)?;
            continue;
        }
        let is_known = match is_rotation {
            true => harmless::in_rotation(key),
            false => harmless::in_config(key),
        };
        if is_known || read.has(&whole) {
            continue;
        }
        let held = held(value);
        if is_rotation && held != Held::Nothing || may_change_answers(key, held) {
            return Err(ModelError::BadValue {
                key: whole,
                value: short(value),
                expected: "forebay does not know this key, and it may change the answer".into(),
            });
        }
        if held != Held::Nothing && may_be_about_text(&whole) {
            unknown.push(whole);
        }
    }
    Ok(())
}

fn held(value: &Value) -> Held {
    match value {
        Value::Null => Held::Nothing,
        Value::Bool(flag) => Held::Flag(*flag),
        Value::Number(number) => number.as_f64().map_or(Held::Other, Held::Number),
        Value::String(text) if text.is_empty() => Held::Nothing,
        Value::Array(list) if list.is_empty() => Held::Nothing,
        Value::Object(object) if object.is_empty() => Held::Nothing,
        _ => Held::Other,
    }
}

/// Returns the beginning of a value, for error messages.
pub(super) fn short(value: &Value) -> String {
    format!("{:.60}", value.to_string())
}
