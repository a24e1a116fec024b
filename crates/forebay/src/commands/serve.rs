//! The command `forebay serve`: answers requests of other programs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use forebay_engine::engine::{EngineOptions, Latency};
use forebay_engine::{Interrupt, Session, SessionOptions};
use forebay_server::{Keys, Listener, Model, ServeError, ServerOptions};

use crate::args::{Parallel, ServeArgs};
use crate::commands::plan;
use crate::config;
use crate::demo;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::open::{self, Sequences};
use crate::output;

/// Least number of sequences that run together if `--parallel` is `auto` and memory has room for their contexts.
const PARALLEL: usize = 4;

/// Time between two looks at the signal while the model loads.
const LOOK_EVERY: Duration = Duration::from_millis(20);

pub fn run(args: ServeArgs) -> Outcome {
    let mut options = config::session(&args.budget)?;
    let path = match &args.model {
        Some(path) => path.clone(),
        None => demo::find()?,
    };
    open::check(&path)?;
    let listener = Listener::bind(server_options(&args)?).map_err(refused)?;
    plan::follow(&path, &mut options);
    // The plan counts the memory that is free before the model is loaded.
    let outlook = plan::outlook(&path, &options);
    let session = while_interruptible(&mut options, |options| open_session(&args, &path, options))?;
    let name = args.name.clone().unwrap_or_else(|| open::name(&path));
    let engine = EngineOptions {
        latency: args.max_latency.map_or(Latency::Automatic, Latency::AtMost),
        waiting: args.queue,
        ..EngineOptions::default()
    };
    let model = Model::start(name.clone(), session, &engine)?;
    let model = model.with_outlook(outlook);
    let (address, parallel) = (listener.address(), model.parallel());
    output::tell!("{name} answers at http://{address}, {parallel} requests at a time");
    let token = interrupt::token();
    let mut told = false;
    listener.serve(model, || {
        if token.is_requested() && !std::mem::replace(&mut told, true) {
            output::tell!("the server ends when its answers are finished; Ctrl-C ends it at once");
        }
        told
    })?;
    Ok(())
}

/// Resolves where the server listens.
fn server_options(args: &ServeArgs) -> Outcome<ServerOptions> {
    let keys = match &args.listen.api_key_file {
        None => Keys::default(),
        Some(file) => {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("{}: cannot be read as text", file.display()))?;
            let keys = Keys::read(&text);
            if keys.is_empty() {
                return Err(anyhow!("{}: there is no key", file.display()).into());
            }
            keys
        }
    };
    Ok(ServerOptions {
        address: SocketAddr::new(args.listen.host, args.listen.port),
        keys,
        insecure: args.listen.insecure,
        origins: args.listen.cors.clone(),
        body_bytes: usize::try_from(args.listen.max_body).unwrap_or(usize::MAX),
    })
}

/// Tells a mistake in the arguments from other reasons.
fn refused(error: ServeError) -> Failure {
    match error {
        ServeError::Open { .. } | ServeError::Origin { .. } => Failure::Usage(error.to_string()),
        error => error.into(),
    }
}

fn open_session(
    args: &ServeArgs,
    path: &std::path::Path,
    options: &SessionOptions,
) -> Outcome<Session> {
    let sequences = match args.parallel {
        Parallel::Auto => {
            let best = plan::best_sequences(path, options);
            Sequences::AtMost(best.unwrap_or(PARALLEL).max(PARALLEL))
        }
        Parallel::Fixed(number) => Sequences::Exactly(number),
    };
    open::for_engine(path, options, sequences, &|_| args.kv_tokens, "--ctx")
}

/// Opens a model so that a signal ends the load, but not the passes of the engine later: requests that run then are finished.
fn while_interruptible<T>(
    options: &mut SessionOptions,
    open: impl FnOnce(&SessionOptions) -> Outcome<T>,
) -> Outcome<T> {
    let (signal, load) = (interrupt::token(), Interrupt::new());
    options.interrupt = load.clone();
    let done = Arc::new(AtomicBool::new(false));
    let watch = {
        let done = done.clone();
        move || {
            while !done.load(Ordering::Relaxed) && !load.is_requested() {
                if signal.is_requested() {
                    load.request();
                }
                thread::sleep(LOOK_EVERY);
            }
        }
    };
    let watch = thread::Builder::new().name("load-signal".into()).spawn(watch)?;
    let opened = open(options);
    done.store(true, Ordering::Relaxed);
    if watch.join().is_err() {
        return Err(anyhow!("the thread that waits for signals has panicked").into());
    }
    opened
}
