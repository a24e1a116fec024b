//! Opens models in the same way for every command.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::Context as _;
use forebay_engine::{EngineError, Inspection, Session, SessionOptions};
use forebay_format::Catalog;
use forebay_model::ModelError;
use forebay_options::{BadOption, OptionName};

use crate::failure::{Failure, Outcome};
use crate::library;
use crate::output;
use crate::progress::BytesProgress;

/// Opens a model and shows a progress bar while it loads. An option that does not fit the model is a usage error; every other
/// error is a failure. `context_for` names the arguments that determined the context if the user gave no `--ctx`.
pub fn session(model: &Path, options: &SessionOptions, context_for: &str) -> Outcome<Session> {
    check(model)?;
    let mut progress = BytesProgress::new("reading weights");
    let opened = Session::open(model, options, &mut |done, total| progress.update(done, total));
    drop(progress);
    let session = opened.map_err(|error| refused(error, model, context_for))?;
    if let Some(words) = &session.info().left_out {
        output::tell!("note: {words}");
    }
    if let Some(choice) = session.device_choice() {
        output::say(format_args!("device: {choice}\n"));
    }
    Ok(session)
}

/// Opens a model like [`session`], but prints nothing.
pub fn quietly(model: &Path, options: &SessionOptions) -> Outcome<Session> {
    check(model)?;
    Session::open(model, options, &mut |_, _| {}).map_err(|error| refused(error, model, "--ctx"))
}

/// Tells options that do not fit the model from other errors.
pub fn refused(error: EngineError, model: &Path, context_for: &str) -> Failure {
    match error {
        EngineError::Option(BadOption { name: OptionName::Context, value, expected }) => {
            Failure::Usage(format!(
                "{context_for} needs {value} positions of context, but {expected}"
            ))
        }
        error @ (EngineError::Option(_) | EngineError::Model(ModelError::NoMtp { .. })) => {
            Failure::Usage(error.to_string())
        }
        error => named(error, model),
    }
}

/// Number of sequences that an engine's session has room for.
#[derive(Clone, Copy)]
pub enum Sequences {
    Exactly(usize),
    /// This number, or half of it until they fit in memory.
    AtMost(usize),
}

/// Opens a model for an engine with `open`. `kv_tokens` says how many positions the KV cache has for a number of sequences;
/// `None` gives each the whole context.
pub fn for_engine(
    options: &SessionOptions,
    sequences: Sequences,
    kv_tokens: &dyn Fn(usize) -> Option<usize>,
    open: &dyn Fn(&SessionOptions) -> Outcome<Session>,
) -> Outcome<Session> {
    let (mut number, may_be_fewer) = match sequences {
        Sequences::Exactly(number) => (number, false),
        Sequences::AtMost(number) => (number, true),
    };
    loop {
        let options = SessionOptions {
            sequences: number,
            kv_tokens: kv_tokens(number),
            for_engine: true,
            ..options.clone()
        };
        match open(&options) {
            Err(Failure::Work(error)) if may_be_fewer && number > 1 && is_too_small(&error) => {
                number /= 2;
            }
            opened => return opened,
        }
    }
}

/// Returns true if the model did not open because memory is too small.
pub fn is_too_small(error: &anyhow::Error) -> bool {
    error.downcast_ref().and_then(EngineError::needed_bytes).is_some()
}

/// Returns a name for a model by its file or folder.
pub fn name(model: &Path) -> String {
    // A link has its own name: in Hugging Face's cache, links lead to files that are named by hashes.
    let named = match model.file_name() {
        Some(_) => model.to_owned(),
        None => std::fs::canonicalize(model).unwrap_or_else(|_| model.to_owned()),
    };
    let of_file = match named.is_dir() {
        true => of_snapshot(&named).or_else(|| named.file_name().map(OsStr::to_os_string)),
        false => named.file_stem().map(OsStr::to_os_string),
    };
    of_file.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// Returns the name of a model's folder in Hugging Face's cache: `NAME` of `models--OWNER--NAME/snapshots/REVISION`.
fn of_snapshot(folder: &Path) -> Option<OsString> {
    let snapshots =
        folder.parent().filter(|of| of.file_name().is_some_and(|of| of == "snapshots"))?;
    let repository = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    repository.rsplit("--").next().map(OsString::from)
}

/// Describes a model from its headers only.
pub fn inspect(model: &Path) -> Outcome<Inspection> {
    check(model)?;
    forebay_engine::inspect(model).map_err(|error| named(error, model))
}

/// Opens the headers of a model.
pub fn catalog(model: &Path) -> Outcome<Catalog> {
    check(model)?;
    Catalog::open(model).map_err(|error| named(error, model))
}

/// Prefixes an error about a model with the model's path.
pub fn named(error: impl Into<anyhow::Error>, model: &Path) -> Failure {
    Failure::from(error.into().context(model.display().to_string()))
}

/// Returns an error if the path does not exist.
pub fn check(model: &Path) -> anyhow::Result<()> {
    let exists = model.try_exists().with_context(|| model.display().to_string())?;
    match exists {
        true => Ok(()),
        false => Err(library::missing(model)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_hugging_faces_cache_keep_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        let snapshot = at("models--org--A-Model/snapshots/abc");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(at("blobs")).unwrap();
        std::fs::write(at("blobs/4f3c"), "").unwrap();
        let link = snapshot.join("A-Model-Q4_K_M.gguf");
        std::os::unix::fs::symlink(at("blobs/4f3c"), &link).unwrap();
        assert_eq!(name(&link), "A-Model-Q4_K_M");
        assert_eq!(name(&snapshot), "A-Model");
        assert_eq!(name(&at("blobs/..")), folder.path().file_name().unwrap().to_str().unwrap());
        assert_eq!(name(Path::new("x.gguf")), "x");
    }
}
