//! What all handlers share.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay_requests::{Prepared, Refusal, Wanted};

use crate::access::Rules;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::files::Storage;
use crate::lifetime::Lifetime;
use crate::models::{Entry, Lease, Models};
use crate::pool::{FOR_EVER, Pool, PoolOptions};
use crate::quota::Quota;
use crate::server::ServerOptions;
use crate::{ollama, responses, stream};

/// Longest time for which a request waits for its prompt and its grammar.
const PREPARING_TIME: Duration = Duration::from_secs(20);

/// Most requests that are answered at a time.
const REQUESTS_MAX: usize = 2048;
/// Most bodies of the largest size that are in memory.
const BODIES_MAX: usize = 16;

/// Threads for short work: bodies, folders and lists.
const SHORT: PoolOptions = PoolOptions {
    name: "short",
    work: "reading the request",
    threads: 16,
    threads_each: 4,
    waiting_each: 256,
    waiting_time: FOR_EVER,
    stack_bytes: 4 << 20,
};

/// Threads for templates and tokenizers, which may take long.
const PREPARING: PoolOptions = PoolOptions {
    name: "preparing",
    work: "preparing the prompt",
    threads: 16,
    threads_each: 2,
    waiting_each: 128,
    waiting_time: FOR_EVER,
    stack_bytes: 64 << 20,
};

/// Returns the options of the threads for requests with a grammar, some of which take minutes. So other requests of the caller do
/// not wait for them, and one caller takes half of the processors at most.
fn compiling() -> PoolOptions {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    PoolOptions {
        name: "compiling",
        work: "preparing the prompt and the grammar",
        threads_each: (processors / 2).clamp(1, PREPARING.threads_each),
        waiting_time: PREPARING_TIME,
        stack_bytes: forebay_grammar::COMPILING_STACK_BYTES,
        ..PREPARING
    }
}

/// What all handlers share.
pub struct App {
    pub models: Models,
    /// Responses that later requests can continue.
    pub responses: responses::Store,
    /// Files and batches.
    pub storage: Storage,
    pub rules: Arc<Rules>,
    /// Threads for bodies, folders and lists.
    short: Pool,
    /// Threads for templates and tokenizers.
    preparing: Pool,
    /// Threads for requests with a grammar.
    compiling: Pool,
    /// Requests that are being answered.
    pub requests: Arc<Quota>,
    /// Bytes of bodies that are in memory.
    pub body_bytes: Arc<Quota>,
    /// Models that are being pulled.
    pub pulls: Arc<Quota>,
    /// Whether the server is ready.
    pub lifetime: Lifetime,
    pub started: Instant,
    /// Time without a part of a streamed answer after which a comment is sent.
    pub ping: Option<Duration>,
    /// Seconds since 1970 when the server started.
    pub created: u64,
}

impl App {
    pub fn new(models: Models, options: &ServerOptions) -> App {
        let ServerOptions { files, ping, body_bytes, .. } = options.clone();
        let (rules, several) = (Arc::new(Rules::new(options)), options.has_several_callers());
        App {
            models,
            responses: responses::Store::default(),
            storage: Storage::new(files, rules.keys.count()),
            rules,
            short: Pool::new(SHORT),
            preparing: Pool::new(PREPARING),
            compiling: Pool::new(compiling()),
            requests: Quota::new("requests", REQUESTS_MAX, several),
            body_bytes: Quota::of_bytes("requests", BODIES_MAX.saturating_mul(body_bytes), several),
            pulls: Quota::new("pulls", ollama::PULLS_MAX, several),
            lifetime: Lifetime::default(),
            started: Instant::now(),
            ping,
            created: stream::now(),
        }
    }

    /// Runs work that blocks for a short time, such as reading a body or a folder.
    ///
    /// # Errors
    /// Returns the errors of the work, and those of [`Pool::run`].
    pub async fn work<T: Send + 'static>(
        &self,
        caller: &Caller,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.short.run(caller, None, work).await
    }

    /// Runs work with a model's text: template and tokenizer. It may take long, so it has threads of its own.
    ///
    /// # Errors
    /// Returns the errors of the work, and those of [`Pool::run`].
    pub async fn prepare<T: Send + 'static>(
        &self,
        caller: &Caller,
        prepare: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.preparing.run(caller, Some(PREPARING_TIME), prepare).await
    }

    /// Makes a request ready to run by `prepare`. If its answer has a form, whose grammar is compiled, threads for that do it.
    ///
    /// # Errors
    /// Returns the errors of the work, and those of [`Pool::run`].
    pub async fn prepare_wanted(
        &self,
        caller: &Caller,
        wanted: Wanted,
        prepare: impl FnOnce(Wanted) -> Result<Prepared, Refusal> + Send + 'static,
    ) -> Result<Prepared, ApiError> {
        let pool = if wanted.has_form() { &self.compiling } else { &self.preparing };
        let work = move || Ok(prepare(wanted)?);
        pool.run(caller, Some(PREPARING_TIME), work).await
    }

    /// Returns the number of tokens of the prompt of the request that `read` gives, with its model.
    ///
    /// # Errors
    /// Returns the errors of `read` and of [`App::prepared`].
    pub async fn count_tokens(
        self: &Arc<App>,
        caller: &Caller,
        read: impl FnOnce() -> Result<(Entry, Wanted), ApiError> + Send + 'static,
    ) -> Result<usize, ApiError> {
        let own = self.clone();
        let count = move || {
            let (entry, wanted) = read()?;
            let prepared = own.models.text(&entry)?.prepare(wanted.without_form(), None)?;
            Ok(prepared.request.prompt.len())
        };
        self.prepare(caller, count).await
    }

    /// Makes tokens of a request's prompt.
    ///
    /// # Errors
    /// Returns an error if the prompt is empty, or if the template refuses the conversation.
    pub async fn prepared(
        &self,
        caller: &Caller,
        lease: &Lease,
        wanted: Wanted,
    ) -> Result<Prepared, ApiError> {
        let lease = lease.clone();
        let prepare = move |wanted| lease.text.prepare(wanted, Some(lease.context));
        self.prepare_wanted(caller, wanted, prepare).await
    }
}
