//! A file that is not there until it is complete.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::FormatError;
use crate::catalog::folder_of;

/// Names that are tried before giving up; leftovers of killed processes occupy some.
const ATTEMPTS: u32 = 1000;

/// A file beside its final place that is removed on drop unless it was renamed.
#[derive(Debug)]
pub struct Temporary {
    path: Option<PathBuf>,
}

impl Temporary {
    /// Creates an empty file in the folder of `target`, under a name that nothing else has.
    pub fn create(target: &Path) -> Result<(Self, File), FormatError> {
        let Some(name) = target.file_name() else {
            let why = "the path names no file".to_owned();
            return Err(FormatError::WriteFile { path: target.to_owned(), why });
        };
        for attempt in 0..ATTEMPTS {
            let mut hidden = std::ffi::OsString::from(".");
            hidden.push(name);
            hidden.push(format!(".{}-{attempt}.tmp", std::process::id()));
            let path = target.with_file_name(hidden);
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => return Ok((Self { path: Some(path) }, file)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(FormatError::Io { path, source: error }),
            }
        }
        let why = format!("{ATTEMPTS} temporary files are in its folder; remove them");
        Err(FormatError::WriteFile { path: target.to_owned(), why })
    }

    /// Where the file is now.
    pub fn path(&self) -> &Path {
        self.path.as_deref().unwrap_or(Path::new(""))
    }

    /// Gives the file its final name, replacing what has it, and makes that durable.
    pub fn rename_to(mut self, target: &Path) -> Result<(), FormatError> {
        if let Some(path) = &self.path {
            std::fs::rename(path, target).map_err(FormatError::io(target))?;
        }
        self.path = None;
        let folder = folder_of(target);
        // The rename is only durable once the folder is; not every system can open folders.
        if cfg!(unix) {
            let opened = File::open(folder).map_err(FormatError::io(folder))?;
            opened.sync_all().map_err(FormatError::io(folder))?;
        }
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Nothing to do about a failure here; the name says what the file is.
            let _ = std::fs::remove_file(path);
        }
    }
}
