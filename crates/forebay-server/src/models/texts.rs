//! Tokenizers, chat templates and descriptions of models that are not loaded. They are small, and take longer to read than a
//! cached model takes to load.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use forebay_engine::{ModelInfo, ModelText};
use forebay_grammar::Place;
use forebay_requests::Text;

use super::Entry;
use crate::ServeError;

/// Prepares the text of a model. With `special_tokens_in_messages`, special tokens in messages are special tokens.
pub(crate) fn prepared(
    name: &str,
    text: ModelText,
    special_tokens_in_messages: bool,
) -> Result<Arc<Text>, ServeError> {
    let text = Text::new(name, text, Place::ThisThread)?;
    Ok(Arc::new(match special_tokens_in_messages {
        true => text.with_special_tokens_in_messages(),
        false => text,
    }))
}

/// Most models whose texts are kept. A text takes some tens of megabytes.
const TEXTS_MAX: usize = 16;

/// Longest time that a request waits for a model's text.
const TEXT_TIME: Duration = Duration::from_secs(15);
/// Longest time that a list waits for the description of a model.
const INFO_TIME: Duration = Duration::from_secs(5);

/// Texts and descriptions by path.
#[derive(Default)]
pub struct Texts {
    /// The text that was used last comes last.
    texts: Vec<(PathBuf, Stamp, Arc<Text>)>,
    infos: HashMap<PathBuf, (Stamp, Arc<ModelInfo>)>,
    digests: HashMap<PathBuf, (Stamp, String)>,
}

/// State of a model's file or folder. If it differs, the model was replaced.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(path: &Path) -> Option<Stamp> {
        let metadata = std::fs::metadata(path).ok()?;
        Some(Stamp { bytes: metadata.len(), modified: metadata.modified().ok() })
    }
}

impl Texts {
    /// Returns the text of a model from an earlier call, if the model has not changed since.
    pub fn known(texts: &Mutex<Texts>, entry: &Entry) -> Option<Arc<Text>> {
        let stamp = Stamp::of(&entry.path)?;
        let mut texts = texts.lock().unwrap_or_else(PoisonError::into_inner);
        let known = &mut texts.texts;
        let at = known.iter().position(|(path, of, _)| *path == entry.path && *of == stamp)?;
        let found = known.remove(at);
        let text = found.2.clone();
        known.push(found);
        Some(text)
    }

    /// Keeps the text of a model.
    pub fn keep(texts: &Mutex<Texts>, entry: &Entry, text: &Arc<Text>) {
        let Some(stamp) = Stamp::of(&entry.path) else { return };
        let mut texts = texts.lock().unwrap_or_else(PoisonError::into_inner);
        texts.infos.insert(entry.path.clone(), (stamp, Arc::new(text.info.clone())));
        let known = &mut texts.texts;
        known.retain(|(path, ..)| *path != entry.path);
        known.push((entry.path.clone(), stamp, text.clone()));
        if known.len() > TEXTS_MAX {
            known.remove(0);
        }
    }

    /// Returns the text of a model, and reads it if it is not known.
    ///
    /// # Errors
    /// Returns an error if the model cannot be read, or not in time.
    pub fn open(
        texts: &Arc<Mutex<Texts>>,
        reads: &Arc<Reads>,
        entry: &Entry,
        special_tokens_in_messages: bool,
    ) -> Result<Arc<Text>, String> {
        let (own, entry) = (texts.clone(), entry.clone());
        let path = entry.path.clone();
        let read = move || -> Result<Arc<Text>, ServeError> {
            // Another read may have ended meanwhile.
            if let Some(text) = Texts::known(&own, &entry) {
                return Ok(text);
            }
            let text = ModelText::open(&entry.path)?;
            let text = prepared(&entry.name, text, special_tokens_in_messages)?;
            Texts::keep(&own, &entry, &text);
            Ok(text)
        };
        reads.read(&path, TEXT_TIME, read)?.map_err(|error| error.to_string())
    }

    /// Returns the digest of a model's content, which is read if it is not known. `None` if it cannot be read.
    pub fn digest(texts: &Mutex<Texts>, path: &Path) -> Option<String> {
        let lock = || texts.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = Stamp::of(path)?;
        if let Some((of, digest)) = lock().digests.get(path)
            && *of == stamp
        {
            return Some(digest.clone());
        }
        let digest = forebay_engine::digest(path);
        let digest =
            digest.inspect_err(|why| tracing::debug!("no digest of a model: {why}")).ok()?;
        lock().digests.insert(path.to_owned(), (stamp, digest.clone()));
        Some(digest)
    }

    /// Returns the description of a model, and reads it if it is not known.
    ///
    /// # Errors
    /// Returns an error if the model cannot be read, or not in time.
    pub fn info(
        texts: &Arc<Mutex<Texts>>,
        reads: &Arc<Reads>,
        entry: &Entry,
    ) -> Result<Arc<ModelInfo>, String> {
        let (own, path) = (texts.clone(), entry.path.clone());
        let read = move || {
            let lock = || own.lock().unwrap_or_else(PoisonError::into_inner);
            let stamp = Stamp::of(&path);
            if let Some((of, info)) = lock().infos.get(&path)
                && Some(*of) == stamp
            {
                return Ok(info.clone());
            }
            let info = Arc::new(ModelText::info(&path).map_err(|error| error.to_string())?);
            if let Some(stamp) = stamp {
                lock().infos.insert(path, (stamp, info.clone()));
            }
            Ok(info)
        };
        reads.read(&entry.path, INFO_TIME, read)?
    }
}

/// Reads of models that go on. Each has a thread of its own, and each model has one at a time, so a disk that does not answer takes
/// one thread for each of its models and holds up no other model for long.
#[derive(Default)]
pub struct Reads {
    going: Mutex<HashMap<PathBuf, Instant>>,
    ended: Condvar,
}

impl Reads {
    /// Reads a model with `read` after other reads of it have ended. Waits up to `limit`, and not at all for a read that takes
    /// longer already.
    fn read<T: Send + 'static>(
        self: &Arc<Reads>,
        path: &Path,
        limit: Duration,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let late = || format!("reading its files takes longer than {} seconds", limit.as_secs());
        let until = Instant::now() + limit;
        let mut going = self.lock();
        while let Some(since) = going.get(path) {
            let left = until.min(*since + limit).saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late());
            }
            let waited = self.ended.wait_timeout(going, left);
            going = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        going.insert(path.to_owned(), Instant::now());
        drop(going);
        let (sender, done) = channel();
        let (own, name) = (self.clone(), path.to_owned());
        let run = move || {
            let result = catch_unwind(AssertUnwindSafe(read));
            own.lock().remove(&name);
            own.ended.notify_all();
            // Nobody may wait any more.
            let _ = sender.send(result);
        };
        let builder = thread::Builder::new().name("read".into());
        if let Err(error) = builder.spawn(run) {
            self.lock().remove(path);
            return Err(format!("the system starts no thread: {error}"));
        }
        let left = until.saturating_duration_since(Instant::now());
        match done.recv_timeout(left) {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(_)) => Err("the program failed while it read the model".to_owned()),
            Err(_) => Err(late()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, Instant>> {
        self.going.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_that_stands_still_holds_up_no_other_model() {
        let reads = Arc::new(Reads::default());
        let (end, ends) = channel::<()>();
        let (slow, short) = (Path::new("slow"), Duration::from_millis(1));
        let hangs = move || ends.recv().is_err();
        assert!(reads.read(slow, short, hangs).unwrap_err().contains("takes longer"));
        let long = Duration::from_secs(600);
        assert_eq!(reads.read(Path::new("other"), long, || 7), Ok(7));
        // No second thread stands still.
        assert!(reads.read(slow, short, || 7).is_err());
        assert_eq!(reads.lock().len(), 1);
        drop(end);
        assert_eq!(reads.read(slow, long, || 7), Ok(7));
        assert!(reads.read(slow, long, || -> u32 { panic!("on purpose") }).is_err());
        assert_eq!(reads.read(slow, long, || 7), Ok(7));
    }
}
