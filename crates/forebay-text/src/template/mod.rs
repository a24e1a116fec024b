//! Chat templates: render conversations to prompts, as `apply_chat_template` of transformers does.
//!
//! Templates are Jinja programs that are part of a model, so they are untrusted. A render has a
//! budget of steps. Its stack is large enough for the deepest values that so many steps can build.
//! Memory is not bounded: a template that doubles a text over and over can use it up.

mod functions;
mod generation;
mod json;
mod methods;
mod stack;
mod time;

use std::error::Error as _;

use forebay_format::{Catalog, Source};
use minijinja::{AutoEscape, Environment, ErrorKind, Value, syntax::SyntaxConfig};
use serde_json::Map;

use crate::TextError;
use functions::Refusal;
pub use time::CivilTime;

/// Number of steps that every render may take, and of additional steps per JSON value of the
/// conversation. The largest published templates take 1,200 for ten messages, about 40 per value.
const STEPS_BASE: u64 = 200_000;
const STEPS_PER_VALUE: u64 = 300;
const STEPS_MAX: u64 = 3_000_000;

/// Limit of the nesting of macros, loops and calls.
const DEPTH_LIMIT: usize = 200;

/// Length limit of a template's source. Published ones stay below 64 KiB.
const SOURCE_BYTES_MAX: usize = 512 << 10;

/// A model's chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
    bos: String,
    eos: String,
    environment: Environment<'static>,
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

const NAME: &str = "chat_template";
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
        let syntax = |reason: String| TextError::TemplateSyntax { reason };
        if source.len() > SOURCE_BYTES_MAX {
            return Err(syntax(format!("{} bytes are too many for a template", source.len())));
        }
        let mut environment = Environment::new();
        let rules = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(rules.map_err(|error| syntax(error.to_string()))?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_recursion_limit(DEPTH_LIMIT);
        environment.set_unknown_method_callback(methods::unknown_method);
        functions::install(&mut environment);
        let program = generation::without_generation_tags(source);
        // The shortest operator that nests, a minus sign, takes one byte.
        let levels = program.len() as u64;
        let added = stack::with_room(levels, || environment.add_template_owned(NAME, program))?;
        added.map_err(|error| syntax(describe(&error)))?;
        Ok(Self {
            source: source.to_owned(),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            environment,
        })
    }

    /// Returns the template as the model's files have it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the variables that the template reads and that are not part of every conversation,
    /// such as `enable_thinking`, in alphabetical order.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateFailed`] if the system has no memory for the analysis.
    pub fn variables(&self) -> Result<Vec<String>, TextError> {
        const ALWAYS_SET: [&str; 5] =
            ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];
        let levels = self.source.len() as u64;
        let found = stack::with_room(levels, || {
            self.environment.get_template(NAME).map(|template| template.undeclared_variables(false))
        })?;
        let mut names: Vec<String> = found.map_err(|error| failure(&error))?.into_iter().collect();
        let mut environment = self.environment.clone();
        functions::install_clock(&mut environment, None);
        names.retain(|name| {
            !ALWAYS_SET.contains(&name.as_str())
                && environment.globals().all(|(global, _)| global != name)
        });
        names.sort_unstable();
        Ok(names)
    }

    /// Renders the prompt for a conversation.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateRefused`] if the template raises an exception, and
    /// [`TextError::TemplateFailed`] for every other failure, including too many steps.
    pub fn render(&self, input: &RenderInput) -> Result<String, TextError> {
        let tools = input.tools.as_ref().unwrap_or(&serde_json::Value::Null);
        let values = json::count(&input.messages) + json::count(tools);
        let steps = STEPS_MAX.min(STEPS_BASE + STEPS_PER_VALUE * values);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(steps));
        functions::install_clock(&mut environment, input.now);
        // A step can nest a value one level deeper.
        let rendered = stack::with_room(steps, || {
            environment.get_template(NAME)?.render(self.context(input, tools))
        })?;
        rendered.map_err(|error| failure(&error))
    }

    fn context(&self, input: &RenderInput, tools: &serde_json::Value) -> Value {
        let mut context = Vec::with_capacity(input.variables.len() + 5);
        context.push(("messages", json::to_template_value(&input.messages)));
        context.push(("tools", json::to_template_value(tools)));
        context.push(("add_generation_prompt", Value::from(input.add_generation_prompt)));
        context.push(("bos_token", Value::from(self.bos.as_str())));
        context.push(("eos_token", Value::from(self.eos.as_str())));
        for (name, value) in &input.variables {
            context.push((name, json::to_template_value(value)));
        }
        Value::from_pairs(context)
    }
}

fn failure(error: &minijinja::Error) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = error.source();
    while let Some(inner) = cause {
        if let Some(Refusal(message)) = inner.downcast_ref() {
            return TextError::TemplateRefused { message: message.clone() };
        }
        cause = inner.source();
    }
    TextError::TemplateFailed { reason: describe(error) }
}

/// Describes an error and the line of the template in which it occurred.
fn describe(error: &minijinja::Error) -> String {
    if error.kind() == ErrorKind::OutOfFuel {
        return "it does not come to an end".to_owned();
    }
    let what = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    match error.line() {
        Some(line) => format!("line {line}: {what}"),
        None => what,
    }
}

#[cfg(test)]
mod tests;
