//! A store of KV blocks in a folder on disk.
//!
//! Blocks are appended to segments ([`format`]). Nothing is written with fsync: every record has checksums, and a block that
//! a crash has cut or damaged is as if it had never been written. Segments are never changed after they are complete, and
//! whole segments are removed when the store is full, those first whose last use is the longest ago.
//!
//! One process writes. Others that open the folder meanwhile can only read what it held then.

mod folder;
mod format;
mod index;
mod reader;
mod seal;
mod writer;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use self::folder::{Folder, Wear};
use self::format::HEADER_BYTES;
use self::index::Index;
use self::reader::Wanted;
pub use self::reader::{Block, Fetch, Fetched};
pub use self::seal::Secret;
use self::writer::{Queued, Writer};
use crate::block::{BlockHash, BlockKey, Link};
use crate::buffers::Buffers;

/// Bytes of all buffers with blocks that wait to be written, and of all buffers with blocks that were read.
const BUFFER_BYTES: usize = 64 << 20;

/// Bytes after which the rate of reading is known.
const MEASURED_BYTES: u64 = 64 << 20;

/// How a store is opened.
#[derive(Clone)]
pub struct DiskOptions {
    /// Made with mode 0700 if it does not exist.
    pub folder: PathBuf,
    /// Most bytes of all segments.
    pub bytes: u64,
    /// Most bytes written on one day (UTC).
    pub bytes_per_day: Option<u64>,
    /// Encrypts the blocks.
    pub secret: Option<Secret>,
    /// Number of threads that read.
    pub readers: usize,
    /// Faults to inject. For tests.
    pub faults: Option<Arc<dyn DiskFaults>>,
    /// Observer of every read and write of a block.
    pub watch: Option<Arc<dyn DiskWatch>>,
}

impl DiskOptions {
    /// Returns the options for a folder of up to so many bytes.
    pub fn new(folder: &Path, bytes: u64) -> DiskOptions {
        let folder = folder.to_owned();
        DiskOptions {
            folder,
            bytes,
            bytes_per_day: None,
            secret: None,
            readers: 8,
            faults: None,
            watch: None,
        }
    }
}

impl fmt::Debug for DiskOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DiskOptions { folder, bytes, bytes_per_day, secret, readers, .. } = self;
        f.debug_struct("DiskOptions")
            .field("folder", folder)
            .field("bytes", bytes)
            .field("bytes_per_day", bytes_per_day)
            .field("secret", secret)
            .field("readers", readers)
            .finish_non_exhaustive()
    }
}

/// Something that a store does with its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

/// Injects faults before reads and writes of blocks.
pub trait DiskFaults: Send + Sync {
    /// Is called before an operation, and may wait.
    ///
    /// # Errors
    /// An error is taken for that of the operation, which then does not happen.
    fn before(&self, operation: Operation) -> io::Result<()>;
}

/// A read or a write of a block that has just ended.
#[derive(Debug, Clone, Copy)]
pub struct Transfer {
    pub operation: Operation,
    /// Number of the segment, and the offset and bytes in it.
    pub segment: u64,
    pub offset: u64,
    pub bytes: u64,
    pub started: Instant,
    /// Error number of the operating system, or 0, if it failed.
    pub failed: Option<i32>,
}

/// Observer of what a store reads and writes.
pub trait DiskWatch: Send + Sync {
    /// Takes note of a transfer, on the thread that has read or written.
    fn ended(&self, transfer: &Transfer);
}

/// What this process may do with a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Write,
    /// Another process writes.
    ReadOnly,
}

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} can be read by other users: run `chmod 700` on it", path.display())]
    OthersMayRead { path: PathBuf },
    #[error("{} is not a folder of KV blocks: give an empty or a new one", path.display())]
    NotAStore { path: PathBuf },
    #[error("{} is in use by another process", path.display())]
    InUse { path: PathBuf },
    #[error("{} has version {version} of the KV folder's format, which this program does not know", path.display())]
    Version { path: PathBuf, version: u32 },
    #[error("the KV blocks in {} are encrypted: give the key file", path.display())]
    Encrypted { path: PathBuf },
    #[error("the KV blocks in {} are not encrypted: give another folder for encrypted ones", path.display())]
    NotEncrypted { path: PathBuf },
    #[error("the KV blocks in {} are encrypted with another key", path.display())]
    WrongSecret { path: PathBuf },
}

/// Why a block cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    #[error("the block was removed")]
    Gone,
    #[error("{}: the bytes at offset {offset} are not those that were written", path.display())]
    WrongBytes { path: PathBuf, offset: u64 },
    #[error("{}, offset {offset}: {source}", path.display())]
    Unreadable { path: PathBuf, offset: u64, source: io::Error },
}

/// What a store holds and has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct DiskStatistics {
    pub blocks: u64,
    /// Bytes of all segments.
    pub bytes: u64,
    pub bytes_max: u64,
    pub read_blocks: u64,
    pub read_bytes: u64,
    /// Sum of the durations of all reads, which overlap.
    pub read_seconds: f64,
    pub written_blocks: u64,
    pub written_bytes: u64,
    /// Blocks that were not written because earlier ones still waited.
    pub skipped_busy: u64,
    /// Blocks that were not written because of the limit of bytes per day.
    pub skipped_wear: u64,
    /// Blocks that were removed for others.
    pub removed_blocks: u64,
    /// Blocks that could not be read or had the wrong bytes.
    pub damaged_blocks: u64,
    pub written_today_bytes: u64,
}

/// The blocks of one model in a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listed {
    /// Name of the model, if it is known.
    pub model: Option<String>,
    pub blocks: u64,
    pub bytes: u64,
    /// Times of the first and the last write, in seconds since 1970.
    pub written: (u64, u64),
}

/// A store of KV blocks in a folder on disk.
#[derive(Debug)]
pub struct DiskStore {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
    readers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    options: DiskOptions,
    folder: Folder,
    state: Mutex<State>,
    /// Signals all changes of the state for which threads wait.
    changed: Condvar,
    write_buffers: Arc<Buffers>,
    read_buffers: Arc<Buffers>,
    /// True while the same disk brings weights.
    shares_disk: AtomicBool,
    /// True after several failed writes in a row.
    stops_writing: AtomicBool,
    /// True for [`Operation::Read`] and [`Operation::Write`] if a warning was logged.
    warned: [AtomicBool; 2],
}

#[derive(Debug, Default)]
struct State {
    index: Index,
    to_write: VecDeque<Queued>,
    /// True while the writing thread has a block that is not in the queue any more.
    writing: bool,
    to_read: VecDeque<Wanted>,
    closing: bool,
    last_number: u64,
    wear: Wear,
    statistics: DiskStatistics,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_within<'a>(
        &self,
        state: MutexGuard<'a, State>,
        limit: Duration,
    ) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    fn inject(&self, operation: Operation) -> io::Result<()> {
        self.options.faults.as_ref().map_or(Ok(()), |faults| faults.before(operation))
    }

    fn tell_watch(
        &self,
        operation: Operation,
        (segment, offset, bytes): (u64, u64, u64),
        started: Instant,
        result: &io::Result<()>,
    ) {
        let Some(watch) = &self.options.watch else { return };
        let failed = result.as_ref().err().map(|error| error.raw_os_error().unwrap_or(0));
        watch.ended(&Transfer { operation, segment, offset, bytes, started, failed });
    }

    fn note_damage(&self, key: BlockKey, damage: &Damage) {
        let mut state = self.state();
        state.index.forget(key);
        if matches!(damage, Damage::Gone) {
            return;
        }
        state.statistics.damaged_blocks += 1;
        drop(state);
        self.warn_once(Operation::Read, damage);
    }

    /// Logs the first failure of each kind. The others are only counted.
    fn warn_once(&self, operation: Operation, failure: &dyn fmt::Display) {
        let (kind, effect) = match operation {
            Operation::Read => (0, "positions whose KV blocks cannot be used are computed again"),
            Operation::Write => (1, "KV blocks that cannot be written are not kept on disk"),
        };
        if !self.warned[kind].swap(true, Ordering::Relaxed) {
            tracing::warn!("{effect}: {failure} (later failures are only counted)");
        }
    }
}

impl DiskStore {
    /// Opens a folder, and makes one if there is none.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be used, if other users may read it, if it holds something else, or if the
    /// secret is not that of its blocks. Damaged files are no error.
    pub fn open(options: DiskOptions) -> Result<DiskStore, DiskError> {
        let folder = Folder::open(&options.folder, options.secret.clone())?;
        DiskStore::start(folder, options)
    }

    /// Opens a folder that is a store already.
    ///
    /// # Errors
    /// Returns the errors of [`DiskStore::open`].
    pub fn open_existing(options: DiskOptions) -> Result<DiskStore, DiskError> {
        let folder = Folder::open_existing(&options.folder, options.secret.clone(), false)?;
        DiskStore::start(folder, options)
    }

    fn start(folder: Folder, options: DiskOptions) -> Result<DiskStore, DiskError> {
        let index = folder.scan()?;
        let wear = folder.wear();
        let is_writable = folder.access == Access::Write;
        let readers = options.readers.max(1);
        let state = State { index, wear, ..State::default() };
        let shared = Arc::new(Shared {
            options,
            folder,
            state: Mutex::new(state),
            changed: Condvar::new(),
            write_buffers: Buffers::new(BUFFER_BYTES),
            read_buffers: Buffers::new(BUFFER_BYTES),
            shares_disk: AtomicBool::new(false),
            stops_writing: AtomicBool::new(false),
            warned: Default::default(),
        });
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let spawned = thread::Builder::new().name(name.into()).spawn(run);
            let path = shared.folder.path().to_owned();
            spawned.map_err(|source| DiskError::Io { path, source })
        };
        let writer = Writer::new(shared.clone());
        let writer =
            is_writable.then(|| spawn("kv-writer", Box::new(move || writer.run()))).transpose()?;
        let readers = (0..readers).map(|_| {
            let shared = shared.clone();
            spawn("kv-reader", Box::new(move || shared.read_all()))
        });
        let readers = readers.collect::<Result<_, _>>()?;
        Ok(DiskStore { shared, writer, readers })
    }

    /// Returns what this process may do with the folder.
    pub fn access(&self) -> Access {
        self.shared.folder.access
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        self.shared.folder.path()
    }

    /// Gives the blocks of a root a name in [`DiskStore::list`]. Returns the tag with which they are written.
    ///
    /// # Errors
    /// Returns an error if the name cannot be written.
    pub fn add_model(&self, root: BlockHash, name: &str) -> Result<u64, DiskError> {
        let [tag @ .., _, _, _, _, _, _, _, _] = root.0;
        let tag = u64::from_le_bytes(tag);
        if self.access() == Access::Write {
            self.shared.folder.add_model(tag, name)?;
        }
        Ok(tag)
    }

    /// Returns the length of a block, if it is here.
    pub fn len_of(&self, key: BlockKey) -> Option<u64> {
        self.shared.state().index.len_of(key)
    }

    /// Returns true if a block behind this one is here.
    pub fn has_followers(&self, hash: BlockHash) -> bool {
        self.shared.state().index.has_followers(hash)
    }

    /// Says whether the same disk brings weights. Writes then take at most a twentieth of the time.
    pub fn share_disk(&self, shares: bool) {
        self.shared.shares_disk.store(shares, Ordering::Relaxed);
    }

    /// Copies a block and queues it to be written ([`DiskStore::write_with`]).
    pub fn write(
        &self,
        key: BlockKey,
        link: Link,
        model: u64,
        block: &[u8],
        waits: Duration,
    ) -> bool {
        let copy = |to: &mut [u8]| {
            to.copy_from_slice(block);
            true
        };
        self.write_with(key, link, model, block.len(), waits, copy)
    }

    /// Queues a block of `len` bytes to be written. `fill` puts it into a buffer, or returns false if there is none. Returns false
    /// if the block is not written: it is here already, too many wait, the limit of the day is reached, or the folder is
    /// read-only; `fill` is not called then. With `waits`, this waits up to that time for others to be written.
    pub fn write_with(
        &self,
        key: BlockKey,
        link: Link,
        model: u64,
        len: usize,
        waits: Duration,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        let shared = &self.shared;
        let stops = shared.stops_writing.load(Ordering::Relaxed);
        if self.writer.is_none() || stops || len as u64 > format::BLOCK_BYTES_MAX {
            return false;
        }
        let bytes = writer::buffer_bytes(len, shared.folder.is_sealed());
        {
            let mut state = shared.state();
            if !shared.may_wear(bytes as u64, state.wear) {
                state.statistics.skipped_wear += 1;
                return false;
            }
            if !state.index.enqueue(key, link.previous) {
                return false;
            }
        }
        let buffer = match waits.is_zero() {
            true => shared.write_buffers.try_take(bytes),
            false => shared.write_buffers.take_within(bytes, waits),
        };
        let Some(mut buffer) = buffer else {
            let mut state = shared.state();
            state.index.dequeue(key);
            state.statistics.skipped_busy += 1;
            return false;
        };
        if !fill(&mut buffer[HEADER_BYTES..][..len]) {
            shared.state().index.dequeue(key);
            return false;
        }
        let queued = Queued { meta: writer::meta(key, link, model), len, buffer };
        shared.state().to_write.push_back(queued);
        shared.changed.notify_all();
        true
    }

    /// Begins to read blocks, in this order as far as possible.
    pub fn fetch(&self, keys: impl Iterator<Item = BlockKey>) -> Fetch {
        let (to, arrived) = mpsc::channel();
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let wanted = keys.map(|key| {
            let (to, is_cancelled) = (to.clone(), is_cancelled.clone());
            Wanted { key, to, is_cancelled }
        });
        let wanted: Vec<Wanted> = wanted.collect();
        let left = wanted.len();
        self.shared.state().to_read.extend(wanted);
        self.shared.changed.notify_all();
        Fetch { arrived, is_cancelled, left }
    }

    /// Waits until everything that is queued is written, up to `limit`. Returns false if it is not.
    pub fn flush(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut state = self.shared.state();
        loop {
            if state.to_write.is_empty() && !state.writing {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.writer.as_ref().is_none_or(JoinHandle::is_finished) {
                return false;
            }
            state = self.shared.wait_within(state, left);
        }
    }

    /// Returns what the store holds and has done.
    pub fn statistics(&self) -> DiskStatistics {
        let state = self.shared.state();
        DiskStatistics {
            blocks: state.index.blocks() as u64,
            bytes: state.index.bytes(),
            bytes_max: self.shared.options.bytes,
            written_today_bytes: state.wear.today().bytes,
            ..state.statistics
        }
    }

    /// Returns the rate at which blocks are read by all readers together, once enough were read.
    pub fn measured_bytes_per_second(&self) -> Option<f64> {
        let DiskStatistics { read_bytes, read_seconds, .. } = self.shared.state().statistics;
        let is_enough = read_bytes >= MEASURED_BYTES && read_seconds > 0.0;
        is_enough.then(|| read_bytes as f64 / read_seconds * self.readers.len() as f64)
    }

    /// Returns the blocks of each model.
    pub fn list(&self) -> Vec<Listed> {
        let state = self.shared.state();
        list(&self.shared.folder, &state.index)
    }

    /// Removes segments, those first whose last use is the longest ago, until at most `bytes` are left. Returns the bytes that were removed.
    ///
    /// # Errors
    /// Returns an error if a file cannot be removed.
    pub fn shrink(&self, bytes: u64) -> Result<u64, DiskError> {
        let mut removed = 0;
        while self.shared.state().index.bytes() > bytes {
            let Some(segment) = self.shared.state().index.remove_oldest(None) else { break };
            Folder::remove(&segment)
                .map_err(|source| DiskError::Io { path: segment.path.clone(), source })?;
            removed += segment.bytes;
        }
        Ok(removed)
    }

    /// Reads every block and compares it with its checksum. Calls `each` after each block with the bytes done and all bytes;
    /// a return value of false ends the check. Returns the damage that was found.
    pub fn verify(&self, mut each: impl FnMut(u64, u64) -> bool) -> Vec<Damage> {
        let keys: Vec<BlockKey> = {
            let state = self.shared.state();
            let records = state.index.segments().flat_map(|(_, segment)| &segment.records);
            let keys = records.map(|record| record.meta.key);
            keys.filter(|key| state.index.len_of(*key).is_some()).collect()
        };
        let total = self.shared.state().index.bytes();
        let (mut done, mut damages) = (0, Vec::new());
        let mut fetch = self.fetch(keys.into_iter());
        while fetch.left() > 0 {
            match fetch.next_within(Duration::from_millis(100)) {
                Some(Fetched { block: Ok(block), .. }) => done += block.len() as u64,
                Some(Fetched { block: Err(damage), .. }) => damages.push(damage),
                None => {}
            }
            if !each(done, total) {
                break;
            }
        }
        damages
    }

    /// Removes all files of the folder at `path`, and the folder if nothing else is in it.
    ///
    /// # Errors
    /// Returns an error if this is no store, if another process uses it, or if a file cannot be removed.
    pub fn wipe(path: &Path) -> Result<(), DiskError> {
        Folder::open_unread(path)?.wipe()
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.shared.state().closing = true;
        self.shared.changed.notify_all();
        // A thread that waits for a stalled disk is left behind.
        let until = Instant::now() + Duration::from_secs(10);
        let threads = self.writer.take().into_iter().chain(self.readers.drain(..));
        for thread in threads {
            while !thread.is_finished() && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

fn list(folder: &Folder, index: &Index) -> Vec<Listed> {
    let names = folder.models();
    let mut listed: BTreeMap<u64, Listed> = BTreeMap::new();
    for record in index.segments().flat_map(|(_, segment)| &segment.records) {
        let model = record.meta.model;
        let of = listed.entry(model).or_insert_with(|| Listed {
            model: names.get(&format!("{model:016x}")).cloned(),
            written: (u64::MAX, 0),
            ..Listed::default()
        });
        of.blocks += 1;
        of.bytes += record.stored_bytes(folder.is_sealed());
        let (first, last) = of.written;
        of.written = (first.min(record.meta.written), last.max(record.meta.written));
    }
    listed.into_values().collect()
}

#[cfg(test)]
mod tests;
