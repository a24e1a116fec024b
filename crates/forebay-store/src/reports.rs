//! Results that threads of a device report and its owner takes.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Results that were reported and not yet taken.
pub(crate) struct Reports<T> {
    state: Mutex<State<T>>,
    enough: Condvar,
}

struct State<T> {
    reported: Vec<T>,
    /// Number of results that the owner waits for; 0 if it does not wait.
    wanted: usize,
}

impl<T> Default for Reports<T> {
    fn default() -> Reports<T> {
        let state = State { reported: Vec::new(), wanted: 0 };
        Reports { state: Mutex::new(state), enough: Condvar::new() }
    }
}

impl<T> Reports<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // No code panics while it holds the lock, so the state is consistent even if the lock is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a result, and wakes the owner if that is enough for it.
    pub fn add(&self, result: T) {
        let mut state = self.lock();
        state.reported.push(result);
        let enough = state.wanted > 0 && state.reported.len() >= state.wanted;
        drop(state);
        if enough {
            self.enough.notify_one();
        }
    }

    /// Takes all results, without waiting.
    pub fn take(&self) -> Vec<T> {
        std::mem::take(&mut self.lock().reported)
    }

    /// Waits until there are `want` results, at least one, or the timeout expires, then takes all.
    pub fn wait(&self, want: usize, timeout: Duration) -> Vec<T> {
        let mut state = self.lock();
        state.wanted = want.max(1);
        let missing = |state: &mut State<T>| state.reported.len() < state.wanted;
        let waited = self.enough.wait_timeout_while(state, timeout, missing);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.wanted = 0;
        std::mem::take(&mut state.reported)
    }
}
