//! Hugging Face folders: `config.json`, safetensors files, tokenizer and chat template.

pub(crate) mod folder;
mod json;
pub mod safetensors;

use std::borrow::Cow;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

pub(crate) use folder::{Folder, read_metadata};
pub use folder::{open, open_weights};
pub use json::parse_config_bytes;

use crate::storage::open_regular;

/// File beside the weights: on disk, or inside a pack.
#[derive(Clone, Debug)]
pub struct Document {
    path: PathBuf,
    embedded: Option<Arc<[u8]>>,
}

impl Document {
    /// Creates a document for a file on disk, which is read only when it is needed.
    pub fn on_disk(path: PathBuf) -> Document {
        Document { path, embedded: None }
    }

    /// Creates a document whose content is already in memory. `path` names it in errors.
    pub fn embedded(path: PathBuf, content: Arc<[u8]>) -> Document {
        Document { path, embedded: Some(content) }
    }

    /// Returns the file's path, for errors.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size in bytes.
    ///
    /// # Errors
    /// Returns an error if the file's metadata cannot be read.
    pub fn bytes(&self) -> std::io::Result<u64> {
        match &self.embedded {
            Some(content) => Ok(content.len() as u64),
            None => Ok(std::fs::metadata(&self.path)?.len()),
        }
    }

    /// Returns the content.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn read(&self) -> std::io::Result<Cow<'_, [u8]>> {
        match &self.embedded {
            Some(content) => Ok(Cow::Borrowed(content)),
            None => {
                let (mut file, _) = open_regular(&self.path)?;
                let mut content = Vec::new();
                file.read_to_end(&mut content)?;
                Ok(Cow::Owned(content))
            }
        }
    }
}

/// Contents of the files beside the weights of a Hugging Face model.
#[derive(Clone, Debug)]
pub struct HfMetadata {
    /// Content of `config.json`, which is an object.
    pub config: Value,
    pub tokenizer_json: Option<Document>,
    /// `tiktoken.model` or `qwen.tiktoken`: the tokens of a byte pair encoding, in the order of their ranks.
    pub tiktoken: Option<Document>,
    /// Content of `tokenizer_config.json`.
    pub tokenizer_config: Option<Value>,
    /// Content of `generation_config.json`.
    pub generation_config: Option<Value>,
    pub chat_templates: ChatTemplates,
}

/// Chat templates of a model. If `chat_template.jinja` exists, it and the files in `additional_chat_templates` are all templates.
/// Otherwise, each template is taken from `additional_chat_templates`, else from `chat_template.json`, else from
/// `tokenizer_config.json`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ChatTemplates {
    pub default: Option<TemplateSource>,
    /// Template for requests with tools, called `tool_use`.
    pub tool_use: Option<TemplateSource>,
}

/// Text of a chat template.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TemplateSource {
    pub text: String,
    /// Where it was found: a file, or an entry of a file.
    pub origin: String,
}
