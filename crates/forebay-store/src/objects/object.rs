//! One object, read by ranges. Everything that fails and may succeed later is repeated here.

use std::error::Error;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use object_store::client::{HttpError, HttpErrorKind};
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore};

use super::requests::{Answer, Requests};

/// Longest time without a byte. After it, a request counts as failed.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time before the first repetition. It doubles with each one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Repetitions of a first request that reaches no server. The address is probably wrong, so the caller hears of it soon.
const RETRIES_UNREACHED: u32 = 2;
/// Bytes that are read when an object is opened. They include the whole header of most files.
pub(super) const HEAD_BYTES: u64 = 256 << 10;

/// A read that failed for good.
#[derive(Debug)]
pub(crate) struct Failure {
    pub attempts: u32,
    pub source: io::Error,
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> io::Error {
        match failure.attempts {
            0 | 1 => failure.source,
            attempts => {
                let words = format!("after {attempts} attempts: {}", failure.source);
                io::Error::new(failure.source.kind(), words)
            }
        }
    }
}

/// Reason why an attempt failed.
pub(super) enum Trouble {
    /// Another attempt may succeed.
    Passing(io::Error),
    Lasting(io::Error),
}

/// What tells one content of an object from the next.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Identity {
    bytes: u64,
    e_tag: Option<String>,
    /// In seconds. HTTP has no fractions.
    modified: i64,
}

impl Identity {
    fn of(meta: &ObjectMeta) -> Identity {
        let modified = meta.last_modified.timestamp();
        Identity { bytes: meta.size, e_tag: meta.e_tag.clone(), modified }
    }

    /// Returns words about what has changed.
    fn change(&self, now: &Identity) -> String {
        let what = if self.bytes != now.bytes {
            format!("it had {} bytes, now it has {}", self.bytes, now.bytes)
        } else if self.e_tag != now.e_tag {
            let show = |tag: &Option<String>| tag.clone().unwrap_or_else(|| "none".to_owned());
            format!("its ETag was {}, now it is {}", show(&self.e_tag), show(&now.e_tag))
        } else {
            "its date is another one".to_owned()
        };
        format!("the object has changed since it was opened: {what}")
    }
}

/// Where an object is, before anything is known about it.
#[derive(Clone)]
pub(super) struct Place {
    pub name: PathBuf,
    pub store: Arc<dyn ObjectStore>,
    pub key: Key,
    /// Number of times that a failed request is repeated.
    pub retries: u32,
    /// All requests to the store.
    pub requests: Arc<Requests>,
}

/// An object that was opened. All reads are of the content that it had then.
pub(crate) struct Object {
    place: Place,
    identity: Identity,
    /// First bytes, read when the object was opened.
    head: Mutex<Arc<[u8]>>,
}

impl std::fmt::Debug for Object {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Object").field("name", &self.place.name).finish_non_exhaustive()
    }
}

impl Object {
    /// Asks for the first bytes of an object, and so for its size.
    pub(super) async fn open(place: Place) -> Result<Object, Failure> {
        let mut attempts = Attempts::of_first_contact(place.retries);
        loop {
            let trouble = match open_once(&place).await {
                Ok((identity, head)) => {
                    let head = Mutex::new(head.into());
                    return Ok(Object { place, identity, head });
                }
                Err(trouble) => trouble,
            };
            attempts.pause_after(trouble, &place.name).await?;
        }
    }

    pub fn bytes(&self) -> u64 {
        self.identity.bytes
    }

    /// Returns the first bytes, unless they were forgotten.
    pub fn head(&self) -> Arc<[u8]> {
        Arc::clone(&self.head.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Frees the first bytes. A model of many files would hold much memory with them.
    pub fn forget_head(&self) {
        *self.head.lock().unwrap_or_else(PoisonError::into_inner) = Arc::default();
    }

    /// Reads a range inside the object and gives its bytes to `take`, in order and each once.
    pub async fn read(
        &self,
        range: Range<u64>,
        take: &mut (dyn FnMut(&[u8]) + Send),
    ) -> Result<(), Failure> {
        let Range { mut start, end } = range;
        let mut attempts = Attempts::new(self.place.retries);
        while start < end {
            // What has arrived is not read again.
            let result = self.read_once(&mut start, end, take).await;
            let Err(trouble) = result else { break };
            attempts.pause_after(trouble, &self.place.name).await?;
        }
        Ok(())
    }

    async fn read_once(
        &self,
        start: &mut u64,
        end: u64,
        take: &mut (dyn FnMut(&[u8]) + Send),
    ) -> Result<(), Trouble> {
        // A weak tag never matches, by the rules of HTTP. It is compared below.
        let strong = self.identity.e_tag.clone().filter(|tag| !tag.starts_with("W/"));
        let (place, range) = (&self.place, *start..end);
        let ask = || get(place, range.clone(), strong.clone());
        let Answer { content: found, connection: _connection } = place.requests.ask(ask).await?;
        let now = Identity::of(&found.meta);
        if now != self.identity {
            let words = self.identity.change(&now);
            return Err(Trouble::Lasting(io::Error::other(words)));
        }
        let mut parts = found.into_stream();
        while *start < end {
            let part = match patiently(parts.next()).await? {
                Some(part) => part.map_err(trouble)?,
                None => {
                    let words = format!("the body ended {} bytes too early", end - *start);
                    let error = io::Error::new(io::ErrorKind::UnexpectedEof, words);
                    return Err(Trouble::Passing(error));
                }
            };
            if part.len() as u64 > end - *start {
                let words = "the body is longer than the range that was asked for";
                return Err(Trouble::Lasting(io::Error::other(words)));
            }
            take(&part);
            *start += part.len() as u64;
        }
        Ok(())
    }

    /// Fills as much of `out` as the object has from `offset` on, and returns the number of bytes.
    pub async fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize, Failure> {
        let left = self.bytes().saturating_sub(offset).min(out.len() as u64) as usize;
        let mut at = 0;
        let mut take = |part: &[u8]| {
            out[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        self.read(offset..offset + left as u64, &mut take).await?;
        Ok(left)
    }
}

/// Returns the keys of all objects that are directly in a folder.
pub(super) async fn list(folder: &Place) -> Result<Vec<Key>, Failure> {
    let prefix = Some(&folder.key).filter(|key| !key.as_ref().is_empty());
    let mut attempts = Attempts::of_first_contact(folder.retries);
    loop {
        let found = patiently(folder.store.list_with_delimiter(prefix)).await;
        let trouble = match found.and_then(|found| found.map_err(trouble)) {
            Ok(found) => return Ok(found.objects.into_iter().map(|meta| meta.location).collect()),
            Err(trouble) => trouble,
        };
        attempts.pause_after(trouble, &folder.name).await?;
    }
}

async fn open_once(place: &Place) -> Result<(Identity, Vec<u8>), Trouble> {
    let ask = || get(place, 0..HEAD_BYTES, None);
    let Answer { content: found, connection: _connection } = match place.requests.ask(ask).await {
        // There is no range of an empty object.
        Err(Trouble::Lasting(error)) if error.to_string().contains(EMPTY) => {
            let identity = Identity { bytes: 0, e_tag: None, modified: 0 };
            return Ok((identity, Vec::new()));
        }
        found => found?,
    };
    let identity = Identity::of(&found.meta);
    let wanted = (found.range.end - found.range.start) as usize;
    let mut head = Vec::with_capacity(wanted);
    let mut parts = found.into_stream();
    while let Some(part) = patiently(parts.next()).await? {
        head.extend_from_slice(&part.map_err(trouble)?);
    }
    if head.len() != wanted {
        let words = format!("the body has {} bytes instead of {wanted}", head.len());
        return Err(Trouble::Passing(io::Error::new(io::ErrorKind::UnexpectedEof, words)));
    }
    Ok((identity, head))
}

async fn get(
    place: &Place,
    range: Range<u64>,
    if_match: Option<String>,
) -> Result<GetResult, Trouble> {
    let options =
        GetOptions { range: Some(GetRange::Bounded(range)), if_match, ..GetOptions::default() };
    patiently(place.store.get_opts(&place.key, options)).await?.map_err(trouble)
}

/// Waits for something that the server sends, but not forever.
async fn patiently<T>(waited_for: impl Future<Output = T>) -> Result<T, Trouble> {
    tokio::time::timeout(PATIENCE, waited_for).await.map_err(|_| {
        let words = format!("nothing has arrived for {} s", PATIENCE.as_secs());
        Trouble::Passing(io::Error::new(io::ErrorKind::TimedOut, words))
    })
}

/// Counts attempts, and waits between them.
struct Attempts {
    made: u32,
    retries: u32,
    /// Repetitions while no server is reached.
    retries_unreached: u32,
}

impl Attempts {
    fn new(retries: u32) -> Attempts {
        Attempts { made: 0, retries, retries_unreached: retries }
    }

    /// Counts attempts to reach a server that has not answered yet.
    fn of_first_contact(retries: u32) -> Attempts {
        Attempts { retries_unreached: retries.min(RETRIES_UNREACHED), ..Attempts::new(retries) }
    }

    fn retries_after(&self, error: &io::Error) -> u32 {
        match error.kind() {
            io::ErrorKind::NotConnected | io::ErrorKind::TimedOut => self.retries_unreached,
            _ => self.retries,
        }
    }

    /// Returns the trouble if another attempt is of no use. Otherwise waits until it is time for one.
    async fn pause_after(&mut self, trouble: Trouble, name: &Path) -> Result<(), Failure> {
        self.made += 1;
        let source = match trouble {
            Trouble::Passing(source) if self.made <= self.retries_after(&source) => source,
            Trouble::Passing(source) | Trouble::Lasting(source) => {
                return Err(Failure { attempts: self.made, source });
            }
        };
        let pause = FIRST_PAUSE.saturating_mul(1 << (self.made - 1).min(10)).min(LONGEST_PAUSE);
        // Many requests that failed together do not come back together.
        let pause = pause.mul_f64(0.5 + 0.5 * fastrand::f64());
        tracing::debug!(name = %name.display(), attempt = self.made, %source, "repeating a request");
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// Words of object_store before the number of a status.
const STATUS: &str = "non-2xx status code: ";
const EMPTY: &str = "status 416";
/// Words of object_store about a server that ignores ranges.
const WITHOUT_RANGES: [&str; 2] = ["Received non-partial response", "Range request not supported"];

/// Sorts an error of object_store, and puts it into words without the URL, whose query may be a secret.
fn trouble(error: object_store::Error) -> Trouble {
    use object_store::Error as Of;
    let kind = match &error {
        Of::NotFound { .. } => io::ErrorKind::NotFound,
        Of::PermissionDenied { .. } | Of::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        Of::NotSupported { .. } | Of::NotImplemented { .. } => io::ErrorKind::Unsupported,
        _ if is_unreached(&error) => io::ErrorKind::NotConnected,
        _ => io::ErrorKind::Other,
    };
    let said = chain(&error);
    let status = said.iter().find_map(|words| {
        let rest = words.split_once(STATUS)?.1;
        Some((rest.get(..3)?.parse::<u16>().ok()?, rest.split_once(": ").map_or("", |rest| rest.1)))
    });
    let is_lasting = match (&error, status) {
        (Of::Generic { .. }, Some((status, _))) => {
            status < 500 && ![408, 425, 429].contains(&status)
        }
        (Of::Generic { .. }, None) => said.iter().any(|words| {
            words.contains("Received redirect without LOCATION")
                || WITHOUT_RANGES.iter().any(|it| words.contains(it))
                || words.contains("Content-Range header not present")
        }),
        _ => true,
    };
    let words = match (&error, status) {
        (Of::Precondition { .. }, _) => {
            "the object has changed since it was opened (its ETag no longer matches)".to_owned()
        }
        (_, Some((404, body))) => format!("there is no such object{}", in_brackets(body)),
        (_, Some((status @ (401 | 403), body))) => {
            format!("access is denied (status {status}){}", in_brackets(body))
        }
        (_, Some((416, _))) => EMPTY.to_owned(),
        (_, Some((status, body))) => {
            format!("the server answered with status {status}{}", in_brackets(body))
        }
        (_, None)
            if said.iter().any(|words| WITHOUT_RANGES.iter().any(|it| words.contains(it))) =>
        {
            "the server sent the whole file instead of a range, so it cannot be read in parts"
                .to_owned()
        }
        (_, None) => said.join(": "),
    };
    let error = io::Error::new(kind, words);
    if is_lasting { Trouble::Lasting(error) } else { Trouble::Passing(error) }
}

/// Returns true if no connection to the server was made.
fn is_unreached(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let of_http = error.downcast_ref::<HttpError>();
        if of_http.is_some_and(|error| matches!(error.kind(), HttpErrorKind::Connect)) {
            return true;
        }
        next = error.source();
    }
    false
}

/// Returns what an error and its causes say. The first ones of a failed request, which have the URL, are left out.
fn chain(error: &dyn Error) -> Vec<String> {
    let mut said: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        next = error.source();
        let words = error.to_string();
        // An error that repeats its cause adds nothing but the URL.
        let repeats = next.is_some_and(|cause| words.contains(&cause.to_string()));
        if !repeats && !said.contains(&words) {
            said.push(words);
        }
    }
    said
}

/// Returns the message inside the XML or JSON of a server, or the start of its text.
fn in_brackets(body: &str) -> String {
    let between = |start: &str, end: &str| body.split_once(start)?.1.split_once(end).map(|it| it.0);
    let message = match (between("<Code>", "</Code>"), between("<Message>", "</Message>")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        _ => body.split_whitespace().collect::<Vec<_>>().join(" "),
    };
    match message.is_empty() {
        true => String::new(),
        false => format!(" ({})", message.chars().take(200).collect::<String>()),
    }
}
