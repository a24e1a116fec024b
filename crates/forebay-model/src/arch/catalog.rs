//! Reads an architecture from a catalog.

use forebay_format::{Catalog, Source};

use super::architecture::Architecture;
use super::{gguf, huggingface};
use crate::ModelError;

impl Architecture {
    /// Reads the architecture from a catalog's metadata.
    ///
    /// # Errors
    /// Returns an error if the architecture is unknown, and names the known ones. Also returns an error if a key is
    /// missing or has a value that no model can have.
    pub fn from_catalog(catalog: &Catalog) -> Result<Self, ModelError> {
        let architecture = match &catalog.source {
            Source::Gguf(metadata) => gguf::describe(catalog, metadata)?,
            Source::HuggingFace(metadata) => huggingface::describe(catalog, metadata)?,
        };
        architecture.validate()?;
        Ok(architecture)
    }
}
