//! Output format of a family of models, and the input that its chat template expects.

use std::str::FromStr;

use forebay_text::{ChatTemplate, ContentMarks, Prompt, RenderInput, Tokenizer};
use serde_json::{Map, Value, json};

use crate::continued::Open;
use crate::conversation::Needs;
use crate::offer::Offer;
use crate::syntax::ThinkMarks;
use crate::{ChatError, Message, SuffixedMarks, ToolSyntax};

/// Marks around the parts of a model's answer, and the form of conversations that its template takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Format {
    pub(crate) kind: Kind,
    /// Tools that the model may call.
    pub(crate) offer: Offer,
    needs: Needs,
    variables: Vec<String>,
    /// Keep the text of messages apart from control tokens.
    marks: ContentMarks,
    /// Format of the template for requests with tools, if the model has one of its own for them.
    with_tools: Option<Box<Format>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All text is content.
    #[default]
    Plain,
    Tagged {
        thinking: Option<ThinkMarks>,
        tools: Option<ToolSyntax>,
    },
    /// gpt-oss: a header with role, recipient and channel before each part.
    Harmony,
    /// Muse: a header with role and recipient before each part.
    Muse,
}

/// Where a prompt ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptEnd {
    /// Where the answer begins, behind what the template writes before an answer.
    #[default]
    Answer,
    /// Behind the text of the last message, which the answer continues.
    Continued,
    /// Behind the last message.
    Nothing,
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

/// Variables for the amount of thinking.
const EFFORTS: [&str; 3] = ["reasoning_effort", "thinking_effort", "reasoning_strength"];

impl Format {
    /// Recognises a model's format from its chat template and vocabulary. Without a template, all text is content. Without a
    /// tokenizer, nothing keeps the text of messages from becoming control tokens.
    ///
    /// # Errors
    /// Returns an error if the template cannot be analysed.
    pub fn recognise(
        template: Option<&ChatTemplate>,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Format, ChatError> {
        let Some(template) = template else { return Ok(Format::default()) };
        let with_tools = template.of_tools().map(|own| Format::of(own, tokenizer, true));
        let format = Format::of(template, tokenizer, false)?;
        Ok(Format { with_tools: with_tools.transpose()?.map(Box::new), ..format })
    }

    /// Recognises the format of one template. `for_tools` is true for one that is only for requests with tools.
    fn of(
        template: &ChatTemplate,
        tokenizer: Option<&Tokenizer>,
        for_tools: bool,
    ) -> Result<Format, ChatError> {
        let source = template.source();
        let token =
            |text: &str| tokenizer.is_some_and(|tokenizer| tokenizer.token_id(text).is_some());
        let suffixed = SuffixedMarks::recognise(template);
        let thinking = ThinkMarks::recognise(source, suffixed, token);
        let tools = ToolSyntax::recognise(template, suffixed, token);
        let kind = if tools == Some(ToolSyntax::Atem) && source.contains("<|eom|>") {
            Kind::Muse
        } else if source.contains("<|channel|>") && source.contains("<|message|>") {
            Kind::Harmony
        } else if thinking.is_some() || tools.is_some() {
            Kind::Tagged { thinking, tools }
        } else {
            Kind::Plain
        };
        Ok(Format {
            kind,
            offer: Offer::Unknown,
            needs: Needs::of(template, tools, kind == Kind::Harmony, for_tools),
            variables: template.variables()?,
            marks: tokenizer.map(ContentMarks::of).unwrap_or_default(),
            with_tools: None,
        })
    }

    /// Returns the format of a model for which special tokens in the text of messages are special tokens. The writer of a
    /// part of a message can then end it and begin another one.
    #[must_use]
    pub fn with_special_tokens_in_messages(self) -> Format {
        let with_tools = self.with_tools.map(|own| Box::new(own.with_special_tokens_in_messages()));
        Format { marks: ContentMarks::default(), with_tools, ..self }
    }

    /// Returns the format of answers to a request with these tools. Without tools, everything that looks like a call is
    /// text. A model whose template has no tool calls writes them in the form of Hermes, which
    /// [`render`](Format::render) describes to it.
    pub fn offering(&self, tools: Option<&Value>) -> Format {
        let offer = Offer::of(tools);
        if let (Offer::Tools(_), Some(own)) = (&offer, &self.with_tools) {
            return own.offering(tools);
        }
        let kind = match (self.kind, &offer) {
            (Kind::Plain, Offer::Tools(_)) => {
                Kind::Tagged { thinking: None, tools: Some(ToolSyntax::Json) }
            }
            (Kind::Tagged { thinking, tools: None }, Offer::Tools(_)) => {
                Kind::Tagged { thinking, tools: Some(ToolSyntax::Json) }
            }
            (kind, _) => kind,
        };
        Format { kind, offer, ..self.clone() }
    }

    /// Returns true if the model may think before it answers.
    pub fn reasons(&self) -> bool {
        matches!(self.kind, Kind::Harmony | Kind::Muse | Kind::Tagged { thinking: Some(_), .. })
    }

    /// Returns true if the model may call tools.
    pub fn calls_tools(&self) -> bool {
        matches!(self.kind, Kind::Harmony | Kind::Muse | Kind::Tagged { tools: Some(_), .. })
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
        let effort = EFFORTS.into_iter().find(|name| has(name));
        let switch = self.switch().filter(|(name, _)| has(name));
        let turned = |on: bool| {
            switch.as_ref().map(|(name, [off_value, on_value])| {
                (*name, if on { on_value.clone() } else { off_value.clone() })
            })
        };
        let set = match think {
            Think::On => vec![turned(true)],
            Think::Off => vec![turned(false)],
            // The effort may be the switch. DeepSeek V4 reads it only if thinking is on.
            _ if effort.is_some() => {
                vec![turned(true), effort.map(|name| (name, json!(think.name())))]
            }
            _ => Vec::new(),
        };
        let set: Map<String, Value> =
            set.into_iter().flatten().map(|(name, value)| (name.to_owned(), value)).collect();
        if !set.is_empty() {
            return Ok(set);
        }
        let supported = match (switch, effort) {
            (None, None) => "has no variable that turns thinking on or off".to_owned(),
            (Some((name, _)), _) => format!("supports on and off ({name})"),
            (None, Some(name)) => format!("supports low, medium and high ({name})"),
        };
        Err(ChatError::Think(format!(
            "this model cannot think '{}': its chat template {supported}",
            think.name()
        )))
    }

    /// Returns the variable that turns thinking off and on, and its values for both.
    fn switch(&self) -> Option<(&'static str, [Value; 2])> {
        let has = |name: &str| self.variables.iter().any(|variable| variable == name);
        let of_family = match self.kind {
            Kind::Tagged { thinking: Some(marks), .. } => marks.switch(),
            _ => None,
        };
        let boolean = ["enable_thinking", "thinking"].into_iter().find(|name| has(name));
        let mode = || {
            has("thinking_mode").then(|| ("thinking_mode", [json!("disabled"), json!("enabled")]))
        };
        of_family.or_else(|| boolean.map(|name| (name, [json!(false), json!(true)]))).or_else(mode)
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

    /// Renders the prompt for a conversation. It ends where the model's answer begins. What the template cannot write
    /// itself, such as tools or a system message, becomes text of another message. The text of messages and tools cannot become
    /// control tokens, unless the format allows it.
    ///
    /// # Errors
    /// Returns the errors of [`ChatTemplate::render`].
    pub fn render(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        tools: Option<&Value>,
        variables: &Map<String, Value>,
    ) -> Result<Prompt, ChatError> {
        self.render_to(PromptEnd::Answer, template, messages, tools, variables)
    }

    /// Renders the prompt for a conversation up to `end`.
    ///
    /// # Errors
    /// Returns the errors of [`ChatTemplate::render`], and an error if the last message cannot be continued.
    pub fn render_to(
        &self,
        end: PromptEnd,
        template: &ChatTemplate,
        messages: &[Message],
        tools: Option<&Value>,
        variables: &Map<String, Value>,
    ) -> Result<Prompt, ChatError> {
        let open = match end {
            PromptEnd::Continued => Some(Open::of(messages, (tools, variables))?),
            PromptEnd::Answer | PromptEnd::Nothing => None,
        };
        let messages = open.as_ref().map_or(messages, |open| &open.messages);
        let (template, format) = match template.of_tools().filter(|_| offers(tools)) {
            Some(own) => (own, self.with_tools.as_deref().unwrap_or(self)),
            None => (template, self),
        };
        let (messages, tools) = format.needs.apply(messages, tools, &format.marks);
        let variables = variables.iter();
        let variables = variables.map(|(name, value)| (name.clone(), format.marks.value(value)));
        let input = RenderInput {
            messages,
            tools,
            add_generation_prompt: end == PromptEnd::Answer,
            variables: variables.collect(),
            now: None,
        };
        let rendered = template.render(&input)?;
        let rendered = match open {
            Some(open) => open.cut(rendered)?,
            None => rendered,
        };
        Ok(format.marks.finish(rendered))
    }
}

/// Returns true if there is a tool in the list.
fn offers(tools: Option<&Value>) -> bool {
    tools.is_some_and(|tools| tools.as_array().is_none_or(|list| !list.is_empty()))
}
