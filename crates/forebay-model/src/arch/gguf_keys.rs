//! Values of the GGUF metadata of one architecture.

use forebay_format::{Array, GgufMetadata, Value};

use super::harmless;
use super::keys_read::{Held, KeysRead, may_be_about_text, may_change_answers, mention};
use crate::ModelError;

/// Keys of one architecture, `ARCH.key`. It records the keys that are asked for.
pub(super) struct Keys<'a> {
    metadata: &'a GgufMetadata,
    pub architecture: &'a str,
    pub family: &'static str,
    read: KeysRead,
}

impl<'a> Keys<'a> {
    pub fn new(
        metadata: &'a GgufMetadata,
        architecture: &'a str,
        family: &'static str,
    ) -> Keys<'a> {
        Keys { metadata, architecture, family, read: KeysRead::default() }
    }

    pub fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    pub fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey {
            source_name: "the GGUF metadata".into(),
            key: self.path(key),
            family: self.family,
        }
    }

    /// Returns the error for a value that forebay cannot use.
    pub fn wrong(&self, key: &str, value: impl ToString, expected: &str) -> ModelError {
        ModelError::BadValue {
            key: self.path(key),
            value: value.to_string(),
            expected: expected.into(),
        }
    }

    /// Returns what is under a key.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.read.note("", key);
        self.metadata.get(&self.path(key))
    }

    /// Returns the number of a layer under a key without the name of the architecture, which has one number or a list with one for each
    /// layer.
    pub fn global_float_of_layer(&self, key: &str, layer: usize) -> Result<f32, ModelError> {
        let value = self.metadata.get(key).ok_or_else(|| ModelError::MissingKey {
            source_name: "the GGUF metadata".into(),
            key: key.into(),
            family: self.family,
        })?;
        let of_list = || value.as_array().and_then(numbers)?.get(layer).copied();
        number(value).or_else(of_list).ok_or_else(|| ModelError::BadValue {
            key: key.into(),
            value: value.describe(),
            expected: format!("it must be a number, or a list with one for layer {layer}"),
        })
    }

    /// Records keys that are not needed because others say the same.
    pub fn note(&self, keys: &[&str]) {
        keys.iter().for_each(|key| self.read.note("", key));
    }

    pub fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let bad = |value: String| {
            self.wrong(key, value, "it must be one whole number, the same for all layers")
        };
        let number = match value.as_u64() {
            Some(number) => number,
            // Some converters write one value per layer. Equal values count as one.
            None => match value.as_array().and_then(|array| array.to_u64s()) {
                Some(list) if !list.is_empty() && list.iter().all(|item| *item == list[0]) => {
                    list[0]
                }
                _ => return Err(bad(value.describe())),
            },
        };
        usize::try_from(number).map(Some).map_err(|_| bad(number.to_string()))
    }

    pub fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_count(key)?.ok_or_else(|| self.missing(key))
    }

    /// Returns the value of each layer of a key with one value for each layer; `None` if the key is absent or has one value for
    /// all.
    pub fn by_layer(&self, key: &str) -> Option<Vec<u64>> {
        self.get(key)?.as_array()?.to_u64s()
    }

    /// Returns the value of a layer, which may be the same for all.
    pub fn count_of_layer(&self, key: &str, layer: usize) -> Result<Option<usize>, ModelError> {
        match self.by_layer(key) {
            None => self.optional_count(key),
            Some(values) => match values.get(layer).map(|value| usize::try_from(*value)) {
                Some(Ok(value)) => Ok(Some(value)),
                _ => {
                    let expected = format!("it must have one for layer {layer}");
                    Err(self.wrong(key, format!("{} values", values.len()), &expected))
                }
            },
        }
    }

    /// Returns a number of any type. A list of equal numbers counts as one.
    pub fn optional_float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        if let Some(number) = number(value) {
            return Ok(Some(number));
        }
        match value.as_array().and_then(numbers).as_deref() {
            Some([first, others @ ..]) if others.iter().all(|other| other == first) => {
                Ok(Some(*first))
            }
            _ => Err(self.wrong(key, value.describe(), "it must be one number")),
        }
    }

    /// Returns a number other than 0, which means that the file does not say it.
    pub fn said_float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        Ok(self.optional_float(key)?.filter(|number| *number != 0.0))
    }

    /// Returns a number, or one for each layer.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = number(value).map(|number| vec![number]);
        let list = list.or_else(|| value.as_array().and_then(numbers));
        list.map(Some).ok_or_else(|| self.wrong(key, value.describe(), "it must be numbers"))
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match (value.as_bool(), value.as_u64()) {
            (Some(flag), _) => Ok(Some(flag)),
            (None, Some(flag @ (0 | 1))) => Ok(Some(flag == 1)),
            _ => Err(self.wrong(key, value.describe(), "it must be true or false")),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, value.describe(), "it must be text"))
    }

    /// Refuses a key that holds something else than these numbers. Without them, forebay computes as if the key were absent.
    pub fn only(&self, key: &str, neutral: &[f32], known: &str) -> Result<(), ModelError> {
        match self.optional_float(key)? {
            Some(number) if !neutral.contains(&number) => Err(self.wrong(key, number, known)),
            _ => Ok(()),
        }
    }

    /// Checks that every key of the architecture was read or changes no answer.
    ///
    /// # Errors
    /// Returns an error that names the first key for which neither holds, if it may change the answer.
    pub fn finish(&self) -> Result<(), ModelError> {
        let mut unknown = Vec::new();
        let beginning = self.path("");
        for (path, value) in self.metadata.iter() {
            let Some(key) = path.strip_prefix(&beginning) else { continue };
            if self.read.has(key) || harmless::in_gguf(key) {
                continue;
            }
            // All of these describe computation.
            let is_core = key.starts_with("rope.") || key.starts_with("attention.");
            if is_core || may_change_answers(key, held(value)) {
                let expected = "forebay does not know this key, and it may change the answer";
                return Err(self.wrong(key, value.describe(), expected));
            }
            if may_be_about_text(key) {
                unknown.push(path.to_owned());
            }
        }
        mention("the GGUF metadata", self.family, &unknown);
        Ok(())
    }
}

/// Returns a number of any type.
fn number(value: &Value) -> Option<f32> {
    let whole = || value.as_i64().map(|number| number as f32);
    value.as_f32().or_else(whole).or_else(|| value.as_u64().map(|number| number as f32))
}

fn numbers(array: &Array) -> Option<Vec<f32>> {
    let whole = || array.to_i64s().map(|list| list.into_iter().map(|item| item as f32).collect());
    array.to_f32s().or_else(whole)
}

fn held(value: &Value) -> Held {
    match (value.as_bool(), number(value)) {
        (Some(flag), _) => Held::Flag(flag),
        (None, Some(number)) => Held::Number(number.into()),
        (None, None) => Held::Other,
    }
}
