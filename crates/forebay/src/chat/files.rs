//! Files of the chat commands `/save` and `/load`: the conversation as JSON, and its keys and values beside it.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufReader, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use forebay_chat::History;
use forebay_engine::{EngineError, KvFileError, Session};
use forebay_store::OutputFile;
use serde_json::Value;

use crate::text_input;

/// Returns the name of the file with the keys and values of the conversation in `path`.
pub fn kv_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".kv");
    name.into()
}

/// Writes a conversation to a file, and the session's keys and values to another one beside it. Returns the bytes of the
/// second, or `None` if the session has read nothing yet. Writes neither or both otherwise. Replaces files only if they are
/// this chat's own (`is_own`).
pub fn save(
    history: &History,
    session: &mut Session,
    path: &Path,
    is_own: bool,
) -> anyhow::Result<Option<u64>> {
    let kv_path = kv_path(path);
    for path in [path, &kv_path] {
        if !is_own && path.symlink_metadata().is_ok() {
            bail!("{}: exists: choose another name", path.display());
        }
    }
    let create = if is_own { OutputFile::replace } else { OutputFile::create };
    let mut file = create(path)?.into_stream();
    let text = serde_json::to_string_pretty(&history.to_json())?;
    writeln!(file, "{text}").with_context(|| format!("{}: cannot be written", path.display()))?;
    if session.cached_tokens().is_empty() {
        file.commit()?;
        if is_own {
            // Keys and values of an earlier conversation would be of no use.
            let _ = std::fs::remove_file(&kv_path);
        }
        return Ok(None);
    }
    let mut kv = create(&kv_path)?.into_stream();
    let bytes = session.write_kv(&mut kv).with_context(|| kv_path.display().to_string())?;
    kv.commit()?;
    file.commit().inspect_err(|_| _ = std::fs::remove_file(&kv_path))?;
    Ok(Some(bytes))
}

/// Reads a conversation written by [`save`], or any JSON list of messages.
pub fn load(path: &Path) -> anyhow::Result<History> {
    let shown = path.display();
    let text = text_input::file(path, &shown.to_string())?;
    let value: Value = serde_json::from_str(&text)
        .with_context(|| format!("{shown}: is not JSON: name a file that /save wrote"))?;
    History::from_json(&value).with_context(|| shown.to_string())
}

/// Takes the keys and values beside a conversation. Returns the number of tokens, or `None` if there are none.
///
/// # Errors
/// Returns an error if they are of no use. The conversation is then read again.
pub fn load_kv(session: &mut Session, path: &Path) -> Result<Option<usize>, EngineError> {
    match File::open(kv_path(path)) {
        Ok(file) => session.read_kv(&mut BufReader::with_capacity(1 << 20, file)).map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(KvFileError::Io(error).into()),
    }
}
