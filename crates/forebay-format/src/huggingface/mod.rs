//! Hugging Face folders: `config.json`, safetensors files, tokenizer and chat template.

pub(crate) mod folder;
pub mod safetensors;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

pub(crate) use folder::{Folder, read_metadata};
pub use folder::{open, open_weights};

/// A file beside the weights: on disk, or inside a pack.
#[derive(Clone, Debug)]
pub struct Document {
    path: PathBuf,
    embedded: Option<Arc<[u8]>>,
}

impl Document {
    /// A file on disk, read when it is needed.
    pub fn on_disk(path: PathBuf) -> Document {
        Document { path, embedded: None }
    }

    /// A file whose content is in memory already; `path` names it in errors.
    pub fn embedded(path: PathBuf, content: Arc<[u8]>) -> Document {
        Document { path, embedded: Some(content) }
    }

    /// The file's name, for errors.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes.
    ///
    /// # Errors
    /// As reading the file's metadata.
    pub fn bytes(&self) -> std::io::Result<u64> {
        match &self.embedded {
            Some(content) => Ok(content.len() as u64),
            None => Ok(std::fs::metadata(&self.path)?.len()),
        }
    }

    /// The content.
    ///
    /// # Errors
    /// As reading the file.
    pub fn read(&self) -> std::io::Result<Cow<'_, [u8]>> {
        match &self.embedded {
            Some(content) => Ok(Cow::Borrowed(content)),
            None => Ok(Cow::Owned(std::fs::read(&self.path)?)),
        }
    }
}

/// The files beside the weights of a Hugging Face model.
#[derive(Clone, Debug)]
pub struct HfMetadata {
    /// `config.json`: an object.
    pub config: Value,
    pub tokenizer_json: Option<Document>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Value>,
    /// `generation_config.json`.
    pub generation_config: Option<Value>,
    /// Source of the chat template: `chat_template.jinja`, else `chat_template.json`, else the
    /// entry in the tokenizer configuration (of several named ones, `default`).
    pub chat_template: Option<String>,
}
