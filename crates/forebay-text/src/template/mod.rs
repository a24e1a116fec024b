//! Chat templates: render conversations to prompts, as `apply_chat_template` of transformers does.
//!
//! Templates are Jinja programs that are part of a model, so they are untrusted. `program.rs` bounds their steps, and
//! `process.rs` their memory: after [`isolate_templates`], every template has a process of its own.

mod defaults;
mod functions;
mod generation;
mod json;
mod limits;
mod lists;
mod methods;
mod process;
mod program;
mod stack;
mod time;
mod wire;

use std::sync::Arc;

use forebay_format::{Catalog, Source};
use serde_json::Map;

use crate::TextError;
pub use limits::serve_template_within_limits;
use process::Host;
pub use process::isolate_templates;
use program::Program;
pub use time::CivilTime;

/// A model's chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
    bos: String,
    eos: String,
    place: Place,
}

/// Where a template runs.
#[derive(Clone, Debug)]
enum Place {
    Here(Box<Program>),
    Process(Arc<Host>),
}

/// Input of a template.
#[derive(Clone, Debug, Default)]
pub struct RenderInput {
    /// A list of objects with `role` and `content`.
    pub messages: serde_json::Value,
    /// Descriptions of functions that the model may call.
    pub tools: Option<serde_json::Value>,
    /// True if the prompt ends where the model's answer begins.
    pub add_generation_prompt: bool,
    /// Additional variables, such as `enable_thinking`. They take precedence over the fields above
    /// and over `bos_token` and `eos_token`.
    pub variables: Map<String, serde_json::Value>,
    /// Time that `strftime_now` uses. `None` selects the system's clock (UTC).
    pub now: Option<CivilTime>,
}

const TEMPLATE_KEY: &str = "tokenizer.chat_template";

impl ChatTemplate {
    /// Returns the template of a model, if it has one.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateSyntax`] if the template is not valid, and
    /// [`TextError::WrongType`] if it is not text.
    pub fn from_catalog(catalog: &Catalog) -> Result<Option<Self>, TextError> {
        let (source, bos, eos) = match &catalog.source {
            Source::Gguf(metadata) => {
                let token = |key| {
                    let id = usize::try_from(metadata.u64(key)?).ok()?;
                    metadata.strings("tokenizer.ggml.tokens")?.get_str(id)
                };
                let source = match metadata.get(TEMPLATE_KEY) {
                    None => None,
                    Some(value) => Some(value.as_str().ok_or_else(|| TextError::WrongType {
                        key: TEMPLATE_KEY,
                        expected: "a string of valid UTF-8",
                        found: value.describe(),
                    })?),
                };
                let bos = token("tokenizer.ggml.bos_token_id");
                (source, bos, token("tokenizer.ggml.eos_token_id"))
            }
            Source::HuggingFace(metadata) => {
                let token = |name| {
                    let entry = metadata.tokenizer_config.as_ref()?.get(name)?;
                    entry.as_str().or_else(|| entry.get("content")?.as_str())
                };
                let source = metadata.chat_template.as_deref();
                (source, token("bos_token"), token("eos_token"))
            }
        };
        let Some(source) = source else { return Ok(None) };
        Self::from_source(source, bos.unwrap_or_default(), eos.unwrap_or_default()).map(Some)
    }

    /// Creates a template from its text. `bos` and `eos` become its `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateSyntax`] if the template is not valid.
    pub fn from_source(source: &str, bos: &str, eos: &str) -> Result<Self, TextError> {
        let Some(host) = Host::start(source, bos, eos)? else {
            return Self::in_this_process(source, bos, eos);
        };
        let [source, bos, eos] = [source, bos, eos].map(str::to_owned);
        Ok(Self { source, bos, eos, place: Place::Process(Arc::new(host)) })
    }

    /// Creates a template that runs in this process, even after [`isolate_templates`]. Its memory is not limited.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateSyntax`] if the template is not valid.
    pub fn in_this_process(source: &str, bos: &str, eos: &str) -> Result<Self, TextError> {
        let place = Place::Here(Box::new(Program::new(source)?));
        let [source, bos, eos] = [source, bos, eos].map(str::to_owned);
        Ok(Self { source, bos, eos, place })
    }

    /// Returns the template as the model's files have it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the variables that the template reads and that are not part of every conversation,
    /// such as `enable_thinking`, in alphabetical order.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateFailed`] if the analysis needs too much memory.
    pub fn variables(&self) -> Result<Vec<String>, TextError> {
        match &self.place {
            Place::Here(program) => program.variables(),
            Place::Process(host) => Ok(host.variables()?.lines().map(str::to_owned).collect()),
        }
    }

    /// Renders the prompt for a conversation.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateRefused`] if the template raises an exception, and
    /// [`TextError::TemplateFailed`] for every other failure, including too many steps and too much memory.
    pub fn render(&self, input: &RenderInput) -> Result<String, TextError> {
        match &self.place {
            Place::Here(program) => program.render(input, &self.bos, &self.eos),
            Place::Process(host) => host.render(input),
        }
    }
}

#[cfg(test)]
mod tests;
