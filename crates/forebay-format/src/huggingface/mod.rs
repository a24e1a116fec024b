//! Hugging Face folders: `config.json`, safetensors files, tokenizer and chat template.

mod folder;
pub mod safetensors;

use std::path::PathBuf;

use serde_json::Value;

pub use folder::open;

/// The files beside the weights of a Hugging Face model.
#[derive(Clone, Debug)]
pub struct HfMetadata {
    /// `config.json`: an object.
    pub config: Value,
    pub tokenizer_json: Option<PathBuf>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Value>,
    /// `generation_config.json`.
    pub generation_config: Option<Value>,
    /// Source of the chat template: `chat_template.jinja`, else `chat_template.json`, else the
    /// entry in the tokenizer configuration (of several named ones, `default`).
    pub chat_template: Option<String>,
}
