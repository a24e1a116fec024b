//! The key-value pairs of a GGUF file.

use std::collections::HashMap;

use super::value::{Array, ByteStrings, Value};
use crate::FormatError;

/// Metadata of a GGUF model, in the file's order. For a split set, that of its first file.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct GgufMetadata {
    /// Version of the container: 2 or 3.
    pub version: u32,
    entries: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
}

impl GgufMetadata {
    pub fn new(version: u32) -> Self {
        Self { version, ..Self::default() }
    }

    /// Sets `key` to `value`. Returns true if the key is new.
    pub fn insert(&mut self, key: String, value: Value) -> bool {
        match self.by_key.get(&key) {
            Some(&at) => {
                self.entries[at].1 = value;
                false
            }
            None => {
                self.by_key.insert(key.clone(), self.entries.len());
                self.entries.push((key, value));
                true
            }
        }
    }

    /// Returns an iterator over all pairs in the file's order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&at| &self.entries[at].1)
    }

    /// Returns the non-negative integer under `key`, which may have any width. Returns `None` if
    /// the key is missing or holds something else. The `require_` methods tell those two cases
    /// apart.
    pub fn u64(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    pub fn i64(&self, key: &str) -> Option<i64> {
        self.get(key)?.as_i64()
    }

    /// Returns the float of either width under `key`.
    pub fn f32(&self, key: &str) -> Option<f32> {
        self.get(key)?.as_f32()
    }

    pub fn bool(&self, key: &str) -> Option<bool> {
        self.get(key)?.as_bool()
    }

    /// Returns the string under `key`, if it is valid UTF-8.
    pub fn str(&self, key: &str) -> Option<&str> {
        self.get(key)?.as_str()
    }

    pub fn array(&self, key: &str) -> Option<&Array> {
        self.get(key)?.as_array()
    }

    pub fn strings(&self, key: &str) -> Option<&ByteStrings> {
        self.get(key)?.as_strings()
    }

    /// Returns the array of non-negative integers under `key`.
    pub fn u64s(&self, key: &str) -> Option<Vec<u64>> {
        self.array(key)?.to_u64s()
    }

    /// Returns the array of integers under `key`.
    pub fn i64s(&self, key: &str) -> Option<Vec<i64>> {
        self.array(key)?.to_i64s()
    }

    /// Returns the array of floats under `key`.
    pub fn f32s(&self, key: &str) -> Option<Vec<f32>> {
        self.array(key)?.to_f32s()
    }

    /// Returns `general.architecture`, the prefix of the model's own keys.
    pub fn architecture(&self) -> Option<&str> {
        self.str("general.architecture")
    }

    /// Returns the non-negative integer under `key`.
    ///
    /// # Errors
    /// Returns [`FormatError::MissingKey`] if the key is missing, and [`FormatError::WrongKeyType`]
    /// if it holds something else. The other `require_` methods return the same errors.
    pub fn require_u64(&self, key: &str) -> Result<u64, FormatError> {
        self.require(key, "an integer that is not negative", Value::as_u64)
    }

    pub fn require_f32(&self, key: &str) -> Result<f32, FormatError> {
        self.require(key, "a float", Value::as_f32)
    }

    pub fn require_bool(&self, key: &str) -> Result<bool, FormatError> {
        self.require(key, "a bool", Value::as_bool)
    }

    pub fn require_str(&self, key: &str) -> Result<&str, FormatError> {
        self.require(key, "a string of valid UTF-8", Value::as_str)
    }

    pub fn require_strings(&self, key: &str) -> Result<&ByteStrings, FormatError> {
        self.require(key, "an array of strings", Value::as_strings)
    }

    fn require<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, FormatError> {
        let value = self.get(key).ok_or_else(|| FormatError::MissingKey { key: key.to_owned() })?;
        convert(value).ok_or_else(|| FormatError::WrongKeyType {
            key: key.to_owned(),
            expected,
            found: value.describe(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typed_access() {
        let mut metadata = GgufMetadata::new(3);
        assert!(metadata.insert("general.architecture".into(), "llama".into()));
        assert!(metadata.insert("llama.block_count".into(), Value::U32(4)));
        assert!(!metadata.insert("llama.block_count".into(), Value::U16(5)));
        assert_eq!(metadata.len(), 2);
        assert_eq!(metadata.architecture(), Some("llama"));
        assert_eq!(metadata.require_u64("llama.block_count").unwrap(), 5);
        assert!(matches!(
            metadata.require_u64("general.architecture"),
            Err(FormatError::WrongKeyType { .. })
        ));
        assert!(matches!(metadata.require_f32("x"), Err(FormatError::MissingKey { .. })));
    }
}
