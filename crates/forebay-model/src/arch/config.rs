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

    /// Returns a whole number. `null` counts as absent.
    pub fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        match self.json.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_u64().map(|count| Some(count as usize)).ok_or_else(|| {
                ModelError::BadValue {
                    key: key.into(),
                    value: format!("{value:.60}"),
                    expected: "it must be a whole number".into(),
                }
            }),
        }
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

    pub fn first_count(&self, keys: &[&str]) -> Result<usize, ModelError> {
        self.optional_first_count(keys)?.ok_or_else(|| self.missing(keys[0]))
    }

    pub fn float(&self, key: &str) -> Option<f64> {
        self.json.get(key).and_then(Value::as_f64)
    }

    pub fn flag(&self, key: &str) -> bool {
        self.json.get(key).and_then(Value::as_bool).unwrap_or(false)
    }
}
