//! From a catalog to a description.

use forebay_format::{Catalog, Source};

use super::architecture::Architecture;
use super::{gguf, huggingface};
use crate::ModelError;

impl Architecture {
    /// Reads the description from a catalog's metadata.
    ///
    /// # Errors
    /// An unknown architecture is refused with the list of known ones; so are missing keys and
    /// values that no model can have.
    pub fn from_catalog(catalog: &Catalog) -> Result<Self, ModelError> {
        let architecture = match &catalog.source {
            Source::Gguf(metadata) => gguf::describe(catalog, metadata)?,
            Source::HuggingFace(metadata) => huggingface::describe(catalog, metadata)?,
        };
        architecture.validate()?;
        Ok(architecture)
    }
}
