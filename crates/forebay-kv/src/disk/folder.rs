//! The files of a folder: how it is opened, scanned and emptied.
//!
//! | file | holds |
//! | --- | --- |
//! | `store.json` | version, whether blocks are encrypted, and a check of the secret |
//! | `models.json` | names of the models whose blocks are here |
//! | `wear.json` | bytes written today |
//! | `lock` | locked by the process that writes |
//! | `NUMBER.kv`, `NUMBER.index` | segments and their indices |

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::format::{self, HEADER_BYTES, Record, Tag};
use super::index::{Index, Segment};
use super::seal::{Cipher, Secret, random};
use super::{Access, DiskError};
use crate::buffers::PAGE;

const VERSION: u32 = 1;
const STORE: &str = "store.json";
const MODELS: &str = "models.json";
const WEAR: &str = "wear.json";
const LOCK: &str = "lock";

/// Bytes of headers and blocks that a scan reads at a time behind a damaged record.
const SCAN_BYTES: usize = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct Store {
    version: u32,
    encrypted: bool,
    /// Random, in hexadecimal digits.
    id: String,
    /// What the secret makes of the id, in hexadecimal digits.
    check: Option<String>,
}

/// Bytes written on one day.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Wear {
    /// Days since 1970.
    pub day: u64,
    pub bytes: u64,
}

impl Wear {
    /// Returns the wear of today.
    pub fn today(self) -> Wear {
        let day = now() / 86_400;
        if self.day == day { self } else { Wear { day, bytes: 0 } }
    }
}

/// An open folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    secret: Option<Secret>,
    pub access: Access,
    /// Holds the lock while it is open.
    _lock: File,
}

/// Returns the seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> DiskError {
    let path = path.to_owned();
    move |source| DiskError::Io { path, source }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Folder {
    /// Opens a folder, and makes one if there is none.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be used, if others may read it, if it holds something else, or if the secret is
    /// not the store's.
    pub fn open(path: &Path, secret: Option<Secret>) -> Result<Folder, DiskError> {
        if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(path) {
            return Err(failed(path)(error));
        }
        Folder::open_existing(path, secret, true)
    }

    /// Opens a folder that is there. An empty folder becomes a store if `makes` is true.
    ///
    /// # Errors
    /// Returns the errors of [`Folder::open`].
    pub fn open_existing(
        path: &Path,
        secret: Option<Secret>,
        makes: bool,
    ) -> Result<Folder, DiskError> {
        let found = fs::metadata(path).map_err(failed(path))?;
        if !found.is_dir() {
            return Err(failed(path)(ErrorKind::NotADirectory.into()));
        }
        if found.mode() & 0o077 != 0 {
            return Err(DiskError::OthersMayRead { path: path.to_owned() });
        }
        let store = path.join(STORE);
        let text = match fs::read(&store) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            read => Some(read.map_err(failed(&store))?),
        };
        if text.is_none() && (!makes || has_other_files(path)?) {
            return Err(DiskError::NotAStore { path: path.to_owned() });
        }
        let lock = path.join(LOCK);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&lock).map_err(failed(&lock))?;
        let access = match file.try_lock() {
            Ok(()) => Access::Write,
            Err(TryLockError::WouldBlock) => Access::ReadOnly,
            Err(TryLockError::Error(error)) => return Err(failed(&lock)(error)),
        };
        let folder = Folder { path: path.to_owned(), secret, access, _lock: file };
        match text {
            Some(text) => folder.check_store(&text)?,
            None if access == Access::Write => folder.make_store()?,
            // Another process makes the store at this moment. It has no blocks yet.
            None => {}
        }
        Ok(folder)
    }

    /// Opens a folder whose blocks are not read, so that no secret is needed.
    ///
    /// # Errors
    /// Returns an error if the folder is no store, or if another process uses it.
    pub fn open_unread(path: &Path) -> Result<Folder, DiskError> {
        if !path.join(STORE).is_file() {
            return Err(DiskError::NotAStore { path: path.to_owned() });
        }
        let lock = path.join(LOCK);
        let file = OpenOptions::new().write(true).open(&lock).map_err(failed(&lock))?;
        if file.try_lock().is_err() {
            return Err(DiskError::InUse { path: path.to_owned() });
        }
        Ok(Folder { path: path.to_owned(), secret: None, access: Access::Write, _lock: file })
    }

    fn make_store(&self) -> Result<(), DiskError> {
        let id: [u8; 16] = random();
        let check = self.secret.as_ref().map(|secret| hex(&secret.check(&id)));
        let encrypted = self.secret.is_some();
        let store = Store { version: VERSION, encrypted, id: hex(&id), check };
        self.write_json(STORE, &store)
    }

    fn check_store(&self, text: &[u8]) -> Result<(), DiskError> {
        let path = || self.path.clone();
        let damaged = |_| DiskError::NotAStore { path: path() };
        let store: Store = serde_json::from_slice(text).map_err(damaged)?;
        if store.version != VERSION {
            return Err(DiskError::Version { path: path(), version: store.version });
        }
        let id: Vec<u8> = (0..store.id.len() / 2)
            .filter_map(|at| u8::from_str_radix(store.id.get(2 * at..2 * at + 2)?, 16).ok())
            .collect();
        let check = self.secret.as_ref().map(|secret| hex(&secret.check(&id)));
        match (store.encrypted, &self.secret) {
            (false, Some(_)) => Err(DiskError::NotEncrypted { path: path() }),
            (true, None) => Err(DiskError::Encrypted { path: path() }),
            _ if check != store.check => Err(DiskError::WrongSecret { path: path() }),
            _ => Ok(()),
        }
    }

    pub fn is_sealed(&self) -> bool {
        self.secret.is_some()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file under a temporary name and renames it.
    fn write_file(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = self.path.join(format!("{name}.partial"));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options.open(&temporary).and_then(|mut file| {
            file.write_all(bytes)?;
            fs::rename(&temporary, self.path.join(name))
        });
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    fn write_json<T: Serialize>(&self, name: &str, value: &T) -> Result<(), DiskError> {
        let text = serde_json::to_vec_pretty(value).map_err(io::Error::from);
        text.and_then(|text| self.write_file(name, &text)).map_err(failed(&self.path.join(name)))
    }

    fn read_json<T: for<'a> Deserialize<'a> + Default>(&self, name: &str) -> T {
        let read = fs::read(self.path.join(name)).ok();
        read.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    /// Returns the names of models by their tags, in hexadecimal digits.
    pub fn models(&self) -> BTreeMap<String, String> {
        self.read_json(MODELS)
    }

    /// Adds the name of a model.
    pub fn add_model(&self, tag: u64, name: &str) -> Result<(), DiskError> {
        let mut models = self.models();
        match models.insert(format!("{tag:016x}"), name.to_owned()) {
            Some(known) if known == name => Ok(()),
            _ => self.write_json(MODELS, &models),
        }
    }

    pub fn wear(&self) -> Wear {
        self.read_json::<Wear>(WEAR).today()
    }

    pub fn write_wear(&self, wear: Wear) -> Result<(), DiskError> {
        self.write_json(WEAR, &wear)
    }

    fn segment_path(&self, number: u64) -> PathBuf {
        self.path.join(format!("{number:016x}.kv"))
    }

    fn index_path(&self, number: u64) -> PathBuf {
        self.path.join(format!("{number:016x}.index"))
    }

    fn cipher(&self, tag: &Tag) -> Option<Arc<Cipher>> {
        self.secret.as_ref().map(|secret| Arc::new(secret.cipher(tag)))
    }

    /// Makes an empty segment.
    pub fn make_segment(&self, number: u64) -> io::Result<Segment> {
        let path = self.segment_path(number);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let (file, tag) = (open_direct(&options, &path)?, random());
        let cipher = self.cipher(&tag);
        Ok(Segment { file: Arc::new(file), path, tag, cipher, bytes: 0, records: Vec::new() })
    }

    /// Writes the index of a segment that is complete.
    pub fn write_index(&self, number: u64, segment: &Segment) -> io::Result<()> {
        let Segment { tag, bytes, records, cipher, .. } = segment;
        let index = format::write_index(tag, *bytes, records, cipher.as_deref());
        self.write_file(&format!("{number:016x}.index"), &index)
    }

    /// Removes the files of a segment.
    pub fn remove(segment: &Segment) -> io::Result<()> {
        // Without its segment, an index is never read.
        let _ = fs::remove_file(segment.path.with_extension("index"));
        fs::remove_file(&segment.path)
    }

    /// Reads which blocks are in the folder. Removes files that hold none, unless another process writes.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read. A segment that cannot be read is left out with a warning.
    pub fn scan(&self) -> Result<Index, DiskError> {
        let mut index = Index::default();
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed(&self.path))? {
            let path = entry.map_err(failed(&self.path))?.path();
            let number = path.file_stem().and_then(|stem| stem.to_str());
            let number = number.and_then(|stem| u64::from_str_radix(stem, 16).ok());
            let extension = path.extension().and_then(|extension| extension.to_str());
            match (number, extension) {
                (Some(number), Some("kv")) if path == self.segment_path(number) => {
                    numbers.push(number);
                }
                (_, Some("partial")) if self.access == Access::Write => {
                    let _ = fs::remove_file(path);
                }
                _ => {}
            }
        }
        numbers.sort_unstable();
        for number in numbers {
            match self.read_segment(number) {
                Ok(Some(segment)) => index.add_segment(number, segment),
                Ok(None) if self.access == Access::Write => {
                    let _ = fs::remove_file(self.index_path(number));
                    let _ = fs::remove_file(self.segment_path(number));
                }
                Ok(None) => {}
                Err(error) => {
                    let path = self.segment_path(number);
                    tracing::warn!("{}: its KV blocks are not used: {error}", path.display());
                }
            }
        }
        Ok(index)
    }

    /// Opens a segment. Returns `None` if it holds no record.
    fn read_segment(&self, number: u64) -> io::Result<Option<Segment>> {
        let path = self.segment_path(number);
        // The page cache is of use here: several headers may be in one page of its read-ahead.
        let scanned = File::open(&path)?;
        let mut header = vec![0; HEADER_BYTES];
        let bytes = scanned.metadata()?.len() / PAGE as u64 * PAGE as u64;
        if bytes < 2 * PAGE as u64 {
            return Ok(None);
        }
        scanned.read_exact_at(&mut header, 0)?;
        let Some(tag) = format::tag_of(&header) else { return Ok(None) };
        let cipher = self.cipher(&tag);
        let known = fs::read(self.index_path(number)).ok();
        let known =
            known.and_then(|index| format::read_index(&index, &tag, bytes, cipher.as_deref()));
        let is_complete = known.is_some();
        let records = match known {
            Some(records) => records,
            None => self.scan_records(&scanned, bytes, &tag, cipher.as_deref())?,
        };
        if records.is_empty() {
            return Ok(None);
        }
        let file = Arc::new(open_direct(OpenOptions::new().read(true), &path)?);
        let segment = Segment { file, path, tag, cipher, bytes, records };
        if !is_complete && self.access == Access::Write {
            // The next start need not scan it.
            if let Err(error) = self.write_index(number, &segment) {
                tracing::debug!("{}: {error}", self.index_path(number).display());
            }
        }
        Ok(Some(segment))
    }

    /// Finds the records of a segment by their headers. Behind a damaged one, it goes on at the next header.
    fn scan_records(
        &self,
        file: &File,
        bytes: u64,
        tag: &Tag,
        cipher: Option<&Cipher>,
    ) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        let mut window = vec![0; SCAN_BYTES.min(bytes as usize)];
        let mut offset = 0;
        let mut step = PAGE;
        while offset < bytes {
            let len = step.min((bytes - offset) as usize);
            file.read_exact_at(&mut window[..len], offset)?;
            let headers = window[..len].chunks_exact(HEADER_BYTES).enumerate();
            let found = headers.filter_map(|(page, header)| {
                let at = offset + (page * PAGE) as u64;
                let record = format::read_header(header, tag, at, bytes, cipher)?;
                Some((record, at + record.stored_bytes(cipher.is_some())))
            });
            match { found }.next() {
                Some((record, end)) => {
                    records.push(record);
                    (offset, step) = (end, PAGE);
                }
                None => {
                    offset += len as u64;
                    step = window.len();
                }
            }
        }
        Ok(records)
    }

    /// Removes the files of a store, and the folder if nothing else is in it.
    ///
    /// # Errors
    /// Returns an error if a file cannot be removed.
    pub fn wipe(self) -> Result<(), DiskError> {
        for entry in fs::read_dir(&self.path).map_err(failed(&self.path))? {
            let path = entry.map_err(failed(&self.path))?.path();
            if is_own_file(&path) {
                fs::remove_file(&path).map_err(failed(&path))?;
            }
        }
        match fs::remove_dir(&self.path) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => removed.map_err(failed(&self.path)),
        }
    }
}

/// Returns true if the name of a file is one that a store gives.
fn is_own_file(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let name = name.strip_suffix(".partial").unwrap_or(name);
    let stem = name.strip_suffix(".kv").or_else(|| name.strip_suffix(".index"));
    let is_number = |stem: &str| stem.len() == 16 && stem.bytes().all(|b| b.is_ascii_hexdigit());
    [STORE, MODELS, WEAR, LOCK].contains(&name) || stem.is_some_and(is_number)
}

fn has_other_files(path: &Path) -> Result<bool, DiskError> {
    for entry in fs::read_dir(path).map_err(failed(path))? {
        if !is_own_file(&entry.map_err(failed(path))?.path()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Opens a file for direct I/O, or for usual I/O if its file system has no direct I/O.
fn open_direct(options: &OpenOptions, path: &Path) -> io::Result<File> {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    match options.clone().custom_flags(direct).open(path) {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
            // The failed attempt may have made the file.
            options.clone().create_new(false).create(false).open(path).or_else(|error| match error
                .kind()
            {
                ErrorKind::NotFound => options.open(path),
                _ => Err(error),
            })
        }
        opened => opened,
    }
}
