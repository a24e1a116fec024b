//! Readers by number: a number that was never given out, or was closed, is refused.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use forebay_store::RawReader;

use crate::status::{BAD_READER, Failure};

/// A reader and the words of its last error.
pub struct Entry {
    /// `None` once it is closed.
    pub reader: Mutex<Option<RawReader>>,
    pub words: Mutex<String>,
}

static READERS: LazyLock<Mutex<HashMap<u64, Arc<Entry>>>> = LazyLock::new(Mutex::default);

/// A number that nothing had before: readers and weights have different ones, so that neither passes for the other.
pub fn next_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// A lock that a panic elsewhere does not close: what is behind it is whole at every step.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn add(reader: RawReader) -> u64 {
    let number = next_number();
    let entry = Entry { reader: Mutex::new(Some(reader)), words: Mutex::default() };
    lock(&READERS).insert(number, Arc::new(entry));
    number
}

pub fn find(number: u64) -> Result<Arc<Entry>, Failure> {
    let found = lock(&READERS).get(&number).cloned();
    found.ok_or_else(|| bad(number))
}

pub fn remove(number: u64) {
    lock(&READERS).remove(&number);
}

pub fn bad(number: u64) -> Failure {
    Failure::new(BAD_READER, format!("there is no reader {number}: it was closed or never opened"))
}
