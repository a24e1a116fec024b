//! The folder of models.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::error::at;
use crate::manifest::Manifest;
use crate::{Error, Name, loose};

/// Quant that a name without quant means if the library has several.
pub(crate) const USUAL_QUANT: &str = "Q4_K_M";

/// A folder of models with names.
#[derive(Clone, Debug)]
pub struct Library {
    root: PathBuf,
}

/// A model of the library.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    /// The file or folder to open.
    pub path: PathBuf,
    pub size_bytes: u64,
    /// Time of the pull.
    pub modified: SystemTime,
    /// SHA-256 of the list of files with their checksums, in hexadecimal digits.
    pub digest: String,
}

/// Everything that a library holds.
#[derive(Debug, Default)]
pub struct Listing {
    /// Models that were pulled and can be opened, by name.
    pub entries: Vec<Entry>,
    /// Models that lie in the folder itself: GGUF files, packs and Hugging Face folders. They are called by their file names
    /// without the ending, and are no part of what pulls made.
    pub loose: Vec<Entry>,
    /// Names whose pull has begun and not ended.
    pub unfinished: Vec<Name>,
    /// Manifests that are damaged, and models whose files are missing.
    pub damaged: Vec<Error>,
}

/// A lock that ends when it is dropped.
pub(crate) struct Lock {
    _file: File,
}

impl Library {
    /// Opens a library. The folder is created by the first pull.
    pub fn open(root: impl Into<PathBuf>) -> Library {
        Library { root: root.into() }
    }

    /// Returns the folder of the library if the user names none: `FOREBAY_MODELS`, else `forebay/models` below
    /// `XDG_DATA_HOME`, else below `~/.local/share`. Returns `None` if `HOME` is not set.
    pub fn default_folder() -> Option<PathBuf> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(folder) = variable("FOREBAY_MODELS") {
            return Some(folder.into());
        }
        let data = variable("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        let home = || Some(Path::new(&variable("HOME")?).join(".local/share"));
        Some(data.or_else(home)?.join("forebay/models"))
    }

    /// Returns the folder of the library.
    pub fn folder(&self) -> &Path {
        &self.root
    }

    /// Lists all models. A damaged manifest does not hide the others.
    pub fn list(&self) -> Result<Listing, Error> {
        let mut listing = Listing::default();
        for name in self.names("manifests")? {
            match self.manifest(&name).and_then(|manifest| self.entry(&manifest)) {
                Ok(entry) => listing.entries.push(entry),
                // It was removed in the meantime.
                Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => listing.damaged.push(error),
            }
        }
        let pulled = |name: &str| listing.entries.iter().any(|entry| entry.name == name);
        let loose = loose::models(&self.root).into_iter().filter(|entry| !pulled(&entry.name));
        listing.loose = loose.collect();
        listing.unfinished = self.names("pulls")?.into_iter().collect();
        Ok(listing)
    }

    /// Finds a model by its name. A name without quant means the only model of the repository, or its Q4_K_M. A model that
    /// lies in the folder itself is found by its name with or without the ending.
    pub fn find(&self, name: &str) -> Result<Entry, Error> {
        let names = self.names("manifests")?;
        match name.parse().and_then(|asked| self.resolve(&asked, &names)) {
            Ok(name) => self.entry(&self.manifest(&name)?),
            Err(error) if error.is_not_found() || matches!(error, Error::BadName { .. }) => {
                let file = |of: &Entry| of.path.file_name().is_some_and(|file| file == name);
                let mut loose = loose::models(&self.root).into_iter();
                loose.find(|of| of.name == name || file(of)).ok_or(error)
            }
            Err(error) => Err(error),
        }
    }

    /// Gives a model a second name, which shares its files.
    pub fn copy(&self, from: &str, to: &str) -> Result<Entry, Error> {
        let to: Name = to.parse()?;
        let _lock = self.lock_library()?;
        let names = self.names("manifests")?;
        let from = self.resolve(&from.parse()?, &names)?;
        if names.contains(&to) {
            return Err(Error::Exists { name: to.to_string() });
        }
        let manifest = Manifest { name: to.to_string(), ..self.manifest(&from)? };
        manifest.write(&self.manifest_file(&to))?;
        self.entry(&manifest)
    }

    /// Removes a name, or what its unfinished pull has left. Files are deleted when no other name has them.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        let names = &self.names("manifests")? | &self.names("pulls")?;
        let asked: Name = name.parse()?;
        let name = self.resolve(&asked, &names).map_err(|error| match error {
            Error::NotFound { name } => Error::NoSuchName { name },
            error => error,
        })?;
        let _pull = self.lock_repository(name.repository())?;
        let _lock = self.lock_library()?;
        for file in [self.manifest_file(&name), self.plan_file(&name)] {
            remove_if_there(&file)?;
        }
        self.collect()
    }

    /// Returns the name that `asked` stands for.
    fn resolve(&self, asked: &Name, names: &BTreeSet<Name>) -> Result<Name, Error> {
        if names.contains(asked) {
            return Ok(asked.clone());
        }
        let found: Vec<&Name> = names.iter().filter(|name| asked.stands_for(name)).collect();
        let usual = |name: &&&Name| name.quant().is_none_or(|quant| quant == USUAL_QUANT);
        match found.as_slice() {
            [] => Err(Error::NotFound { name: asked.to_string() }),
            [name] => Ok((*name).clone()),
            several => match several.iter().filter(usual).collect::<Vec<_>>().as_slice() {
                [name] => Ok((**name).clone()),
                _ => Err(Error::Ambiguous {
                    name: asked.to_string(),
                    names: several.iter().map(ToString::to_string).collect(),
                }),
            },
        }
    }

    /// Returns the names that have a file in a folder of the library.
    fn names(&self, folder: &str) -> Result<BTreeSet<Name>, Error> {
        let folder = self.root.join(folder);
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            entries => entries.map_err(at(&folder))?,
        };
        let mut names = BTreeSet::new();
        for entry in entries {
            let file = entry.map_err(at(&folder))?.file_name();
            names.extend(file.to_str().and_then(Name::of_file));
        }
        Ok(names)
    }

    fn manifest_file(&self, name: &Name) -> PathBuf {
        self.root.join("manifests").join(name.file_name())
    }

    fn plan_file(&self, name: &Name) -> PathBuf {
        self.root.join("pulls").join(name.file_name())
    }

    /// Returns the folder that the files of a manifest share with nothing else.
    fn set_folder(&self, manifest: &Manifest) -> PathBuf {
        self.root.join("files").join(&manifest.digest)
    }

    /// Returns the folder of a manifest's files. Its last part is the repository's name.
    pub(crate) fn files_folder(&self, manifest: &Manifest) -> PathBuf {
        let repository = manifest.repository.rsplit('/').next().unwrap_or_default();
        self.set_folder(manifest).join(repository)
    }

    fn manifest(&self, name: &Name) -> Result<Manifest, Error> {
        Manifest::read(&self.manifest_file(name), name)
    }

    /// Returns the entry of a manifest if its files are there, and inside the library.
    fn entry(&self, manifest: &Manifest) -> Result<Entry, Error> {
        let damaged = |why: String| Error::Damaged {
            path: self.root.join("manifests").join(manifest.name.replace('/', "%2F")),
            why,
        };
        let folder = self.files_folder(manifest);
        let inside = self.root.join("files");
        let inside = fs::canonicalize(&inside).map_err(|error| damaged(error.to_string()))?;
        for file in &manifest.files {
            let path = folder.join(&file.path);
            let real = fs::canonicalize(&path)
                .map_err(|error| damaged(format!("{}: {error}", path.display())))?;
            let length = fs::metadata(&real).map_err(at(&real))?.len();
            if !real.starts_with(&inside) {
                return Err(damaged(format!("{} lies outside the library", path.display())));
            }
            if length != file.size {
                return Err(damaged(format!(
                    "{} has {length} bytes instead of {}",
                    path.display(),
                    file.size
                )));
            }
        }
        let path = if manifest.open.is_empty() { folder } else { folder.join(&manifest.open) };
        Ok(Entry {
            name: manifest.name.clone(),
            path,
            size_bytes: manifest.size_bytes(),
            modified: SystemTime::UNIX_EPOCH + Duration::from_secs(manifest.pulled),
            digest: manifest.digest.clone(),
        })
    }

    /// Notes that a pull begins, so that its unfinished files have a name. Returns the folder for them.
    pub(crate) fn begin(&self, name: &Name, manifest: &Manifest) -> Result<PathBuf, Error> {
        let _lock = self.lock_library()?;
        for folder in ["manifests", "pulls", "files"] {
            create_folder(&self.root.join(folder))?;
        }
        manifest.write(&self.plan_file(name))?;
        // An earlier pull of this name may have begun with other files.
        self.collect()?;
        let folder = self.files_folder(manifest);
        create_folder(&folder)?;
        Ok(folder)
    }

    /// Notes that all files of a pull are there and checked.
    pub(crate) fn finish(&self, name: &Name, manifest: &Manifest) -> Result<Entry, Error> {
        let _lock = self.lock_library()?;
        manifest.write(&self.manifest_file(name))?;
        remove_if_there(&self.plan_file(name))?;
        self.collect()?;
        self.entry(manifest)
    }

    /// Returns a complete file of another name with the same bytes, so that it need not be downloaded again.
    pub(crate) fn same_file(&self, wanted: &crate::manifest::RepositoryFile) -> Option<PathBuf> {
        let names = self.names("manifests").ok()?;
        let manifests = names.iter().filter_map(|name| self.manifest(name).ok());
        for manifest in manifests {
            let is_same = |file: &&crate::manifest::RepositoryFile| {
                file.size == wanted.size && file.checksum == wanted.checksum
            };
            if let Some(file) = manifest.files.iter().find(is_same) {
                let path = self.files_folder(&manifest).join(&file.path);
                if fs::symlink_metadata(&path)
                    .is_ok_and(|found| found.is_file() && found.len() == wanted.size)
                {
                    return Some(path);
                }
            }
        }
        None
    }

    /// Deletes the files that no name has. The caller holds the library's lock. While a manifest is damaged, nothing is
    /// deleted, because its files are not known.
    fn collect(&self) -> Result<(), Error> {
        let mut used = BTreeSet::new();
        for name in self.names("manifests")? {
            match self.manifest(&name) {
                Ok(manifest) => used.insert(manifest.digest),
                Err(_) => return Ok(()),
            };
        }
        for name in self.names("pulls")? {
            match Manifest::read(&self.plan_file(&name), &name) {
                Ok(plan) => used.insert(plan.digest),
                Err(_) => return Ok(()),
            };
        }
        let folder = self.root.join("files");
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(at(&folder))?,
        };
        for entry in entries {
            let entry = entry.map_err(at(&folder))?;
            let name = entry.file_name();
            // Only folders that a pull made are deleted.
            let is_set = |name: &str| {
                name.len() == 64
                    && name.bytes().all(|c| c.is_ascii_hexdigit())
                    && !used.contains(name)
            };
            if name.to_str().is_some_and(is_set) {
                fs::remove_dir_all(entry.path()).map_err(at(&entry.path()))?;
            }
        }
        Ok(())
    }

    /// Waits for the lock that every change of manifests needs.
    fn lock_library(&self) -> Result<Lock, Error> {
        let (file, path) = self.lock_file("library.lock")?;
        file.lock().map_err(at(&path))?;
        Ok(Lock { _file: file })
    }

    /// Takes the lock of a repository's pull.
    pub(crate) fn lock_repository(&self, repository: &str) -> Result<Lock, Error> {
        let name = repository.to_ascii_lowercase().replace('/', "%2F");
        let (file, path) = self.lock_file(&format!("{name}.lock"))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock { _file: file }),
            Err(TryLockError::WouldBlock) => {
                Err(Error::Locked { repository: repository.to_owned() })
            }
            Err(TryLockError::Error(error)) => Err(at(&path)(error)),
        }
    }

    fn lock_file(&self, name: &str) -> Result<(File, PathBuf), Error> {
        let folder = self.root.join("locks");
        create_folder(&folder)?;
        let path = folder.join(name);
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(at(&path))?;
        Ok((file, path))
    }
}

fn create_folder(folder: &Path) -> Result<(), Error> {
    fs::create_dir_all(folder).map_err(at(folder))
}

fn remove_if_there(file: &Path) -> Result<(), Error> {
    match fs::remove_file(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map_err(at(file)),
    }
}
