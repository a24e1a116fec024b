//! A loaded model, and the part of it that stays when it leaves.

use std::sync::{Arc, Once};

use forebay_chat::Format;
use forebay_engine::{Engine, ModelInfo, ModelText};
use forebay_grammar::Compiler;
use forebay_text::{ChatTemplate, Tokenizer};

use crate::ServeError;
use crate::error::ApiError;
use crate::live::Outlook;
use crate::metrics::Counts;
use crate::models::{Loaded, Memory, ModelsOptions};
use crate::openai::answer::Choice;
use crate::openai::{Input, Wanted};
use crate::prepare::{Preparation, Prepared};
use crate::worker::Worker;

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
    /// Done once the log says that the model's template has no tool calls.
    tools_logged: Once,
}

impl Text {
    /// Prepares the text of a model. `name` is how requests call it.
    ///
    /// # Errors
    /// Returns an error if the chat template is damaged.
    pub fn new(name: &str, text: ModelText) -> Result<Text, ServeError> {
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
        let compiler = Compiler::new(&tokenizer);
        let (name, tools_logged) = (name.to_owned(), Once::new());
        Ok(Text { info, tokenizer, template, format, compiler, is_plain, name, tools_logged })
    }

    /// Makes tokens of a request's prompt. `context` is the number of positions of a sequence, if it is known.
    ///
    /// # Errors
    /// Returns an error if the prompt is empty or cannot fit, or if the template refuses the conversation.
    pub fn prepare(&self, wanted: Wanted, context: Option<usize>) -> Result<Prepared, ApiError> {
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
    ) -> Result<Prepared, ApiError> {
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
        };
        let mut prepared = preparation.prepare(wanted, seed)?;
        if self.is_plain && !prepared.continues {
            prepared.stops.push(PLAIN_STOP.to_owned());
        }
        Ok(prepared)
    }
}

/// A model that answers requests.
pub struct Model {
    pub name: String,
    pub text: Arc<Text>,
    pub context: usize,
    pub worker: Worker,
    pub load_seconds: f64,
    pub memory: Memory,
    pub outlook: Arc<Outlook>,
    pub counts: Counts,
}

impl Model {
    /// Starts the engine of an open model. `text` is the model's own from an earlier load.
    ///
    /// # Errors
    /// Returns an error if the model has no tokenizer or its chat template is damaged.
    pub fn start(
        name: &str,
        loaded: Loaded,
        text: Option<Arc<Text>>,
        options: &ModelsOptions,
        counts: Counts,
    ) -> Result<Model, ServeError> {
        let Loaded { session, memory, outlook } = loaded;
        let text = match text {
            Some(text) => text,
            None => Arc::new(Text::new(name, session.text()?)?),
        };
        let (context, load_seconds) = (session.context(), session.statistics().load_seconds);
        let mut engine = Engine::new(session, &options.engine);
        if let Some(disk) = &options.kv_disk {
            engine.set_kv_disk(disk.clone(), name)?;
        }
        Ok(Model {
            name: name.to_owned(),
            text,
            context,
            load_seconds,
            worker: Worker::start(engine)?,
            memory,
            outlook,
            counts,
        })
    }

    /// Returns why answers failed.
    pub fn failure_of(&self, choices: &[Choice]) -> ApiError {
        if let Some(error) = choices.iter().find_map(Choice::failure) {
            return error;
        }
        match self.worker.failure() {
            Some(why) => ApiError::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, why),
            None => ApiError::stopped(),
        }
    }
}
