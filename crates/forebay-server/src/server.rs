//! Listens, and routes requests to their handlers.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
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
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};
use tower_http::timeout::RequestBodyTimeoutLayer;

use crate::access::{self, Keys};
use crate::access_log::AccessLog;
use crate::app::App;
use crate::body::BodyLimit;
use crate::caller;
use crate::connections::{Connections, Place, Taken};
use crate::error::ApiError;
use crate::files::{self, FilesOptions};
use crate::half_close::{Answered, Exchange, Patient, Received};
use crate::large::{self, Cleaner, LargeRequests};
use crate::models::Models;
use crate::request_log::{self, Logging, Remote};
use crate::routes::Routes;
use crate::sockets::{Address, BUFFER_BYTES, Connection, Socket};
use crate::{
    ServeError, anthropic, batches, embeddings, lifetime, live, llama_cpp, ollama, openai, openapi,
    operations, page, paths, plan, responses,
};

/// Threads that talk to clients. The engine has threads of its own.
const THREADS: usize = 2;
/// Longest wait for the end of the first load when the server ends.
const INTERRUPTED: Duration = Duration::from_secs(2);
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
    /// Names of hosts by which clients may reach a server without keys, beside those of this machine; `*` is all.
    pub hosts: Vec<String>,
    /// Most connections at a time.
    pub connections: usize,
    /// Time that a client has for the head of a request, between two pieces of its body, and to take more of an answer.
    pub client_time: Duration,
    /// Time that requests have to end after the server was told to stop.
    pub drain: Duration,
}

impl ServerOptions {
    /// Returns true if requests may come from several callers: there are several keys, or other machines may use the server
    /// without one.
    pub fn has_several_callers(&self) -> bool {
        match self.keys.count() {
            0 => !self.address.is_local(),
            keys => keys > 1,
        }
    }
}

/// Usual [`ServerOptions::connections`].
pub const CONNECTIONS_MAX: usize = 2048;
/// Usual [`ServerOptions::client_time`].
pub const CLIENT_TIME: Duration = Duration::from_secs(20);

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
            .thread_name("server")
            .on_thread_start(|| {
                if let Err(error) = forebay_engine::run_promptly() {
                    tracing::debug!("threads that talk to clients may wait for others: {error}");
                }
            })
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

    /// Answers requests until `stops` returns true. Then the address is free at once, and the requests that run have
    /// [`ServerOptions::drain`] to end.
    ///
    /// `start` loads the first models meanwhile. Until it returns, the server says that it is not ready, and requests wait. What it
    /// returns is called when the server is ready. If it fails, the server ends.
    ///
    /// # Errors
    /// Returns an error if the server cannot be set up, and the error of `start`.
    pub fn serve<E: From<ServeError> + Send + 'static, R: FnOnce()>(
        self,
        models: Models,
        start: impl FnOnce(&Models) -> Result<R, E> + Send + 'static,
        mut stops: impl FnMut() -> bool,
    ) -> Result<(), E> {
        let Listener { runtime, socket, options, .. } = self;
        let app = Arc::new(App::new(models, &options));
        let large = Arc::new(LargeRequests::new());
        let _cleaner = Cleaner::start(large.clone()).map_err(ServeError::from)?;
        let router = router(app.clone(), &options)?.layer(from_fn_with_state(large, large::note));
        app.models.hold_loads(true);
        let mut starting = Starting::begin(app.clone(), start).map_err(ServeError::from)?;
        let batches = runtime.spawn(batches::run(app.clone()));
        let service = Service { app: app.clone(), router, options };
        runtime.block_on(async {
            service.accept(socket, || starting.has_failed() || stops()).await;
            // What is unfinished goes on at the next start.
            batches.abort();
            let _ = batches.await;
        });
        // Requests that are unfinished end here.
        drop(runtime);
        app.models.write_kv(WRITE_KV);
        starting.end()
    }
}

/// The thread that loads the first models.
struct Starting<E> {
    failed: Receiver<E>,
    failure: Option<E>,
}

impl<E: Send + 'static> Starting<E> {
    fn begin<R: FnOnce()>(
        app: Arc<App>,
        start: impl FnOnce(&Models) -> Result<R, E> + Send + 'static,
    ) -> std::io::Result<Starting<E>> {
        let (fails, failed) = sync_channel(1);
        let run = move || match start(&app.models) {
            Ok(is_ready) => {
                app.models.hold_loads(false);
                app.lifetime.begin();
                is_ready();
            }
            // An error means that the server has ended.
            Err(error) => drop(fails.send(error)),
        };
        thread::Builder::new().name("start".into()).spawn(run)?;
        Ok(Starting { failed, failure: None })
    }

    fn has_failed(&mut self) -> bool {
        self.failure = self.failure.take().or_else(|| self.failed.try_recv().ok());
        self.failure.is_some()
    }

    /// Returns the failure, if there is one. A load that is interrupted says so soon, and one that does not come to an end is left
    /// behind.
    fn end(self) -> Result<(), E> {
        let failure = self.failure.or_else(|| self.failed.recv_timeout(INTERRUPTED).ok());
        failure.map_or(Ok(()), Err)
    }
}

/// What every connection needs.
struct Service {
    app: Arc<App>,
    router: Router,
    options: ServerOptions,
}

impl Service {
    /// Accepts connections until `stops` returns true. Then waits for the requests that run, up to a limit.
    async fn accept(&self, socket: Socket, mut stops: impl FnMut() -> bool) {
        let connections = Connections::new(self.options.connections);
        let graceful = GracefulShutdown::new();
        let mut look = tokio::time::interval(LOOK_EVERY);
        while !stops() {
            let accepted = tokio::select! {
                accepted = socket.accept() => accepted,
                _ = look.tick() => continue,
            };
            match accepted {
                Ok((stream, remote)) => {
                    let share = caller::share_of_remote(remote.map(|remote| remote.ip()));
                    match connections.admit(share) {
                        Some(place) => self.answer(stream, remote, place, &graceful),
                        None => refuse(&*stream),
                    }
                }
                Err(error) => {
                    // The system has no descriptor or memory left for a connection: others have to end first.
                    tracing::warn!("a connection was not accepted: {error}");
                    tokio::time::sleep(LOOK_EVERY).await;
                }
            }
        }
        // New clients are refused at once, as if the server were gone.
        drop(socket);
        self.app.lifetime.end();
        let drained = async {
            connections.without_requests().await;
            graceful.shutdown().await;
        };
        if tokio::time::timeout(self.options.drain, drained).await.is_err() {
            let cut = connections.requests();
            tracing::warn!("the time for unfinished requests is over: {cut} requests are cut off");
        }
    }

    /// Answers the requests of a connection.
    fn answer(
        &self,
        stream: Box<dyn Connection>,
        remote: Option<SocketAddr>,
        place: Arc<Place>,
        graceful: &GracefulShutdown,
    ) {
        let exchange = Arc::new(Exchange::default());
        let stream = Patient::new(stream, exchange.clone());
        let (router, own) = (TowerToHyperService::new(self.router.clone()), place.clone());
        let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
            let (answering, in_work) = (exchange.begin(request.version()), own.request());
            request.extensions_mut().insert(Remote(remote));
            paths::make_canonical(request.uri_mut());
            let answer = router.call(request.map(|body| Received::new(body, exchange.clone())));
            async move {
                let answer = answer.await?;
                Ok::<_, Infallible>(answer.map(|body| Answered::new(body, (answering, in_work))))
            }
        });
        let mut connection = http1::Builder::new();
        connection.timer(TokioTimer::new()).header_read_timeout(self.options.client_time);
        connection.max_buf_size(BUFFER_BYTES);
        let stream = TokioIo::new(Taken::new(stream, self.options.client_time));
        let served = graceful.watch(connection.serve_connection(stream, service));
        tokio::spawn(async move {
            tokio::select! {
                served = served => if let Err(error) = served {
                    tracing::debug!("a connection ended: {error}");
                },
                () = place.ended() => tracing::debug!("an idle connection gave way to a new one"),
            }
        });
    }
}

/// Tells a client that there are too many connections. A client that does not read it at once does not learn it.
fn refuse(stream: &dyn Connection) {
    let answer = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    let _ = stream.try_write(answer);
}

/// Returns the routes. Each is described in `openapi/routes.rs`.
pub fn routes() -> Routes {
    Routes::new()
        .route("/", get(page::root))
        .route("/page/{name}", get(page::asset))
        .route("/live", get(live::live))
        .route("/plan", get(plan::plan))
        .route("/openapi.json", get(openapi::document))
        .route("/health", get(lifetime::health))
        .route("/ready", get(lifetime::health))
        .route("/metrics", get(operations::metrics))
        .route("/slots", get(operations::slots))
        .route("/tokenize", post(operations::tokenize))
        .route("/tokenizer_info", get(operations::tokenizer_info))
        .route("/detokenize", post(operations::detokenize))
        .route("/apply-template", post(operations::apply_template))
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{*model}", get(openai::model))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/v1/chat/completions/input_tokens", post(openai::input_tokens))
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
        .layer(RequestBodyTimeoutLayer::new(options.client_time))
        .layer(from_fn_with_state(app.clone(), lifetime::check))
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
