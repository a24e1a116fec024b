//! The thread that loads and unloads models, one at a time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::catalogue::{Entry, LoadError, Loaded};
use super::room::{self, Holding, Memory, Room};
use super::texts::Texts;
use super::{Lease, Shared, Slot, State, failed};
use crate::ServeError;
use crate::model::Model;

/// What the thread does next.
enum Step {
    /// Find out how much memory the model at the front of the queue needs.
    Measure(Entry),
    Load {
        entry: Entry,
        room: Option<Memory>,
        is_tight: bool,
    },
    /// Unload the model with this index.
    Unload(usize),
    /// Give back leases whose clients are gone.
    GiveBack(Vec<Lease>),
    /// Wait until something changes, or until this moment.
    Wait(Option<Instant>),
    End,
}

/// What is known about the model at the front of the queue.
struct Front {
    name: String,
    needs: Memory,
    /// True if it did not load into what was free, and nothing has left since.
    was_too_small: bool,
}

impl Shared {
    /// Runs the thread.
    pub(super) fn run(self: &Arc<Shared>) {
        let mut front: Option<Front> = None;
        let mut state = self.lock();
        loop {
            match self.next_step(&mut state, &mut front) {
                Step::End => return,
                Step::Wait(None) => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Step::Wait(Some(until)) => {
                    let time = until.saturating_duration_since(Instant::now());
                    let waited = self.changed.wait_timeout(state, time);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                Step::GiveBack(leases) => {
                    // The end of a lease needs the lock.
                    drop(state);
                    drop(leases);
                    state = self.lock();
                }
                Step::Unload(index) => {
                    let slot = state.loaded.swap_remove(index);
                    // Under the lock, so that no metric goes back in between.
                    self.metrics.note_unload(&slot.model.name, &slot.model.worker.report());
                    let others_are_loaded = !state.loaded.is_empty();
                    drop(state);
                    self.unload(slot, others_are_loaded);
                    if let Some(front) = &mut front {
                        front.was_too_small = false;
                    }
                    state = self.lock();
                }
                Step::Measure(entry) => {
                    drop(state);
                    match guarded(|| self.loader.needs(&entry)) {
                        Ok(needs) => {
                            let name = entry.name;
                            front = Some(Front { name, needs, was_too_small: false });
                        }
                        Err(error) => self.lock().refuse(&entry, &error),
                    }
                    state = self.lock();
                }
                Step::Load { entry, room, is_tight } => {
                    drop(state);
                    match self.load(&entry, room) {
                        Ok(model) => self.insert(&entry, model, is_tight),
                        Err(LoadError::TooSmall(_)) if room.is_some() => {
                            front.iter_mut().for_each(|front| front.was_too_small = true);
                        }
                        Err(error) => {
                            front = None;
                            self.lock().refuse(&entry, &error);
                        }
                    }
                    state = self.lock();
                }
            }
        }
    }

    /// Decides what to do next, after lending loaded models to all who wait for them.
    fn next_step(self: &Arc<Shared>, state: &mut State, front: &mut Option<Front>) -> Step {
        state.waiting.retain(|waiting| !waiting.reply.is_closed());
        if state.is_stopping {
            state.waiting.clear();
            let idle = state.loaded.iter().position(|slot| slot.leases == 0);
            // Models that are still lent end with their leases.
            return idle.map_or(Step::End, Step::Unload);
        }
        let first = state.waiting.front().map(|waiting| &waiting.entry.name);
        if front.as_ref().map(|front| &front.name) != first {
            // Nobody waits any more for what other models had to leave for.
            *front = None;
            state.loaded.iter_mut().for_each(|slot| slot.is_closing = false);
        }
        let unclaimed = state.lend_to_waiting(self);
        if !unclaimed.is_empty() {
            return Step::GiveBack(unclaimed);
        }
        let now = Instant::now();
        if let Some(index) = state.loaded.iter().position(|slot| slot.has_to_leave(now)) {
            return Step::Unload(index);
        }
        let Some(waiting) = state.waiting.front() else {
            return Step::Wait(state.next_end());
        };
        let entry = waiting.entry.clone();
        let at = state.loaded.iter().position(|slot| slot.model.name == entry.name);
        if let Some(index) = at {
            // It failed and is still lent, or it got too little memory.
            let is_idle = state.loaded[index].leases == 0;
            return if is_idle { Step::Unload(index) } else { Step::Wait(state.next_end()) };
        }
        let known = front.as_ref().filter(|front| front.name == entry.name);
        let Some(known) = known else { return Step::Measure(entry) };
        let holding = |slot: &Slot| Holding {
            memory: slot.model.memory,
            is_busy: slot.leases > 0,
            last_used: slot.last_used,
        };
        let loaded: Vec<Holding> = state.loaded.iter().map(holding).collect();
        match room::next(known.needs, self.loader.memory(), &loaded, known.was_too_small) {
            Room::Load { room, is_tight } => Step::Load { entry, room, is_tight },
            Room::Unload(index) => Step::Unload(index),
            Room::Wait(busy) => {
                busy.into_iter().for_each(|index| state.loaded[index].is_closing = true);
                Step::Wait(state.next_end())
            }
        }
    }

    /// Loads a model and starts its engine.
    fn load(&self, entry: &Entry, room: Option<Memory>) -> Result<Arc<Model>, LoadError> {
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

    /// Adds a loaded model to those that can be lent.
    pub(super) fn insert(&self, entry: &Entry, model: Arc<Model>, is_tight: bool) {
        let keep_alive = entry.keep_alive.unwrap_or(self.options.keep_alive);
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.loaded.push(Slot {
            id,
            model,
            leases: 0,
            keep_alive,
            last_used: Instant::now(),
            is_closing: false,
            is_tight,
            was_lent: false,
            unloads: Vec::new(),
        });
    }

    /// Gives a model's memory back. The engine's thread drops the session, and this waits for it.
    fn unload(&self, slot: Slot, others_are_loaded: bool) {
        let Slot { model, unloads, .. } = slot;
        let name = model.name.clone();
        let is_broken = model.worker.is_broken();
        // No lease is left, so this is the last owner: the memory is free when `drop` returns.
        drop(model);
        if is_broken && !others_are_loaded {
            self.loader.forget();
        }
        tracing::info!(model = name, is_broken, "model unloaded");
        for sender in unloads {
            // The client may be gone.
            let _ = sender.send(());
        }
    }
}

/// Runs work on a model. A panic must not end the thread that loads the other models.
fn guarded<T>(work: impl FnOnce() -> Result<T, LoadError>) -> Result<T, LoadError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(LoadError::Failed("the program failed while it loaded the model".to_owned()))
    })
}

impl Slot {
    /// Returns true if nobody uses the model and it has failed or its time is over.
    fn has_to_leave(&self, now: Instant) -> bool {
        let is_over = || self.keep_alive.ends(self.last_used).is_some_and(|end| end <= now);
        self.leases == 0 && (self.model.worker.is_broken() || is_over())
    }
}

impl State {
    /// Lends loaded models to requests that wait for them, wherever they are in the queue. A model that has to leave for the
    /// first request is not lent. Returns the leases of clients that are gone.
    fn lend_to_waiting(&mut self, shared: &Arc<Shared>) -> Vec<Lease> {
        let mut unclaimed = Vec::new();
        for waiting in std::mem::take(&mut self.waiting) {
            match self.lend(&waiting.entry.name, waiting.keep_alive, shared) {
                Some(lease) => {
                    unclaimed.extend(waiting.reply.send(Ok(lease)).err().and_then(Result::ok))
                }
                None => self.waiting.push_back(waiting),
            }
        }
        unclaimed
    }

    /// Returns when the next idle model has to leave.
    fn next_end(&self) -> Option<Instant> {
        let idle = self.loaded.iter().filter(|slot| slot.leases == 0);
        idle.filter_map(|slot| slot.keep_alive.ends(slot.last_used)).min()
    }

    /// Answers all requests that wait for a model with the reason why it cannot be loaded.
    fn refuse(&mut self, entry: &Entry, error: &LoadError) {
        tracing::warn!(model = entry.name, "the model was not loaded: {error}");
        let why = format!("model {:?} cannot be loaded: {error}", entry.name);
        for waiting in std::mem::take(&mut self.waiting) {
            if waiting.entry.name == entry.name {
                let _ = waiting.reply.send(Err(failed(why.clone())));
            } else {
                self.waiting.push_back(waiting);
            }
        }
    }
}
