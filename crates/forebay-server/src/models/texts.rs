//! Tokenizers, chat templates and descriptions of models that are not loaded. They are small, and take longer to read than a
//! cached model takes to load.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use forebay_engine::{ModelInfo, ModelText};
use forebay_requests::Text;

use super::Entry;
use crate::ServeError;

/// Most models whose texts are kept. A text takes some tens of megabytes.
const TEXTS_MOST: usize = 16;

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
        if known.len() > TEXTS_MOST {
            known.remove(0);
        }
    }

    /// Returns the text of a model, and reads it if it is not known.
    ///
    /// # Errors
    /// Returns an error if the model cannot be read.
    pub fn open(texts: &Mutex<Texts>, entry: &Entry) -> Result<Arc<Text>, ServeError> {
        if let Some(text) = Texts::known(texts, entry) {
            return Ok(text);
        }
        let text = Arc::new(Text::new(&entry.name, ModelText::open(&entry.path)?)?);
        Texts::keep(texts, entry, &text);
        Ok(text)
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
    /// Returns an error if the model cannot be read.
    pub fn info(texts: &Mutex<Texts>, entry: &Entry) -> Result<Arc<ModelInfo>, String> {
        let lock = || texts.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = Stamp::of(&entry.path);
        if let Some((of, info)) = lock().infos.get(&entry.path)
            && Some(*of) == stamp
        {
            return Ok(info.clone());
        }
        let info = Arc::new(ModelText::info(&entry.path).map_err(|error| error.to_string())?);
        if let Some(stamp) = stamp {
            lock().infos.insert(entry.path.clone(), (stamp, info.clone()));
        }
        Ok(info)
    }
}
