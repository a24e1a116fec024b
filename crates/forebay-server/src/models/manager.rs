//! The thread that decides which models are loaded and unloaded.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::catalogue::{Entry, LoadError};
use super::keep_alive::KeepAlive;
use super::loading::{LOADS_MAX, MEASURES_MAX, MEASURING_TIME};
use super::room::{self, Holding, Memory, Room};
use super::{Known, Lease, Shared, Slot, State, failed};
use crate::caller::Share;
use crate::model::Model;

/// Most callers whose last turns are remembered.
const TURNS_MAX: usize = 256;

/// What the thread does next.
enum Step {
    /// Find out how much memory a model needs.
    Measure(Entry),
    Load {
        /// Whose turn it is.
        share: Share,
        entry: Entry,
        room: Option<Memory>,
        /// Memory that the model may take.
        reserved: Memory,
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

impl Shared {
    /// Runs the thread.
    pub(super) fn run(self: &Arc<Shared>) {
        let mut state = self.lock();
        loop {
            match self.next_step(&mut state) {
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
                    let others_are_loaded = !state.loaded.is_empty() || !state.loading.is_empty();
                    drop(state);
                    self.unload(slot, others_are_loaded);
                    state = self.lock();
                    state.try_again();
                }
                Step::Measure(entry) => {
                    let since = Instant::now();
                    state.known.insert(entry.name.clone(), Known::Measuring(since));
                    self.measure(&mut state, entry);
                }
                Step::Load { share, entry, room, reserved, is_tight } => {
                    state.note_turn(share);
                    state.loading.push((entry.name.clone(), reserved));
                    self.load(&mut state, entry, room, is_tight);
                }
            }
        }
    }

    /// Decides what to do next, after lending loaded models to all who wait for them.
    fn next_step(self: &Arc<Shared>, state: &mut State) -> Step {
        state.waiting.retain(|waiting| !waiting.reply.is_closed());
        if state.is_stopping {
            state.waiting.clear();
            let idle = state.loaded.iter().position(|slot| slot.leases == 0);
            // Models that are still lent end with their leases, and loads that have not come to an end are left behind.
            return idle.map_or(Step::End, Step::Unload);
        }
        state.forget_unwanted();
        let unclaimed = state.lend_to_waiting(self);
        if !unclaimed.is_empty() {
            return Step::GiveBack(unclaimed);
        }
        let now = Instant::now();
        if let Some(index) = state.loaded.iter().position(|slot| slot.has_to_leave(now)) {
            return Step::Unload(index);
        }
        if !state.is_held {
            state.refuse_late(now);
            let all = self.loader.memory();
            for (share, entry) in state.wanted() {
                match state.next_for(share, entry, all) {
                    Next::Step(step) => return step,
                    Next::NotYet => {}
                    Next::Last => break,
                }
            }
        }
        Step::Wait(state.next_end())
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

/// What is to be done for a model that is waited for.
enum Next {
    Step(Step),
    /// Nothing now. Others may come before it.
    NotYet,
    /// Nothing until others have left. What comes to be free is for this model.
    Last,
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

    /// Returns the models that are waited for and the callers, in the order in which they are loaded. Callers take turns, and each
    /// has its own models in the order of its requests.
    fn wanted(&self) -> Vec<(Share, Entry)> {
        let (mut names, mut counts) = (HashSet::new(), HashMap::new());
        let mut wanted = Vec::new();
        for waiting in &self.waiting {
            if names.insert(&waiting.entry.name) {
                let turn: &mut usize = counts.entry(waiting.share).or_default();
                let last = self.turns.iter().rposition(|share| *share == waiting.share);
                wanted.push(((*turn, last), waiting));
                *turn += 1;
            }
        }
        // The sort keeps the order of equal turns.
        wanted.sort_by_key(|(turn, _)| *turn);
        wanted.into_iter().map(|(_, of)| (of.share, of.entry.clone())).collect()
    }

    /// Notes that a caller had its turn.
    fn note_turn(&mut self, share: Share) {
        self.turns.retain(|other| *other != share);
        self.turns.push_back(share);
        if self.turns.len() > TURNS_MAX {
            self.turns.pop_front();
        }
    }

    /// Decides what to do for a model that is waited for.
    fn next_for(&mut self, share: Share, entry: Entry, all: Memory) -> Next {
        if self.loading.iter().any(|(name, _)| *name == entry.name) {
            return Next::NotYet;
        }
        let at = self.loaded.iter().position(|slot| slot.model.name == entry.name);
        if let Some(index) = at {
            // It failed and is still lent, it got too little memory, or it has to leave for another one.
            let is_idle = self.loaded[index].leases == 0;
            return if is_idle { Next::Step(Step::Unload(index)) } else { Next::NotYet };
        }
        let (needs, was_too_small) = match self.known.get(&entry.name) {
            Some(Known::Needs { memory, was_too_small }) => (*memory, *was_too_small),
            Some(Known::Measuring(_)) => return Next::NotYet,
            None => {
                let measuring = |known: &&Known| matches!(known, Known::Measuring(_));
                return match self.known.values().filter(measuring).count() < MEASURES_MAX {
                    true => Next::Step(Step::Measure(entry)),
                    false => Next::NotYet,
                };
            }
        };
        match room::next(needs, all, &self.holdings(), was_too_small) {
            Room::Load { .. } if self.loading.len() >= LOADS_MAX => Next::Last,
            Room::Load { room, is_tight } => {
                let reserved = needs.within(room.unwrap_or(all));
                Next::Step(Step::Load { share, entry, room, reserved, is_tight })
            }
            Room::Unload(index) => Next::Step(Step::Unload(index)),
            Room::Wait(busy) => {
                // Those that are being loaded cannot leave yet.
                if self.closing_for.as_ref() != Some(&entry.name) {
                    self.loaded.iter_mut().for_each(|slot| slot.is_closing = false);
                }
                let loaded = self.loaded.len();
                for index in busy.into_iter().filter(|index| *index < loaded) {
                    self.loaded[index].is_closing = true;
                }
                self.closing_for = Some(entry.name);
                Next::Last
            }
        }
    }

    /// Returns what holds memory: the loaded models, then those that are being loaded.
    fn holdings(&self) -> Vec<Holding> {
        let loaded = self.loaded.iter().map(|slot| Holding {
            memory: slot.model.memory,
            is_busy: slot.leases > 0,
            last_used: slot.last_used,
        });
        let now = Instant::now();
        let loading = self.loading.iter();
        let loading =
            loading.map(|(_, memory)| Holding { memory: *memory, is_busy: true, last_used: now });
        loaded.chain(loading).collect()
    }

    /// Forgets what was found out for requests that do not wait any more.
    fn forget_unwanted(&mut self) {
        let State { waiting, known, closing_for, loaded, .. } = self;
        let is_wanted = |name: &str| waiting.iter().any(|waiting| waiting.entry.name == name);
        // What is being measured keeps its thread, also if no request waits for it.
        known.retain(|name, known| matches!(known, Known::Measuring(_)) || is_wanted(name));
        if closing_for.take_if(|name| !is_wanted(name)).is_some() {
            loaded.iter_mut().for_each(|slot| slot.is_closing = false);
        }
    }

    /// Refuses requests for models that cannot be measured in time.
    fn refuse_late(&mut self, now: Instant) {
        let late = self.known.iter().filter_map(|(name, known)| match known {
            Known::Measuring(since) => (now >= *since + MEASURING_TIME).then(|| name.clone()),
            Known::Needs { .. } => None,
        });
        let late: Vec<String> = late.collect();
        for name in late {
            if self.waiting.iter().any(|waiting| waiting.entry.name == name) {
                let seconds = MEASURING_TIME.as_secs();
                let why = format!("reading its files takes longer than {seconds} seconds");
                self.refuse(&name, &LoadError::Failed(why));
            }
        }
    }

    /// Notes that memory is free, so that models which did not fit may try again.
    pub(super) fn try_again(&mut self) {
        for known in self.known.values_mut() {
            if let Known::Needs { was_too_small, .. } = known {
                *was_too_small = false;
            }
        }
    }

    /// Adds a loaded model to those that can be lent.
    pub(super) fn insert(
        &mut self,
        entry: &Entry,
        model: Arc<Model>,
        keep_alive: KeepAlive,
        is_tight: bool,
    ) {
        let id = self.next_id;
        self.next_id += 1;
        self.loaded.push(Slot {
            id,
            model,
            leases: 0,
            keep_alive: entry.keep_alive.unwrap_or(keep_alive),
            last_used: Instant::now(),
            is_closing: false,
            is_tight,
            was_lent: false,
            unloads: Vec::new(),
        });
    }

    /// Returns when the next idle model has to leave, or the next request is refused because its model is not measured.
    fn next_end(&self) -> Option<Instant> {
        let idle = self.loaded.iter().filter(|slot| slot.leases == 0);
        let ends = idle.filter_map(|slot| slot.keep_alive.ends(slot.last_used));
        let late = self.waiting.iter().filter_map(|waiting| {
            match self.known.get(&waiting.entry.name)? {
                Known::Measuring(since) => Some(*since + MEASURING_TIME),
                Known::Needs { .. } => None,
            }
        });
        ends.chain(late).min()
    }

    /// Answers all requests that wait for a model with the reason why it cannot be loaded.
    pub(super) fn refuse(&mut self, name: &str, error: &LoadError) {
        tracing::warn!(model = name, "the model was not loaded: {error}");
        let why = format!("model {name:?} cannot be loaded: {error}");
        for waiting in std::mem::take(&mut self.waiting) {
            if waiting.entry.name == name {
                let _ = waiting.reply.send(Err(failed(why.clone())));
            } else {
                self.waiting.push_back(waiting);
            }
        }
    }
}
