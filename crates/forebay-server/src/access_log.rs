//! The access log: a line of JSON for every request, without prompts and keys.
//!
//! Requests never wait for the log. A thread writes the lines, and lines beyond [`LINES_MAX`] that it has not written are
//! dropped and counted.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::{Value, json};

/// Most lines that wait to be written.
const LINES_MAX: usize = 4096;
/// Time between two looks at whether the file should be opened again.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Most bytes of a line. Paths in it are cut.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Keys that every line of a request has had since the first version.
const REQUEST_KEYS: [&str; 5] = ["request_id", "method", "path", "status", "seconds"];

/// Where the access log goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessLogTarget {
    StandardOutput,
    /// Lines are added to the file, which is created if it is not there.
    File(PathBuf),
}

/// An open access log. Dropping it writes what waits.
pub struct AccessLog {
    /// `None` once the log ends.
    lines: Option<SyncSender<String>>,
    dropped: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl AccessLog {
    /// Opens the log and starts its thread. The caller sets `reopens` to have the file opened again, as after a rotation.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened, or if the system starts no thread.
    pub fn open(target: AccessLogTarget, reopens: Arc<AtomicBool>) -> io::Result<AccessLog> {
        let out = Out::open(&target)?;
        let (lines, received) = sync_channel(LINES_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        let writer = Writer { target, out, reopens, dropped: dropped.clone() };
        let thread = thread::Builder::new().name("access-log".into());
        let thread = thread.spawn(move || writer.run(&received))?;
        Ok(AccessLog { lines: Some(lines), dropped, thread: Some(thread) })
    }

    /// Queues a line. Drops it if too many wait.
    fn write(&self, line: String) {
        let sent = self.lines.as_ref().map(|lines| lines.try_send(line));
        if !matches!(sent, Some(Ok(()))) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        self.lines = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the access log has panicked");
        }
    }
}

enum Out {
    Standard(io::Stdout),
    File(File),
}

impl Out {
    fn open(target: &AccessLogTarget) -> io::Result<Out> {
        Ok(match target {
            AccessLogTarget::StandardOutput => Out::Standard(io::stdout()),
            AccessLogTarget::File(path) => Out::File(append(path)?),
        })
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        match self {
            Out::Standard(out) => out.write_all(text.as_bytes()).and_then(|()| out.flush()),
            Out::File(file) => file.write_all(text.as_bytes()),
        }
    }
}

/// Opens a file to add lines to it. A file that holds something other than an access log stays as it is.
fn append(path: &Path) -> io::Result<File> {
    let about = path.metadata().ok();
    let has_content = about.is_some_and(|about| about.is_file() && about.len() > 0);
    // A pipe could not be read.
    let mut file = OpenOptions::new().create(true).read(has_content).append(true).open(path)?;
    if has_content {
        let mut first = Vec::new();
        BufReader::new((&file).take(LINE_BYTES_MAX)).read_until(b'\n', &mut first)?;
        if !is_line(&first) {
            let why = "the file is there and is no access log: give another name";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            // The last line was cut, as by a full disk.
            file.write_all(b"\n")?;
        }
    }
    Ok(file)
}

/// Returns true if this is a line of an access log.
fn is_line(line: &[u8]) -> bool {
    let Ok(Value::Object(fields)) = serde_json::from_slice(line) else { return false };
    let has_time = fields.get("time").and_then(Value::as_str);
    let has_time = has_time.is_some_and(|time| time.parse::<Timestamp>().is_ok());
    let has_all = |keys: &[&str]| keys.iter().all(|key| fields.contains_key(*key));
    line.ends_with(b"\n") && has_time && (has_all(&REQUEST_KEYS) || has_all(&["dropped"]))
}

struct Writer {
    target: AccessLogTarget,
    out: Out,
    reopens: Arc<AtomicBool>,
    dropped: Arc<AtomicU64>,
}

impl Writer {
    fn run(mut self, received: &Receiver<String>) {
        loop {
            let mut text = match received.recv_timeout(LOOK_EVERY) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => String::new(),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            // Lines that wait are written together.
            let mut count = 1;
            while count < LINES_MAX {
                match received.try_recv() {
                    Ok(line) => text.push_str(&line),
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                }
                count += 1;
            }
            let dropped = self.dropped.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                tracing::warn!(dropped, "the access log is too slow");
                let line = json!({ "time": Timestamp::now().to_string(), "dropped": dropped });
                text.push_str(&format!("{line}\n"));
            }
            if self.reopens.swap(false, Ordering::Relaxed) {
                match Out::open(&self.target) {
                    Ok(out) => self.out = out,
                    Err(error) => tracing::warn!("the access log cannot be opened again: {error}"),
                }
            }
            if !text.is_empty()
                && let Err(error) = self.out.write(&text)
            {
                tracing::warn!("the access log cannot be written: {error}");
            }
        }
    }
}

/// What handlers tell about a request.
#[derive(Default)]
pub struct Note(Mutex<Noted>);

#[derive(Clone, Default)]
struct Noted {
    model: Option<String>,
    first_token: Option<Instant>,
    prompt_tokens: Option<usize>,
    generated_tokens: usize,
}

impl Note {
    fn change(&self, change: impl FnOnce(&mut Noted)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Notes the model that answers.
    pub fn model(&self, name: &str) {
        self.change(|noted| noted.model = Some(name.to_owned()));
    }

    /// Notes the length of the prompt.
    pub fn prompt(&self, tokens: usize) {
        self.change(|noted| noted.prompt_tokens = Some(tokens));
    }

    /// Counts a generated token.
    pub fn token(&self, now: Instant) {
        self.change(|noted| {
            noted.generated_tokens += 1;
            noted.first_token.get_or_insert(now);
        });
    }
}

/// A request, which is logged when this is dropped.
pub struct Record {
    pub log: Option<Arc<AccessLog>>,
    pub note: Arc<Note>,
    pub id: String,
    pub method: String,
    pub path: String,
    /// Beginning of the hash of the key that the client sent.
    pub key: Option<String>,
    pub remote: Option<String>,
    /// Status of the answer. `None` if the client was gone before the answer began.
    pub status: Option<u16>,
    /// Bytes of the answer's body that were sent.
    pub bytes: u64,
    pub time: Timestamp,
    pub started: Instant,
}

impl Drop for Record {
    fn drop(&mut self) {
        let Some(log) = &self.log else { return };
        let noted = self.note.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let line = json!({
            "time": self.time.to_string(),
            "request_id": self.id,
            "method": self.method,
            "path": self.path,
            "model": noted.model,
            "status": self.status,
            "bytes": self.bytes,
            "seconds": self.started.elapsed().as_secs_f64(),
            "first_token_seconds": noted.first_token.map(|at| (at - self.started).as_secs_f64()),
            "prompt_tokens": noted.prompt_tokens,
            "generated_tokens": noted.prompt_tokens.map(|_| noted.generated_tokens),
            "key": self.key,
            "remote": self.remote,
        });
        log.write(format!("{line}\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_added_to_access_logs_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let write = |line: &str| {
            let target = AccessLogTarget::File(path.clone());
            let log = AccessLog::open(target, Arc::default())?;
            log.write(format!("{line}\n"));
            drop(log);
            io::Result::Ok(std::fs::read_to_string(&path).unwrap())
        };
        let request = r#"{"time":"2026-11-28T12:00:00Z","request_id":"r","method":"GET","path":"/","status":200,"seconds":0.1}"#;
        let dropped = r#"{"dropped":3,"time":"2026-11-28T12:00:00Z"}"#;
        for (before, after) in [
            (String::new(), "x\n".to_owned()),
            (format!("{request}\n"), format!("{request}\nx\n")),
            (format!("{dropped}\n{request}\n"), format!("{dropped}\n{request}\nx\n")),
            // The last line was cut.
            (format!("{request}\n{{\"ti"), format!("{request}\n{{\"ti\nx\n")),
        ] {
            std::fs::write(&path, &before).unwrap();
            assert_eq!(write("x").unwrap(), after);
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(write("x").unwrap(), "x\n", "a new file");
        for other in [
            r#"{"eos_token_id": 1}"#,
            "{\n  \"temperature\": 0.7\n}\n",
            "{}\n",
            "{",
            "text\n",
            "\n",
            r#"{"time":"noon","dropped":1}"#,
            r#"{"time":"2026-11-28T12:00:00Z"}"#,
            r#"[{"time":"2026-11-28T12:00:00Z","dropped":1}]"#,
            "\u{feff}{\"time\":\"2026-11-28T12:00:00Z\",\"dropped\":1}\n",
            request,
            &format!(" {{}}\n{request}\n"),
            &"{".repeat(1 << 20),
        ] {
            std::fs::write(&path, other).unwrap();
            assert_eq!(write("x").unwrap_err().kind(), io::ErrorKind::AlreadyExists, "{other}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), other, "it stays as it is");
        }
    }

    #[test]
    fn a_log_that_is_full_drops_lines_and_counts_them() {
        let (lines, received) = sync_channel(2);
        let dropped = Arc::new(AtomicU64::new(0));
        let log = AccessLog { lines: Some(lines), dropped: dropped.clone(), thread: None };
        (0..5).for_each(|number| log.write(format!("{number}\n")));
        assert_eq!(dropped.load(Ordering::Relaxed), 3);
        drop(log);
        let folder =
            std::env::temp_dir().join(format!("forebay-access-log-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let target = AccessLogTarget::File(folder.join("log"));
        let out = Out::open(&target).unwrap();
        let reopens = Arc::new(AtomicBool::new(false));
        Writer { target, out, reopens, dropped }.run(&received);
        let text = std::fs::read_to_string(folder.join("log")).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..2], ["0", "1"]);
        let last: serde_json::Value = serde_json::from_str(lines[2]).unwrap();
        assert_eq!(last["dropped"], 3);
    }
}
