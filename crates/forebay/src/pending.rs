//! Output files that appear whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};

use crate::interrupt;

/// A file under a temporary name beside its destination. Creating it first shows, before hours of
/// work, whether the result can be written; dropping it unfinished removes it.
pub struct PendingFile {
    destination: PathBuf,
    temporary: PathBuf,
    writer: Option<BufWriter<File>>,
}

impl PendingFile {
    /// Creates the temporary file. Fails where the destination is no place for a file.
    pub fn create(destination: &Path) -> anyhow::Result<PendingFile> {
        check_destination(destination)?;
        let temporary = temporary_name(destination)?;
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary)
            .map_err(|error| explain(destination, error))?;
        interrupt::watch(&temporary);
        let writer = Some(BufWriter::with_capacity(1 << 20, file));
        Ok(PendingFile { destination: destination.to_path_buf(), temporary, writer })
    }

    /// The name that it will have.
    pub fn destination(&self) -> &Path {
        &self.destination
    }

    /// Makes the file durable and gives it its name, replacing what had that name.
    pub fn commit(mut self) -> anyhow::Result<()> {
        let failed = || format!("{}: cannot be written", self.destination.display());
        if let Some(writer) = self.writer.take() {
            let file = writer.into_inner().map_err(|e| e.into_error()).with_context(failed)?;
            file.sync_all().with_context(failed)?;
        }
        fs::rename(&self.temporary, &self.destination).with_context(failed)?;
        interrupt::unwatch(&self.temporary);
        // The name is durable only with its directory. Some file systems refuse to sync one; the
        // data is safe by then, so that is no failure.
        if let Ok(directory) = File::open(parent_of(&self.destination)) {
            let _ = directory.sync_all();
        }
        Ok(())
    }
}

impl Write for PendingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.as_mut().ok_or_else(|| io::Error::other("already finished"))?.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.as_mut().ok_or_else(|| io::Error::other("already finished"))?.flush()
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        // After a commit the temporary name is gone, and this does nothing.
        let _ = fs::remove_file(&self.temporary);
        interrupt::unwatch(&self.temporary);
    }
}

/// Checks that a file can be made at `destination`, by making one beside it and removing it.
pub fn probe(destination: &Path) -> anyhow::Result<()> {
    PendingFile::create(destination).map(drop)
}

fn check_destination(destination: &Path) -> anyhow::Result<()> {
    match fs::metadata(destination) {
        Ok(metadata) if metadata.is_dir() => {
            bail!("{}: is a directory: name the file to write inside it", destination.display())
        }
        // Renaming over /dev/null would replace the device.
        Ok(metadata) if !metadata.is_file() => bail!(
            "{}: exists and is not a regular file: choose another name",
            destination.display()
        ),
        Ok(metadata) if metadata.permissions().readonly() => bail!(
            "{}: exists and is read-only: remove it or choose another name",
            destination.display()
        ),
        _ => Ok(()),
    }
}

fn temporary_name(destination: &Path) -> anyhow::Result<PathBuf> {
    let name = destination.file_name().ok_or_else(|| {
        anyhow!("{}: names no file: end the path with a file name", destination.display())
    })?;
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}.tmp", std::process::id()));
    Ok(parent_of(destination).join(temporary))
}

/// The directory that a path's file is in.
pub fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn explain(destination: &Path, error: io::Error) -> anyhow::Error {
    let directory = parent_of(destination);
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => {
            format!("the directory {} does not exist: create it first", directory.display())
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            format!("{} is not writable: choose another place", directory.display())
        }
        io::ErrorKind::NotADirectory => {
            format!("{} is not a directory: choose another place", directory.display())
        }
        _ => format!("{error}: choose another place"),
    };
    anyhow!("{}: cannot be written: {remedy}", destination.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appears_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out");
        let mut file = PendingFile::create(&path).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);

        let mut file = PendingFile::create(&path).unwrap();
        file.write_all(b"whole").unwrap();
        assert!(!path.exists());
        file.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn refuses_what_is_no_place_for_a_file() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("file"), "").unwrap();
        for path in ["", "missing/out", "file/out", ".."] {
            assert!(PendingFile::create(&directory.path().join(path)).is_err(), "{path}");
        }
        assert!(PendingFile::create(Path::new("/dev/null")).is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
