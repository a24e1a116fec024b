//! Chat templates: render conversations to prompts, as `apply_chat_template` of transformers does.
//!
//! Templates are Jinja programs that are part of a model, so they are untrusted. `program.rs` bounds their steps, and
//! `process.rs` their memory: after [`isolate_templates`], every template has a process of its own.

mod comparisons;
mod defaults;
mod functions;
mod generation;
mod json;
mod limits;
mod lists;
mod literals;
mod methods;
mod process;
mod program;
mod stack;
mod strings;
mod time;
mod wire;

use std::sync::Arc;

use forebay_format::{Catalog, GgufMetadata, Source};
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
    /// Where in the model's files it was found.
    origin: String,
    /// Template for requests with tools.
    of_tools: Option<Box<ChatTemplate>>,
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
const TOOLS_TEMPLATE_KEY: &str = "tokenizer.chat_template.tool_use";

impl ChatTemplate {
    /// Returns the template of a model, if it has one. A template that the model has for requests with tools is a part of it.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateSyntax`] if a template is not valid, and
    /// [`TextError::WrongType`] if it is not text.
    pub fn from_catalog(catalog: &Catalog) -> Result<Option<Self>, TextError> {
        let (sources, bos, eos) = match &catalog.source {
            Source::Gguf(metadata) => {
                let token = |key| {
                    let id = usize::try_from(metadata.u64(key)?).ok()?;
                    metadata.strings("tokenizer.ggml.tokens")?.get_str(id)
                };
                let sources = [TEMPLATE_KEY, TOOLS_TEMPLATE_KEY].map(|key| of_gguf(metadata, key));
                let [default, tools] = sources;
                let bos = token("tokenizer.ggml.bos_token_id");
                ([default?, tools?], bos, token("tokenizer.ggml.eos_token_id"))
            }
            Source::HuggingFace(metadata) => {
                let token = |name| {
                    let entry = metadata.tokenizer_config.as_ref()?.get(name)?;
                    entry.as_str().or_else(|| entry.get("content")?.as_str())
                };
                let all = &metadata.chat_templates;
                let sources = [&all.default, &all.tool_use].map(|source| {
                    source.as_ref().map(|source| (source.text.as_str(), source.origin.as_str()))
                });
                (sources, token("bos_token"), token("eos_token"))
            }
        };
        let (bos, eos) = (bos.unwrap_or_default(), eos.unwrap_or_default());
        let create = |(source, origin): (&str, &str)| {
            let template = Self::from_source(source, bos, eos)?;
            Ok::<_, TextError>(Self { origin: origin.to_owned(), ..template })
        };
        let (default, tools) = match sources {
            [None, tools] => (tools, None),
            [default, tools] => (default, tools),
        };
        let Some(default) = default.map(create).transpose()? else { return Ok(None) };
        let of_tools = tools.map(create).transpose()?.map(Box::new);
        Ok(Some(Self { of_tools, ..default }))
    }

    /// Returns the template for requests with tools, if the model has one of its own for them.
    pub fn of_tools(&self) -> Option<&ChatTemplate> {
        self.of_tools.as_deref()
    }

    /// Returns where in the model's files the template was found. It is empty for other templates.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Creates a template from its text. `bos` and `eos` become its `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateSyntax`] if the template is not valid.
    pub fn from_source(source: &str, bos: &str, eos: &str) -> Result<Self, TextError> {
        let Some(host) = Host::start(source, bos, eos)? else {
            return Self::in_this_process(source, bos, eos);
        };
        Ok(Self::new(source, bos, eos, Place::Process(Arc::new(host))))
    }

    /// Creates a template that runs in this process, even after [`isolate_templates`]. Its memory is not limited.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateSyntax`] if the template is not valid.
    pub fn in_this_process(source: &str, bos: &str, eos: &str) -> Result<Self, TextError> {
        let place = Place::Here(Box::new(Program::new(source)?));
        Ok(Self::new(source, bos, eos, place))
    }

    fn new(source: &str, bos: &str, eos: &str, place: Place) -> Self {
        let [source, bos, eos] = [source, bos, eos].map(str::to_owned);
        Self { source, bos, eos, origin: String::new(), of_tools: None, place }
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

/// Returns the template of a GGUF and its key.
fn of_gguf<'a>(
    metadata: &'a GgufMetadata,
    key: &'static str,
) -> Result<Option<(&'a str, &'static str)>, TextError> {
    let Some(value) = metadata.get(key) else { return Ok(None) };
    let text = value.as_str().ok_or_else(|| TextError::WrongType {
        key,
        expected: "a string of valid UTF-8",
        found: value.describe(),
    })?;
    Ok(Some((text, key)))
}

#[cfg(test)]
mod tests;
