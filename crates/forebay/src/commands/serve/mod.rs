//! The command `forebay serve`: answers requests of other programs.

mod access_log;
mod library;
mod loader;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use forebay_engine::engine::{EngineOptions, Latency};
use forebay_engine::{Interrupt, SessionOptions};
use forebay_library::Library;
use forebay_server::{
    Address, CLIENT_TIME, CONNECTIONS_MAX, Catalogue as _, Entry, FilesOptions, KeepAlive, Keys,
    Listener, Loader as _, Memory, Models, ModelsOptions, ServeError, ServerOptions,
};

use self::library::ServedModels;
use self::loader::SessionLoader;
use crate::args::{ServeArgs, SharePrefixes};
use crate::config;
use crate::demo;
use crate::failure::{Failure, Outcome, usage};
use crate::interrupt;
use crate::kv_disk;
use crate::open;
use crate::output;
use crate::routing_file;
use crate::state;
use crate::statistics;
use crate::text_input;

/// Time between two looks at the signal while a model loads.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Runs the server. `models` is the folder of the library, if the user named it.
pub fn run(args: ServeArgs, models: Option<PathBuf>) -> Outcome {
    args.mtp.refuse("serve")?;
    let mut options = config::session(&args.budget)?;
    options.kv_ram_bytes = args.kv.kv_ram;
    options.snapshot_every = args.kv.snapshot_every;
    let names_folder = models.is_some();
    let library = match models {
        Some(folder) => {
            open::check(&folder)?;
            if !folder.is_dir() {
                return usage(format!("--models {}: is not a folder", folder.display()));
            }
            Some(Library::open(folder))
        }
        // Without models, the library is what is served.
        None => crate::library::folder(None).map(Library::open).filter(|_| args.model.is_empty()),
    };
    let has_models = library.iter().any(|library| !library::models(library).is_empty());
    let paths = match args.model.is_empty() && !names_folder && !has_models {
        true => vec![demo::find()?],
        false => args.model.clone(),
    };
    let served = ServedModels::new(&paths, &args, library)?;
    let server = server_options(&args)?;
    let callers_share = server.has_several_callers();
    let listener = Listener::bind(server).map_err(refused)?;
    let may_switch = names_folder || has_models || paths.len() > 1;
    let followed = routing_file::followed(&args.followed)?;
    let kv_disk = kv_disk::open(&args.kv, &options)?;
    let loader = SessionLoader::new(options, args.parallel, args.kv_tokens, may_switch, followed)?;
    let loader = Arc::new(loader);
    let options = ModelsOptions {
        engine: EngineOptions {
            latency: args.max_latency.map_or(Latency::Automatic, Latency::AtMost),
            waiting: args.queue,
            callers_share,
            ..EngineOptions::default()
        },
        keep_alive: args.keep_alive.unwrap_or(KeepAlive::USUAL),
        waiting: args.queue,
        kv_disk,
        special_tokens_in_messages: args.special_tokens_in_messages,
    };
    let models = Models::new(served.clone(), loader.clone(), options)?;
    let address = listener.address().clone();
    let ready = Arc::new(AtomicBool::new(false));
    let is_ready = ready.clone();
    let start = move |models: &Models| -> Outcome<_> {
        let loaded = load_named(&served.named, &loader, models)?;
        Ok(move || {
            announce(&address, &served.list(), &loaded);
            is_ready.store(true, Ordering::Relaxed);
        })
    };
    let token = interrupt::token();
    let mut told = false;
    listener.serve(models, start, || {
        let stops = token.is_requested();
        if stops && !std::mem::replace(&mut told, true) && ready.load(Ordering::Relaxed) {
            output::tell!("the server ends when its answers are finished; Ctrl-C ends it at once");
        }
        stops
    })
}

/// A model that was loaded at the start.
struct AtStart {
    name: String,
    /// Number of requests that run at a time.
    parallel: usize,
    /// The model, its device and where its weights are, in one line.
    place: String,
}

/// Says where the server answers, and what.
fn announce(address: &Address, all: &[Entry], loaded: &[AtStart]) {
    let url = address.url();
    match (all, loaded) {
        ([only], [model]) => output::tell!(
            "{} answers at {url}, {} at a time",
            only.name,
            output::counted(model.parallel, "request")
        ),
        (all, loaded) => output::tell!(
            "forebay answers at {url}, with {}, {} loaded{}",
            output::counted(all.len(), "model"),
            loaded.len(),
            loaded.iter().map(|model| format!(" {}", model.name)).collect::<String>()
        ),
    }
    let mut lines = match address {
        Address::Tcp(address) => {
            // A browser cannot open an address that stands for all.
            let host = match address.ip() {
                ip if ip.is_unspecified() => "localhost".to_owned(),
                IpAddr::V4(ip) => ip.to_string(),
                IpAddr::V6(ip) => format!("[{ip}]"),
            };
            let base = format!("http://{host}:{}", address.port());
            let openai = format!("{base}/v1");
            vec![("page", base.clone()), ("OpenAI", openai), ("Anthropic, Ollama", base)]
        }
        Address::Unix(_) => Vec::new(),
    };
    lines.extend(loaded.iter().map(|model| ("model", model.place.clone())));
    output::say_labelled(&lines);
}

/// Loads the first of the models, and the others as long as they fit beside each other.
fn load_named(named: &[Entry], loader: &SessionLoader, models: &Models) -> Outcome<Vec<AtStart>> {
    let (mut held, mut loaded) = (Memory::default(), Vec::new());
    for entry in named {
        let free = loader.memory() - held;
        let room = (!loaded.is_empty()).then_some(free);
        if room.is_some() && !loader.whole(&entry.path)?.fits(free) {
            continue;
        }
        let opened = while_interruptible(|interrupt| {
            let path = &entry.path;
            let change = |options: &mut SessionOptions| options.interrupt = interrupt;
            loader.open(path, room, change, |options| open::session(path, options, "--ctx"))
        })?;
        held = held + opened.memory;
        let place = statistics::place(&opened.session, &entry.path);
        let parallel = models.add(entry, opened)?;
        loaded.push(AtStart { name: entry.name.clone(), parallel, place });
    }
    Ok(loaded)
}

/// Resolves where the server listens.
fn server_options(args: &ServeArgs) -> Outcome<ServerOptions> {
    let keys = match &args.listen.api_key_file {
        None => Keys::default(),
        Some(file) => {
            let keys = Keys::read(&text_input::keys(file)?);
            if keys.is_empty() {
                return Err(anyhow!("{}: there is no key", file.display()).into());
            }
            keys
        }
    };
    Ok(ServerOptions {
        address: args.listen.address(),
        keys,
        insecure: args.listen.insecure,
        shares_prefixes: args.share_prefixes == SharePrefixes::All,
        origins: args.listen.cors.clone(),
        body_bytes: usize::try_from(args.listen.max_body).unwrap_or(usize::MAX),
        files: FilesOptions {
            folder: args.files.folder.clone().or_else(|| Some(state::folder()?.join("files"))),
            bytes_max: args.files.files_size,
            file_bytes_max: args.files.file_size,
        },
        ping: match args.sse_ping_interval {
            0 => None,
            seconds => Some(Duration::from_secs(seconds.into())),
        },
        hosts: args.listen.allowed_host.clone(),
        connections: CONNECTIONS_MAX,
        client_time: CLIENT_TIME,
        drain: args.listen.drain_time,
        access_log: args.access_log.as_deref().map(access_log::open).transpose()?,
    })
}

/// Tells a mistake in the arguments from other reasons.
fn refused(error: ServeError) -> Failure {
    match error {
        ServeError::Open { .. } | ServeError::Origin { .. } => Failure::Usage(error.to_string()),
        error => error.into(),
    }
}

/// Opens a model so that a signal ends the load, but not the passes of the engine later: requests that run then are finished.
fn while_interruptible<T>(open: impl FnOnce(Interrupt) -> Outcome<T>) -> Outcome<T> {
    let (signal, load) = (interrupt::token(), Interrupt::new());
    let own = load.clone();
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
    let opened = open(own);
    done.store(true, Ordering::Relaxed);
    if watch.join().is_err() {
        return Err(anyhow!("the thread that waits for signals has panicked").into());
    }
    opened
}
