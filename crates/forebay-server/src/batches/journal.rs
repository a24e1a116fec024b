//! The journal of a batch: every answer is in a file before the batch is complete, so that work which was killed goes on
//! where it ended.
//!
//! The first line describes the batch. Every other line is the number of a request, a tab, and the answer. A last line that
//! was cut is dropped. `forebay batch` and the server's batches both keep one.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{
    self, BufRead as _, BufReader, ErrorKind, Read as _, Seek as _, SeekFrom, Write as _,
};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_engine::reached;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Time after which new answers are written to the disk itself. A process that is killed loses nothing in between, a
/// machine that fails loses as much.
const SYNC_EVERY: Duration = Duration::from_secs(5);

/// Reason why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    #[error("{path}: another process works on this batch", path = path.display())]
    InUse { path: PathBuf },
    #[error("{path} holds the answers of another batch ({differences})", path = path.display())]
    OtherBatch { path: PathBuf, differences: String },
    #[error("{path} exists and is no journal of a batch", path = path.display())]
    NoJournal { path: PathBuf },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// The first line of a journal.
#[derive(Serialize, Deserialize)]
struct Header {
    forebay_batch: u32,
    /// Seconds since 1970 when the batch began.
    created: u64,
    /// Everything that the answers depend on.
    settings: Value,
}

/// An open journal. Its file is locked.
pub struct Journal {
    file: File,
    path: PathBuf,
    /// Seconds since 1970 when the batch began.
    pub created: u64,
    /// Offset and length of every answer in the file, by the number of its request.
    answers: Vec<Option<(u64, usize)>>,
    end: u64,
    synced: Instant,
}

impl Journal {
    /// Opens the journal `path` for `requests` requests. Takes up an earlier one with the same settings. Replaces another one
    /// only with `force`.
    ///
    /// # Errors
    /// Returns an error if there is a journal of another batch, if the file cannot be used, or if another process uses it.
    pub fn open(
        path: &Path,
        settings: Value,
        requests: usize,
        created: u64,
        force: bool,
    ) -> Result<Journal, JournalError> {
        let failed = |source| JournalError::Io { path: path.to_owned(), source };
        let (mut file, is_new) = open_locked(path)?;
        let mut journal = Journal {
            file: file.try_clone().map_err(failed)?,
            path: path.to_owned(),
            created,
            answers: vec![None; requests],
            end: 0,
            synced: Instant::now(),
        };
        if !is_new {
            let length_of_file = file.metadata().map_err(failed)?.len();
            match read_header(&mut file).map_err(failed)? {
                Some((header, length)) if header.settings == settings => {
                    journal.created = header.created;
                    journal.end = length;
                    journal.read(&mut file).map_err(failed)?;
                    return Ok(journal);
                }
                // Nothing is lost with a journal without answers.
                Some((_, length)) if length_of_file == length => {}
                None if length_of_file == 0 => {}
                Some(_) if force => {}
                Some((header, _)) => {
                    let differences = differences(&header.settings, &settings);
                    return Err(JournalError::OtherBatch { path: path.to_owned(), differences });
                }
                None => return Err(JournalError::NoJournal { path: path.to_owned() }),
            }
        }
        let header = Header { forebay_batch: 1, created, settings };
        let line = serde_json::to_string(&header).map_err(|error| failed(error.into()))? + "\n";
        journal.file.set_len(0).map_err(failed)?;
        journal.write(line.as_bytes())?;
        journal.file.sync_all().map_err(failed)?;
        reached("journal begun");
        Ok(journal)
    }

    /// Reads the answers, up to the first line that is not whole.
    fn read(&mut self, file: &mut File) -> io::Result<()> {
        file.seek(SeekFrom::Start(self.end))?;
        let mut reader = BufReader::new(file);
        let mut line = Vec::new();
        loop {
            line.clear();
            let length = reader.read_until(b'\n', &mut line)?;
            let Some((number, answer)) = entry(&line).filter(|(n, _)| *n < self.answers.len())
            else {
                break;
            };
            let at = self.end + (length - 1 - answer) as u64;
            self.answers[number] = Some((at, answer));
            self.end += length as u64;
        }
        self.file.set_len(self.end)
    }

    /// Returns true if the request is answered.
    pub fn has(&self, number: usize) -> bool {
        self.answers[number].is_some()
    }

    /// Returns the number of answered requests.
    pub fn answered(&self) -> usize {
        self.answers.iter().flatten().count()
    }

    /// Returns the bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.end
    }

    /// Adds the answer of a request.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The answer may then be in it or not.
    pub fn add(&mut self, number: usize, answer: &Value) -> Result<(), JournalError> {
        let text = answer.to_string();
        let start = format!("{number}\t");
        let place = (self.end + start.len() as u64, text.len());
        self.write((start + &text + "\n").as_bytes())?;
        self.answers[number] = Some(place);
        reached("answer added");
        if self.synced.elapsed() >= SYNC_EVERY {
            self.synced = Instant::now();
            self.file.sync_data().map_err(|source| self.failed(source))?;
        }
        Ok(())
    }

    fn failed(&self, source: io::Error) -> JournalError {
        JournalError::Io { path: self.path.clone(), source }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), JournalError> {
        let at = SeekFrom::Start(self.end);
        let written = self.file.seek(at).and_then(|_| self.file.write_all(bytes));
        if let Err(error) = written {
            // What was written of the line is dropped.
            let _ = self.file.set_len(self.end);
            return Err(self.failed(error));
        }
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// Removes the journal if it has no answers.
    pub fn discard_if_empty(self) {
        if self.answered() == 0 {
            // It would do no harm.
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Gives the answers to `take`, each as text with its line's end, in the order of the requests.
    ///
    /// # Errors
    /// Returns an error if the journal cannot be read, and the errors of `take`.
    pub fn each<E: From<JournalError>>(
        &mut self,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut answer = Vec::new();
        for at in 0..self.answers.len() {
            let Some((at, length)) = self.answers[at] else { continue };
            answer.resize(length, 0);
            let read = self.file.seek(SeekFrom::Start(at));
            let read = read.and_then(|_| self.file.read_exact(&mut answer));
            read.map_err(|source| self.failed(source))?;
            answer.push(b'\n');
            take(&answer)?;
        }
        Ok(())
    }

    /// Removes the journal.
    ///
    /// # Errors
    /// Returns an error if the file cannot be removed.
    pub fn remove(self) -> Result<(), JournalError> {
        std::fs::remove_file(&self.path).map_err(|source| self.failed(source))?;
        reached("journal removed");
        Ok(())
    }
}

/// Opens and locks a journal, and says if it is new.
fn open_locked(path: &Path) -> Result<(File, bool), JournalError> {
    let failed = |source| JournalError::Io { path: path.to_owned(), source };
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let (file, is_new) = match options.clone().create_new(true).open(path) {
        Ok(file) => (file, true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            (options.open(path).map_err(failed)?, false)
        }
        Err(error) => return Err(failed(error)),
    };
    match file.try_lock() {
        Ok(()) => Ok((file, is_new)),
        Err(TryLockError::WouldBlock) => Err(JournalError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// Returns the header and the length of its line, or `None` if the file does not begin with one.
fn read_header(file: &mut File) -> io::Result<Option<(Header, u64)>> {
    /// A journal's first line is shorter.
    const LONGEST: u64 = 1 << 20;
    let mut line = Vec::new();
    let length = BufReader::new(file.take(LONGEST)).read_until(b'\n', &mut line)?;
    let header = serde_json::from_slice::<Header>(&line).ok();
    let header = header.filter(|header| header.forebay_batch == 1 && line.ends_with(b"\n"));
    Ok(header.map(|header| (header, length as u64)))
}

/// Returns the number of a line's request and the length of its answer, or `None` if the line is not whole.
fn entry(line: &[u8]) -> Option<(usize, usize)> {
    let line = line.strip_suffix(b"\n")?;
    let tab = line.iter().position(|byte| *byte == b'\t')?;
    let number = std::str::from_utf8(&line[..tab]).ok()?.parse().ok()?;
    let answer = &line[tab + 1..];
    serde_json::from_slice::<IgnoredAny>(answer).ok()?;
    Some((number, answer.len()))
}

/// Names the settings that differ.
fn differences(earlier: &Value, now: &Value) -> String {
    let (Some(earlier), Some(now)) = (earlier.as_object(), now.as_object()) else {
        return "of another version".to_owned();
    };
    let differ = now.iter().filter(|(name, value)| earlier.get(*name) != Some(value));
    let names: Vec<&str> = differ.map(|(name, _)| name.as_str()).collect();
    match names.is_empty() {
        true => "of another version".to_owned(),
        false => format!("different: {}", names.join(", ")),
    }
}
