//! Listens, and routes requests to their handlers.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::{delete, get, post};
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};
use tower_http::timeout::RequestBodyTimeoutLayer;

use crate::access::{self, Keys, Rules};
use crate::access_log::AccessLog;
use crate::app::App;
use crate::body::BodyLimit;
use crate::error::ApiError;
use crate::files::{self, FilesOptions};
use crate::half_close::{Answered, Exchange, Patient};
use crate::large::{self, Cleaner, LargeRequests};
use crate::models::Models;
use crate::request_log::{self, Logging, Remote};
use crate::routes::Routes;
use crate::sockets::{Address, Socket};
use crate::{
    ServeError, anthropic, batches, embeddings, live, llama_cpp, ollama, openai, openapi,
    operations, page, paths, plan, responses,
};

/// Most connections at a time. Others wait until one ends.
const CONNECTIONS_MOST: usize = 2048;
/// Time that a client has for the head of a request, and between two pieces of its body.
const CLIENT_TIME: Duration = Duration::from_secs(20);
/// Threads that talk to clients. The engine has threads of its own.
const THREADS: usize = 2;
/// Most requests whose prompts are made into tokens at a time.
const PREPARING_MOST: usize = 4;
/// Time between two looks at whether the server should stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Options of a server.
#[derive(Clone)]
pub struct ServerOptions {
    pub address: Address,
    /// Keys with which clients may use the server; none lets everybody.
    pub keys: Keys,
    /// True to listen beyond this machine without keys.
    pub insecure: bool,
    /// Origins of web pages on other hosts that may use the server; `*` is all.
    pub origins: Vec<String>,
    /// True if requests share keys and values of equal prefixes with requests of other keys. The time of an answer tells
    /// whether its prefix was known.
    pub shares_prefixes: bool,
    /// Most bytes of a request.
    pub body_bytes: usize,
    /// Where files of clients are stored.
    pub files: FilesOptions,
    /// Time without a part of a streamed answer after which a comment is sent. `None` sends no comments.
    pub ping: Option<Duration>,
    /// Where every request is logged.
    pub access_log: Option<Arc<AccessLog>>,
}

/// A server that has its address but does not answer yet.
pub struct Listener {
    runtime: Runtime,
    socket: Socket,
    address: Address,
    options: ServerOptions,
}

/// Longest time that a server takes at its end to write KV blocks to the disk.
const WRITE_KV: Duration = Duration::from_secs(60);

impl Listener {
    /// Takes the address.
    ///
    /// # Errors
    /// Returns an error if another program has the address, or if other machines could use the server without a key.
    pub fn bind(options: ServerOptions) -> Result<Listener, ServeError> {
        let address = options.address.clone();
        if !address.is_local() && options.keys.is_empty() && !options.insecure {
            return Err(ServeError::Open { address });
        }
        drop(cors(&options.origins, address.is_local())?);
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(PREPARING_MOST)
            .thread_name("server")
            .enable_io()
            .enable_time()
            .build()?;
        let listen = |source| ServeError::Listen { address: address.clone(), source };
        let socket = runtime.block_on(Socket::bind(&address)).map_err(listen)?;
        let address = socket.address().map_err(listen)?;
        Ok(Listener { runtime, socket, address, options })
    }

    /// Returns the address, with the port that the system chose if it was 0.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Answers requests until `stops` returns true and all running requests have ended.
    ///
    /// # Errors
    /// Returns an error if the server cannot be set up.
    pub fn serve(self, models: Models, mut stops: impl FnMut() -> bool) -> Result<(), ServeError> {
        let Listener { runtime, socket, options, .. } = self;
        let rules = Arc::new(Rules {
            keys: options.keys.clone(),
            origins: options.origins.clone(),
            // No web page can connect to a Unix socket.
            is_local: matches!(&options.address, Address::Tcp(address) if address.ip().is_loopback()),
            shares_prefixes: options.shares_prefixes,
        });
        let app = Arc::new(App::new(models, options.files.clone(), options.ping, rules));
        let large = Arc::new(LargeRequests::new());
        let _cleaner = Cleaner::start(large.clone())?;
        let router = router(app.clone(), &options)?.layer(from_fn_with_state(large, large::note));
        let batches = runtime.spawn(batches::run(app.clone()));
        runtime.block_on(async {
            accept(&socket, router, &mut stops).await;
            // What is unfinished goes on at the next start.
            batches.abort();
            let _ = batches.await;
        });
        app.models.write_kv(WRITE_KV);
        // The log is written to its end after the last request.
        drop(runtime);
        Ok(())
    }
}

/// Accepts connections until `stops` returns true, then waits for those that have an unfinished request.
async fn accept(socket: &Socket, router: Router, stops: &mut dyn FnMut() -> bool) {
    let mut connection = http1::Builder::new();
    connection.timer(TokioTimer::new()).header_read_timeout(CLIENT_TIME);
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(CONNECTIONS_MOST));
    let mut look = tokio::time::interval(LOOK_EVERY);
    let mut next = None;
    while !stops() {
        let place = match next.take() {
            Some(place) => place,
            None => tokio::select! {
                place = places.clone().acquire_owned() => place,
                _ = look.tick() => continue,
            },
        };
        let stream = tokio::select! {
            accepted = socket.accept() => accepted,
            _ = look.tick() => {
                next = Some(place);
                continue;
            }
        };
        let (stream, remote) = match stream {
            Ok(accepted) => accepted,
            Err(error) => {
                // The system has no descriptor or memory left for a connection: others have to end first.
                tracing::warn!("a connection was not accepted: {error}");
                tokio::time::sleep(LOOK_EVERY).await;
                continue;
            }
        };
        let exchange = Arc::new(Exchange::default());
        let stream = TokioIo::new(Patient::new(stream, exchange.clone()));
        let router = TowerToHyperService::new(router.clone());
        let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
            let answering = exchange.begin(request.version());
            if let Some(remote) = remote {
                request.extensions_mut().insert(Remote(remote));
            }
            paths::make_canonical(request.uri_mut());
            let answer = router.call(request);
            async move {
                let answer = answer.await?;
                Ok::<_, Infallible>(answer.map(|body| Answered::new(body, answering)))
            }
        });
        let served = graceful.watch(connection.serve_connection(stream, service));
        tokio::spawn(async move {
            if let Err(error) = served.await {
                tracing::debug!("a connection ended: {error}");
            }
            drop(place);
        });
    }
    graceful.shutdown().await;
}

/// Returns the routes. Each is described in `openapi/routes.rs`.
pub fn routes() -> Routes {
    Routes::new()
        .route("/", get(page::root))
        .route("/page/{name}", get(page::asset))
        .route("/live", get(live::live))
        .route("/plan", get(plan::plan))
        .route("/openapi.json", get(openapi::document))
        .route("/health", get(operations::health))
        .route("/ready", get(operations::health))
        .route("/metrics", get(operations::metrics))
        .route("/slots", get(operations::slots))
        .route("/tokenize", post(operations::tokenize))
        .route("/detokenize", post(operations::detokenize))
        .route("/apply-template", post(operations::apply_template))
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{*model}", get(openai::model))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/v1/completions", post(openai::completions))
        .route("/props", get(operations::props))
        .route("/completion", post(llama_cpp::completion))
        .route("/infill", post(llama_cpp::infill))
        .route("/rerank", post(operations::rerank))
        .route("/v1/rerank", post(operations::rerank))
        .route("/v1/embeddings", post(embeddings::openai))
        .route("/v1/files", get(files::list).post(files::create).layer(DefaultBodyLimit::disable()))
        .route("/v1/files/{id}", get(files::get).delete(files::delete))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/batches", get(batches::list).post(batches::create))
        .route("/v1/batches/{id}", get(batches::get))
        .route("/v1/batches/{id}/cancel", post(batches::cancel))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{id}/input_items", get(responses::input_items_of))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/api/version", get(ollama::version))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::ps))
        .route("/api/show", post(ollama::show))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(embeddings::ollama))
        .route("/api/embeddings", post(embeddings::ollama_older))
        .route("/api/create", post(ollama::not_implemented))
        .route("/api/copy", post(ollama::copy))
        .route("/api/push", post(ollama::not_implemented))
        .route("/api/pull", post(ollama::pull))
        .route("/api/delete", delete(ollama::delete))
}

/// Returns the routes with what all requests go through.
fn router(app: Arc<App>, options: &ServerOptions) -> Result<Router, ServeError> {
    let logging = Logging { app: app.clone(), access_log: options.access_log.clone() };
    let router = routes()
        .into_router()
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app.clone())
        .layer(Extension(BodyLimit(options.body_bytes)))
        .layer(DefaultBodyLimit::max(options.body_bytes))
        .layer(RequestBodyTimeoutLayer::new(CLIENT_TIME))
        .layer(from_fn_with_state(app.rules.clone(), access::check))
        .layer(cors(&options.origins, options.address.is_local())?)
        .layer(CatchPanicLayer::new())
        .layer(from_fn_with_state(Arc::new(logging), request_log::log));
    Ok(router)
}

async fn unknown(request: Request) -> Response {
    let path = request.uri().path();
    access::refused(path, ApiError::new(StatusCode::NOT_FOUND, format!("there is no {path}")))
}

async fn wrong_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let why = format!("{path} does not take {method}");
    access::refused(path, ApiError::new(StatusCode::METHOD_NOT_ALLOWED, why))
}

/// Returns which web pages may read answers: those of `origins`, and for a local server those of this machine.
fn cors(origins: &[String], is_local: bool) -> Result<CorsLayer, ServeError> {
    for origin in origins {
        let is_header = HeaderValue::from_str(origin).is_ok();
        if !is_header || origin != "*" && !origin.contains("://") {
            return Err(ServeError::Origin { origin: origin.clone() });
        }
    }
    // A star would not allow the header Authorization.
    let layer = CorsLayer::new()
        .allow_methods(Any)
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(Any);
    if origins.iter().any(|origin| origin == "*") {
        return Ok(layer.allow_origin(Any));
    }
    let origins = origins.to_vec();
    Ok(layer.allow_origin(AllowOrigin::predicate(move |origin, _| {
        origin.to_str().is_ok_and(|origin| access::allows_origin(&origins, is_local, origin))
    })))
}
