//! The files and batches of clients, which stay when the server ends.

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use forebay_options::OptionName;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::folder::{Folder, Incoming, Kind, Room, StoreError};
use crate::batches::{self, Batch};
use crate::error::ApiError;
use crate::stream;

/// Most files, and most batches, of all keys: each may have an equal part. Finished batches beyond that are forgotten, the
/// oldest first.
const RECORDS_MAX: usize = 10_000;
/// Most batches of all keys that are not finished: each may have an equal part.
const UNFINISHED_MAX: usize = 100;

/// Where files of clients are stored, and how large they may become.
#[derive(Clone, Debug)]
pub struct FilesOptions {
    /// Folder, which is created when a client first needs it. `None` refuses files.
    pub folder: Option<PathBuf>,
    /// Most bytes of all files.
    pub bytes_max: u64,
    /// Most bytes of one file.
    pub file_bytes_max: u64,
}

/// A stored file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FileRecord {
    pub id: String,
    /// Hash of the key whose client sent it.
    pub owner: String,
    /// Number that grows from file to file.
    pub order: u64,
    pub bytes: u64,
    pub created_at: u64,
    pub filename: String,
    pub purpose: String,
    pub expires_at: Option<u64>,
}

/// What a new file is called and how long it stays.
pub struct Naming {
    pub id: String,
    pub owner: String,
    pub filename: String,
    pub purpose: &'static str,
    /// Seconds after which it is removed.
    pub stays: Option<u64>,
}

/// The folder of files, which is opened when it is first needed.
pub struct Storage {
    pub options: FilesOptions,
    /// Number of keys, each of which may use an equal part. 0 if the server asks for none.
    keys: usize,
    disk: Mutex<Option<Arc<Disk>>>,
    changed: watch::Sender<()>,
}

impl Storage {
    /// Creates the storage of a server with so many keys.
    pub fn new(options: FilesOptions, keys: usize) -> Storage {
        Storage { options, keys, disk: Mutex::default(), changed: watch::Sender::new(()) }
    }

    /// Returns a receiver that is told when a batch changes.
    pub fn watch(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Returns the files, after opening or creating the folder. This reads and writes files.
    ///
    /// # Errors
    /// Returns an error if there is no folder, or another server uses it.
    pub fn disk(&self) -> Result<Arc<Disk>, ApiError> {
        let mut disk = self.disk.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(disk) = &*disk {
            return Ok(disk.clone());
        }
        let unusable = |why: &str, start: &str| {
            let why = format!("{why}: {start} with {}", OptionName::Files.with("DIR"));
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why)
        };
        let folder = self
            .options
            .folder
            .as_ref()
            .ok_or_else(|| unusable("this server has no folder for files", "start it"))?;
        let room = Room { most: self.options.bytes_max, keys: self.keys as u64 };
        let folder = Folder::open(folder, room)?.ok_or_else(|| {
            unusable("another server uses the folder for files", "start this one")
        })?;
        let opened = Arc::new(Disk::open(folder, self.changed.clone())?);
        *disk = Some(opened.clone());
        self.changed.send_replace(());
        Ok(opened)
    }

    /// Returns the files if their folder is open.
    pub fn opened(&self) -> Option<Arc<Disk>> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Opens the folder if an earlier server left one.
    pub fn open_existing(&self) {
        let exists =
            self.options.folder.as_ref().is_some_and(|folder| folder.join("lock").exists());
        if exists && let Err(error) = self.disk() {
            tracing::warn!("batches are not resumed: {error}");
        }
    }
}

/// An open folder of files. All methods read or write files.
pub struct Disk {
    pub folder: Arc<Folder>,
    files: Mutex<HashMap<String, FileRecord>>,
    batches: Mutex<HashMap<String, Batch>>,
    last_order: AtomicU64,
    changed: watch::Sender<()>,
}

fn content_name(id: &str) -> String {
    format!("{id}.data")
}

fn record_name(id: &str) -> String {
    format!("{id}.json")
}

fn journal_name(id: &str) -> String {
    format!("{id}.journal")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    fn open(folder: Folder, changed: watch::Sender<()>) -> Result<Disk, StoreError> {
        let files: Vec<FileRecord> = folder.read_all(Kind::Files, |file: &FileRecord| &file.id)?;
        let batches: Vec<Batch> = folder.read_all(Kind::Batches, |batch: &Batch| &batch.id)?;
        let orders = files.iter().map(|file| file.order);
        let last = orders.chain(batches.iter().map(|batch| batch.order)).max().unwrap_or(0);
        let files: HashMap<_, _> = files.into_iter().map(|file| (file.id.clone(), file)).collect();
        for file in files.values() {
            folder.count(&file.owner, file.bytes);
        }
        let disk = Disk {
            folder: Arc::new(folder),
            files: Mutex::new(files),
            batches: Mutex::new(batches.into_iter().map(|of| (of.id.clone(), of)).collect()),
            last_order: AtomicU64::new(last),
            changed,
        };
        disk.remove_remains();
        disk.count_answers();
        Ok(disk)
    }

    /// Removes contents without a description, which are those of a process that was killed between writing the two. Removes
    /// journals of finished batches, and counts the others.
    fn remove_remains(&self) {
        let (batches, files) = (lock(&self.batches), lock(&self.files));
        for (kind, ending) in [(Kind::Files, "data"), (Kind::Batches, "journal")] {
            let entries = std::fs::read_dir(self.folder.path(kind, "")).into_iter().flatten();
            for path in entries.flatten().map(|entry| entry.path()) {
                if path.extension().is_none_or(|extension| extension != ending) {
                    continue;
                }
                let id = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
                match kind {
                    Kind::Batches
                        if let Some(batch) = batches.get(id)
                            && !batch.is_finished() =>
                    {
                        let bytes = path.metadata().map_or(0, |about| about.len());
                        self.folder.count(&batch.owner, bytes);
                    }
                    Kind::Files if files.contains_key(id) => {}
                    _ => {
                        if let Err(error) = std::fs::remove_file(&path) {
                            tracing::warn!("{}: {error}", path.display());
                        }
                    }
                }
            }
        }
    }

    /// Counts the answers of batches that are not finished, whose journals know more than their descriptions.
    fn count_answers(&self) {
        for batch in lock(&self.batches).values_mut().filter(|batch| !batch.is_finished()) {
            let journal = self.journal(&batch.id);
            if !journal.exists() {
                continue;
            }
            match batches::answers_of(&journal, batch) {
                Ok(counts) => (batch.counts.completed, batch.counts.failed) = counts,
                Err(error) => tracing::warn!("{error}"),
            }
        }
    }

    /// Returns a number that is larger than all before.
    pub fn next_order(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_micros() as u64);
        let next = |last: u64| Some(now.max(last + 1));
        let last = self.last_order.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        now.max(last.unwrap_or(0) + 1)
    }

    /// Keeps a file that was written.
    pub fn keep(&self, incoming: Incoming, naming: Naming) -> Result<FileRecord, ApiError> {
        let Naming { id, owner, filename, purpose, stays } = naming;
        let created_at = stream::now();
        let record = FileRecord {
            id,
            owner,
            order: self.next_order(),
            bytes: incoming.bytes(),
            created_at,
            filename,
            purpose: purpose.to_owned(),
            expires_at: stays.map(|seconds| created_at + seconds),
        };
        let mut files = lock(&self.files);
        let own = files.values().filter(|file| file.owner == record.owner).count();
        let most = self.share_of(RECORDS_MAX);
        if own >= most && purpose == super::PURPOSE {
            let why = format!("you may keep {most} files at most: delete some");
            return Err(ApiError::bad(why));
        }
        incoming.keep(Kind::Files, &content_name(&record.id))?;
        let described = self.folder.write(Kind::Files, &record_name(&record.id), &record);
        if described.is_err() {
            // The next start removes the content if this does not.
            let _ = self.folder.remove(Kind::Files, &content_name(&record.id));
            self.folder.release(&record.owner, record.bytes);
        }
        described?;
        if let Some(earlier) = files.insert(record.id.clone(), record.clone()) {
            self.folder.release(&earlier.owner, earlier.bytes);
        }
        Ok(record)
    }

    /// Returns a file of this owner.
    pub fn file(&self, owner: &str, id: &str) -> Result<FileRecord, ApiError> {
        let files = lock(&self.files);
        let now = stream::now();
        let found = files.get(id).filter(|file| file.owner == owner && !has_expired(file, now));
        found.cloned().ok_or_else(|| no_file(id))
    }

    /// Returns all files of this owner, the newest first.
    pub fn files(&self, owner: &str) -> Vec<FileRecord> {
        let now = stream::now();
        let files = lock(&self.files);
        let own = files.values().filter(|file| file.owner == owner && !has_expired(file, now));
        let mut own: Vec<FileRecord> = own.cloned().collect();
        own.sort_unstable_by_key(|file| std::cmp::Reverse(file.order));
        own
    }

    /// Opens the content of a file.
    pub fn content(&self, id: &str) -> Result<File, StoreError> {
        let path = self.folder.path(Kind::Files, &content_name(id));
        File::open(&path).map_err(|source| StoreError::Io { path, source })
    }

    /// Deletes a file of this owner, unless a batch still reads it.
    pub fn delete(&self, owner: &str, id: &str) -> Result<(), ApiError> {
        self.file(owner, id)?;
        let batches = lock(&self.batches);
        if let Some(user) = batches.values().find(|batch| batch.uses(id)) {
            let why = format!("{} still uses this file: cancel it first", user.id);
            return Err(ApiError::new(StatusCode::CONFLICT, why));
        }
        Ok(self.remove_file(id)?)
    }

    fn remove_file(&self, id: &str) -> Result<(), StoreError> {
        let mut files = lock(&self.files);
        let Some(file) = files.get(id) else { return Ok(()) };
        // The next start removes a content without a description.
        self.folder.remove(Kind::Files, &record_name(id))?;
        self.folder.remove(Kind::Files, &content_name(id))?;
        self.folder.release(&file.owner, file.bytes);
        files.remove(id);
        Ok(())
    }

    /// Removes the files whose time is over and that no batch reads.
    pub fn remove_expired(&self) {
        let now = stream::now();
        let batches = lock(&self.batches);
        let over: Vec<String> = lock(&self.files)
            .values()
            .filter(|file| has_expired(file, now) && !batches.values().any(|of| of.uses(&file.id)))
            .map(|file| file.id.clone())
            .collect();
        for id in over {
            if let Err(error) = self.remove_file(&id) {
                tracing::warn!("a file whose time is over was not removed: {error}");
            }
        }
    }

    /// Adds a batch, whose input file must be the owner's.
    pub fn add_batch(&self, batch: Batch) -> Result<Batch, ApiError> {
        let mut batches = lock(&self.batches);
        self.file(&batch.owner, &batch.input_file_id).map_err(|error| ApiError {
            param: Some("input_file_id".into()),
            ..ApiError::bad(error.message)
        })?;
        let own = || batches.values().filter(|of| of.owner == batch.owner);
        let unfinished = own().filter(|batch| !batch.is_finished()).count();
        if unfinished >= self.share_of(UNFINISHED_MAX) {
            let why =
                format!("{unfinished} of your batches are not finished yet, and no more may wait");
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, why));
        }
        if own().count() >= self.share_of(RECORDS_MAX) {
            let finished = own().filter(|batch| batch.is_finished());
            let oldest = finished.min_by_key(|batch| batch.order).map(|batch| batch.id.clone());
            if let Some(oldest) = oldest {
                self.folder.remove(Kind::Batches, &record_name(&oldest))?;
                batches.remove(&oldest);
            }
        }
        self.folder.write(Kind::Batches, &record_name(&batch.id), &batch)?;
        batches.insert(batch.id.clone(), batch.clone());
        drop(batches);
        self.changed.send_replace(());
        Ok(batch)
    }

    /// Returns the most of something that one owner may have.
    fn share_of(&self, most: usize) -> usize {
        self.folder.room.share_of(most as u64) as usize
    }

    /// Returns a batch of this owner.
    pub fn batch(&self, owner: &str, id: &str) -> Result<Batch, ApiError> {
        let found = lock(&self.batches).get(id).filter(|batch| batch.owner == owner).cloned();
        found.ok_or_else(|| no_batch(id))
    }

    /// Returns all batches of this owner, the newest first.
    pub fn batches(&self, owner: &str) -> Vec<Batch> {
        let batches = lock(&self.batches);
        let mut own: Vec<Batch> =
            batches.values().filter(|batch| batch.owner == owner).cloned().collect();
        own.sort_unstable_by_key(|batch| std::cmp::Reverse(batch.order));
        own
    }

    /// Returns the batches that are not finished, the oldest first.
    pub fn unfinished(&self) -> Vec<Batch> {
        let batches = lock(&self.batches);
        let mut left: Vec<Batch> =
            batches.values().filter(|batch| !batch.is_finished()).cloned().collect();
        left.sort_unstable_by_key(|batch| batch.order);
        left
    }

    /// Returns the state of a batch.
    pub fn state_of(&self, id: &str) -> Option<Batch> {
        lock(&self.batches).get(id).cloned()
    }

    /// Changes a batch and writes it down. `change` returns an error to change nothing.
    pub fn change<T>(
        &self,
        id: &str,
        change: impl FnOnce(&mut Batch) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut batches = lock(&self.batches);
        let batch = batches.get_mut(id).ok_or_else(|| no_batch(id))?;
        let mut changed = batch.clone();
        let value = change(&mut changed)?;
        self.folder.write(Kind::Batches, &record_name(id), &changed)?;
        *batch = changed;
        drop(batches);
        self.changed.send_replace(());
        Ok(value)
    }

    /// Counts an answer of a batch, which the journal already has.
    pub fn note_answer(&self, id: &str, is_error: bool) {
        if let Some(batch) = lock(&self.batches).get_mut(id) {
            let counts = &mut batch.counts;
            *if is_error { &mut counts.failed } else { &mut counts.completed } += 1;
        }
    }

    /// Returns the path of a batch's journal.
    pub fn journal(&self, id: &str) -> PathBuf {
        self.folder.path(Kind::Batches, &journal_name(id))
    }
}

fn has_expired(file: &FileRecord, now: u64) -> bool {
    file.expires_at.is_some_and(|end| end <= now)
}

fn no_file(id: &str) -> ApiError {
    let why =
        format!("there is no file {id:?}: it was deleted, expired, or belongs to another key");
    ApiError { param: Some("id".into()), ..ApiError::new(StatusCode::NOT_FOUND, why) }
}

fn no_batch(id: &str) -> ApiError {
    let why = format!("there is no batch {id:?}, or it belongs to another key");
    ApiError { param: Some("id".into()), ..ApiError::new(StatusCode::NOT_FOUND, why) }
}
