//! A hub on this machine that misbehaves as a test asks.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// A file of the repository `o/r`.
#[derive(Clone)]
pub struct Served {
    pub path: String,
    pub bytes: Arc<Vec<u8>>,
    /// A file on the disk whose bytes are served instead.
    pub on_disk: Option<PathBuf>,
    /// True for a file with SHA-256, false for one with Git's SHA-1.
    pub large: bool,
    /// What the list says, if it is not true.
    pub listed_size: Option<u64>,
    pub listed_checksum: Option<String>,
}

impl Served {
    pub fn large(path: &str, bytes: Vec<u8>) -> Served {
        let bytes = Arc::new(bytes);
        Served {
            path: path.into(),
            bytes,
            on_disk: None,
            large: true,
            listed_size: None,
            listed_checksum: None,
        }
    }

    /// Serves a file of any size from the disk, under a checksum that is not its own.
    pub fn on_disk(path: &str, file: &Path) -> Served {
        Served {
            on_disk: Some(file.to_owned()),
            listed_size: Some(std::fs::metadata(file).unwrap().len()),
            listed_checksum: Some("0".repeat(64)),
            ..Served::large(path, Vec::new())
        }
    }

    fn size(&self) -> usize {
        match &self.on_disk {
            Some(path) => std::fs::metadata(path).unwrap().len() as usize,
            None => self.bytes.len(),
        }
    }

    /// Sends bytes of the file and counts them.
    fn send(
        &self,
        out: &mut TcpStream,
        span: Range<usize>,
        sent: &AtomicU64,
    ) -> std::io::Result<()> {
        let mut at = span.start.min(self.size());
        let end = span.end.min(self.size());
        while at < end {
            let next = end.min(at + (64 << 10));
            let piece = match &self.on_disk {
                Some(path) => {
                    let mut piece = vec![0; next - at];
                    File::open(path)?.read_exact_at(&mut piece, at as u64)?;
                    piece
                }
                None => self.bytes[at..next].to_vec(),
            };
            out.write_all(&piece)?;
            sent.fetch_add(piece.len() as u64, Ordering::SeqCst);
            at = next;
        }
        Ok(())
    }

    pub fn small(path: &str, text: &str) -> Served {
        Served { large: false, ..Served::large(path, text.as_bytes().to_vec()) }
    }

    fn listed(&self) -> String {
        let size = self.listed_size.unwrap_or(self.bytes.len() as u64);
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let path = serde_json::to_string(&self.path).unwrap();
        if self.large {
            let sum = || hex(&Sha256::digest(self.bytes.as_slice()));
            let sum = self.listed_checksum.clone().unwrap_or_else(sum);
            let lfs = format!(r#"{{"oid":"{sum}","size":{size},"pointerSize":135}}"#);
            return format!(
                r#"{{"type":"file","oid":"x","size":{size},"path":{path},"lfs":{lfs}}}"#
            );
        }
        let header = format!("blob {}\0", self.bytes.len());
        let sum = Sha1::new().chain_update(header).chain_update(self.bytes.as_slice());
        let sum = self.listed_checksum.clone().unwrap_or(hex(&sum.finalize()));
        format!(r#"{{"type":"file","oid":"{sum}","size":{size},"path":{path}}}"#)
    }
}

/// A request as the hub received it.
#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    pub headers: HashMap<String, String>,
}

impl Request {
    pub fn range(&self) -> Option<Range<usize>> {
        let (first, last) = self.headers.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some(first.parse().unwrap()..last.parse::<usize>().unwrap() + 1)
    }
}

/// What the hub does with a request for a file.
#[derive(Clone)]
pub enum Answer {
    Usual,
    /// The whole file, although a range was asked for.
    Whole,
    /// The same, and the connection is cut after so many bytes.
    WholeCut(usize),
    /// The right length, and only so many bytes before the connection is cut.
    Cut(usize),
    /// Other bytes than those asked for are announced.
    ContentRange(String),
    /// Another length is announced, with the whole file.
    Length(u64),
    /// No length is announced, and so many bytes are sent.
    Unannounced(usize),
    Status(u16, &'static str),
    Redirect(String),
    /// Pauses of a millisecond between pieces of so many bytes.
    Slow(usize),
    /// Nothing is sent for so long.
    Silent(Duration),
}

type Rule = dyn Fn(&Request, usize) -> Answer + Send + Sync;

pub struct Hub {
    pub address: String,
    requests: Arc<Mutex<Vec<Request>>>,
    sent: Arc<AtomicU64>,
}

impl Hub {
    /// Starts a hub. `rule` decides about each request for a file, with the number of such requests before it.
    pub fn start(
        files: Vec<Served>,
        rule: impl Fn(&Request, usize) -> Answer + Send + Sync + 'static,
    ) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (rule, files): (Arc<Rule>, _) = (Arc::new(rule), Arc::new(files));
        let seen = Arc::clone(&requests);
        let sent = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&sent);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (rule, files, seen) =
                    (Arc::clone(&rule), Arc::clone(&files), Arc::clone(&seen));
                let sent = Arc::clone(&counted);
                // A client that goes away ends the connection.
                thread::spawn(move || drop(serve(stream, &files, &*rule, &seen, &sent)));
            }
        });
        Hub { address, requests, sent }
    }

    /// Returns the bytes of bodies that were sent so far.
    pub fn sent_bytes(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }

    /// Returns all requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// Returns the requests for files so far.
    pub fn downloads(&self) -> Vec<Request> {
        self.requests().into_iter().filter(|request| request.path.contains("/resolve/")).collect()
    }
}

fn serve(
    stream: TcpStream,
    files: &[Served],
    rule: &Rule,
    seen: &Mutex<Vec<Request>>,
    sent: &AtomicU64,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut out = stream;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut headers = HashMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim().split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let request = Request { path, headers };
        let before = {
            let mut seen = seen.lock().unwrap();
            let before = seen.iter().filter(|old| old.path.contains("/resolve/")).count();
            seen.push(request.clone());
            before
        };
        if !answer(&mut out, &request, files, &rule(&request, before), sent)? {
            return Ok(());
        }
    }
}

/// Answers a request. Returns false if the connection ends with it.
fn answer(
    out: &mut TcpStream,
    request: &Request,
    files: &[Served],
    answer: &Answer,
    sent: &AtomicU64,
) -> std::io::Result<bool> {
    if let Answer::Status(status, more) = answer {
        write!(out, "HTTP/1.1 {status} X\r\n{more}Content-Length: 0\r\n\r\n")?;
        return Ok(true);
    }
    if request.path.starts_with("/api/") {
        // Two pages, one file each at least.
        let second = request.path.contains("page=2");
        let half = files.len().min(1);
        let page = if second { &files[half..] } else { &files[..half] };
        let list: Vec<String> = page.iter().map(Served::listed).collect();
        let body = format!("[{}]", list.join(","));
        let host = &request.headers["host"];
        let next = format!("Link: <http://{host}{}&page=2>; rel=\"next\"\r\n", request.path);
        let next = if second { "" } else { &next };
        write!(out, "HTTP/1.1 200 OK\r\n{next}Content-Length: {}\r\n\r\n{body}", body.len())?;
        sent.fetch_add(body.len() as u64, Ordering::SeqCst);
        return Ok(true);
    }
    let name = request.path.split("/main/").nth(1).unwrap_or_default().split('?').next().unwrap();
    let Some(file) = files.iter().find(|file| file.path.replace(' ', "%20") == name) else {
        write!(out, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
        return Ok(true);
    };
    let size = file.size();
    let range = request
        .range()
        .filter(|_| !matches!(answer, Answer::Whole | Answer::WholeCut(_) | Answer::Length(_)));
    let span = range.clone().unwrap_or(0..size);
    let span = span.start.min(size)..span.end.min(size);
    let length = span.len();
    let content_range = match answer {
        Answer::ContentRange(text) => text.clone(),
        _ => format!("bytes {}-{}/{size}", span.start, span.end.saturating_sub(1)),
    };
    let head = match range {
        Some(_) => format!("HTTP/1.1 206 X\r\nContent-Range: {content_range}\r\n"),
        None => "HTTP/1.1 200 OK\r\n".into(),
    };
    match answer {
        Answer::Redirect(to) => {
            write!(out, "HTTP/1.1 302 X\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n")?;
            Ok(true)
        }
        Answer::Cut(cut) | Answer::WholeCut(cut) => {
            write!(out, "{head}Content-Length: {length}\r\n\r\n")?;
            file.send(out, span.start..span.end.min(span.start + cut), sent)?;
            Ok(false)
        }
        Answer::Length(length) => {
            write!(out, "{head}Content-Length: {length}\r\n\r\n")?;
            file.send(out, span, sent)?;
            Ok(false)
        }
        Answer::Unannounced(length) => {
            write!(out, "{head}Connection: close\r\n\r\n")?;
            out.write_all(&vec![7; *length])?;
            Ok(false)
        }
        Answer::Silent(time) => {
            thread::sleep(*time);
            Ok(false)
        }
        Answer::Slow(piece) => {
            write!(out, "{head}Content-Length: {length}\r\n\r\n")?;
            for start in span.clone().step_by(*piece) {
                file.send(out, start..span.end.min(start + piece), sent)?;
                thread::sleep(Duration::from_millis(1));
            }
            Ok(true)
        }
        _ => {
            write!(out, "{head}Content-Length: {length}\r\n\r\n")?;
            file.send(out, span, sent)?;
            Ok(true)
        }
    }
}
