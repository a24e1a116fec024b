//! Names of models in place of paths.

use std::path::{Path, PathBuf};

use forebay_library::{Library, find_named};
use pyo3::prelude::*;

use crate::errors::{no_model, of_library};

/// Returns the path of a model that was given by its path, or by its name in the model library.
///
/// The folder of the library is `FOREBAY_MODELS`, or the usual one. A path that exists is a path.
pub fn path_of(py: Python<'_>, model: PathBuf) -> PyResult<PathBuf> {
    let folder = Library::default_folder();
    match py.detach(|| find_named(&model, folder.as_deref())) {
        Ok(Some(entry)) => Ok(entry.path),
        Ok(None) if model.try_exists().unwrap_or(true) => Ok(model),
        Ok(None) => Err(no_model(&model, missing(folder.as_deref()))),
        Err(error) => Err(of_library(py, &model, &error)),
    }
}

/// Returns why there is no model: neither the path nor the name exists.
fn missing(folder: Option<&Path>) -> String {
    match folder {
        Some(folder) => format!(
            "no such file or folder, and the model library in {} has no model of this name",
            folder.display()
        ),
        None => "no such file or folder, and no model library is known: set FOREBAY_MODELS".into(),
    }
}
