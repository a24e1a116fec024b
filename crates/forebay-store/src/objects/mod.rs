//! Files in object stores and on HTTP servers.
//!
//! ```text
//! places.rs    URLs, and how their stores are reached
//! object.rs    one object, read by ranges; repeats what fails
//! device.rs    the device of the scheduler: many requests at a time
//! requests.rs  how many requests run at a time, and second ones where an answer is late
//! runtime.rs   threads for requests
//! ```

mod device;
mod object;
mod places;
mod requests;
mod runtime;

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_format::PathKind;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use object_store::ObjectStore;
use tokio::runtime::Handle;

use crate::error::StoreError;
use crate::interrupt::Interrupt;
pub(crate) use device::ObjectDevice;
pub(crate) use object::{Failure, Object};
use object::{Place, list};
use places::{Service, Settings, Url, connect};
use requests::Requests;
use runtime::Runtime;

/// Extensions of files of weights, and of the texts beside them. A URL with one of them names a file.
const EXTENSIONS: [&str; 4] = ["safetensors", "gguf", "fbay", "json"];
/// Bytes that a reader of a header fetches after the first ones. Each time they are twice as many.
const FETCH_BYTES: usize = 512 << 10;
const FETCH_BYTES_MAX: usize = 8 << 20;

/// How objects are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectOptions {
    /// Requests that run at a time, 1 to 1024. Each has a connection.
    pub connections: usize,
    /// Bytes of a request, a multiple of 4096 from 1 MiB to 1 GiB. Requests are smaller where there is less to read.
    pub request_bytes: usize,
    /// Number of times that a failed request is repeated.
    pub retries: u32,
    /// Whether a request whose answer is late is made once more. At most one in ten is.
    pub hedge: bool,
}

impl Default for ObjectOptions {
    /// Returns options for latencies around 200 ms: 1 GiB on the way at a time.
    fn default() -> ObjectOptions {
        ObjectOptions { connections: 64, request_bytes: 16 << 20, retries: 10, hedge: true }
    }
}

/// Stores by scheme and host, and query.
type Stores = HashMap<(String, Option<String>), Arc<dyn ObjectStore>>;

/// An object that is being opened, or was.
type Opening = Shared<BoxFuture<'static, Result<Arc<Object>, Arc<io::Error>>>>;

/// Files that URLs name. All of them are read as they were when they were first opened.
pub struct Objects {
    options: ObjectOptions,
    settings: Settings,
    /// Queries of URLs, by name.
    queries: HashMap<PathBuf, String>,
    stores: Mutex<Stores>,
    opened: Mutex<HashMap<PathBuf, Opening>>,
    listed: Mutex<HashMap<PathBuf, Vec<PathBuf>>>,
    requests: Arc<Requests>,
    runtime: Arc<Runtime>,
}

impl fmt::Debug for Objects {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Settings may be secrets.
        out.debug_struct("Objects").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Chooses the cryptography of TLS, unless this process has chosen.
fn choose_tls() {
    // It fails if there is a choice already, which is then used.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // No code panics while it holds one of these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Objects {
    /// Prepares to open the files of `urls`, and returns their names: the URLs without queries. `settings` has
    /// settings of the store as the crate object_store names them, such as `aws_region`, and `connections`,
    /// `request_bytes`, `retries` and `hedge`. What it lacks is taken from the environment. Waits for servers end when
    /// `interrupt` is requested.
    ///
    /// # Errors
    /// Returns [`StoreError::Url`] if a URL or a setting is wrong.
    pub fn new(
        urls: &[PathBuf],
        mut settings: HashMap<String, String>,
        interrupt: &Interrupt,
    ) -> Result<(Objects, Vec<PathBuf>), StoreError> {
        choose_tls();
        let options = take_options(&mut settings)?;
        let runtime = Runtime::start(interrupt.clone());
        let runtime = runtime.map_err(|source| StoreError::Engine { engine: NAME, source })?;
        let mut objects = Objects {
            options,
            settings,
            queries: HashMap::new(),
            stores: Mutex::default(),
            opened: Mutex::default(),
            listed: Mutex::default(),
            requests: Arc::new(Requests::new(options)),
            runtime: Arc::new(runtime),
        };
        let mut names = Vec::with_capacity(urls.len());
        for url in urls {
            let failed = |why: String| StoreError::Url { url: shown(url), why };
            let text = url.to_str().ok_or_else(|| failed("it is no UTF-8".to_owned()))?;
            let parsed = Url::parse(text).map_err(failed)?;
            let name = PathBuf::from(parsed.name());
            objects.queries.extend(parsed.query.clone().map(|query| (name.clone(), query)));
            // Also finds wrong settings.
            objects.store(&parsed).map_err(failed)?;
            names.push(name);
        }
        Ok((objects, names))
    }

    pub fn options(&self) -> ObjectOptions {
        self.options
    }

    /// Opens an object, unless it is open.
    pub(crate) fn object(&self, name: &Path) -> io::Result<Arc<Object>> {
        let opening = self.opening(name)?;
        let opened = self.runtime.wait(opening)?;
        opened.map_err(|error| io::Error::new(error.kind(), error.to_string()))
    }

    /// Fills as much of `out` as an object has from `offset` on, and returns the number of bytes.
    pub(crate) fn read_at(
        &self,
        object: &Object,
        offset: u64,
        out: &mut [u8],
    ) -> io::Result<usize> {
        Ok(self.runtime.wait(object.read_at(offset, out))??)
    }

    fn handle(&self) -> Handle {
        self.runtime.handle()
    }

    fn opening(&self, name: &Path) -> io::Result<Opening> {
        if let Some(opening) = lock(&self.opened).get(name) {
            return Ok(opening.clone());
        }
        let (_, place) = self.place(name)?;
        let open = async move {
            let opened = Object::open(place).await;
            opened.map(Arc::new).map_err(|failure| Arc::new(failure.into()))
        };
        let opening: Opening = open.boxed().shared();
        lock(&self.opened).insert(name.to_owned(), opening.clone());
        Ok(opening)
    }

    /// Returns the parts of a name, and where its object is.
    fn place(&self, name: &Path) -> io::Result<(Url, Place)> {
        let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        let text = name.to_str().ok_or_else(|| wrong("the name is no UTF-8".to_owned()))?;
        let mut url = Url::parse(text).map_err(wrong)?;
        // A query is for the URL that it came with and for everything below. `?` inside a name is no query.
        let query = name.ancestors().find_map(|above| self.queries.get(above));
        url.query = query.cloned();
        let place = Place {
            name: name.to_owned(),
            store: self.store(&url).map_err(wrong)?,
            key: url.key()?,
            retries: self.options.retries,
            requests: Arc::clone(&self.requests),
        };
        Ok((url, place))
    }

    fn store(&self, url: &Url) -> Result<Arc<dyn ObjectStore>, String> {
        let mut stores = lock(&self.stores);
        let key = (url.base.clone(), url.query.clone());
        if let Some(store) = stores.get(&key) {
            return Ok(Arc::clone(store));
        }
        let store = connect(url, &self.settings)?;
        stores.insert(key, Arc::clone(&store));
        Ok(store)
    }
}

/// Name of the engine in errors and statistics.
pub(crate) const NAME: &str = "objects";

/// Returns a URL for errors, without its query.
fn shown(url: &Path) -> String {
    let text = url.display().to_string();
    text.split('?').next().unwrap_or_default().to_owned()
}

/// Removes the options of this crate from the settings.
fn take_options(settings: &mut HashMap<String, String>) -> Result<ObjectOptions, StoreError> {
    let mut number = |option, range: RangeInclusive<usize>, remedy| {
        let Some(given) = settings.remove(option) else { return Ok(None) };
        let number = given.parse().ok().filter(|number| range.contains(number));
        number.map(Some).ok_or(StoreError::Option { option, given, remedy })
    };
    let defaults = ObjectOptions::default();
    let connections = number("connections", 1..=1024, "take 1 to 1024")?;
    let bytes = number("request_bytes", 1 << 20..=1 << 30, "take 1 MiB to 1 GiB")?;
    let retries = number("retries", 0..=1000, "take 0 to 1000")?;
    let hedge = match settings.remove("hedge").as_deref() {
        None => defaults.hedge,
        Some("true") => true,
        Some("false") => false,
        Some(given) => {
            let (given, remedy) = (given.to_owned(), "take true or false");
            return Err(StoreError::Option { option: "hedge", given, remedy });
        }
    };
    Ok(ObjectOptions {
        connections: connections.unwrap_or(defaults.connections),
        request_bytes: bytes.unwrap_or(defaults.request_bytes) / 4096 * 4096,
        retries: retries.map_or(defaults.retries, |retries| retries as u32),
        hedge,
    })
}

impl forebay_format::Storage for Objects {
    fn kind(&self, path: &Path) -> io::Result<PathKind> {
        let (url, _) = self.place(path)?;
        let extension = path.extension().and_then(|extension| extension.to_str());
        let is_named = extension.is_some_and(|extension| EXTENSIONS.contains(&extension));
        if is_named && !url.path.is_empty() {
            return Ok(PathKind::File);
        }
        if url.service == Service::Http || !self.list(path)?.is_empty() {
            return Ok(PathKind::Folder);
        }
        match self.object(path) {
            Ok(_) => Ok(PathKind::File),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let words = "there is no object of this name, and no folder";
                Err(io::Error::new(io::ErrorKind::NotFound, words))
            }
            Err(error) => Err(error),
        }
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        if let Some(listed) =
            path.parent().and_then(|folder| lock(&self.listed).get(folder).cloned())
        {
            return Ok(listed.iter().any(|listed| listed == path));
        }
        let is_http = self.place(path)?.0.service == Service::Http;
        match self.object(path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            // Some servers say so of files that are not there.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && is_http => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn open(&self, path: &Path) -> io::Result<(Box<dyn Read>, u64)> {
        let object = self.object(path)?;
        let bytes = object.bytes();
        let (runtime, ahead, step) = (Arc::clone(&self.runtime), Vec::new(), FETCH_BYTES);
        let reader = ObjectReader { object, runtime, at: 0, ahead, ahead_at: 0, step };
        Ok((Box::new(reader), bytes))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        if let Some(listed) = lock(&self.listed).get(folder) {
            return Ok(listed.clone());
        }
        let (url, place) = self.place(folder)?;
        if url.service == Service::Http {
            let words = "neither model.safetensors nor model.safetensors.index.json can be read \
                         there, and an HTTP server does not list other files: give their URLs";
            return Err(io::Error::new(io::ErrorKind::NotFound, words));
        }
        let keys = self.runtime.wait(list(&place))?.map_err(io::Error::from)?;
        let named = keys.iter().filter_map(|key| key.filename()).map(|name| folder.join(name));
        let listed: Vec<PathBuf> = named.collect();
        lock(&self.listed).insert(folder.to_owned(), listed.clone());
        Ok(listed)
    }

    fn expect(&self, paths: &[PathBuf]) {
        for path in paths {
            // An error comes back when the file is opened.
            if let Ok(opening) = self.opening(path) {
                self.handle().spawn(opening);
            }
        }
    }
}

/// Reads an object from its start. It fetches more and more at a time.
struct ObjectReader {
    object: Arc<Object>,
    runtime: Arc<Runtime>,
    at: u64,
    /// Bytes that were fetched, and where they begin.
    ahead: Vec<u8>,
    ahead_at: u64,
    step: usize,
}

impl Read for ObjectReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let head = self.object.head();
        let from = match usize::try_from(self.at) {
            Ok(at) if at < head.len() => &head[at..],
            _ => {
                let end = self.ahead_at + self.ahead.len() as u64;
                if self.at >= end {
                    let left = self.object.bytes().saturating_sub(self.at);
                    let wanted = (self.step.max(out.len()) as u64).min(left) as usize;
                    self.ahead = vec![0; wanted];
                    self.ahead_at = self.at;
                    self.runtime.wait(self.object.read_at(self.at, &mut self.ahead))??;
                    self.step = (2 * self.step).min(FETCH_BYTES_MAX);
                }
                &self.ahead[(self.at - self.ahead_at) as usize..]
            }
        };
        let count = from.len().min(out.len());
        out[..count].copy_from_slice(&from[..count]);
        self.at += count as u64;
        Ok(count)
    }
}
