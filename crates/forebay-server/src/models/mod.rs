//! The models of a server: which ones there are, which ones are loaded, and who waits for one.
//!
//! [`Models::get`] lends a loaded model. If the model has to be loaded first, the request waits in a queue. One thread decides
//! which models are loaded and unloaded (`manager.rs`). Each load has a thread of its own (`loading.rs`), so one that stands still
//! holds up no other model. A model that is lent stays in memory.

mod catalogue;
mod keep_alive;
mod loading;
mod manager;
mod room;
#[cfg(test)]
mod tests;
mod texts;

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use forebay_engine::engine::EngineOptions;
use forebay_engine::{KvDisk, ModelInfo, ModelText};
use forebay_library::{Library, Name, RemoteModel, Repository};
use forebay_requests::{Report, Text};
use tokio::sync::oneshot;

pub use self::catalogue::{Catalogue, Entry, LoadError, Loaded, Loader, PullError};
pub use self::keep_alive::KeepAlive;
pub use self::room::Memory;
use self::texts::{Reads, Texts};
use crate::ServeError;
use crate::caller::{Caller, Share};
use crate::error::ApiError;
use crate::live::Outlook;
use crate::metrics::Metrics;
use crate::model::Model;

/// Most names in the error for an unknown name.
const NAMES_MAX: usize = 20;

/// Options of [`Models`].
#[derive(Clone, Debug)]
pub struct ModelsOptions {
    pub engine: EngineOptions,
    /// How long an idle model stays if neither a request nor its entry says it.
    pub keep_alive: KeepAlive,
    /// Most requests that wait for models to be loaded.
    pub waiting: usize,
    /// Folder of KV blocks on disk, for all models.
    pub kv_disk: Option<KvDisk>,
    /// True if special tokens in messages are special tokens.
    pub special_tokens_in_messages: bool,
}

impl ModelsOptions {
    /// Prepares the text of a model.
    pub(crate) fn text(&self, name: &str, text: ModelText) -> Result<Arc<Text>, ServeError> {
        texts::prepared(name, text, self.special_tokens_in_messages)
    }
}

/// All models of a server.
pub struct Models {
    shared: Arc<Shared>,
    manager: Option<JoinHandle<()>>,
}

/// What requests, leases and the thread that loads share.
struct Shared {
    catalogue: Box<dyn Catalogue>,
    loader: Box<dyn Loader>,
    options: ModelsOptions,
    metrics: Metrics,
    texts: Arc<Mutex<Texts>>,
    reads: Arc<Reads>,
    state: Mutex<State>,
    /// Notified when a request begins to wait, when a lease ends, and when the server stops.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    loaded: Vec<Slot>,
    waiting: VecDeque<Waiting>,
    /// What is known about models that are waited for, by name.
    known: HashMap<String, Known>,
    /// Models that are being loaded, each with the memory that it may take.
    loading: Vec<(String, Memory)>,
    /// Callers whose models were loaded, the last one last.
    turns: VecDeque<Share>,
    /// Name of the model for which others have to leave.
    closing_for: Option<String>,
    next_id: u64,
    /// True while the first models are loaded by the start of the server. No other model is loaded then.
    is_held: bool,
    is_stopping: bool,
}

/// What is known about a model that is waited for.
enum Known {
    /// A thread finds out how much memory it needs, since this moment.
    Measuring(Instant),
    Needs {
        memory: Memory,
        /// True if it did not load into what was free, and nothing has left since.
        was_too_small: bool,
    },
}

/// A loaded model.
struct Slot {
    id: u64,
    model: Arc<Model>,
    leases: usize,
    keep_alive: KeepAlive,
    /// When the last lease began or ended.
    last_used: Instant,
    /// True while the model has to leave as soon as it is idle. New requests for it wait.
    is_closing: bool,
    /// True if the model got less memory than it needs because others were busy.
    is_tight: bool,
    /// True if a request has used the model.
    was_lent: bool,
    /// Requests that wait until the model is unloaded.
    unloads: Vec<oneshot::Sender<()>>,
}

/// A request that waits for a model.
struct Waiting {
    /// Whose request it is.
    share: Share,
    entry: Entry,
    keep_alive: Option<KeepAlive>,
    reply: oneshot::Sender<Result<Lease, ApiError>>,
}

/// State of a loaded model, for lists. It does not keep the model in memory.
pub struct Status {
    pub name: String,
    pub text: Arc<Text>,
    pub context: usize,
    pub memory: Memory,
    pub outlook: Arc<Outlook>,
    pub load_seconds: f64,
    pub report: Report,
    /// When the model leaves if nobody asks for it. `None` is never.
    pub ends: Option<Instant>,
}

/// A loaded model that stays in memory while the lease exists.
#[derive(Clone)]
pub struct Lease(Arc<Guard>);

struct Guard {
    /// Taken before the lease is given back, so that the last owner of the model is the thread that unloads it.
    model: Option<Arc<Model>>,
    shared: Arc<Shared>,
    id: u64,
    /// Time that the request waited for the model.
    waited: OnceLock<Duration>,
}

impl Lease {
    /// Returns the time that the request waited for the model to be loaded.
    pub fn waited(&self) -> Duration {
        self.0.waited.get().copied().unwrap_or_default()
    }
}

impl Deref for Lease {
    type Target = Model;

    fn deref(&self) -> &Model {
        self.0.model.as_deref().expect("only the end of the lease takes the model")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.model = None;
        let mut state = self.shared.lock();
        if let Some(slot) = state.loaded.iter_mut().find(|slot| slot.id == self.id) {
            slot.leases -= 1;
            slot.last_used = Instant::now();
        }
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Models {
    /// Starts the thread that loads models. No model is loaded yet.
    ///
    /// # Errors
    /// Returns an error if the system starts no thread.
    pub fn new(
        catalogue: impl Catalogue,
        loader: impl Loader,
        options: ModelsOptions,
    ) -> Result<Models, ServeError> {
        let shared = Arc::new(Shared {
            catalogue: Box::new(catalogue),
            loader: Box::new(loader),
            options,
            metrics: Metrics::new(),
            texts: Arc::default(),
            reads: Arc::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let own = shared.clone();
        let manager = thread::Builder::new().name("models".into()).spawn(move || own.run())?;
        Ok(Models { shared, manager: Some(manager) })
    }

    /// Adds a model that is loaded already, and returns the most requests that it runs at a time.
    ///
    /// # Errors
    /// Returns an error if the model has no tokenizer or its chat template is damaged.
    pub fn add(&self, entry: &Entry, loaded: Loaded) -> Result<usize, ServeError> {
        let model = self.shared.start(entry, loaded)?;
        let parallel = model.worker.report().running_max;
        self.shared.lock().insert(entry, model, self.shared.options.keep_alive, false);
        self.shared.changed.notify_all();
        Ok(parallel)
    }

    /// Lends a model, after loading it if it is not in memory.
    ///
    /// # Errors
    /// Returns an error if too many requests wait for models, or if the model cannot be loaded.
    pub async fn get(
        &self,
        caller: &Caller,
        entry: Entry,
        keep_alive: Option<KeepAlive>,
    ) -> Result<Lease, ApiError> {
        caller.note().model(&entry.name);
        let asked = Instant::now();
        let loaded = {
            let mut state = self.shared.lock();
            if let Some(lease) = state.lend(&entry.name, keep_alive, &self.shared) {
                return Ok(lease);
            }
            self.check_queue(&state, caller.share())?;
            let (reply, loaded) = oneshot::channel();
            let share = caller.share();
            state.waiting.push_back(Waiting { share, entry, keep_alive, reply });
            loaded
        };
        self.shared.changed.notify_all();
        let lease = loaded.await.map_err(|_| ApiError::stopped())??;
        // Nothing else sets it.
        let _ = lease.0.waited.set(asked.elapsed());
        Ok(lease)
    }

    /// Refuses a request of this caller if too many wait. A caller may have as many as places are left for others, if there are
    /// others.
    fn check_queue(&self, state: &State, share: Share) -> Result<(), ApiError> {
        let options = &self.shared.options;
        let live = state.waiting.iter().filter(|waiting| !waiting.reply.is_closed());
        let (all, own) = live.fold((0, 0), |(all, own), waiting| {
            (all + 1, own + usize::from(waiting.share == share))
        });
        let left = options.waiting.saturating_sub(all);
        let why = match left {
            0 => format!("the queue for models is full: try again later (waiting requests: {all})"),
            _ if options.engine.callers_share && own >= left => {
                format!(
                    "your part of the queue for models is full: try again later (your waiting requests: {own}; places left \
                     for others: {left})"
                )
            }
            _ => return Ok(()),
        };
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, why);
        Err(ApiError { code: Some("queue_full"), ..error })
    }

    /// Says whether the start of the server loads the first models. Requests for other models wait until then.
    pub fn hold_loads(&self, holds: bool) {
        self.shared.lock().is_held = holds;
        self.shared.changed.notify_all();
    }

    /// Writes KV blocks of all loaded models to the disk that later requests may use, for up to `limit`. Requests that run come
    /// first.
    pub fn write_kv(&self, limit: Duration) {
        let models: Vec<Arc<Model>> =
            self.shared.lock().loaded.iter().map(|slot| slot.model.clone()).collect();
        let written: Vec<_> = models.iter().map(|model| model.worker.write_kv(limit)).collect();
        let until = Instant::now() + limit;
        for written in written {
            let _ = written.recv_timeout(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Unloads a model when no request uses it. If it is idle, returns after it is unloaded.
    pub async fn unload(&self, entry: &Entry) {
        let unloaded = {
            let mut state = self.shared.lock();
            let Some(slot) = state.slot(&entry.name) else { return };
            slot.keep_alive = KeepAlive::For(std::time::Duration::ZERO);
            if slot.leases > 0 {
                return;
            }
            let (sender, unloaded) = oneshot::channel();
            slot.unloads.push(sender);
            unloaded
        };
        self.shared.changed.notify_all();
        // An error means that the server stops.
        let _ = unloaded.await;
    }

    /// Returns the entry of a model. Ollama's clients add `:latest` to names. Without a name it is the preferred model of the
    /// catalogue, or the one that was used last, or the only one. The catalogue may read a folder.
    ///
    /// # Errors
    /// Returns an error that names the models that there are.
    pub fn entry(&self, name: Option<&str>) -> Result<Entry, ApiError> {
        let catalogue = &self.shared.catalogue;
        let Some(name) = name else { return self.unnamed() };
        let shorter = name.strip_suffix(":latest");
        let found = catalogue.find(name).or_else(|| catalogue.find(shorter?));
        found.ok_or_else(|| {
            let names = catalogue.list();
            let shown: Vec<String> =
                names.iter().take(NAMES_MAX).map(|entry| format!("{:?}", entry.name)).collect();
            let here = match (shown.as_slice(), names.len().saturating_sub(NAMES_MAX)) {
                ([], _) => "no models".to_owned(),
                (shown, 0) => shown.join(", "),
                (shown, more) => format!("{} and {more} more", shown.join(", ")),
            };
            let message = format!("model {name:?} is not here: this server has {here}");
            ApiError {
                code: Some("model_not_found"),
                param: Some("model".into()),
                ..ApiError::new(StatusCode::NOT_FOUND, message)
            }
        })
    }

    /// Returns the entry for requests that name no model.
    fn unnamed(&self) -> Result<Entry, ApiError> {
        let catalogue = &self.shared.catalogue;
        if let Some(entry) = catalogue.preferred() {
            return Ok(entry);
        }
        let last = {
            let state = self.shared.lock();
            let last = state.loaded.iter().max_by_key(|slot| slot.last_used);
            last.map(|slot| slot.model.name.clone())
        };
        if let Some(entry) = last.and_then(|name| catalogue.find(&name)) {
            return Ok(entry);
        }
        match catalogue.list().as_slice() {
            [only] => Ok(only.clone()),
            _ => Err(ApiError {
                param: Some("model".into()),
                ..ApiError::bad("model is missing: GET /v1/models lists the models")
            }),
        }
    }

    /// Returns the library into which requests may pull models, if there is one.
    pub fn library(&self) -> Option<Library> {
        self.shared.catalogue.library()
    }

    /// Finds a model on the hub that this machine can run ([`Catalogue::offer`]).
    pub fn offer(&self, name: &Name) -> Result<(Repository, RemoteModel), PullError> {
        self.shared.catalogue.offer(name)
    }

    /// Returns all models that requests may name.
    pub fn list(&self) -> Vec<Entry> {
        self.shared.catalogue.list()
    }

    /// Returns the loaded models, the one that was used last first.
    pub fn loaded(&self) -> Vec<Status> {
        self.shared.lock().loaded()
    }

    /// Returns the number of requests that wait for a model to be loaded.
    pub fn waiting(&self) -> usize {
        self.shared.lock().waiting()
    }

    /// Returns all metrics in the text format of Prometheus.
    ///
    /// # Errors
    /// Returns the errors of [`Metrics::text`].
    pub fn metrics(&self) -> Result<String, std::fmt::Error> {
        // A model that is unloaded meanwhile would count twice, or not at all.
        let state = self.shared.lock();
        self.shared.metrics.text(&state.loaded(), state.waiting())
    }

    /// Counts an answer with this status.
    pub fn note_response(&self, status: u16) {
        self.shared.metrics.note_response(status);
    }

    /// Returns the text of a model, which does not load its weights. Reading it may take a while.
    ///
    /// # Errors
    /// Returns an error if the model cannot be read.
    pub fn text(&self, entry: &Entry) -> Result<Arc<Text>, ApiError> {
        let loaded = self.shared.lock().slot(&entry.name).map(|slot| slot.model.text.clone());
        match loaded {
            Some(text) => Ok(text),
            None => {
                let special = self.shared.options.special_tokens_in_messages;
                Texts::open(&self.shared.texts, &self.shared.reads, entry, special).map_err(failed)
            }
        }
    }

    /// Returns the description of a model. Reading it may take a while.
    ///
    /// # Errors
    /// Returns an error if the model cannot be read.
    pub fn info(&self, entry: &Entry) -> Result<Arc<ModelInfo>, String> {
        Texts::info(&self.shared.texts, &self.shared.reads, entry)
    }

    /// Returns the digest of the content of a model's file or folder. Reading it may take a while.
    pub fn digest(&self, path: &Path) -> Option<String> {
        Texts::digest(&self.shared.texts, path)
    }
}

impl Drop for Models {
    fn drop(&mut self) {
        self.shared.lock().is_stopping = true;
        self.shared.changed.notify_all();
        if let Some(manager) = self.manager.take()
            && manager.join().is_err()
        {
            tracing::error!("the thread that loads models has panicked");
        }
    }
}

/// Creates the error of a model that cannot be read or loaded.
fn failed(why: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn waiting(&self) -> usize {
        self.waiting.iter().filter(|waiting| !waiting.reply.is_closed()).count()
    }

    fn loaded(&self) -> Vec<Status> {
        let mut slots: Vec<&Slot> = self.loaded.iter().collect();
        slots.sort_by_key(|slot| std::cmp::Reverse(slot.last_used));
        let now = Instant::now();
        let status = |slot: &Slot| {
            let Model { name, text, context, memory, outlook, load_seconds, worker, .. } =
                &*slot.model;
            Status {
                name: name.clone(),
                text: text.clone(),
                context: *context,
                memory: *memory,
                outlook: outlook.clone(),
                load_seconds: *load_seconds,
                report: worker.report(),
                ends: slot.keep_alive.ends(if slot.leases > 0 { now } else { slot.last_used }),
            }
        };
        slots.into_iter().map(status).collect()
    }

    fn slot(&mut self, name: &str) -> Option<&mut Slot> {
        self.loaded.iter_mut().find(|slot| slot.model.name == name)
    }

    /// Returns true if a model that got too little memory could get more now.
    fn could_get_more(&self, index: usize) -> bool {
        let slot = &self.loaded[index];
        let others_are_idle =
            self.loaded.iter().all(|other| other.id == slot.id || other.leases == 0);
        slot.is_tight && slot.was_lent && slot.leases == 0 && others_are_idle
    }

    /// Lends a loaded model, unless it has to leave first.
    fn lend(
        &mut self,
        name: &str,
        keep_alive: Option<KeepAlive>,
        shared: &Arc<Shared>,
    ) -> Option<Lease> {
        let index = self.loaded.iter().position(|slot| slot.model.name == name)?;
        if self.could_get_more(index) {
            return None;
        }
        let slot = &mut self.loaded[index];
        if slot.is_closing || slot.model.worker.is_broken() {
            return None;
        }
        slot.leases += 1;
        slot.was_lent = true;
        slot.last_used = Instant::now();
        slot.keep_alive = keep_alive.unwrap_or(slot.keep_alive);
        let (model, shared, id) = (Some(slot.model.clone()), shared.clone(), slot.id);
        Some(Lease(Arc::new(Guard { model, shared, id, waited: OnceLock::new() })))
    }
}
