//! What a user writes for a model: a path or a name.

use std::path::Path;

use crate::{Entry, Error, Library, Others};

/// Finds the model that a user named. A path that exists is a path, even if a model has the same name.
///
/// Returns `None` for such a path, and for a name that the library in `folder` does not have. The caller reports the second
/// when it opens the model.
///
/// # Errors
/// Returns an error if the name stands for several models, if the model is damaged, or if it is a name of another program,
/// such as `ollama:NAME`, that this program does not have.
pub fn find_named(model: &Path, folder: Option<&Path>) -> Result<Option<Entry>, Error> {
    let Some(name) = model.to_str().filter(|_| !model.try_exists().unwrap_or(true)) else {
        return Ok(None);
    };
    if Others::is_name(name) {
        return Others::of_user().find(name).map(Some);
    }
    let Some(folder) = folder else { return Ok(None) };
    match Library::open(folder).find(name) {
        Ok(entry) => Ok(Some(entry)),
        Err(error) if error.is_not_found() || matches!(error, Error::BadName { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_path_that_exists_wins_over_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tales.gguf");
        fs::write(&file, b"GGUF").unwrap();
        let find = |model: &Path| find_named(model, Some(folder.path())).unwrap();
        assert!(find(&file).is_none());
        for name in ["tales", "tales.gguf"] {
            assert_eq!(find(Path::new(name)).map(|entry| entry.path), Some(file.clone()), "{name}");
        }
        for name in ["nothing", "a/b:c", "no/such/path.gguf"] {
            assert!(find(Path::new(name)).is_none(), "{name}");
        }
        assert!(find_named(Path::new("tales"), None).unwrap().is_none());
    }
}
