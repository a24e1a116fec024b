//! Reads an architecture from a catalog.

use forebay_format::{Catalog, Source};

use super::architecture::Architecture;
use super::head::expect_complete;
use super::mtp::add_mtp;
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
        expect_complete(&architecture, catalog)?;
        Ok(architecture)
    }

    /// Reads the architecture as [`Architecture::from_catalog`] does, with the first layer that predicts further tokens.
    ///
    /// # Errors
    /// Returns the errors of [`Architecture::from_catalog`]. Returns [`ModelError::NoMtp`] if forebay cannot use such layers of
    /// the family, or if the files have none.
    pub fn with_mtp(catalog: &Catalog) -> Result<Self, ModelError> {
        let mut architecture = Architecture::from_catalog(catalog)?;
        add_mtp(&mut architecture, catalog)?;
        architecture.validate()?;
        Ok(architecture)
    }
}
