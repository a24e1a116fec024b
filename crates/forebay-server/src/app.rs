//! What all handlers share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use forebay_requests::{Prepared, Wanted};
use tokio::sync::Semaphore;

use crate::access::Rules;
use crate::error::ApiError;
use crate::files::{FilesOptions, Storage};
use crate::models::{Lease, Models};
use crate::{ollama, responses, stream};

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

/// Makes tokens of a request's prompt.
///
/// # Errors
/// Returns an error if the prompt is empty, or if the template refuses the conversation.
pub async fn prepare(lease: &Lease, wanted: Wanted) -> Result<Prepared, ApiError> {
    let lease = lease.clone();
    work(move || Ok(lease.text.prepare(wanted, Some(lease.context))?)).await
}

/// What all handlers share.
pub struct App {
    pub models: Models,
    /// Responses that later requests can continue.
    pub responses: responses::Store,
    /// Files and batches.
    pub storage: Storage,
    pub rules: Arc<Rules>,
    /// Places for pulls.
    pub pulls: Arc<Semaphore>,
    pub started: Instant,
    /// Time without a part of a streamed answer after which a comment is sent.
    pub ping: Option<Duration>,
    /// Seconds since 1970 when the server started.
    pub created: u64,
}

impl App {
    pub fn new(
        models: Models,
        files: FilesOptions,
        ping: Option<Duration>,
        rules: Arc<Rules>,
    ) -> App {
        App {
            models,
            responses: responses::Store::default(),
            storage: Storage::new(files, rules.keys.count()),
            rules,
            pulls: Arc::new(Semaphore::new(ollama::PULLS_MOST)),
            started: Instant::now(),
            ping,
            created: stream::now(),
        }
    }
}
