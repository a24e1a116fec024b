//! A server of objects that fails on purpose. It answers GET as S3, Google, Azure and plain HTTP servers do.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What is wrong with some answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Status(u16),
    /// The connection closes in the middle of the body.
    CutBody,
    /// The body is complete by the headers, but has fewer bytes than the range.
    ShortBody,
    /// The connection closes instead of an answer.
    NoAnswer,
    Slow(Duration),
    /// The answer never comes.
    Silence,
}

/// Faults that one in so many requests have, in turn.
pub const MIXED: [Fault; 6] = [
    Fault::Status(503),
    Fault::CutBody,
    Fault::NoAnswer,
    Fault::Status(500),
    Fault::ShortBody,
    Fault::Slow(Duration::from_millis(120)),
];

#[derive(Clone, Copy)]
pub struct Behaviour {
    /// One in this many requests for a range fails. 0 means none.
    pub one_in: u64,
    pub faults: &'static [Fault],
    pub latency: Duration,
    pub has_etags: bool,
    /// False for a server that ignores `If-Match`.
    pub knows_if_match: bool,
    pub knows_ranges: bool,
}

impl Default for Behaviour {
    fn default() -> Behaviour {
        Behaviour {
            one_in: 0,
            faults: &MIXED,
            latency: Duration::ZERO,
            has_etags: true,
            knows_if_match: true,
            knows_ranges: true,
        }
    }
}

/// The content and the version of an object.
type Object = (Arc<Vec<u8>>, u64);

/// The target and the range of a request.
pub type Asked = (String, Option<Range<u64>>);

#[derive(Default)]
struct State {
    /// Contents and versions by path, such as `box/model.gguf`.
    objects: Mutex<HashMap<String, Object>>,
    behaviour: Mutex<Behaviour>,
    asked: Mutex<Vec<Asked>>,
    number: AtomicU64,
    running: AtomicUsize,
    most_running: AtomicUsize,
    connections: AtomicUsize,
    is_over: AtomicBool,
}

pub struct Server {
    state: Arc<State>,
    address: SocketAddr,
}

impl Server {
    pub fn start(behaviour: Behaviour) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State { behaviour: Mutex::new(behaviour), ..State::default() });
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.is_over.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(stream), shared) = (stream, Arc::clone(&shared)) else { continue };
                thread::spawn(move || {
                    shared.connections.fetch_add(1, Ordering::SeqCst);
                    let _ = shared.serve(stream);
                    shared.connections.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Server { state, address }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn put(&self, path: &str, content: Vec<u8>) {
        let mut objects = self.state.objects.lock().unwrap();
        let version = objects.get(path).map_or(1, |(_, version)| version + 1);
        objects.insert(path.to_owned(), (Arc::new(content), version));
    }

    pub fn behave(&self, behaviour: Behaviour) {
        *self.state.behaviour.lock().unwrap() = behaviour;
    }

    /// Returns the targets and ranges of all requests since the last call.
    pub fn take_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.state.asked.lock().unwrap())
    }

    pub fn most_running(&self) -> usize {
        self.state.most_running.load(Ordering::SeqCst)
    }

    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

struct Answer {
    bytes: Vec<u8>,
    /// Whether the connection closes after it.
    closes: bool,
}

struct Request {
    target: String,
    range: Option<Range<u64>>,
    if_match: Option<String>,
}

fn read_request(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    if reader.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let target = line.split(' ').nth(1)?.trim_start_matches('/').to_owned();
    let mut request = Request { target, range: None, if_match: None };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { return Some(request) };
        match name.to_ascii_lowercase().as_str() {
            // Azure has a name of its own.
            "range" | "x-ms-range" => {
                let (start, last) = value.strip_prefix("bytes=")?.split_once('-')?;
                request.range = Some(start.parse().ok()?..last.parse::<u64>().ok()? + 1);
            }
            "if-match" => request.if_match = Some(value.to_owned()),
            _ => {}
        }
    }
}

impl State {
    fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut out = stream.try_clone()?;
        let mut reader = BufReader::new(stream);
        while let Some(request) = read_request(&mut reader) {
            let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_running.fetch_max(running, Ordering::SeqCst);
            self.asked.lock().unwrap().push((request.target.clone(), request.range.clone()));
            let answer = self.answer(&request, &mut reader);
            // All but the end is sent before the request counts as answered, and the end after it: a client that has the
            // whole answer may begin its next request at once.
            let (start, end) = answer.bytes.split_at(answer.bytes.len().saturating_sub(1));
            let sent = out.write_all(start);
            self.running.fetch_sub(1, Ordering::SeqCst);
            sent.and_then(|()| out.write_all(end))?;
            if answer.closes {
                return out.shutdown(Shutdown::Both);
            }
        }
        Ok(())
    }

    fn answer(&self, request: &Request, reader: &mut impl Read) -> Answer {
        let behaviour = *self.behaviour.lock().unwrap();
        thread::sleep(behaviour.latency);
        let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
        let path = &decoded(path);
        if query.contains("list-type=2") {
            return self.list(path, query);
        }
        if path.contains("denied") {
            return status(403, "<Code>AccessDenied</Code><Message>not yours</Message>");
        }
        let found = self.objects.lock().unwrap().get(path).cloned();
        let Some((content, version)) = found else {
            return status(404, "<Code>NoSuchKey</Code><Message>none here</Message>");
        };
        let number = self.number.fetch_add(1, Ordering::SeqCst) + 1;
        let fails = behaviour.one_in > 0 && number.is_multiple_of(behaviour.one_in);
        let which = (number / behaviour.one_in.max(1)) as usize % behaviour.faults.len();
        let fault = fails.then(|| behaviour.faults[which]);
        let etag = format!("\"v{version}\"");
        let is_other = request.if_match.as_ref().is_some_and(|tag| *tag != etag);
        if is_other && behaviour.knows_if_match {
            return status(412, "");
        }
        match fault {
            Some(Fault::Status(code)) => return status(code, "on purpose"),
            Some(Fault::NoAnswer) => return Answer { bytes: Vec::new(), closes: true },
            Some(Fault::Slow(time)) => thread::sleep(time),
            Some(Fault::Silence) => {
                // Until the client goes away.
                let _ = reader.read(&mut [0; 1]);
                return Answer { bytes: Vec::new(), closes: true };
            }
            _ => {}
        }
        let range = request.range.clone().filter(|_| behaviour.knows_ranges);
        let whole = content.len() as u64;
        let wanted = range.clone().map_or(0..whole, |range| range.start..range.end.min(whole));
        if wanted.start >= whole {
            return status(416, "");
        }
        let body = &content[wanted.start as usize..wanted.end as usize];
        let told = if fault == Some(Fault::ShortBody) { body.len() * 2 / 3 } else { body.len() };
        let code = if range.is_some() { "206 Partial Content" } else { "200 OK" };
        let mut head = format!(
            "HTTP/1.1 {code}\r\nContent-Length: {told}\r\nLast-Modified: Tue, 01 Jan 2030 00:00:00 GMT\r\n"
        );
        if range.is_some() {
            let last = wanted.end - 1;
            head += &format!("Content-Range: bytes {}-{last}/{whole}\r\n", wanted.start);
        }
        if behaviour.has_etags {
            head += &format!("ETag: {etag}\r\n");
        }
        let mut bytes = (head + "\r\n").into_bytes();
        let sent = if fault == Some(Fault::CutBody) { told / 2 } else { told };
        bytes.extend_from_slice(&body[..sent]);
        Answer { bytes, closes: sent != told }
    }

    fn list(&self, bucket: &str, query: &str) -> Answer {
        let value = |name: &str| {
            let found = query.split('&').find_map(|pair| pair.strip_prefix(name));
            found.unwrap_or_default().replace("%2F", "/")
        };
        let prefix = value("prefix=");
        let mut keys: Vec<String> = Vec::new();
        for (path, (content, _)) in self.objects.lock().unwrap().iter() {
            let Some(key) = path.strip_prefix(&format!("{bucket}/")) else { continue };
            if key.strip_prefix(&prefix).is_some_and(|rest| !rest.contains('/')) {
                keys.push(format!(
                    "<Contents><Key>{key}</Key><LastModified>2030-01-01T00:00:00.000Z</LastModified>\
                     <ETag>\"v1\"</ETag><Size>{}</Size></Contents>",
                    content.len()
                ));
            }
        }
        let body = format!(
            "<?xml version=\"1.0\"?><ListBucketResult><Name>{bucket}</Name><Prefix>{prefix}</Prefix>\
             <IsTruncated>false</IsTruncated>{}</ListBucketResult>",
            keys.concat()
        );
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        Answer { bytes: (head + &body).into_bytes(), closes: false }
    }
}

/// Decodes percent signs.
fn decoded(path: &str) -> String {
    let mut parts = path.split('%');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (number, rest) = part.split_at(2);
        text.push(u8::from_str_radix(number, 16).unwrap() as char);
        text += rest;
    }
    text
}

fn status(code: u16, body: &str) -> Answer {
    let text =
        format!("HTTP/1.1 {code} On Purpose\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    Answer { bytes: text.into_bytes(), closes: false }
}
