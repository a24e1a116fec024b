//! The folder with the files and batches of clients.
//!
//! Names are ids that the server made. A file is written under a temporary name, flushed to the disk and renamed, so that it
//! is whole or absent. A lock keeps a second server out.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use forebay_format::at_most;
use forebay_options::OptionName;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::ApiError;
use crate::stream;

/// Reason why something cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "there is no room: the files of this server may have {} in all ({})",
        at_most(*most),
        OptionName::FilesSize
    )]
    NoRoom { most: u64 },
    #[error(
        "there is no room: the files of your key may have {} in all. The server has {keys} keys, and each may use an equal \
         part of {} ({})",
        at_most(*most),
        at_most(*all),
        OptionName::FilesSize
    )]
    NoRoomForKey { most: u64, keys: u64, all: u64 },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> ApiError {
        let status = match &error {
            StoreError::NoRoom { .. } | StoreError::NoRoomForKey { .. } => {
                StatusCode::PAYLOAD_TOO_LARGE
            }
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

/// How large the files in the folder may become.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Most bytes of all files.
    pub most: u64,
    /// Number of keys, each of which may use an equal part. 0 if the server asks for none.
    pub keys: u64,
}

impl Room {
    /// Returns the most bytes of the files of one owner.
    fn share(self) -> u64 {
        self.share_of(self.most)
    }

    /// Returns the equal part of one owner of something of which there is `most`, at least 1.
    pub fn share_of(self, most: u64) -> u64 {
        (most / self.keys.max(1)).max(1)
    }
}

/// Bytes that are in use.
#[derive(Default)]
struct Used {
    all: u64,
    by_owner: HashMap<String, u64>,
}

impl Used {
    fn add(&mut self, owner: &str, bytes: u64) {
        self.all += bytes;
        *self.by_owner.entry(owner.to_owned()).or_default() += bytes;
    }
}

/// An open folder.
pub struct Folder {
    path: PathBuf,
    pub room: Room,
    used: Mutex<Used>,
    _lock: File,
}

impl Folder {
    /// Opens or creates the folder. Returns `None` if another process uses it.
    pub fn open(path: &Path, room: Room) -> Result<Option<Folder>, StoreError> {
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
        let (path, used) = (path.to_owned(), Mutex::default());
        Ok(Some(Folder { path, room, used, _lock: lock }))
    }

    /// Returns the path of a name that the server made.
    pub fn path(&self, kind: Kind, name: &str) -> PathBuf {
        self.path.join(kind.name()).join(name)
    }

    fn failed(path: &Path) -> impl FnOnce(io::Error) -> StoreError {
        let path = path.to_owned();
        move |source| StoreError::Io { path, source }
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves bytes for a file of this owner.
    pub fn reserve(&self, owner: &str, bytes: u64) -> Result<(), StoreError> {
        let Room { most, keys } = self.room;
        let mut used = self.used();
        let own = used.by_owner.get(owner).copied().unwrap_or(0);
        if used.all.saturating_add(bytes) > most {
            return Err(StoreError::NoRoom { most });
        }
        let share = self.room.share();
        if own.saturating_add(bytes) > share {
            return Err(StoreError::NoRoomForKey { most: share, keys, all: most });
        }
        used.add(owner, bytes);
        Ok(())
    }

    /// Counts bytes that are on the disk already, whether there is room or not.
    pub fn count(&self, owner: &str, bytes: u64) {
        self.used().add(owner, bytes);
    }

    /// Gives bytes back.
    pub fn release(&self, owner: &str, bytes: u64) {
        let mut used = self.used();
        used.all = used.all.saturating_sub(bytes);
        let Some(own) = used.by_owner.get_mut(owner) else { return };
        *own = own.saturating_sub(bytes);
        if *own == 0 {
            used.by_owner.remove(owner);
        }
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

    /// Begins a file of this owner. Dropping it removes what was written.
    pub fn begin(self: &Arc<Folder>, owner: &str) -> Result<Incoming, StoreError> {
        let (file, path) = self.temporary()?;
        Ok(Incoming {
            folder: self.clone(),
            owner: owner.to_owned(),
            file,
            path,
            bytes: 0,
            is_bounded: true,
            is_kept: false,
        })
    }

    /// Begins a file that may exceed the bound, because it replaces a journal of about its size.
    pub fn begin_output(self: &Arc<Folder>, owner: &str) -> Result<Incoming, StoreError> {
        let mut output = self.begin(owner)?;
        output.is_bounded = false;
        Ok(output)
    }
}

/// A file that is being written under a temporary name.
pub struct Incoming {
    folder: Arc<Folder>,
    owner: String,
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
            true => self.folder.reserve(&self.owner, length)?,
            false => self.folder.count(&self.owner, length),
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
            self.folder.release(&self.owner, self.bytes);
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
        let room = Room { most: 10, keys: 0 };
        let folder = Arc::new(Folder::open(&path, room).unwrap().unwrap());
        assert!(Folder::open(&path, room).unwrap().is_none(), "another one is kept out");
        let names = |kind: Kind| fs::read_dir(path.join(kind.name())).unwrap().count();
        let mut incoming = folder.begin("a").unwrap();
        incoming.write(b"12345678").unwrap();
        assert_eq!((names(Kind::Incoming), names(Kind::Files)), (1, 0));
        assert!(matches!(incoming.write(b"9ab"), Err(StoreError::NoRoom { most: 10 })));
        drop(incoming);
        assert_eq!((names(Kind::Incoming), folder.used().all), (0, 0));
        let mut incoming = folder.begin("b").unwrap();
        incoming.write(b"12345678").unwrap();
        incoming.keep(Kind::Files, "x").unwrap();
        assert_eq!(fs::read(folder.path(Kind::Files, "x")).unwrap(), b"12345678");
        assert_eq!((names(Kind::Incoming), folder.used().all), (0, 8));
        fs::write(path.join("incoming/left"), "x").unwrap();
        drop(folder);
        Folder::open(&path, room).unwrap().unwrap();
        assert_eq!(names(Kind::Incoming), 0);
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn each_key_has_an_equal_part() {
        let place = tempfile::tempdir().unwrap();
        let room = Room { most: 30, keys: 3 };
        let folder = Folder::open(place.path(), room).unwrap().unwrap();
        folder.reserve("a", 10).unwrap();
        let full = folder.reserve("a", 1);
        assert!(matches!(full, Err(StoreError::NoRoomForKey { most: 10, keys: 3, all: 30 })));
        // Others have their part, and what one gives back is free for it alone.
        folder.reserve("b", 8).unwrap();
        assert!(folder.reserve("b", 3).is_err());
        folder.release("a", 4);
        folder.reserve("b", 2).unwrap();
        folder.reserve("a", 4).unwrap();
        // Files of keys that the server does not have any more take room from all.
        folder.count("old", 5);
        assert!(matches!(folder.reserve("c", 6), Err(StoreError::NoRoom { most: 30 })));
        folder.reserve("c", 5).unwrap();
        for owner in ["a", "b", "c", "old"] {
            folder.release(owner, 10);
        }
        assert!(folder.used().by_owner.is_empty(), "nothing stays of owners without files");
    }

    #[test]
    fn one_key_or_none_may_use_all() {
        for keys in [0, 1] {
            let place = tempfile::tempdir().unwrap();
            let folder = Folder::open(place.path(), Room { most: 30, keys }).unwrap().unwrap();
            folder.reserve("a", 30).unwrap();
            assert!(matches!(folder.reserve("a", 1), Err(StoreError::NoRoom { most: 30 })));
        }
    }
}
