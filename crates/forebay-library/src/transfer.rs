//! Downloads ranges of files over several connections and checks the files.

use std::collections::VecDeque;
use std::io::Read as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sha1::Sha1;
use sha2::{Digest, Sha256};
use ureq::Body;
use ureq::http::Response;

use crate::Error;
use crate::client::{Client, Trouble, in_words, passing, shown};
use crate::error::at;
use crate::manifest::{Checksum, hex};
use crate::partial::Partial;

const BUFFER_BYTES: usize = 256 << 10;
/// Bytes of a range after which they are noted, and the same if the last note is older than `NOTE_AFTER`.
const NOTE_BYTES: u64 = 16 << 20;
const NOTE_BYTES_LATE: u64 = 1 << 20;
const NOTE_AFTER: Duration = Duration::from_secs(1);
/// Interval at which the caller hears of progress.
const INTERVAL: Duration = Duration::from_millis(50);

/// Work on the unfinished files of a pull.
pub struct Transfer<'a> {
    client: &'a Client,
    files: &'a [(Partial, String)],
    connections: usize,
    /// Bytes that are done, of the current kind of work.
    done_bytes: AtomicU64,
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl<'a> Transfer<'a> {
    /// Prepares the download of files, each with its URL.
    pub fn new(client: &'a Client, files: &'a [(Partial, String)], connections: usize) -> Self {
        Transfer {
            client,
            files,
            connections: connections.max(1),
            done_bytes: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// Downloads what is missing. `progress` receives the bytes that arrived.
    pub fn download(
        &self,
        progress: &dyn Fn(u64),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let mut jobs = VecDeque::new();
        for (file, (partial, _)) in self.files.iter().enumerate() {
            jobs.extend(partial.missing().into_iter().map(|range| (file, range)));
        }
        self.run(jobs, progress, cancelled, |(file, range)| {
            let (partial, url) = &self.files[file];
            if partial.is_whole() {
                return Ok(());
            }
            self.range(partial, url, range)
        })?;
        match self.files.iter().find(|(partial, _)| !partial.missing().is_empty()) {
            None => Ok(()),
            Some((_, url)) => {
                let why = "parts of the file did not arrive: pull again".into();
                Err(Error::Network { url: shown(url), why })
            }
        }
    }

    /// Checks the downloaded files and gives them their names. `progress` receives the bytes that were checked.
    pub fn verify(
        &self,
        progress: &dyn Fn(u64),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        self.done_bytes.store(0, Ordering::SeqCst);
        let jobs = (0..self.files.len()).collect();
        self.run(jobs, progress, cancelled, |file| self.check(&self.files[file].0))
    }

    /// Runs jobs on threads, one per connection, until all are done or one fails.
    fn run<J: Send>(
        &self,
        jobs: VecDeque<J>,
        progress: &dyn Fn(u64),
        cancelled: &dyn Fn() -> bool,
        work: impl Fn(J) -> Result<(), Error> + Sync,
    ) -> Result<(), Error> {
        let threads = self.connections.min(jobs.len());
        let jobs = Mutex::new(jobs);
        let work_on_jobs = || {
            while !self.stopped() {
                let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                let Some(job) = job else { return };
                if let Err(error) = work(job) {
                    self.stop.store(true, Ordering::SeqCst);
                    let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                    failure.get_or_insert(error);
                }
            }
        };
        let mut is_cancelled = false;
        thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work_on_jobs)).collect();
            while !workers.iter().all(|worker| worker.is_finished()) {
                thread::sleep(INTERVAL);
                progress(self.done_bytes.load(Ordering::SeqCst));
                if !is_cancelled && cancelled() {
                    is_cancelled = true;
                    self.stop.store(true, Ordering::SeqCst);
                }
            }
        });
        if is_cancelled {
            return Err(Error::Cancelled);
        }
        match self.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Downloads one range. A connection that breaks off is taken up again where it ended.
    fn range(&self, partial: &Partial, url: &str, range: usize) -> Result<(), Error> {
        let span = partial.span(range);
        let is_all = span == (0..partial.remote.size);
        let kept = span.start + partial.kept_bytes(range);
        if kept >= span.end {
            return partial.finish_range(range);
        }
        let mut at = kept;
        let (mut noted, mut noted_at) = (at, Instant::now());
        let by_range = self.client.retry(&|| self.stopped(), || {
            let wanted = (!is_all || at > 0).then(|| (at, span.end - 1));
            let mut response = self.client.get(url, wanted)?;
            let has_range = response.status().as_u16() == 206;
            if has_range {
                check_range(partial, &response, at, span.end)?;
            } else if at == 0 && is_all {
                check_length(partial, &response)?;
            } else {
                return Ok(Some(response));
            }
            let before = at;
            let result = self.receive(&mut response, url, |bytes| {
                let room = usize::try_from(span.end - at).unwrap_or(usize::MAX);
                if bytes.len() > room {
                    return Err(too_long(partial));
                }
                partial.write(bytes, at)?;
                at += bytes.len() as u64;
                self.done_bytes.fetch_add(bytes.len() as u64, Ordering::SeqCst);
                let is_late = noted_at.elapsed() > NOTE_AFTER && at - noted >= NOTE_BYTES_LATE;
                if at < span.end && (is_late || at - noted >= NOTE_BYTES) {
                    partial.keep_bytes(range, at - span.start)?;
                    (noted, noted_at) = (at, Instant::now());
                }
                Ok(())
            });
            match result {
                Ok(()) if at < span.end => Err(broken_off(url, at > before)),
                Err(Trouble::Passing { error, after, .. }) => {
                    Err(Trouble::Passing { error, after, progressed: at > before })
                }
                result => result.map(|()| None),
            }
        });
        if by_range.is_err() && at > noted {
            // A later pull goes on here.
            partial.keep_bytes(range, at - span.start)?;
        }
        match by_range? {
            None => partial.finish_range(range),
            Some(response) => {
                self.done_bytes.fetch_sub(at - kept, Ordering::SeqCst);
                if partial.claim_whole() { self.whole(partial, url, response) } else { Ok(()) }
            }
        }
    }

    /// Downloads a file from its beginning, because the server ignores ranges.
    fn whole(&self, partial: &Partial, url: &str, first: Response<Body>) -> Result<(), Error> {
        let mut first = Some(first);
        self.client.retry(&|| self.stopped(), || {
            let mut response = match first.take() {
                Some(response) => response,
                None => self.client.get(url, None)?,
            };
            check_length(partial, &response)?;
            let (mut at, mut unfinished, mut progressed) = (0, 0, false);
            let result = self.receive(&mut response, url, |mut bytes| {
                while !bytes.is_empty() {
                    if at >= partial.remote.size {
                        return Err(too_long(partial));
                    }
                    let range = partial.range_of(at);
                    let end = partial.span(range).end;
                    let length = bytes.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
                    let (now, later) = bytes.split_at(length);
                    if !partial.is_done(range) {
                        partial.write(now, at)?;
                        unfinished += length as u64;
                        self.done_bytes.fetch_add(length as u64, Ordering::SeqCst);
                        if at + length as u64 == end {
                            partial.finish_range(range)?;
                            (unfinished, progressed) = (0, true);
                        }
                    }
                    at += length as u64;
                    bytes = later;
                }
                Ok(())
            });
            // The next attempt writes these bytes again.
            self.done_bytes.fetch_sub(unfinished, Ordering::SeqCst);
            match result {
                Ok(()) if at < partial.remote.size => Err(broken_off(url, progressed)),
                Err(Trouble::Passing { error, after, .. }) => {
                    Err(Trouble::Passing { error, after, progressed })
                }
                result => result,
            }
        })
    }

    /// Reads a response to its end.
    fn receive(
        &self,
        response: &mut Response<Body>,
        url: &str,
        mut take: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Trouble> {
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut body = response.body_mut().as_reader();
        loop {
            if self.stopped() {
                return Err(Error::Cancelled.into());
            }
            match body.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(length) => take(&buffer[..length])?,
                Err(error) => return Err(passing(url, &in_words(&error))),
            }
        }
    }

    /// Checks a complete file and gives it its name.
    fn check(&self, partial: &Partial) -> Result<(), Error> {
        let found = match &partial.remote.checksum {
            Checksum::Sha256(_) => self.checksum(partial, Sha256::new())?,
            Checksum::GitSha1(_) => {
                let header = format!("blob {}\0", partial.remote.size);
                self.checksum(partial, Sha1::new().chain_update(header))?
            }
        };
        let expected = partial.remote.checksum.text();
        if found != expected {
            partial.discard()?;
            let (path, expected) = (partial.remote.path.clone(), expected.to_owned());
            return Err(Error::WrongChecksum { path, expected, found });
        }
        partial.keep()
    }

    fn checksum<D: Digest>(&self, partial: &Partial, mut hash: D) -> Result<String, Error> {
        let mut file = partial.reader()?;
        let mut buffer = vec![0; 4 * BUFFER_BYTES];
        loop {
            if self.stopped() {
                return Err(Error::Cancelled);
            }
            let length = file.read(&mut buffer).map_err(at(&partial.target))?;
            if length == 0 {
                return Ok(hex(&hash.finalize()));
            }
            hash.update(&buffer[..length]);
            self.done_bytes.fetch_add(length as u64, Ordering::SeqCst);
        }
    }
}

/// Checks that a response has the range that was asked for, of a file of the right length.
fn check_range(
    partial: &Partial,
    response: &Response<Body>,
    start: u64,
    end: u64,
) -> Result<(), Error> {
    let size = partial.remote.size;
    let header = response.headers().get("content-range").and_then(|value| value.to_str().ok());
    let wanted = format!("bytes {start}-{}/", end - 1);
    let total = header.and_then(|header| header.strip_prefix(&wanted));
    match total {
        Some("*") => Ok(()),
        Some(total) if total.parse() == Ok(size) => Ok(()),
        Some(total) => Err(wrong_length(partial, total.parse().unwrap_or(0))),
        None => {
            let why = format!(
                "the server sends {} instead of {wanted}{size}",
                header.unwrap_or("an unknown range")
            );
            Err(Error::Network { url: partial.remote.path.clone(), why })
        }
    }
}

/// Checks the length that a response with a whole file announces.
fn check_length(partial: &Partial, response: &Response<Body>) -> Result<(), Error> {
    match response.body().content_length() {
        Some(length) if length != partial.remote.size => Err(wrong_length(partial, length)),
        _ => Ok(()),
    }
}

fn wrong_length(partial: &Partial, found: u64) -> Error {
    Error::WrongLength { path: partial.remote.path.clone(), expected: partial.remote.size, found }
}

/// Returns the error of a body that does not end where it should.
fn too_long(partial: &Partial) -> Error {
    wrong_length(partial, partial.remote.size + 1)
}

fn broken_off(url: &str, progressed: bool) -> Trouble {
    let error = Error::Network { url: shown(url), why: "the connection broke off".into() };
    Trouble::Passing { error, after: None, progressed }
}
