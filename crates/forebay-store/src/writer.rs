//! Files that appear under their name only when they are whole, written at the speed of the disk.

use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, fallocate, fstatvfs};

use crate::arena::SLOT_ALIGNMENT;
use crate::error::StoreError;

/// Names that are tried before giving up; leftovers of killed processes occupy some.
const ATTEMPTS: u32 = 1000;

/// A file under a temporary name, with its room on the disk reserved. Writes may come from several
/// threads, in any order. Dropping it unfinished removes it.
///
/// Whole pages at aligned addresses go past the page cache where the file system allows it: buffered
/// writes of gigabytes push out what others have there, and are slower.
#[derive(Debug)]
pub struct OutputFile {
    target: PathBuf,
    temporary: PathBuf,
    cached: File,
    direct: Option<File>,
    /// Whether direct writes work; some file systems refuse them only when they come.
    direct_works: AtomicBool,
}

impl OutputFile {
    /// Creates the temporary file `.NAME.XXXXXXXX.partial` beside `target` and reserves `bytes` for
    /// it, so that a full disk shows before any work.
    ///
    /// # Errors
    /// [`StoreError::Create`], [`StoreError::NoRoom`].
    pub fn create(target: &Path, bytes: u64) -> Result<OutputFile, StoreError> {
        let failed = |source| StoreError::Create { file: target.to_path_buf(), source };
        let name = target.file_name().ok_or_else(|| failed(ErrorKind::InvalidFilename.into()))?;
        let mut found = None;
        for attempt in 0..ATTEMPTS {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            let number = std::process::id().wrapping_mul(ATTEMPTS).wrapping_add(attempt);
            hidden.push(format!(".{number:08x}.partial"));
            let path = target.with_file_name(hidden);
            match File::options().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => {
                    found = Some((path, file));
                    break;
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(error)),
            }
        }
        let (temporary, cached) = found.ok_or_else(|| {
            failed(std::io::Error::other(format!("{ATTEMPTS} unfinished files are beside it")))
        })?;
        let direct = File::options().write(true).custom_flags(libc::O_DIRECT).open(&temporary).ok();
        let file = OutputFile {
            target: target.to_path_buf(),
            temporary,
            cached,
            direct_works: AtomicBool::new(direct.is_some()),
            direct,
        };
        file.reserve(bytes)?;
        Ok(file)
    }

    fn reserve(&self, bytes: u64) -> Result<(), StoreError> {
        let failed = |source| StoreError::Create { file: self.target.clone(), source };
        let free = || fstatvfs(&self.cached).map_or(0, |disk| disk.f_bavail * disk.f_frsize);
        let no_room = |free_bytes| StoreError::NoRoom {
            file: self.target.clone(),
            needed_bytes: bytes,
            free_bytes,
        };
        match fallocate(&self.cached, FallocateFlags::empty(), 0, bytes.max(1)) {
            Ok(()) if bytes > 0 => Ok(()),
            Err(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) => {
                // What was reserved before the disk was full counts as free.
                let _ = self.cached.set_len(0);
                Err(no_room(free()))
            }
            // A file system that cannot reserve: look, and hope that nobody else takes the room.
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
                let free = free();
                if free < bytes {
                    return Err(no_room(free));
                }
                self.cached.set_len(bytes).map_err(failed)
            }
            Err(error) => Err(failed(error.into())),
        }
    }

    /// Where the unfinished file is.
    pub fn temporary_path(&self) -> &Path {
        &self.temporary
    }

    /// Whether whole pages are written past the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct_works.load(Ordering::Relaxed)
    }

    /// Writes `bytes` at `offset`.
    ///
    /// # Errors
    /// [`StoreError::Write`].
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let aligned = offset.is_multiple_of(SLOT_ALIGNMENT as u64)
            && bytes.as_ptr().addr().is_multiple_of(SLOT_ALIGNMENT);
        let whole = if aligned { bytes.len() / SLOT_ALIGNMENT * SLOT_ALIGNMENT } else { 0 };
        let (pages, rest) = bytes.split_at(whole);
        self.write_pages(offset, pages)?;
        let at = offset + whole as u64;
        self.cached.write_all_at(rest, at).map_err(|source| self.failed(at, source))
    }

    fn write_pages(&self, offset: u64, pages: &[u8]) -> Result<(), StoreError> {
        if pages.is_empty() {
            return Ok(());
        }
        if let Some(direct) = self.direct.as_ref().filter(|_| self.is_direct()) {
            match direct.write_all_at(pages, offset) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    tracing::warn!(
                        "{}: its file system refuses direct writes; writing through the page cache",
                        self.target.display()
                    );
                    self.direct_works.store(false, Ordering::Relaxed);
                }
                Err(error) => return Err(self.failed(offset, error)),
            }
        }
        self.cached.write_all_at(pages, offset).map_err(|source| self.failed(offset, source))
    }

    fn failed(&self, offset: u64, source: std::io::Error) -> StoreError {
        StoreError::Write { file: self.target.clone(), offset, source }
    }

    /// Brings everything to the disk and gives the file its name, replacing what had that name.
    ///
    /// # Errors
    /// [`StoreError::Create`].
    pub fn commit(self) -> Result<(), StoreError> {
        let failed = |source| StoreError::Create { file: self.target.clone(), source };
        self.cached.sync_all().map_err(failed)?;
        std::fs::rename(&self.temporary, &self.target).map_err(failed)?;
        // The name is durable only with its folder. Some file systems refuse to sync one; the data
        // is safe by then, so that is no failure.
        let folder = self.target.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Ok(folder) = File::open(folder.unwrap_or(Path::new("."))) {
            let _ = folder.sync_all();
        }
        Ok(())
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        // After a commit the temporary name is gone, and this does nothing.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arena;

    #[test]
    fn appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        let names = || std::fs::read_dir(folder.path()).unwrap().count();
        let file = OutputFile::create(&target, 10_000).unwrap();
        assert!(file.temporary_path().to_str().unwrap().ends_with(".partial"));
        drop(file);
        assert_eq!(names(), 0);

        let bytes: Vec<u8> = (0..10_000_u32).map(|i| (i % 251) as u8).collect();
        let arena = Arena::reserve(12_288).unwrap();
        let mut slot = arena.carve(12_288).unwrap();
        slot.as_mut_slice()[..10_000].copy_from_slice(&bytes);
        let file = OutputFile::create(&target, 10_000).unwrap();
        // Aligned and not, in the wrong order.
        file.write_at(8192, &slot.as_slice()[8192..10_000]).unwrap();
        file.write_at(0, &bytes[..8192]).unwrap();
        file.write_at(4096, &slot.as_slice()[4096..8192]).unwrap();
        assert!(!target.exists());
        file.commit().unwrap();
        assert!(std::fs::read(&target).unwrap() == bytes);
        assert_eq!(names(), 1);
    }

    #[test]
    fn no_room_is_an_error_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        let error = OutputFile::create(&target, 1 << 55).unwrap_err();
        assert!(matches!(error, StoreError::NoRoom { .. } | StoreError::Create { .. }), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let missing = folder.path().join("missing/out");
        assert!(matches!(OutputFile::create(&missing, 1), Err(StoreError::Create { .. })));
    }
}
