//! A template that runs in this process.
//!
//! A render has a budget of steps. Its stack is large enough for the deepest values that so many steps can build. Its memory
//! is not bounded here: see `process.rs`.

use std::error::Error as _;

use minijinja::{AutoEscape, Environment, ErrorKind, Value, syntax::SyntaxConfig};

use super::functions::{self, Refusal};
use super::{
    RenderInput, comparisons, defaults, generation, json, lists, literals, methods, stack, strings,
};
use crate::TextError;

/// Number of steps that every render may take, and of additional steps per JSON value of the
/// conversation. The largest published templates take 1,200 for ten messages, about 40 per value.
const STEPS_BASE: u64 = 200_000;
const STEPS_PER_VALUE: u64 = 300;
const STEPS_MAX: u64 = 3_000_000;

/// Limit of the nesting of macros, loops and calls.
const DEPTH_LIMIT: usize = 200;

/// Length limit of a template's source. Published ones stay below 64 KiB.
pub const SOURCE_BYTES_MAX: usize = 512 << 10;

const NAME: &str = "chat_template";

/// A compiled template.
#[derive(Clone, Debug)]
pub struct Program {
    source_bytes: u64,
    /// True if the template changes lists.
    changes_lists: bool,
    /// Variables that the template gives a default under the same name.
    with_defaults: Vec<String>,
    environment: Environment<'static>,
}

impl Program {
    /// Compiles a template.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateSyntax`] if the template is not valid.
    pub fn new(source: &str) -> Result<Program, TextError> {
        let syntax = |reason: String| TextError::TemplateSyntax { reason };
        if source.len() > SOURCE_BYTES_MAX {
            return Err(syntax(format!("{} bytes are too many for a template", source.len())));
        }
        let mut environment = Environment::new();
        let rules = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let rules = rules.map_err(|error| syntax(error.to_string()))?;
        environment.set_syntax(rules.clone());
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_formatter(functions::print);
        environment.set_recursion_limit(DEPTH_LIMIT);
        environment.set_unknown_method_callback(methods::unknown_method);
        functions::install(&mut environment);
        comparisons::install(&mut environment);
        strings::install(&mut environment);
        let program = literals::with_known_escapes(&generation::without_generation_tags(source));
        let program = comparisons::with_filtered_operands(&program, rules.clone());
        let with_defaults = defaults::variables_with_defaults(&program, rules.clone());
        // The shortest operator that nests, a minus sign, takes one byte.
        let levels = source.len() as u64;
        let added = stack::with_room(levels, || {
            if let Some(changed) = lists::with_changeable_lists(&program, rules)
                && environment.add_template_owned(NAME, changed).is_ok()
            {
                return Ok(true);
            }
            environment.add_template_owned(NAME, program).map(|()| false)
        })?;
        let changes_lists = added.map_err(|error| syntax(describe(&error)))?;
        let source_bytes = source.len() as u64;
        Ok(Program { source_bytes, changes_lists, with_defaults, environment })
    }

    /// Returns the variables that the template reads and that are not part of every conversation,
    /// such as `enable_thinking`, in alphabetical order.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateFailed`] if the system has no memory for the analysis.
    pub fn variables(&self) -> Result<Vec<String>, TextError> {
        const ALWAYS_SET: [&str; 5] =
            ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];
        let found = stack::with_room(self.source_bytes, || {
            self.environment.get_template(NAME).map(|template| template.undeclared_variables(false))
        })?;
        let mut names: Vec<String> = found.map_err(|error| failure(&error))?.into_iter().collect();
        names.extend(self.with_defaults.iter().cloned());
        let mut environment = self.environment.clone();
        functions::install_clock(&mut environment, None);
        lists::install(&mut environment, 0);
        names.retain(|name| {
            !ALWAYS_SET.contains(&name.as_str())
                && environment.globals().all(|(global, _)| global != name)
        });
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// Renders the prompt for a conversation. `bos` and `eos` are the template's `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateRefused`] if the template raises an exception, and
    /// [`TextError::TemplateFailed`] for every other failure, including too many steps.
    pub fn render(&self, input: &RenderInput, bos: &str, eos: &str) -> Result<String, TextError> {
        let steps = steps(input);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(steps));
        functions::install_clock(&mut environment, input.now);
        if self.changes_lists {
            lists::install(&mut environment, steps);
        }
        // A step can nest a value one level deeper.
        let rendered = stack::with_room(steps, || {
            environment.get_template(NAME)?.render(context(input, bos, eos))
        })?;
        rendered.map_err(|error| failure(&error))
    }

    /// Returns the bytes of stack that a template of this length is compiled with.
    pub fn stack_to_compile(source: &str) -> u64 {
        stack::bytes(source.len() as u64)
    }

    /// Returns the bytes of stack that a conversation is rendered with.
    pub fn stack_to_render(input: &RenderInput) -> u64 {
        stack::bytes(steps(input))
    }
}

/// Returns how many steps a render may take.
fn steps(input: &RenderInput) -> u64 {
    let tools = input.tools.as_ref().map_or(1, json::count);
    STEPS_MAX.min(STEPS_BASE + STEPS_PER_VALUE * (json::count(&input.messages) + tools))
}

fn context(input: &RenderInput, bos: &str, eos: &str) -> Value {
    let mut context = Vec::with_capacity(input.variables.len() + 5);
    let tools = input.tools.as_ref().unwrap_or(&serde_json::Value::Null);
    context.push(("messages", json::to_template_value(&input.messages)));
    context.push(("tools", json::to_template_value(tools)));
    // transformers sets it even if there is none, and templates test it for that.
    context.push(("documents", Value::from(())));
    context.push(("add_generation_prompt", Value::from(input.add_generation_prompt)));
    context.push(("bos_token", Value::from(bos)));
    context.push(("eos_token", Value::from(eos)));
    for (name, value) in &input.variables {
        context.push((name, json::to_template_value(value)));
    }
    Value::from_pairs(context)
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
