//! The model library of the command line: its folder, and names in place of paths.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::anyhow;
use forebay_library::{Entry, Error, Library, Name, Notice, Options, find_named};

use crate::args::{Command, RunArgs};
use crate::commands::pull;
use crate::failure::{Failure, Outcome, usage};
use crate::output;
use crate::settings;

/// Returns the folder of the library: `--models`, else `FOREBAY_MODELS`, else that of the configuration file, else the usual
/// one.
pub fn folder(named: Option<PathBuf>) -> Option<PathBuf> {
    let has_variable = std::env::var_os("FOREBAY_MODELS").is_some_and(|value| !value.is_empty());
    let of_file = || settings::global("models").filter(|_| !has_variable).map(PathBuf::from);
    named.or_else(of_file).or_else(Library::default_folder)
}

/// Opens the library in the folder that the user named, else in the usual one.
pub fn open(named: Option<PathBuf>) -> Outcome<Library> {
    match folder(named) {
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
    let folder = self::folder(folder.map(Path::to_owned));
    Ok(find_named(model, folder.as_deref())?)
}

/// Returns the name of a model on the hub, or `None` for a path, and for a name that cannot be pulled.
pub fn remote_name(model: &Path) -> Option<Name> {
    let is_file = model.extension().is_some_and(|ending| ending == "gguf" || ending == "fbay");
    let is_there = || model.try_exists().unwrap_or(true);
    let name = || model.to_str()?.parse::<Name>().ok().filter(Name::has_owner);
    name().filter(|_| !is_file && !is_there())
}

/// Returns how repositories are asked. Says on standard error why a request is tried again, the same reason once.
pub fn options(revision: &str) -> Options {
    let said = Mutex::new(String::new());
    let notice = Notice::new(move |why: &str| {
        let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
        if *said != why {
            output::tell!("note: {why}");
            why.clone_into(&mut said);
        }
    });
    Options { revision: revision.to_owned(), notice, ..Options::from_environment() }
}

/// Returns the library's folder, or the nearest folder above it that exists: both are on the disk that models are on.
pub fn nearest_folder(folder: Option<PathBuf>) -> Outcome<PathBuf> {
    let library = open(folder)?;
    let nearest = library.folder().ancestors().find(|folder| folder.is_dir());
    Ok(match nearest {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    })
}

/// Downloads the model of `run` if the user agrees, when it is a name on the hub that the library does not have.
pub fn pull_if_asked(args: &mut RunArgs, folder: Option<&Path>) -> Outcome {
    let Some(model) = &args.model else { return Ok(()) };
    let Some(name) = remote_name(model) else { return Ok(()) };
    let is_terminal = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !is_terminal {
        return Ok(());
    }
    output::tell!("{name} is not downloaded.");
    let entry = pull::ask_and_pull(&name, folder.map(Path::to_owned))?;
    args.model = Some(entry.path);
    Ok(())
}

/// Returns the error for a model that is neither a path nor a name of the library.
pub fn missing(model: &Path) -> anyhow::Error {
    let shown = model.display();
    match remote_name(model) {
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
