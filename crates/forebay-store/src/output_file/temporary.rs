//! Temporary names, and their removal.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Maximum number of names that are tried. Killed processes may have left some behind.
const ATTEMPTS: u32 = 1000;

/// Every temporary name of this process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes every file that has a temporary name of this process. Only a signal handler's thread that is about to end
/// the process calls this, because the owners of these files must not continue. A thread that creates or removes such a
/// file afterwards waits until the process ends.
pub fn remove_unfinished() {
    let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
    for path in unfinished.drain(..) {
        // If one removal fails, the best that can be done is to try the others.
        let _ = std::fs::remove_file(path);
    }
    // The lock is never released: a file that is created now would stay.
    std::mem::forget(unfinished);
}

/// A file name that is removed on drop and by [`remove_unfinished`].
#[derive(Debug)]
pub struct TemporaryName {
    path: PathBuf,
}

impl TemporaryName {
    /// Calls `make` with names `.forebay-….partial` in `folder` until one is free.
    ///
    /// # Errors
    /// Returns the errors of `make`, except [`ErrorKind::AlreadyExists`]. Returns an error if too many names are taken.
    pub fn make<T>(
        folder: &Path,
        mut make: impl FnMut(&Path) -> io::Result<T>,
    ) -> io::Result<(TemporaryName, T)> {
        // The lock is held while the file is made: `remove_unfinished` must not run between its creation and its entry
        // in the list.
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
        // After a rename the name is gone, and this call fails without effect.
        let _ = std::fs::remove_file(&self.path);
        let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        unfinished.retain(|path| *path != self.path);
    }
}
