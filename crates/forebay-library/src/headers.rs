//! Reads the headers of models on the hub, and no weights.
//!
//! A header becomes a hollow file: the header's bytes, and a hole where the weights would be. Whatever reads headers of
//! files can read it.
//!
//! The largest part of a GGUF header is the vocabulary, up to 15 MB, which is the same in all quantisations of a model.
//! It is read once. Of every other file, only what stands before and after it is read, and the entries after it must
//! follow where they are expected.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use forebay_format::gguf::outline::{COUNTS_BYTES, Cut, Outline, counts, key, outline, row};
use forebay_format::pack::{PAGE_BYTES, front_bytes};
use ureq::BodyReader;
use ureq::http::Response;

use crate::client::{in_words, passing};
use crate::error::at;
use crate::manifest::RepositoryFile;
use crate::repository::Repository;
use crate::{Error, RemoteModel};

/// Most bytes that are read to plan the models of a repository, its list of files included.
pub const HEADER_BYTES_MAX: u64 = 16 << 20;

/// Bytes of a metadata entry from which on it counts as part of the vocabulary.
const LARGE_ENTRY_BYTES: usize = 32 << 10;
/// Bytes of the first request for a whole header. Further ones ask for as much as there is, up to `NEXT_BYTES_MAX`, so that
/// few bytes beyond the header are read.
const FIRST_BYTES: u64 = 64 << 10;
const NEXT_BYTES_MAX: u64 = 1 << 20;
/// Bytes that are read beyond what is expected, because entries differ a little between files.
const SLACK_BYTES: usize = 4 << 10;
/// Bytes of the first request for a later file of a split set, or for a file with safetensors.
const SHARD_BYTES: u64 = 16 << 10;
/// Requests at a time.
const THREADS: usize = 8;
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// Why the header of a model was not read.
#[derive(Debug)]
pub enum Unread {
    /// It is not within the bytes that may be read.
    TooLarge,
    /// The server sends whole files only.
    NoRanges,
    Failed(Error),
}

/// The headers of a model's files.
#[derive(Clone, Debug)]
pub struct RemoteHeader {
    files: Vec<HollowFile>,
    /// Path of the file to open; empty for the folder.
    open: String,
}

#[derive(Clone, Debug)]
struct HollowFile {
    path: String,
    size: u64,
    pieces: Vec<Piece>,
}

/// Bytes of a file, from an offset on.
#[derive(Clone, Debug)]
struct Piece {
    offset: u64,
    bytes: Arc<Vec<u8>>,
    part: Range<usize>,
}

impl Piece {
    fn all(offset: u64, bytes: Vec<u8>) -> Piece {
        let part = 0..bytes.len();
        Piece { offset, bytes: Arc::new(bytes), part }
    }
}

impl RemoteHeader {
    /// Writes hollow files into a folder, which take as much of the disk as the headers. Returns the path to open.
    ///
    /// # Errors
    /// Returns an error if the disk is full, or if its file system has no files of this size.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, Error> {
        for file in &self.files {
            let path = folder.join(&file.path);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent).map_err(at(parent))?;
            }
            let write = || {
                let mut out = File::create(&path)?;
                for piece in &file.pieces {
                    out.write_all_at(&piece.bytes[piece.part.clone()], piece.offset)?;
                }
                out.flush()?;
                out.set_len(file.size)
            };
            write().map_err(at(&path))?;
        }
        Ok(if self.open.is_empty() { folder.to_owned() } else { folder.join(&self.open) })
    }
}

/// A header that was read whole.
struct Known {
    bytes: Arc<Vec<u8>>,
    outline: Outline,
    /// Bytes of the vocabulary: from the first large entry to the last one. Empty if there is none.
    vocabulary: Range<usize>,
    /// Number of entries in these bytes.
    entries: usize,
    /// Name of the first of them.
    first: String,
}

impl Known {
    fn new(bytes: Vec<u8>, outline: Outline) -> Known {
        let is_large = |index: &usize| {
            let key = &outline.keys[*index];
            key.end - key.start >= LARGE_ENTRY_BYTES
        };
        let mut large = (0..outline.keys.len()).filter(is_large);
        let (vocabulary, entries, first) = match large.next() {
            None => (0..0, 0, String::new()),
            Some(first) => {
                let last = large.next_back().unwrap_or(first);
                let (from, to) = (&outline.keys[first], &outline.keys[last]);
                (from.start..to.end, last - first + 1, from.name.clone())
            }
        };
        Known { bytes: Arc::new(bytes), outline, vocabulary, entries, first }
    }
}

/// Reader of headers. All of its reads together are bounded by [`HEADER_BYTES_MAX`].
pub struct Headers<'a> {
    repository: &'a Repository,
    cancelled: &'a (dyn Fn() -> bool + Sync),
    /// Bytes that were asked for.
    spent: AtomicU64,
}

impl<'a> Headers<'a> {
    pub(crate) fn new(
        repository: &'a Repository,
        cancelled: &'a (dyn Fn() -> bool + Sync),
    ) -> Headers<'a> {
        let spent = repository.client.received_bytes.load(Ordering::Relaxed);
        Headers { repository, cancelled, spent: AtomicU64::new(spent) }
    }

    /// Returns the bytes that were read, the list of files included.
    pub fn read_bytes(&self) -> u64 {
        self.repository.client.received_bytes.load(Ordering::Relaxed)
    }

    /// Reads the headers of models. That of number `first` is read whole, before the others.
    pub fn read(&self, models: &[RemoteModel], first: usize) -> Vec<Result<RemoteHeader, Unread>> {
        let mut known = None;
        let leading = models.get(first).map(|model| self.model(model, None, &mut known));
        let known = known.filter(|known| !known.vocabulary.is_empty());
        let mut leading = leading;
        let next = AtomicUsize::new(0);
        let work = || {
            let mut found = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(model) = models.get(index) else { return found };
                if index != first {
                    found.push((index, self.model(model, known.as_ref(), &mut None)));
                }
            }
        };
        let mut found: Vec<(usize, Result<RemoteHeader, Unread>)> = thread::scope(|scope| {
            let workers: Vec<_> =
                (0..THREADS.min(models.len())).map(|_| scope.spawn(work)).collect();
            workers.into_iter().filter_map(|worker| worker.join().ok()).flatten().collect()
        });
        found.extend(leading.take().map(|leading| (first, leading)));
        found.sort_by_key(|(index, _)| *index);
        found.into_iter().map(|(_, header)| header).collect()
    }

    /// Reads the header of a model. `like` is that of another quantisation; `known` receives this one.
    fn model(
        &self,
        model: &RemoteModel,
        like: Option<&Known>,
        known: &mut Option<Known>,
    ) -> Result<RemoteHeader, Unread> {
        let open = model.open.clone();
        if model.is_folder() {
            return Ok(RemoteHeader { files: self.folder(model)?, open });
        }
        let Some((head, others)) = model.files.split_first() else {
            return Err(Unread::TooLarge);
        };
        let derived = match like {
            Some(like) => self.derived(head, like)?,
            None => None,
        };
        let mut files = vec![match derived {
            Some(pieces) => hollow(head, pieces),
            None if head.path.to_ascii_lowercase().ends_with(".fbay") => self.pack(head)?,
            None => {
                let (bytes, outline) = self.gguf(head, FIRST_BYTES)?;
                let pieces = vec![Piece::all(0, bytes.clone())];
                *known = outline.map(|outline| Known::new(bytes, outline));
                hollow(head, pieces)
            }
        }];
        for file in others {
            let (bytes, _) = self.gguf(file, SHARD_BYTES)?;
            files.push(hollow(file, vec![Piece::all(0, bytes)]));
        }
        Ok(RemoteHeader { files, open })
    }

    /// Reads a whole GGUF header. There is no outline if it is damaged or no GGUF.
    fn gguf(
        &self,
        file: &RepositoryFile,
        first: u64,
    ) -> Result<(Vec<u8>, Option<Outline>), Unread> {
        let mut source = Source::new(self, file);
        source.more(first)?;
        loop {
            match outline(&source.bytes) {
                Ok(found) => return Ok((source.bytes, Some(found))),
                Err(Cut::Short) if !source.is_whole() => {
                    source.more(NEXT_BYTES_MAX.min(source.bytes.len() as u64))?;
                }
                Err(_) => return Ok((source.bytes, None)),
            }
        }
    }

    /// Reads what stands before and after the vocabulary of a GGUF header, and takes the vocabulary from another one.
    /// Returns `None` if the file is not like the other.
    fn derived(&self, file: &RepositoryFile, like: &Known) -> Result<Option<Vec<Piece>>, Unread> {
        let length = (like.vocabulary.start + SLACK_BYTES) as u64;
        let head = self.read_range(file, 0, length.min(file.size))?;
        let Some((start, keys)) = vocabulary_start(&head, &like.first) else { return Ok(None) };
        let beginning = &head[start..];
        if !like.bytes[like.vocabulary.clone()].starts_with(beginning) || beginning.is_empty() {
            return Ok(None);
        }
        let Ok(of) = counts(&head) else { return Ok(None) };
        let Some(keys) = (of.keys as usize).checked_sub(keys + like.entries) else {
            return Ok(None);
        };
        let end = start + like.vocabulary.len();
        let usual = like.outline.end - like.vocabulary.end;
        let mut tail = Vec::new();
        let mut length = usual + SLACK_BYTES;
        let is_table = loop {
            let from = (end + tail.len()) as u64;
            let wanted = (length as u64).min(file.size.saturating_sub(from));
            tail.extend(self.read_range(file, from, wanted)?);
            match walk(&tail, keys, of.tensors) {
                Err(Cut::Short) if wanted > 0 && tail.len() < 4 * usual + (1 << 20) => {
                    length = SHARD_BYTES as usize;
                }
                found => break found.is_ok(),
            }
        };
        let vocabulary = Piece {
            offset: start as u64,
            bytes: Arc::clone(&like.bytes),
            part: like.vocabulary.clone(),
        };
        let pieces = || vec![Piece::all(0, head), vocabulary, Piece::all(end as u64, tail)];
        Ok(is_table.then(pieces))
    }

    /// Reads what stands before the blocks of a pack.
    fn pack(&self, file: &RepositoryFile) -> Result<HollowFile, Unread> {
        let mut source = Source::new(self, file);
        source.more(PAGE_BYTES)?;
        let front = front_bytes(&source.bytes).unwrap_or(0).min(file.size);
        source.more(front.saturating_sub(source.bytes.len() as u64))?;
        Ok(hollow(file, vec![Piece::all(0, source.bytes)]))
    }

    /// Reads the configuration, the index and the headers of a folder's safetensors files.
    fn folder(&self, model: &RemoteModel) -> Result<Vec<HollowFile>, Unread> {
        let find = |name: &str| model.files.iter().find(|file| file.path == name);
        let mut files = Vec::new();
        if let Some(config) = find(CONFIG) {
            let bytes = self.read_range(config, 0, config.size)?;
            files.push(hollow(config, vec![Piece::all(0, bytes)]));
        }
        let is_shard = |file: &&RepositoryFile| file.path.ends_with(".safetensors");
        let shards: Vec<&RepositoryFile> = model.files.iter().filter(is_shard).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut found = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(shard) = shards.get(index) else { return found };
                found.push(self.safetensors(shard));
            }
        };
        let headers: Vec<Result<HollowFile, Unread>> = thread::scope(|scope| {
            let workers: Vec<_> =
                (0..THREADS.min(shards.len())).map(|_| scope.spawn(work)).collect();
            workers.into_iter().filter_map(|worker| worker.join().ok()).flatten().collect()
        });
        let headers: Vec<HollowFile> = headers.into_iter().collect::<Result<_, _>>()?;
        if let Some(index) = find(INDEX) {
            // The index only says which tensor is in which file, which the headers say, too.
            let left = HEADER_BYTES_MAX.saturating_sub(self.spent.load(Ordering::Relaxed));
            let bytes = match index.size <= left {
                true => self.read_range(index, 0, index.size)?,
                false => index_of(&headers),
            };
            let size = bytes.len() as u64;
            let pieces = vec![Piece::all(0, bytes)];
            files.push(HollowFile { path: index.path.clone(), size, pieces });
        }
        files.extend(headers);
        Ok(files)
    }

    fn safetensors(&self, file: &RepositoryFile) -> Result<HollowFile, Unread> {
        let mut source = Source::new(self, file);
        source.more(SHARD_BYTES)?;
        if let Some(length) = source.bytes.first_chunk() {
            let end = u64::from_le_bytes(*length).saturating_add(8).min(file.size);
            source.more(end.saturating_sub(source.bytes.len() as u64))?;
        }
        Ok(hollow(file, vec![Piece::all(0, source.bytes)]))
    }

    /// Reads bytes of a file.
    fn read_range(
        &self,
        file: &RepositoryFile,
        start: u64,
        length: u64,
    ) -> Result<Vec<u8>, Unread> {
        let mut source = Source { start, ..Source::new(self, file) };
        source.more(length)?;
        Ok(source.bytes)
    }

    /// Takes bytes from those that may be read.
    fn spend(&self, length: u64) -> Result<(), Unread> {
        let add = |spent: u64| Some(spent + length).filter(|sum| *sum <= HEADER_BYTES_MAX);
        match self.spent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(()),
            Err(_) => Err(Unread::TooLarge),
        }
    }
}

fn hollow(file: &RepositoryFile, pieces: Vec<Piece>) -> HollowFile {
    HollowFile { path: file.path.clone(), size: file.size, pieces }
}

/// Returns where the entry of this name starts, and the number of entries before it.
fn vocabulary_start(head: &[u8], first: &str) -> Option<(usize, usize)> {
    let of = counts(head).ok()?;
    let (mut at, mut keys) = (COUNTS_BYTES, 0);
    let wanted = [&(first.len() as u64).to_le_bytes(), first.as_bytes()].concat();
    while !head.get(at..)?.starts_with(&wanted) {
        at = key(head, at).ok()?.end;
        keys += 1;
        if keys as u64 >= of.keys {
            return None;
        }
    }
    Some((at, keys))
}

/// Walks over entries and rows of the tensor table.
fn walk(bytes: &[u8], keys: usize, rows: u64) -> Result<(), Cut> {
    let mut at = 0;
    for _ in 0..keys {
        at = key(bytes, at)?.end;
    }
    for _ in 0..rows {
        at = row(bytes, at)?;
    }
    Ok(())
}

/// Returns an index for the tensors in the headers of safetensors files.
fn index_of(headers: &[HollowFile]) -> Vec<u8> {
    let mut map = serde_json::Map::new();
    for file in headers {
        let table = file.pieces.first().and_then(|piece| piece.bytes.get(8..)).unwrap_or_default();
        // What follows the table is no JSON.
        let mut values = serde_json::Deserializer::from_slice(table).into_iter();
        if let Some(Ok(serde_json::Value::Object(tensors))) = values.next() {
            let names = tensors.into_iter().map(|(name, _)| name);
            let names = names.filter(|name| name != "__metadata__");
            map.extend(names.map(|name| (name, file.path.clone().into())));
        }
    }
    serde_json::json!({ "weight_map": map }).to_string().into_bytes()
}

/// Bytes of a file that arrive in pieces.
struct Source<'a> {
    headers: &'a Headers<'a>,
    file: &'a RepositoryFile,
    start: u64,
    bytes: Vec<u8>,
    /// The rest of the file, if the server ignores ranges.
    rest: Option<BodyReader<'static>>,
}

impl<'a> Source<'a> {
    fn new(headers: &'a Headers<'a>, file: &'a RepositoryFile) -> Source<'a> {
        Source { headers, file, start: 0, bytes: Vec::new(), rest: None }
    }

    fn is_whole(&self) -> bool {
        self.start + self.bytes.len() as u64 >= self.file.size
    }

    /// Reads further bytes, as far as the file has them.
    fn more(&mut self, length: u64) -> Result<(), Unread> {
        let from = self.start + self.bytes.len() as u64;
        let length = length.min(self.file.size.saturating_sub(from));
        if length == 0 {
            return Ok(());
        }
        let before = self.bytes.len();
        let url = self.headers.repository.url(&self.file.path);
        let client = &self.headers.repository.client;
        let mut unread = None;
        let done = client.retry(self.headers.cancelled, || {
            if let Err(why) = self.headers.spend(length) {
                unread = Some(why);
                return Ok(());
            }
            let (mut body, is_range) = match self.rest.take() {
                Some(rest) => (rest, false),
                None => {
                    let response = client.get(&url, Some((from, from + length - 1)))?;
                    if !starts_at(&response, from) {
                        unread = Some(Unread::NoRanges);
                        return Ok(());
                    }
                    let is_range = response.status().as_u16() == 206;
                    (response.into_body().into_reader(), is_range)
                }
            };
            self.bytes.truncate(before);
            let arrived = body.by_ref().take(length).read_to_end(&mut self.bytes);
            let count = (self.bytes.len() - before) as u64;
            client.received_bytes.fetch_add(count, Ordering::Relaxed);
            if count < length {
                let why = arrived.err().map(|error| in_words(&error));
                return Err(passing(&url, why.as_deref().unwrap_or("the connection broke off")));
            }
            match is_range {
                // The connection serves the next request once its body has ended.
                true => drop(body.read(&mut [0])),
                false => self.rest = Some(body),
            }
            Ok(())
        });
        match (unread, done) {
            (Some(why), _) => Err(why),
            (None, done) => done.map_err(Unread::Failed),
        }
    }
}

/// Returns true if a response begins with the byte that was asked for.
fn starts_at(response: &Response<ureq::Body>, from: u64) -> bool {
    if response.status().as_u16() != 206 {
        return from == 0;
    }
    let range = response.headers().get("content-range").and_then(|value| value.to_str().ok());
    range.is_some_and(|range| range.starts_with(&format!("bytes {from}-")))
}

impl From<Error> for Unread {
    fn from(error: Error) -> Unread {
        Unread::Failed(error)
    }
}
