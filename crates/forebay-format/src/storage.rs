//! Places that hold files: the disk, or something that another crate knows how to read.

use std::fmt::Debug;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

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
        let (file, bytes) = open_regular(path)?;
        Ok((Box::new(file), bytes))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
    }
}

/// Opens a file of a model to read it. Also returns its size in bytes. Never waits for another program, as opening a FIFO does.
///
/// # Errors
/// Returns an error if there is no such file, if it cannot be read, or if it is something else than a regular file. The error then
/// says what it is.
pub fn open_regular(path: &Path) -> io::Result<(File, u64)> {
    // A device may act when it is opened, so the first check comes before.
    expect_regular(&std::fs::metadata(path)?)?;
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    // Something else may have taken the file's name since.
    let metadata = file.metadata()?;
    expect_regular(&metadata)?;
    Ok((file, metadata.len()))
}

fn expect_regular(metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    let what = if kind.is_file() {
        return Ok(());
    } else if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a named pipe (FIFO)"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_char_device() || kind.is_block_device() {
        "a device"
    } else {
        "no regular file"
    };
    let why = format!("it is {what}, but every file of a model must be a regular file");
    Err(io::Error::new(io::ErrorKind::InvalidInput, why))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), "12345").unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        std::os::unix::fs::symlink(at("fifo"), at("link to fifo")).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        assert_eq!(open_regular(&at("file")).unwrap().1, 5);
        assert_eq!(open_regular(&at("link")).unwrap().1, 5);
        for (path, said) in [
            (at("fifo"), "FIFO"),
            (at("link to fifo"), "FIFO"),
            (at("socket"), "a socket"),
            (at("folder"), "a folder"),
            ("/dev/zero".into(), "a device"),
        ] {
            let error = Disk.open(&path).err().unwrap();
            assert!(error.to_string().contains(said), "{}: {error}", path.display());
        }
        let missing = Disk.open(&at("missing")).err().unwrap();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
