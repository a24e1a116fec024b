//! Readers by number: a number that was never given out, or was closed, is refused.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use forebay_store::RawReader;

use crate::status::{BAD_READER, Failure};

/// A reader and the words of its last error.
pub struct Entry {
    /// `None` once it is closed.
    pub reader: Mutex<Option<RawReader>>,
    pub words: Mutex<String>,
}

#[derive(Default)]
struct Registry {
    last: u64,
    entries: HashMap<u64, Arc<Entry>>,
}

static REGISTRY: LazyLock<Mutex<Registry>> = LazyLock::new(Mutex::default);

/// A lock that a panic elsewhere does not close: what is behind it is whole at every step.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn add(reader: RawReader) -> u64 {
    let mut registry = lock(&REGISTRY);
    registry.last += 1;
    let number = registry.last;
    let entry = Entry { reader: Mutex::new(Some(reader)), words: Mutex::default() };
    registry.entries.insert(number, Arc::new(entry));
    number
}

pub fn find(number: u64) -> Result<Arc<Entry>, Failure> {
    let found = lock(&REGISTRY).entries.get(&number).cloned();
    found.ok_or_else(|| bad(number))
}

pub fn remove(number: u64) {
    lock(&REGISTRY).entries.remove(&number);
}

pub fn bad(number: u64) -> Failure {
    Failure::new(BAD_READER, format!("there is no reader {number}: it was closed or never opened"))
}
