//! Values of a Hugging Face `config.json`.

use serde_json::Value;

use crate::ModelError;

/// The object that describes the language model.
pub(super) struct Config<'a> {
    pub json: &'a Value,
    pub family: &'static str,
}

impl Config<'_> {
    pub fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey {
            source_name: "config.json".into(),
            key: key.into(),
            family: self.family,
        }
    }

    /// Returns a whole number. `null` counts as absent. Some configurations have a list with one number for each layer. Equal
    /// numbers count as one.
    pub fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let value = match self.json.get(key) {
            None | Some(Value::Null) => return Ok(None),
            Some(value) => value,
        };
        let one = match value.as_array().map(Vec::as_slice) {
            Some([first, others @ ..]) if others.iter().all(|other| other == first) => first,
            _ => value,
        };
        one.as_u64().map(|count| Some(count as usize)).ok_or_else(|| ModelError::BadValue {
            key: key.into(),
            value: short(value),
            expected: "it must be one whole number, the same for all layers".into(),
        })
    }

    pub fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_count(key)?.ok_or_else(|| self.missing(key))
    }

    /// Returns the count under the first of these keys that is present.
    pub fn optional_first_count(&self, keys: &[&str]) -> Result<Option<usize>, ModelError> {
        for key in keys {
            if let Some(count) = self.optional_count(key)? {
                return Ok(Some(count));
            }
        }
        Ok(None)
    }

    /// Returns a list of whole numbers. It is empty if the key is absent.
    pub fn counts(&self, key: &str) -> Result<Vec<usize>, ModelError> {
        let bad = |value: &Value| ModelError::BadValue {
            key: key.into(),
            value: short(value),
            expected: "it must be a list of whole numbers".into(),
        };
        let count = |item: &Value| item.as_u64().map(|count| count as usize);
        match self.json.get(key) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(list)) => {
                list.iter().map(|item| count(item).ok_or_else(|| bad(item))).collect()
            }
            Some(other) => Err(bad(other)),
        }
    }

    /// Returns a whole number, or the first one of a list.
    pub fn first_of(&self, key: &str) -> Result<Option<usize>, ModelError> {
        match self.json.get(key) {
            Some(Value::Array(_)) => Ok(self.counts(key)?.first().copied()),
            _ => self.optional_count(key),
        }
    }

    pub fn first_count(&self, keys: &[&str]) -> Result<usize, ModelError> {
        self.optional_first_count(keys)?.ok_or_else(|| self.missing(keys[0]))
    }

    pub fn float(&self, key: &str) -> Option<f64> {
        self.json.get(key).and_then(Value::as_f64)
    }

    /// Returns item `index` of a list with a flag for each layer, which is 0 or 1. Returns `None` if the list is absent or empty.
    pub fn flag_of_layer(&self, key: &str, index: usize) -> Result<Option<bool>, ModelError> {
        let list = self.json.get(key).and_then(Value::as_array);
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

    pub fn flag(&self, key: &str) -> bool {
        self.json.get(key).and_then(Value::as_bool).unwrap_or(false)
    }
}

/// Returns the beginning of a value, for error messages.
pub(super) fn short(value: &Value) -> String {
    format!("{:.60}", value.to_string())
}
