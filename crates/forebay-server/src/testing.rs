//! What tests share: a tiny model under several names, a loader that decides what fits, and a server in this process.

use std::collections::{HashMap, HashSet};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_engine::engine::EngineOptions;
use forebay_engine::{Session, SessionOptions};
use forebay_library::{Name, RemoteModel, Repository};
use forebay_text::Tokenizer;
use serde_json::Value;

use crate::caller::Caller;
use crate::files::FilesOptions;
use crate::models::{
    Catalogue, Entry, KeepAlive, LoadError, Loaded, Loader, Memory, Models, ModelsOptions,
    PullError,
};
use crate::{Address, CLIENT_TIME, Keys, Listener, ServeError, ServerOptions};

/// Room of all models in these tests.
pub const ALL: u64 = 10;

/// A load as the loader saw it: the model, and its room in VRAM.
pub type Load = (String, Option<u64>);

/// A catalogue and a loader for tests.
#[derive(Default)]
pub struct Test {
    /// What each model needs, and the least with which it runs.
    models: HashMap<&'static str, (u64, u64)>,
    loads: Mutex<Vec<Load>>,
    /// Loads that shall fail from now on.
    pub failures: AtomicUsize,
    pub panics: AtomicBool,
    /// While true, loads wait.
    pub is_held: AtomicBool,
    /// Models whose loads, or whose measuring, wait.
    pub held: Mutex<HashSet<&'static str>>,
    pub held_measuring: Mutex<HashSet<&'static str>>,
    pub had_tokenizer: AtomicUsize,
    pub forgotten: AtomicUsize,
}

impl Test {
    pub fn new(models: &[(&'static str, u64, u64)]) -> Arc<Test> {
        let models = models.iter().map(|&(name, needs, least)| (name, (needs, least))).collect();
        Arc::new(Test { models, ..Test::default() })
    }

    pub fn models(self: &Arc<Test>, keep_alive: KeepAlive) -> Models {
        self.models_with(keep_alive, EngineOptions::default())
    }

    /// Returns models that run one request at a time, for several callers.
    pub fn models_one_by_one(self: &Arc<Test>, keep_alive: KeepAlive) -> Models {
        let (running, callers_share) = (Some(1), true);
        let engine = EngineOptions { running, callers_share, ..EngineOptions::default() };
        self.models_with(keep_alive, engine)
    }

    fn models_with(self: &Arc<Test>, keep_alive: KeepAlive, engine: EngineOptions) -> Models {
        let options = ModelsOptions {
            engine,
            keep_alive,
            waiting: 100,
            kv_disk: None,
            special_tokens_in_messages: false,
        };
        Models::new(Names(self.clone()), self.clone(), options).unwrap()
    }

    pub fn loads(&self) -> Vec<Load> {
        self.loads.lock().unwrap().clone()
    }

    pub fn names(&self) -> Vec<String> {
        self.loads().into_iter().map(|(name, _)| name).collect()
    }
}

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/qwen3_moe")
}

struct Names(Arc<Test>);

impl Catalogue for Names {
    fn list(&self) -> Vec<Entry> {
        let mut names: Vec<_> = self.0.models.keys().collect();
        names.sort();
        names.into_iter().map(|name| entry(name)).collect()
    }

    fn find(&self, name: &str) -> Option<Entry> {
        self.0.models.contains_key(name).then(|| entry(name))
    }

    fn offer(&self, name: &Name) -> Result<(Repository, RemoteModel), PullError> {
        Err(PullError::CannotRun(format!("{name}: there is no hub")))
    }

    fn preferred(&self) -> Option<Entry> {
        None
    }
}

pub fn entry(name: &str) -> Entry {
    Entry { name: name.to_owned(), path: folder(), keep_alive: None }
}

pub fn vram(vram_bytes: u64) -> Memory {
    Memory { vram_bytes, ram_bytes: 0 }
}

impl Loader for Test {
    fn memory(&self) -> Memory {
        vram(ALL)
    }

    fn needs(&self, entry: &Entry) -> Result<Memory, LoadError> {
        while self.held_measuring.lock().unwrap().contains(entry.name.as_str()) {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(vram(self.models[entry.name.as_str()].0))
    }

    fn load(
        &self,
        entry: &Entry,
        room: Option<Memory>,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Loaded, LoadError> {
        let (needs, least) = self.models[entry.name.as_str()];
        let room = room.map(|room| room.vram_bytes);
        if room.unwrap_or(ALL) < least {
            return Err(LoadError::TooSmall("too small".to_owned()));
        }
        self.loads.lock().unwrap().push((entry.name.clone(), room));
        let is_held = || self.held.lock().unwrap().contains(entry.name.as_str());
        while self.is_held.load(Ordering::SeqCst) || is_held() {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!self.panics.swap(false, Ordering::SeqCst), "a test");
        let failures = self.failures.load(Ordering::SeqCst);
        if failures > 0 {
            self.failures.store(failures - 1, Ordering::SeqCst);
            return Err(LoadError::Failed("the disk is gone".to_owned()));
        }
        self.had_tokenizer.fetch_add(usize::from(tokenizer.is_some()), Ordering::SeqCst);
        let options = SessionOptions {
            tokenizer,
            sequences: 2,
            context: Some(64),
            threads: Some(1),
            for_engine: true,
            ..SessionOptions::default()
        };
        let session = Session::open(&entry.path, &options, &mut |_, _| {}).unwrap();
        Ok(Loaded {
            session,
            memory: vram(needs.min(room.unwrap_or(ALL))),
            outlook: Arc::default(),
        })
    }

    fn forget(&self) {
        self.forgotten.fetch_add(1, Ordering::SeqCst);
    }
}

/// Returns a caller.
pub fn somebody() -> Caller {
    Caller::new("", Vec::new(), 0)
}

/// Waits until something is true.
pub async fn until(is_true: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_true() {
        assert!(started.elapsed() < Duration::from_secs(20), "it takes too long");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A server in this process, on a port of its own. Dropping it ends it.
pub struct Running {
    pub address: SocketAddr,
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl Running {
    /// Starts a server of these models with keys, one on each line, and waits until it is ready.
    pub fn start(models: Models, keys: &str, change: impl FnOnce(&mut ServerOptions)) -> Running {
        let server = Running::start_with(models, keys, change, |_| Ok(()));
        while server.ask("", "GET", "/health", &Value::Null).0 != 200 {
            thread::yield_now();
        }
        server
    }

    /// Starts a server whose first models are loaded by `start`.
    pub fn start_with(
        models: Models,
        keys: &str,
        change: impl FnOnce(&mut ServerOptions),
        start: impl FnOnce(&Models) -> Result<(), ServeError> + Send + 'static,
    ) -> Running {
        let files = FilesOptions { folder: None, bytes_max: 1 << 20, file_bytes_max: 1 << 20 };
        let mut options = ServerOptions {
            address: Address::Tcp(SocketAddr::from(([127, 0, 0, 1], 0))),
            keys: Keys::read(keys),
            insecure: false,
            origins: Vec::new(),
            shares_prefixes: false,
            body_bytes: 1 << 20,
            files,
            ping: None,
            access_log: None,
            hosts: Vec::new(),
            connections: 100,
            client_time: CLIENT_TIME,
            drain: Duration::from_secs(600),
        };
        change(&mut options);
        let listener = Listener::bind(options).unwrap();
        let &Address::Tcp(address) = listener.address() else { panic!("the address is a path") };
        let stops = Arc::new(AtomicBool::new(false));
        let own = stops.clone();
        let start = move |models: &Models| start(models).map(|()| || ());
        let thread =
            thread::spawn(move || listener.serve(models, start, || own.load(Ordering::SeqCst)));
        Running { address, stops, thread: Some(thread) }
    }

    /// Tells the server to end, as a signal does.
    pub fn stop(&self) {
        self.stops.store(true, Ordering::SeqCst);
    }

    /// Waits for the end of the server.
    pub fn join(mut self) {
        self.thread.take().unwrap().join().unwrap().unwrap();
    }

    /// Waits for the end of a server that fails, and returns why.
    pub fn join_failed(mut self) -> String {
        self.thread.take().unwrap().join().unwrap().unwrap_err().to_string()
    }

    /// Returns the number of requests that wait for a model to be loaded.
    pub fn waiting(&self) -> usize {
        let (_, slots) = self.ask("A", "GET", "/slots", &Value::Null);
        let slots: Value = serde_json::from_str(&slots).unwrap();
        slots["waiting_for_models"].as_u64().unwrap() as usize
    }

    /// Sends a request with this key. The connection ends with the answer.
    pub fn begin(&self, key: &str, method: &str, path: &str, body: &str) -> Answer {
        self.begin_as(key, method, path, "application/json", body)
    }

    /// Sends a request whose body has this type.
    pub fn begin_as(&self, key: &str, method: &str, path: &str, kind: &str, body: &str) -> Answer {
        let mut answer = Answer::open(self);
        answer.send(&format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {key}\r\nConnection: close\r\n\
             Content-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        answer
    }

    /// Asks for a path on a connection that stays open.
    pub fn keep_alive(&self, path: &str) -> Answer {
        let mut answer = Answer::open(self);
        answer.send(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        answer
    }

    /// Sends a request with this key, and returns the status and the body of its answer.
    pub fn ask(&self, key: &str, method: &str, path: &str, body: &Value) -> (u16, String) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        self.begin(key, method, path, &body).rest()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        let Some(thread) = self.thread.take() else { return };
        let ended = thread.join();
        assert!(matches!(ended, Ok(Ok(()))) || thread::panicking(), "the server has failed");
    }
}

/// An answer that comes.
pub struct Answer {
    pub stream: TcpStream,
    /// What has come.
    pub text: String,
}

impl Answer {
    /// Opens a connection.
    pub fn open(server: &Running) -> Answer {
        let stream = TcpStream::connect(server.address).unwrap();
        Answer { stream, text: String::new() }
    }

    /// Sends text. The server may have ended the connection already.
    pub fn send(&mut self, text: &str) {
        let _ = self.stream.write_all(text.as_bytes());
    }

    /// Reads until this text has come.
    pub fn until(&mut self, text: &str) {
        let mut bytes = [0; 4096];
        while !self.text.contains(text) {
            let count = self.stream.read(&mut bytes).unwrap();
            assert!(count > 0, "the answer ends before {text:?}: {}", self.text);
            self.text.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
        }
    }

    /// Reads the head of the answer, and returns it in lower case.
    pub fn rest_of_head(&mut self) -> String {
        self.until("\r\n\r\n");
        self.text.split("\r\n\r\n").next().unwrap().to_ascii_lowercase()
    }

    /// Reads until the server ends the connection, and returns what came.
    pub fn read_to_end(&mut self) -> &str {
        // A connection that is cut off is no error here.
        let _ = self.stream.read_to_string(&mut self.text);
        &self.text
    }

    /// Reads to the end, and returns the status and the body.
    pub fn rest(mut self) -> (u16, String) {
        self.read_to_end();
        let status = self.text.split(' ').nth(1).and_then(|status| status.parse().ok());
        let (head, body) = self.text.split_once("\r\n\r\n").unwrap_or_default();
        let body = match head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
            true => unchunked(body),
            false => body.to_owned(),
        };
        (status.unwrap_or_else(|| panic!("{:?}", self.text)), body)
    }
}

/// Returns the content of chunks.
fn unchunked(mut text: &str) -> String {
    let mut content = String::new();
    while let Some((size, rest)) = text.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break;
        }
        content.push_str(&rest[..size]);
        text = &rest[size + 2..];
    }
    content
}
