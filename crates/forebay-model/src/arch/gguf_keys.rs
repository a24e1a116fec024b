//! Values of the GGUF metadata of one architecture.

use forebay_format::GgufMetadata;

use crate::ModelError;

/// Keys of one architecture, `ARCH.key`.
pub(super) struct Keys<'a> {
    pub metadata: &'a GgufMetadata,
    pub architecture: &'a str,
    pub family: &'static str,
}

impl Keys<'_> {
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

    pub fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let path = self.path(key);
        let Some(value) = self.metadata.get(&path) else { return Ok(None) };
        let bad = |value: String| ModelError::BadValue {
            key: path.clone(),
            value,
            expected: "it must be one whole number, the same for all layers".into(),
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
        self.metadata.get(&self.path(key))?.as_array()?.to_u64s()
    }

    /// Returns the value of a layer, which may be the same for all.
    pub fn count_of_layer(&self, key: &str, layer: usize) -> Result<Option<usize>, ModelError> {
        match self.by_layer(key) {
            None => self.optional_count(key),
            Some(values) => match values.get(layer).map(|value| usize::try_from(*value)) {
                Some(Ok(value)) => Ok(Some(value)),
                _ => Err(ModelError::BadValue {
                    key: self.path(key),
                    value: format!("{} values", values.len()),
                    expected: format!("it must have one for layer {layer}"),
                }),
            },
        }
    }

    pub fn optional_float(&self, key: &str) -> Option<f32> {
        self.metadata.f32(&self.path(key))
    }

    /// Returns the value `mscale_all_dim / 10`, unless it is 0.
    pub fn log_multiplier(&self) -> Option<f32> {
        self.optional_float("rope.scaling.yarn_log_multiplier").filter(|m| *m != 0.0)
    }
}
