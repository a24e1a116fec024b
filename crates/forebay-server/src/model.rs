//! A loaded model.

use std::sync::Arc;

use axum::http::StatusCode;
use forebay_engine::Engine;
use forebay_requests::{Choice, Text, Worker};

use crate::ServeError;
use crate::error::ApiError;
use crate::live::Outlook;
use crate::metrics::Counts;
use crate::models::{Loaded, Memory, ModelsOptions};

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
            None => options.text(name, session.text()?)?,
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
            return error.into();
        }
        match self.worker.failure() {
            Some(why) => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why),
            None => ApiError::stopped(),
        }
    }
}
