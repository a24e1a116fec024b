//! The command `forebay serve`: answers requests of other programs.

mod access_log;
mod library;
mod loader;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use forebay_engine::engine::{EngineOptions, Latency};
use forebay_engine::{Interrupt, SessionOptions};
use forebay_library::Library;
use forebay_server::{
    Catalogue as _, Entry, FilesOptions, KeepAlive, Keys, Listener, Loader as _, Memory, Models,
    ModelsOptions, ServeError, ServerOptions,
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
        None => Library::default_folder().map(Library::open).filter(|_| args.model.is_empty()),
    };
    let has_models = library.iter().any(|library| !library::models(library).is_empty());
    let paths = match args.model.is_empty() && !names_folder && !has_models {
        true => vec![demo::find()?],
        false => args.model.clone(),
    };
    let served = ServedModels::new(&paths, &args, library)?;
    let listener = Listener::bind(server_options(&args)?).map_err(refused)?;
    let may_switch = names_folder || has_models || paths.len() > 1;
    let followed = routing_file::followed(&args.followed)?;
    let kv_disk = kv_disk::open(&args.kv, &options)?;
    let loader = SessionLoader::new(options, args.parallel, args.kv_tokens, may_switch, followed)?;
    let loader = Arc::new(loader);
    let options = ModelsOptions {
        engine: EngineOptions {
            latency: args.max_latency.map_or(Latency::Automatic, Latency::AtMost),
            waiting: args.queue,
            ..EngineOptions::default()
        },
        keep_alive: args.keep_alive.unwrap_or(KeepAlive::USUAL),
        waiting: args.queue,
        kv_disk,
    };
    let models = Models::new(served.clone(), loader.clone(), options)?;
    let loaded = load_named(&served.named, &loader, &models)?;
    let address = listener.address().url();
    match (served.list().as_slice(), loaded.as_slice()) {
        ([only], [(_, parallel)]) => {
            output::tell!("{} answers at {address}, {parallel} requests at a time", only.name);
        }
        (all, loaded) => output::tell!(
            "forebay answers at {address}, with {} models, of which {} are loaded{}",
            all.len(),
            loaded.len(),
            loaded.iter().map(|(name, _)| format!(" {name}")).collect::<String>()
        ),
    }
    let token = interrupt::token();
    let mut told = false;
    listener.serve(models, || {
        if token.is_requested() && !std::mem::replace(&mut told, true) {
            output::tell!("the server ends when its answers are finished; Ctrl-C ends it at once");
        }
        told
    })?;
    Ok(())
}

/// Loads the first of the models, and the others as long as they fit beside each other. Returns the names of those that are
/// loaded, and how many requests each runs at a time.
fn load_named(
    named: &[Entry],
    loader: &SessionLoader,
    models: &Models,
) -> Outcome<Vec<(String, usize)>> {
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
        loaded.push((entry.name.clone(), models.add(entry, opened)?));
    }
    Ok(loaded)
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
        address: args.listen.address(),
        keys,
        insecure: args.listen.insecure,
        shares_prefixes: args.share_prefixes == SharePrefixes::All,
        origins: args.listen.cors.clone(),
        body_bytes: usize::try_from(args.listen.max_body).unwrap_or(usize::MAX),
        files: FilesOptions {
            folder: args.files.folder.clone().or_else(|| Some(state::folder()?.join("files"))),
            bytes_most: args.files.files_size,
            file_bytes_most: args.files.file_size,
        },
        ping: match args.sse_ping_interval {
            0 => None,
            seconds => Some(Duration::from_secs(seconds.into())),
        },
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
