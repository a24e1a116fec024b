//! The threads that measure and load models, one for each model.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::catalogue::{Entry, LoadError, Loaded};
use super::room::Memory;
use super::texts::Texts;
use super::{Known, Shared, State};
use crate::ServeError;
use crate::model::Model;

/// Most models that are loaded at a time.
pub const LOADS_MAX: usize = 4;
/// Most models whose files are read at a time to find out how much memory they need.
pub const MEASURES_MAX: usize = 16;
/// Longest time that requests wait for that. The thread goes on.
pub const MEASURING_TIME: Duration = Duration::from_secs(60);

impl Shared {
    /// Finds out how much memory a model needs, on a thread of its own.
    pub(super) fn measure(self: &Arc<Shared>, state: &mut MutexGuard<'_, State>, entry: Entry) {
        let (own, name) = (self.clone(), entry.name.clone());
        let measure = move || {
            let needs = guarded(|| own.loader.needs(&entry));
            let mut state = own.lock();
            match needs {
                Ok(memory) => {
                    let needs = Known::Needs { memory, was_too_small: false };
                    state.known.insert(entry.name, needs);
                }
                Err(error) => state.give_up(&entry.name, &error),
            }
            drop(state);
            own.changed.notify_all();
        };
        if let Err(error) = thread::Builder::new().name("measure".into()).spawn(measure) {
            state.give_up(&name, &LoadError::Failed(error.to_string()));
        }
    }

    /// Loads a model and starts its engine, on a thread of its own.
    pub(super) fn load(
        self: &Arc<Shared>,
        state: &mut MutexGuard<'_, State>,
        entry: Entry,
        room: Option<Memory>,
        is_tight: bool,
    ) {
        let (own, name) = (self.clone(), entry.name.clone());
        let load = move || {
            let loaded = own.load_now(&entry, room);
            let mut state = own.lock();
            state.loading.retain(|(name, _)| *name != entry.name);
            match loaded {
                Ok(model) => state.insert(&entry, model, own.options.keep_alive, is_tight),
                Err(LoadError::TooSmall(_)) if room.is_some() => {
                    if let Some(Known::Needs { was_too_small, .. }) =
                        state.known.get_mut(&entry.name)
                    {
                        *was_too_small = true;
                    }
                }
                Err(error) => {
                    state.give_up(&entry.name, &error);
                    state.try_again();
                }
            }
            drop(state);
            own.changed.notify_all();
        };
        if let Err(error) = thread::Builder::new().name("load".into()).spawn(load) {
            state.loading.retain(|(loading, _)| *loading != name);
            state.give_up(&name, &LoadError::Failed(error.to_string()));
        }
    }

    fn load_now(&self, entry: &Entry, room: Option<Memory>) -> Result<Arc<Model>, LoadError> {
        let started = Instant::now();
        let text = Texts::known(&self.texts, entry);
        let tokenizer = text.map(|text| text.tokenizer.clone());
        let model = guarded(|| {
            let loaded = self.loader.load(entry, room, tokenizer)?;
            self.start(entry, loaded).map_err(|error| LoadError::Failed(error.to_string()))
        })?;
        let seconds = started.elapsed().as_secs_f64();
        let Memory { vram_bytes, ram_bytes } = model.memory;
        tracing::info!(model = entry.name, seconds, vram_bytes, ram_bytes, "model loaded");
        self.metrics.note_load(&entry.name, seconds);
        Ok(model)
    }

    /// Starts the engine of an open model, with its text from an earlier load.
    pub(super) fn start(&self, entry: &Entry, loaded: Loaded) -> Result<Arc<Model>, ServeError> {
        let text = Texts::known(&self.texts, entry);
        let counts = self.metrics.counts_of(&entry.name);
        let model = Model::start(&entry.name, loaded, text, &self.options, counts)?;
        Texts::keep(&self.texts, entry, &model.text);
        Ok(Arc::new(model))
    }
}

impl State {
    /// Refuses all requests for a model, and forgets what is known about it.
    fn give_up(&mut self, name: &str, error: &LoadError) {
        self.known.remove(name);
        self.refuse(name, error);
    }
}

/// Runs work on a model. A panic must not leave requests waiting.
fn guarded<T>(work: impl FnOnce() -> Result<T, LoadError>) -> Result<T, LoadError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(LoadError::Failed("the program failed while it loaded the model".to_owned()))
    })
}
