//! The open model and what all handlers share.

use std::sync::Arc;
use std::time::Instant;

use axum::http::StatusCode;
use forebay_chat::Format;
use forebay_engine::engine::{EngineOptions, RequestEnd};
use forebay_engine::{ModelInfo, Session};
use forebay_grammar::Compiler;
use forebay_text::{ChatTemplate, Tokenizer};

use crate::ServeError;
use crate::error::ApiError;
use crate::live::Outlook;
use crate::metrics::Metrics;
use crate::openai::Wanted;
use crate::openai::answer::Choice;
use crate::prepare::{Preparation, Prepared};
use crate::run::Answers;
use crate::worker::Worker;
use crate::{responses, stream};

/// Template for models that have none: a dialogue in plain text.
const PLAIN_TEMPLATE: &str = "{% for message in messages %}{% if message.role == 'user' %}User: \
{{ message.content }}\n{% elif message.role == 'assistant' %}Assistant: {{ message.content }}\n\
{% else %}{{ message.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";

/// Text that begins the next turn of such a dialogue.
const PLAIN_STOP: &str = "\nUser:";

/// A model that answers requests.
pub struct Model {
    pub name: String,
    pub info: ModelInfo,
    pub context: usize,
    pub tokenizer: Arc<Tokenizer>,
    pub compiler: Compiler,
    pub template: ChatTemplate,
    pub format: Format,
    /// True if the model has no template of its own.
    pub plain: bool,
    pub worker: Worker,
    pub load_seconds: f64,
    pub outlook: Outlook,
}

impl Model {
    /// Starts the engine of an open model. `name` is how requests call it.
    ///
    /// # Errors
    /// Returns an error if the model has no tokenizer or its chat template is damaged.
    pub fn start(
        name: String,
        session: Session,
        options: &EngineOptions,
    ) -> Result<Model, ServeError> {
        let tokenizer = session.shared_tokenizer()?;
        let own = session.chat_template();
        let plain = own.is_none();
        if plain {
            tracing::warn!(
                "{name} has no chat template: chats are plain text, \"User:\" and \"Assistant:\""
            );
        }
        let template = match own {
            Some(own) => own.clone(),
            None => ChatTemplate::from_source(PLAIN_TEMPLATE, "", "")?,
        };
        let format = Format::recognise(Some(&template), Some(&tokenizer))?;
        Ok(Model {
            name,
            info: session.info().clone(),
            context: session.context(),
            load_seconds: session.statistics().load_seconds,
            compiler: Compiler::new(&tokenizer),
            tokenizer,
            template,
            format,
            plain,
            worker: Worker::start(session, options)?,
            outlook: Outlook::default(),
        })
    }
}

impl Model {
    /// Adds what the machine can do, which the web page shows beside what it does.
    #[must_use]
    pub fn with_outlook(self, outlook: Outlook) -> Model {
        Model { outlook, ..self }
    }

    /// Returns the most requests that run at a time.
    pub fn parallel(&self) -> usize {
        self.worker.report().running_most
    }
}

/// Runs work that may take long, such as making tokens of a large prompt, beside the threads that talk to clients.
///
/// # Errors
/// Returns the errors of the work, and an error if it panics.
pub async fn work<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| {
        tracing::error!("preparing a request: {error}");
        Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request could not be prepared"))
    })
}

/// What all handlers share.
pub struct App {
    pub model: Model,
    pub metrics: Metrics,
    /// Responses that later requests can continue.
    pub responses: responses::Store,
    pub started: Instant,
    /// Seconds since 1970 when the server started.
    pub created: u64,
}

impl App {
    pub fn new(model: Model) -> App {
        App {
            model,
            metrics: Metrics::new(),
            responses: responses::Store::default(),
            started: Instant::now(),
            created: stream::now(),
        }
    }

    /// Checks the name of a model. Ollama's clients add `:latest`. No name means the only model.
    ///
    /// # Errors
    /// Returns an error with the name of the model that there is.
    pub fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        let own = &self.model.name;
        let Some(name) = name.map(|name| name.strip_suffix(":latest").unwrap_or(name)) else {
            return Ok(());
        };
        if name == own {
            return Ok(());
        }
        let message = format!("model {name:?} is not here: this server has {own:?}");
        let code = Some("model_not_found");
        Err(ApiError {
            code,
            param: Some("model"),
            ..ApiError::new(StatusCode::NOT_FOUND, message)
        })
    }

    /// Makes tokens of a request's prompt.
    ///
    /// # Errors
    /// Returns an error if the prompt is empty, or if the template refuses the conversation.
    pub fn prepare(&self, wanted: Wanted) -> Result<Prepared, ApiError> {
        let preparation = Preparation {
            tokenizer: &self.model.tokenizer,
            compiler: &self.model.compiler,
            template: Some(&self.model.template),
            format: self.model.format.clone(),
            max_tokens: None,
            exact_thinking: false,
        };
        let mut prepared = preparation.prepare(wanted, fastrand::u64(..))?;
        if self.model.plain && !prepared.continues {
            prepared.stops.push(PLAIN_STOP.to_owned());
        }
        Ok(prepared)
    }

    /// Queues a request.
    ///
    /// # Errors
    /// Returns the errors of [`Answers::start`].
    pub async fn start(&self, prepared: &Prepared) -> Result<Answers, ApiError> {
        Answers::start(&self.model.worker, &self.model.tokenizer, prepared, &self.metrics).await
    }

    /// Waits for all answers to a request.
    ///
    /// # Errors
    /// Returns an error if one of them failed.
    pub async fn all(&self, answers: Answers) -> Result<Vec<Choice>, ApiError> {
        let choices = answers.all().await?;
        match choices.iter().any(Choice::has_failed) {
            true => Err(self.failure_of(&choices)),
            false => Ok(choices),
        }
    }

    /// Returns why answers failed.
    pub fn failure_of(&self, choices: &[Choice]) -> ApiError {
        let why = choices.iter().find_map(|choice| match &choice.end {
            RequestEnd::Failed(why) => Some(why.clone()),
            _ => None,
        });
        match why.or_else(|| self.model.worker.failure()) {
            Some(why) => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why),
            None => ApiError::stopped(),
        }
    }
}
