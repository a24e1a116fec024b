//! Warnings about a model's files. A program reads them more than once, and should say what is wrong once.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, PoisonError};

static SAID: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

/// Logs a warning, unless this process has logged it before.
pub fn warn(warning: String) {
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if !said.contains(&warning) {
        tracing::warn!("{warning}");
        said.insert(warning);
    }
}
