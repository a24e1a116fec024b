//! The model library of the command line: its folder, and names in place of paths.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use forebay_library::{Entry, Error, Library, Name};

use crate::args::Command;
use crate::failure::{Failure, Outcome, usage};

/// Opens the library in the folder that the user named, else in the usual one.
pub fn open(folder: Option<PathBuf>) -> Outcome<Library> {
    match folder.or_else(Library::default_folder) {
        Some(folder) => Ok(Library::open(folder)),
        None => usage("no folder for models is known: set FOREBAY_MODELS, or give --models DIR"),
    }
}

/// Replaces names of the library by the paths of their models. A path that exists is a path, and what is neither stays as it
/// is: the command reports it when it opens the model.
pub fn resolve(command: &mut Command, folder: Option<&Path>) -> Outcome {
    let is_about_library = command.is_about_library();
    let models = command.models_mut();
    if folder.is_some() && models.is_empty() && !is_about_library {
        return usage("--models: this command opens no model by name");
    }
    let mut found = Vec::new();
    for model in models {
        if let Some(entry) = find(model, folder)? {
            model.clone_from(&entry.path);
            found.push((entry.path, entry.name));
        }
    }
    // Requests call a served model by the name that the user knows.
    if let Command::Serve(args) = command {
        args.from_library = found;
    }
    Ok(())
}

/// Returns the model of a name, or `None` for a path and for a name that the library does not have.
fn find(model: &Path, folder: Option<&Path>) -> Outcome<Option<Entry>> {
    let Some(name) = model.to_str().filter(|name| name.parse::<Name>().is_ok()) else {
        return Ok(None);
    };
    if model.try_exists().unwrap_or(true) {
        return Ok(None);
    }
    let Some(folder) = folder.map(Path::to_owned).or_else(Library::default_folder) else {
        return Ok(None);
    };
    match Library::open(folder).find(name) {
        Ok(entry) => Ok(Some(entry)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the error for a model that is neither a path nor a name of the library.
pub fn missing(model: &Path) -> anyhow::Error {
    let shown = model.display();
    let is_file = model.extension().is_some_and(|ending| ending == "gguf" || ending == "fbay");
    let name = model.to_str().and_then(|text| text.parse::<Name>().ok());
    match name.filter(|name| name.has_owner() && !is_file) {
        Some(name) => anyhow!(
            "{shown}: no such file or folder, and no model of the library: check the path, or download it with \
             forebay pull {name}"
        ),
        None => anyhow!(
            "{shown}: no such file or folder: check the path; forebay list shows the models of the library"
        ),
    }
}

/// Returns the failure of an error about a name: wrong names are wrong usage.
pub fn failed(error: Error) -> Failure {
    match error {
        Error::BadName { .. } | Error::NoOwner { .. } => Failure::Usage(error.to_string()),
        Error::Cancelled => Failure::Interrupted,
        error => error.into(),
    }
}
