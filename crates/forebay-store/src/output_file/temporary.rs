//! Temporary names, and their removal.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Names that are tried before giving up; leftovers of killed processes may occupy some.
const ATTEMPTS: u32 = 1000;

/// Every temporary name that is in use.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes every temporary name of this process. For a signal handler's thread that is about to end the process: the owners
/// of these files must not go on.
pub fn remove_unfinished() {
    for path in UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        // There is nothing better to do about a failure than to go on with the others.
        let _ = std::fs::remove_file(path);
    }
}

/// A name in a folder that is removed on drop, and by [`remove_unfinished`].
#[derive(Debug)]
pub struct TemporaryName {
    path: PathBuf,
}

impl TemporaryName {
    /// Calls `make` with names `.forebay-….partial` in `folder` until it does not find one taken.
    ///
    /// # Errors
    /// Those of `make`, except [`ErrorKind::AlreadyExists`].
    pub fn make<T>(
        folder: &Path,
        mut make: impl FnMut(&Path) -> io::Result<T>,
    ) -> io::Result<(TemporaryName, T)> {
        // Held while the file is made: `remove_unfinished` must not run between its creation and its entry in the list.
        let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        for attempt in 0..ATTEMPTS {
            let path = folder.join(format!(".forebay-{}-{attempt}.partial", std::process::id()));
            match make(&path) {
                Ok(made) => {
                    unfinished.push(path.clone());
                    return Ok((TemporaryName { path }, made));
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        let why = format!("{ATTEMPTS} unfinished files (.forebay-*.partial) are in its folder");
        Err(io::Error::other(why))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TemporaryName {
    fn drop(&mut self) {
        // After a rename the name is gone, and this does nothing.
        let _ = std::fs::remove_file(&self.path);
        let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        unfinished.retain(|path| *path != self.path);
    }
}
