//! Readers by number. A number that was never issued, or whose reader was closed, is an error.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use forebay_store::RawReader;

use crate::status::{BAD_READER, Failure};

/// A reader and the message of its last error.
pub struct Entry {
    /// `None` once the reader is closed.
    pub reader: Mutex<Option<RawReader>>,
    pub words: Mutex<String>,
}

static READERS: LazyLock<Mutex<HashMap<u64, Arc<Entry>>>> = LazyLock::new(Mutex::default);

/// Returns a number that was never used before. Readers and weights share one sequence, so that one cannot be mistaken
/// for the other.
pub fn next_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// Locks a mutex even if a thread panicked while it held the lock. The data are consistent at every step.
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
