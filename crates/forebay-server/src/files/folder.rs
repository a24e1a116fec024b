//! The folder with the files and batches of clients.
//!
//! Names are ids that the server made. A file is written under a temporary name, flushed to the disk and renamed, so that it
//! is whole or absent. A lock keeps a second server out.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::StatusCode;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::ApiError;
use crate::stream;

/// Reason why something cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "there is no room: the files of this server may have {most} bytes in all (--files-size)"
    )]
    NoRoom { most: u64 },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> ApiError {
        let status = match &error {
            StoreError::NoRoom { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            StoreError::Io { .. } => {
                // A client need not know the paths of this machine.
                tracing::error!("files: {error}");
                let why = "the server could not use its folder for files; its log says why";
                return ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why);
            }
        };
        ApiError { code: Some("files_full"), ..ApiError::new(status, error.to_string()) }
    }
}

/// What a part of the folder holds.
#[derive(Clone, Copy)]
pub enum Kind {
    Files,
    Batches,
    /// Files that are not whole yet.
    Incoming,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Files => "files",
            Kind::Batches => "batches",
            Kind::Incoming => "incoming",
        }
    }
}

/// An open folder.
pub struct Folder {
    path: PathBuf,
    /// Most bytes of all files.
    most: u64,
    used: AtomicU64,
    _lock: File,
}

impl Folder {
    /// Opens or creates the folder. Returns `None` if another process uses it.
    pub fn open(path: &Path, most: u64) -> Result<Option<Folder>, StoreError> {
        let failed = |source| StoreError::Io { path: path.to_owned(), source };
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(path).map_err(failed)?;
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).mode(0o600);
        let lock = options.open(path.join("lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        for kind in [Kind::Files, Kind::Batches, Kind::Incoming] {
            builder.create(path.join(kind.name())).map_err(failed)?;
        }
        // What an earlier process left unfinished.
        for entry in fs::read_dir(path.join(Kind::Incoming.name())).map_err(failed)? {
            fs::remove_file(entry.map_err(failed)?.path()).map_err(failed)?;
        }
        let (path, used) = (path.to_owned(), AtomicU64::new(0));
        Ok(Some(Folder { path, most, used, _lock: lock }))
    }

    /// Returns the path of a name that the server made.
    pub fn path(&self, kind: Kind, name: &str) -> PathBuf {
        self.path.join(kind.name()).join(name)
    }

    fn failed(path: &Path) -> impl FnOnce(io::Error) -> StoreError {
        let path = path.to_owned();
        move |source| StoreError::Io { path, source }
    }

    /// Reserves bytes.
    pub fn reserve(&self, bytes: u64) -> Result<(), StoreError> {
        let (most, add) = (self.most, |used: u64| used.checked_add(bytes));
        let fits = |used| add(used).filter(|sum| *sum <= most);
        let reserved = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        reserved.map(|_| ()).map_err(|_| StoreError::NoRoom { most })
    }

    /// Counts bytes that are on the disk already, whether there is room or not.
    pub fn count(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Gives bytes back.
    pub fn release(&self, bytes: u64) {
        let less = |used: u64| Some(used.saturating_sub(bytes));
        // The closure always returns a value.
        let _ = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Returns the bytes of all files.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Reads the JSON documents of a part of the folder. One that is damaged is left alone and logged.
    pub fn read_all<T: DeserializeOwned>(
        &self,
        kind: Kind,
        id: impl Fn(&T) -> &str,
    ) -> Result<Vec<T>, StoreError> {
        let folder = self.path.join(kind.name());
        let mut all = Vec::new();
        for entry in fs::read_dir(&folder).map_err(Folder::failed(&folder))? {
            let path = entry.map_err(Folder::failed(&folder))?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let bytes = fs::read(&path).map_err(Folder::failed(&path))?;
            match serde_json::from_slice::<T>(&bytes) {
                Ok(value) if path.file_stem().is_some_and(|stem| stem == id(&value)) => {
                    all.push(value);
                }
                Ok(_) => tracing::warn!("{}: names another id", path.display()),
                Err(error) => tracing::warn!("{}: {error}", path.display()),
            }
        }
        Ok(all)
    }

    /// Writes a JSON document, replacing an earlier one.
    pub fn write(
        &self,
        kind: Kind,
        name: &str,
        document: &impl Serialize,
    ) -> Result<(), StoreError> {
        let (mut file, path) = self.temporary()?;
        let moved = serde_json::to_vec(document).map_err(io::Error::from).and_then(|bytes| {
            file.write_all(&bytes)?;
            file.sync_all()
        });
        let moved =
            moved.map_err(Folder::failed(&path)).and_then(|()| self.rename(&path, kind, name));
        if moved.is_err() {
            // The next start removes it if this does not.
            let _ = fs::remove_file(&path);
        }
        moved
    }

    fn temporary(&self) -> Result<(File, PathBuf), StoreError> {
        let path = self.path(Kind::Incoming, &stream::unique());
        let mut options = OpenOptions::new();
        let file = options.create_new(true).write(true).mode(0o600).open(&path);
        Ok((file.map_err(Folder::failed(&path))?, path))
    }

    fn rename(&self, from: &Path, kind: Kind, name: &str) -> Result<(), StoreError> {
        let to = self.path(kind, name);
        fs::rename(from, &to).map_err(Folder::failed(&to))?;
        let folder = self.path.join(kind.name());
        let synced = File::open(&folder).and_then(|folder| folder.sync_all());
        synced.map_err(Folder::failed(&folder))
    }

    /// Removes a file, if it is there.
    pub fn remove(&self, kind: Kind, name: &str) -> Result<(), StoreError> {
        let path = self.path(kind, name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Folder::failed(&path)(error))
            }
            _ => Ok(()),
        }
    }

    /// Begins a file. Dropping it removes what was written.
    pub fn begin(self: &Arc<Folder>) -> Result<Incoming, StoreError> {
        let (file, path) = self.temporary()?;
        Ok(Incoming {
            folder: self.clone(),
            file,
            path,
            bytes: 0,
            is_bounded: true,
            is_kept: false,
        })
    }

    /// Begins a file that may exceed the bound, because it replaces a journal of about its size.
    pub fn begin_output(self: &Arc<Folder>) -> Result<Incoming, StoreError> {
        let mut output = self.begin()?;
        output.is_bounded = false;
        Ok(output)
    }
}

/// A file that is being written under a temporary name.
pub struct Incoming {
    folder: Arc<Folder>,
    file: File,
    path: PathBuf,
    bytes: u64,
    is_bounded: bool,
    is_kept: bool,
}

impl Incoming {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let length = bytes.len() as u64;
        match self.is_bounded {
            true => self.folder.reserve(length)?,
            false => self.folder.count(length),
        }
        self.bytes += length;
        self.file.write_all(bytes).map_err(Folder::failed(&self.path))
    }

    /// Flushes the file to the disk and gives it its name.
    pub fn keep(mut self, kind: Kind, name: &str) -> Result<(), StoreError> {
        self.file.sync_all().map_err(Folder::failed(&self.path))?;
        self.folder.rename(&self.path, kind, name)?;
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if !self.is_kept {
            // The next start removes it if this does not.
            let _ = fs::remove_file(&self.path);
            self.folder.release(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_whole_or_absent_and_bounded() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a/b");
        let folder = Arc::new(Folder::open(&path, 10).unwrap().unwrap());
        assert!(Folder::open(&path, 10).unwrap().is_none(), "another one is kept out");
        let names = |kind: Kind| fs::read_dir(path.join(kind.name())).unwrap().count();
        let mut incoming = folder.begin().unwrap();
        incoming.write(b"12345678").unwrap();
        assert_eq!((names(Kind::Incoming), names(Kind::Files)), (1, 0));
        assert!(matches!(incoming.write(b"9ab"), Err(StoreError::NoRoom { most: 10 })));
        drop(incoming);
        assert_eq!((names(Kind::Incoming), folder.used()), (0, 0));
        let mut incoming = folder.begin().unwrap();
        incoming.write(b"12345678").unwrap();
        incoming.keep(Kind::Files, "x").unwrap();
        assert_eq!(fs::read(folder.path(Kind::Files, "x")).unwrap(), b"12345678");
        assert_eq!((names(Kind::Incoming), folder.used()), (0, 8));
        fs::write(path.join("incoming/left"), "x").unwrap();
        drop(folder);
        Folder::open(&path, 10).unwrap().unwrap();
        assert_eq!(names(Kind::Incoming), 0);
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o700);
    }
}
