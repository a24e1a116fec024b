//! What turns requests for a model into tokens, and tokens into text.

use std::sync::{Arc, Once};

use forebay_chat::{ChatError, Format};
use forebay_engine::{ModelInfo, ModelText};
use forebay_grammar::{Compiler, Place};
use forebay_text::{ChatTemplate, TextError, Tokenizer};

use crate::prepare::{Preparation, Prepared};
use crate::request::{Input, Refusal, Wanted};

/// Reason why a chat template cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error(transparent)]
    Text(#[from] TextError),
    #[error(transparent)]
    Chat(#[from] ChatError),
}

/// Template for models that have none: a dialogue in plain text.
const PLAIN_TEMPLATE: &str = "{% for message in messages %}{% if message.role == 'user' %}User: \
{{ message.content }}\n{% elif message.role == 'assistant' %}Assistant: {{ message.content }}\n\
{% else %}{{ message.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";

/// Text that begins the next turn of such a dialogue.
const PLAIN_STOP: &str = "\nUser:";

/// What turns requests for a model into tokens, and tokens into text. It needs no weights.
pub struct Text {
    pub info: ModelInfo,
    pub tokenizer: Arc<Tokenizer>,
    pub template: ChatTemplate,
    pub format: Format,
    compiler: Compiler,
    /// True if the model has no template of its own.
    is_plain: bool,
    /// Name of the model in the log.
    name: String,
    /// True to refuse variables that the template does not know.
    exact_variables: bool,
    /// Done once the log says that the model's template has no tool calls.
    tools_logged: Once,
}

impl Text {
    /// Prepares the text of a model. `name` is how requests call it, and `place` says which thread compiles grammars.
    ///
    /// # Errors
    /// Returns an error if the chat template is damaged.
    pub fn new(name: &str, text: ModelText, place: Place) -> Result<Text, TemplateError> {
        let ModelText { info, tokenizer, chat_template } = text;
        let is_plain = chat_template.is_none();
        if is_plain {
            tracing::warn!(
                "{name} has no chat template: chats are plain text, \"User:\" and \"Assistant:\""
            );
        }
        let template = match chat_template {
            Some(own) => own,
            None => ChatTemplate::from_source(PLAIN_TEMPLATE, "", "")?,
        };
        let format = Format::recognise(Some(&template), Some(&tokenizer))?;
        let compiler = Compiler::new(&tokenizer).at(place);
        Ok(Text {
            info,
            tokenizer,
            template,
            format,
            compiler,
            is_plain,
            name: name.to_owned(),
            exact_variables: false,
            tools_logged: Once::new(),
        })
    }

    /// Refuses requests with variables that the chat template does not know. Otherwise such variables have no effect.
    #[must_use]
    pub fn with_exact_variables(self) -> Text {
        Text { exact_variables: true, ..self }
    }

    /// Lets special tokens in the text of messages be special tokens. The writer of a part of a message can then end it and
    /// begin another one.
    #[must_use]
    pub fn with_special_tokens_in_messages(self) -> Text {
        Text { format: self.format.clone().with_special_tokens_in_messages(), ..self }
    }

    /// Makes tokens of a request's prompt. `context` is the number of positions of a sequence, if it is known.
    ///
    /// # Errors
    /// Returns an error if the prompt is empty or cannot fit, or if the template refuses the conversation.
    pub fn prepare(&self, wanted: Wanted, context: Option<usize>) -> Result<Prepared, Refusal> {
        self.prepare_with(wanted, context, fastrand::u64(..))
    }

    /// Makes tokens of a request's prompt. `seed` is for a request that names none.
    ///
    /// # Errors
    /// Returns the errors of [`Text::prepare`].
    pub fn prepare_with(
        &self,
        wanted: Wanted,
        context: Option<usize>,
        seed: u64,
    ) -> Result<Prepared, Refusal> {
        if matches!(&wanted.input, Input::Chat { tools: Some(_), .. }) && !self.format.calls_tools()
        {
            let name = &self.name;
            self.tools_logged.call_once(|| {
                tracing::warn!(
                    "{name}'s chat template has no tool calls: the system message describes the tools, and calls \
                     have the form <tool_call>{{...}}</tool_call>"
                );
            });
        }
        let preparation = Preparation {
            tokenizer: &self.tokenizer,
            compiler: &self.compiler,
            template: Some(&self.template),
            format: self.format.clone(),
            max_tokens: None,
            context,
            exact_thinking: false,
            exact_variables: self.exact_variables,
        };
        let mut prepared = preparation.prepare(wanted, seed)?;
        let is_chat = !prepared.continues || prepared.continued.is_some();
        if self.is_plain && is_chat {
            prepared.stops.push(PLAIN_STOP.to_owned());
        }
        Ok(prepared)
    }
}
