//! Output format of a family of models, and the input that its chat template expects.

use std::str::FromStr;

use forebay_text::{ChatTemplate, RenderInput, Tokenizer};
use serde_json::{Map, Value, json};

use crate::{ChatError, Message};

/// Names under which templates look for the reasoning of a message.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Marks around the parts of a model's answer, and the names that its template uses for them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Format {
    pub(crate) kind: Kind,
    /// Fields of a message that the template reads reasoning from.
    reasoning_fields: Vec<&'static str>,
    /// True if the template writes a tool call's arguments as they are. It then gets the model's own text.
    arguments_as_text: bool,
    /// True if the arguments of DeepSeek's tool calls are in a code block, as in V3 and R1.
    pub(crate) fenced_arguments: bool,
    variables: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All text is content.
    #[default]
    Plain,
    Tagged {
        thinking: bool,
        tools: Option<ToolSyntax>,
    },
    /// gpt-oss: a header with role, recipient and channel before each part.
    Harmony,
}

/// Syntax of a tool call between its tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolSyntax {
    /// Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    Json,
    /// Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
    FunctionTags,
    /// GLM: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.
    ArgumentTags,
    /// DeepSeek V3, R1 and V3.1: `<｜tool▁call▁begin｜>...<｜tool▁call▁end｜>`.
    DeepSeek,
}

/// Amount of thinking that is requested from a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Think {
    On,
    Off,
    Low,
    Medium,
    High,
}

impl Think {
    pub fn name(self) -> &'static str {
        match self {
            Think::On => "on",
            Think::Off => "off",
            Think::Low => "low",
            Think::Medium => "medium",
            Think::High => "high",
        }
    }
}

impl FromStr for Think {
    type Err = String;

    fn from_str(text: &str) -> Result<Think, String> {
        let all = [Think::On, Think::Off, Think::Low, Think::Medium, Think::High];
        let found = all.into_iter().find(|think| think.name() == text);
        found.ok_or_else(|| "must be on, off, low, medium or high".to_owned())
    }
}

impl Format {
    /// Recognises a model's format from its chat template and vocabulary. Without a template, all text is content.
    ///
    /// # Errors
    /// Returns an error if the template cannot be analysed.
    pub fn recognise(
        template: Option<&ChatTemplate>,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Format, ChatError> {
        let Some(template) = template else { return Ok(Format::default()) };
        let source = template.source();
        let token = |text| tokenizer.is_some_and(|tokenizer| tokenizer.token_id(text).is_some());
        let thinking = source.contains("</think>") || (token("<think>") && token("</think>"));
        let tools = tool_syntax(source);
        let kind = if source.contains("<|channel|>") && source.contains("<|message|>") {
            Kind::Harmony
        } else if thinking || tools.is_some() {
            Kind::Tagged { thinking, tools }
        } else {
            Kind::Plain
        };
        let reasoning_fields = REASONING_FIELDS.into_iter().filter(|name| reads(source, name));
        Ok(Format {
            kind,
            reasoning_fields: reasoning_fields.collect(),
            arguments_as_text: writes_arguments_verbatim(template),
            fenced_arguments: source.contains("```json"),
            variables: template.variables()?,
        })
    }

    /// Returns true if the model may think before it answers.
    pub fn reasons(&self) -> bool {
        matches!(self.kind, Kind::Harmony | Kind::Tagged { thinking: true, .. })
    }

    /// Returns true if the model may call tools.
    pub fn calls_tools(&self) -> bool {
        matches!(self.kind, Kind::Harmony | Kind::Tagged { tools: Some(_), .. })
    }

    /// Returns the variables that the template reads besides the conversation.
    pub fn variables(&self) -> &[String] {
        &self.variables
    }

    /// Returns the variables that make the model think as much as `think` requests.
    ///
    /// # Errors
    /// Returns [`ChatError::Think`] with the supported values if the template does not support `think`.
    pub fn think(&self, think: Think) -> Result<Map<String, Value>, ChatError> {
        let has = |name: &str| self.variables.iter().any(|variable| variable == name);
        let switch = ["enable_thinking", "thinking"].into_iter().find(|name| has(name));
        let effort = has("reasoning_effort").then_some("reasoning_effort");
        let set = match think {
            Think::On => switch.map(|name| (name, json!(true))),
            Think::Off => switch.map(|name| (name, json!(false))),
            _ => effort.map(|name| (name, json!(think.name()))),
        };
        if let Some((name, value)) = set {
            return Ok(Map::from_iter([(name.to_owned(), value)]));
        }
        let supported = match (switch, effort) {
            (None, None) => "has no variable that turns thinking on or off".to_owned(),
            (Some(name), _) => format!("supports on and off ({name})"),
            (None, Some(name)) => format!("supports low, medium and high ({name})"),
        };
        Err(ChatError::Think(format!(
            "this model cannot think '{}': its chat template {supported}",
            think.name()
        )))
    }

    /// Checks that the template reads a variable.
    ///
    /// # Errors
    /// Returns [`ChatError::UnknownVariable`] with the variables that the template reads.
    pub fn check_variable(&self, name: &str) -> Result<(), ChatError> {
        if self.variables.iter().any(|variable| variable == name) {
            return Ok(());
        }
        let known = match self.variables.is_empty() {
            true => "it has none".to_owned(),
            false => format!("it has {}", self.variables.join(", ")),
        };
        Err(ChatError::UnknownVariable { name: name.to_owned(), known })
    }

    /// Renders the prompt for a conversation. It ends where the model's answer begins.
    ///
    /// # Errors
    /// Returns the errors of [`ChatTemplate::render`].
    pub fn render(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        tools: Option<&Value>,
        variables: &Map<String, Value>,
    ) -> Result<String, ChatError> {
        let input = RenderInput {
            messages: messages.iter().map(|message| self.for_template(message)).collect(),
            tools: tools.cloned(),
            add_generation_prompt: true,
            variables: variables.clone(),
            now: None,
        };
        Ok(template.render(&input)?)
    }

    /// Returns a message with the fields that the template reads. The template decides which past reasoning stays in
    /// the prompt.
    fn for_template(&self, message: &Message) -> Value {
        let mut value = message.to_json();
        let Some(object) = value.as_object_mut() else { return value };
        object.remove("reasoning_content");
        if let Some(reasoning) = &message.reasoning {
            for field in &self.reasoning_fields {
                object.insert((*field).to_owned(), json!(reasoning));
            }
            // The template of gpt-oss uses the reasoning of a tool call or its preamble, never both. The model was
            // trained to see its reasoning.
            if self.kind == Kind::Harmony && !message.tool_calls.is_empty() {
                object.insert("content".into(), json!(""));
            }
        }
        if !self.arguments_as_text
            && let Some(Value::Array(calls)) = object.get_mut("tool_calls")
        {
            calls.iter_mut().for_each(arguments_to_value);
        }
        value
    }
}

/// Replaces the text of a call's arguments by the JSON that it holds. Text that is not JSON, such as an answer that was
/// cut, stays text.
fn arguments_to_value(call: &mut Value) {
    let Some(arguments) = call.pointer_mut("/function/arguments") else { return };
    let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
    if let Some(parsed) = parsed {
        *arguments = parsed;
    }
}

fn tool_syntax(source: &str) -> Option<ToolSyntax> {
    if source.contains("<｜tool▁call▁begin｜>") {
        Some(ToolSyntax::DeepSeek)
    } else if !source.contains("<tool_call>") {
        None
    } else if source.contains("<arg_key>") {
        Some(ToolSyntax::ArgumentTags)
    } else if source.contains("<function=") {
        Some(ToolSyntax::FunctionTags)
    } else {
        Some(ToolSyntax::Json)
    }
}

/// Returns true if a template reads a field `name`, as `.name`, `['name']` or `'name' in`.
fn reads(source: &str, name: &str) -> bool {
    source.match_indices(name).any(|(at, _)| {
        let before = source[..at].chars().next_back();
        let after = source[at + name.len()..].chars().next();
        before.is_some_and(|c| matches!(c, '.' | '\'' | '"'))
            && after.is_none_or(|c| !c.is_alphanumeric() && c != '_')
    })
}

/// Returns true if the template writes the text of a tool call's arguments as it is. Some templates do. Others turn a
/// value into JSON and would quote a text, and some iterate over an object.
fn writes_arguments_verbatim(template: &ChatTemplate) -> bool {
    const ARGUMENTS: &str = "{\"needle\":  1}";
    let function = json!({ "name": "f", "arguments": ARGUMENTS });
    let call = json!([{ "type": "function", "id": "call00000", "function": function }]);
    let messages = json!([
        { "role": "user", "content": "x" },
        { "role": "assistant", "content": "", "tool_calls": call },
    ]);
    let input = RenderInput { messages, ..RenderInput::default() };
    template.render(&input).is_ok_and(|prompt| prompt.contains(ARGUMENTS))
}
