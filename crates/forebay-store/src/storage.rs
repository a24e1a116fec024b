//! Places that files of weights are read from.

use std::collections::HashMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
#[cfg(feature = "objects")]
use std::sync::Arc;

use forebay_format::{Disk, PathKind};

use crate::error::StoreError;
use crate::interrupt::Interrupt;
#[cfg(feature = "objects")]
use crate::objects::Objects;

/// Where the files of a model are.
#[derive(Clone, Debug, Default)]
pub enum Storage {
    /// File systems of this machine.
    #[default]
    Disk,
    /// Object stores and HTTP servers.
    #[cfg(feature = "objects")]
    Objects(Arc<Objects>),
}

impl Storage {
    /// Returns the place that has all of `paths`, and the names of the files there. Paths that begin like `s3://` are
    /// URLs, for which `settings` says how their store is reached. Waits for servers end when `interrupt` is requested.
    ///
    /// # Errors
    /// Returns [`StoreError::Url`] if a URL or a setting is wrong, if only some of the paths are URLs, if there are
    /// settings without URLs, or if this build cannot read URLs.
    pub fn of(
        paths: &[PathBuf],
        settings: HashMap<String, String>,
        interrupt: &Interrupt,
    ) -> Result<(Storage, Vec<PathBuf>), StoreError> {
        let wrong = |path: &Path, why: &str| {
            Err(StoreError::Url { url: path.display().to_string(), why: why.to_owned() })
        };
        let Some(url) = paths.iter().find(|path| is_url(path)) else {
            let first = paths.first().map(PathBuf::as_path).unwrap_or(Path::new(""));
            return match settings.is_empty() {
                true => Ok((Storage::Disk, paths.to_vec())),
                false => wrong(first, "options of a store are for URLs, and this is none"),
            };
        };
        if let Some(file) = paths.iter().find(|path| !is_url(path)) {
            return wrong(file, "files on a disk cannot be opened together with URLs");
        }
        #[cfg(feature = "objects")]
        {
            let _ = url;
            let (objects, names) = Objects::new(paths, settings, interrupt)?;
            Ok((Storage::Objects(Arc::new(objects)), names))
        }
        #[cfg(not(feature = "objects"))]
        {
            let _ = interrupt;
            wrong(url, "this build cannot read URLs: build it with the feature objects")
        }
    }

    fn inner(&self) -> &dyn forebay_format::Storage {
        match self {
            Storage::Disk => &Disk,
            #[cfg(feature = "objects")]
            Storage::Objects(objects) => objects.as_ref(),
        }
    }
}

/// Returns true if a path begins with a scheme.
fn is_url(path: &Path) -> bool {
    let Some((scheme, _)) = path.to_str().and_then(|text| text.split_once("://")) else {
        return false;
    };
    let is_of_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+.-".contains(&byte);
    !scheme.is_empty() && scheme.bytes().all(is_of_scheme)
}

impl forebay_format::Storage for Storage {
    fn kind(&self, path: &Path) -> io::Result<PathKind> {
        self.inner().kind(path)
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.inner().exists(path)
    }

    fn open(&self, path: &Path) -> io::Result<(Box<dyn Read>, u64)> {
        self.inner().open(path)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        self.inner().list(folder)
    }

    fn expect(&self, paths: &[PathBuf]) {
        self.inner().expect(paths);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_and_paths() {
        let of = |paths: &[&str], settings| {
            let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
            Storage::of(&paths, settings, &Interrupt::new())
        };
        let none = HashMap::new;
        assert!(matches!(of(&["a/b", "c"], none()), Ok((Storage::Disk, _))));
        assert!(matches!(of(&[], none()), Ok((Storage::Disk, _))));
        // Not a URL: `://` in the name of a folder.
        assert!(matches!(of(&["a b://c"], none()), Ok((Storage::Disk, _))));
        let settings = HashMap::from([("region".to_owned(), "x".to_owned())]);
        assert!(matches!(of(&["a/b"], settings), Err(StoreError::Url { .. })));
        let mixed = of(&["s3://a/b.gguf", "c"], none());
        assert!(matches!(mixed, Err(StoreError::Url { url, .. }) if url == "c"));
        assert!(matches!(of(&["ftp://a/b"], none()), Err(StoreError::Url { .. })));
    }
}
