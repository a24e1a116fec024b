//! Files of the chat commands `/save` and `/load`.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use forebay_chat::History;
use forebay_store::OutputFile;
use serde_json::Value;

/// Writes a conversation to a new file.
pub fn save(history: &History, path: &Path) -> anyhow::Result<()> {
    if path.symlink_metadata().is_ok() {
        bail!("{}: exists: choose another name", path.display());
    }
    let mut file = OutputFile::create(path)?.into_stream();
    let text = serde_json::to_string_pretty(&history.to_json())?;
    writeln!(file, "{text}").with_context(|| format!("{}: cannot be written", path.display()))?;
    Ok(file.commit()?)
}

/// Reads a conversation written by [`save`], or any JSON list of messages.
pub fn load(path: &Path) -> anyhow::Result<History> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("{shown}: cannot be read"))?;
    let value: Value = serde_json::from_str(&text)
        .with_context(|| format!("{shown}: is not JSON: name a file that /save wrote"))?;
    History::from_json(&value).with_context(|| shown.to_string())
}
