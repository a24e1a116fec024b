//! The journal of a batch: every answer is in a file before the batch is complete, so that work which was killed goes on
//! where it ended.
//!
//! The journal of `OUT` is `OUT.partial`. Its first line describes the batch. Every other line is the number of a request,
//! a tab, and the answer. A last line that was cut is dropped. When all requests are answered, `OUT` gets the answers in
//! the order of the requests, and the journal is removed.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use forebay_store::Outputs;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::failure::{Failure, Outcome, usage};
use crate::outputs;

/// Time after which new answers are written to the disk itself. A process that is killed loses nothing in between, a
/// machine that fails loses as much.
const SYNC_EVERY: Duration = Duration::from_secs(5);

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
    /// Opens the journal of `out` for `requests` requests. Takes up an earlier one with the same settings. Replaces another
    /// one only with `force`.
    ///
    /// # Errors
    /// Returns a usage error if there is a journal of another batch, and an error if the file cannot be used or another
    /// process uses it.
    pub fn open(
        out: &Path,
        settings: Value,
        requests: usize,
        created: u64,
        force: bool,
    ) -> Outcome<Journal> {
        let mut path = out.as_os_str().to_owned();
        path.push(".partial");
        let path = PathBuf::from(path);
        let named = || path.display().to_string();
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let (mut file, is_new) = match options.clone().create_new(true).open(&path) {
            Ok(file) => (file, true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                (options.open(&path).with_context(named)?, false)
            }
            Err(error) => return Err(anyhow!(error).context(named()).into()),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(anyhow!("{}: another process works on this batch", named()).into());
            }
            Err(TryLockError::Error(error)) => return Err(anyhow!(error).context(named()).into()),
        }
        let mut journal = Journal {
            file: file.try_clone().with_context(named)?,
            path: path.clone(),
            created,
            answers: vec![None; requests],
            end: 0,
            synced: Instant::now(),
        };
        if !is_new {
            match read_header(&mut file).with_context(named)? {
                Some((header, length)) if header.settings == settings => {
                    journal.created = header.created;
                    journal.end = length;
                    journal.read(&mut file).with_context(named)?;
                    return Ok(journal);
                }
                // Nothing is lost with a journal without answers.
                Some((_, length)) if file.metadata().with_context(named)?.len() == length => {}
                None if file.metadata().with_context(named)?.len() == 0 => {}
                Some(_) if force => {}
                Some((header, _)) => {
                    return usage(format!(
                        "{} holds the answers of another batch ({}): finish that one, remove the file, or give --force",
                        named(),
                        differences(&header.settings, &settings)
                    ));
                }
                None => {
                    return usage(format!(
                        "{} exists and is no journal of a batch: remove it, or choose another -o",
                        named()
                    ));
                }
            }
        }
        let header = Header { forebay_batch: 1, created, settings };
        let line = serde_json::to_string(&header)? + "\n";
        journal.file.set_len(0).with_context(named)?;
        journal.write(line.as_bytes())?;
        journal.file.sync_all().with_context(named)?;
        Ok(journal)
    }

    /// Reads the answers, up to the first line that is not whole.
    fn read(&mut self, file: &mut File) -> anyhow::Result<()> {
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
        Ok(self.file.set_len(self.end)?)
    }

    /// Returns true if the request is answered.
    pub fn has(&self, number: usize) -> bool {
        self.answers[number].is_some()
    }

    /// Returns the number of answered requests.
    pub fn answered(&self) -> usize {
        self.answers.iter().flatten().count()
    }

    /// Adds the answer of a request.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The answer may then be in it or not.
    pub fn add(&mut self, number: usize, answer: &Value) -> Outcome {
        let text = serde_json::to_string(answer)?;
        let start = format!("{number}\t");
        let place = (self.end + start.len() as u64, text.len());
        self.write((start + &text + "\n").as_bytes())?;
        self.answers[number] = Some(place);
        if self.synced.elapsed() >= SYNC_EVERY {
            self.synced = Instant::now();
            self.file.sync_data().with_context(|| self.path.display().to_string())?;
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Outcome {
        let written = self
            .file
            .seek(SeekFrom::Start(self.end))
            .and_then(|_| self.file.write_all(bytes))
            .with_context(|| format!("{}: cannot be written", self.path.display()));
        if let Err(error) = written {
            // What was written of the line is dropped.
            let _ = self.file.set_len(self.end);
            return Err(Failure::Work(error));
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

    /// Writes all answers to `out`, in the order of the requests, and removes the journal. Calls `look` with each answer.
    ///
    /// # Errors
    /// Returns an error if `out` cannot be written. The journal then stays.
    ///
    /// # Panics
    /// Panics if a request has no answer.
    pub fn finish(
        mut self,
        outputs: &mut Outputs,
        out: &Path,
        mut look: impl FnMut(&[u8]),
    ) -> Outcome {
        let mut stream = outputs::create(outputs, out)?.into_stream();
        let mut answer = Vec::new();
        for place in &self.answers {
            let (at, length) = place.expect("every request is answered");
            answer.resize(length, 0);
            self.file
                .seek(SeekFrom::Start(at))
                .and_then(|_| self.file.read_exact(&mut answer))
                .with_context(|| self.path.display().to_string())?;
            look(&answer);
            answer.push(b'\n');
            stream.write_all(&answer)?;
        }
        stream.commit()?;
        std::fs::remove_file(&self.path).with_context(|| self.path.display().to_string())?;
        Ok(())
    }
}

/// Returns the header and the length of its line, or `None` if the file does not begin with one.
fn read_header(file: &mut File) -> std::io::Result<Option<(Header, u64)>> {
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
