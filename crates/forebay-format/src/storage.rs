//! Places that hold files: the disk, or something that another crate knows how to read.

use std::fmt::Debug;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// What a name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathKind {
    File,
    Folder,
    /// Something that has no content of its own, such as a device.
    Other,
}

/// A place that holds files. Names are paths: on a disk those of the system, elsewhere whatever the place makes of them.
/// A name joined with `/` and a file name is that file in the folder.
pub trait Storage: Send + Sync + Debug {
    /// Returns what a name stands for.
    ///
    /// # Errors
    /// Returns an error if there is nothing of this name, or if the place cannot be asked.
    fn kind(&self, path: &Path) -> io::Result<PathKind>;

    /// Returns true if there is a file of this name.
    ///
    /// # Errors
    /// Returns an error if the place cannot be asked.
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// Opens a file. Returns a reader of its content from the start, and its size in bytes.
    ///
    /// # Errors
    /// Returns an error if there is no such file or it cannot be read.
    fn open(&self, path: &Path) -> io::Result<(Box<dyn Read>, u64)>;

    /// Returns the names of everything in a folder, in any order.
    ///
    /// # Errors
    /// Returns an error if there is no such folder, or if the place cannot list folders.
    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>>;

    /// Says that these files will be opened soon, so that a place that answers slowly can begin with all of them.
    fn expect(&self, _paths: &[PathBuf]) {}
}

/// The file systems of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Disk;

impl Storage for Disk {
    fn kind(&self, path: &Path) -> io::Result<PathKind> {
        let metadata = std::fs::metadata(path)?;
        Ok(match (metadata.is_dir(), metadata.is_file()) {
            (true, _) => PathKind::Folder,
            (_, true) => PathKind::File,
            _ => PathKind::Other,
        })
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        Ok(path.exists())
    }

    fn open(&self, path: &Path) -> io::Result<(Box<dyn Read>, u64)> {
        let file = File::open(path)?;
        let bytes = file.metadata()?.len();
        Ok((Box::new(file), bytes))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
    }
}
