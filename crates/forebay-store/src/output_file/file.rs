//! A file that gets its name only when it is complete, written at the speed of the disk.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, RenameFlags, fallocate, fstatvfs, linkat, renameat_with,
};
use rustix::io::Errno;

use super::rules::folder_of;
use super::temporary::TemporaryName;
use super::{OutputError, OutputStream, Outputs};
use crate::arena::SLOT_ALIGNMENT;
use crate::points::reached;

/// An output that does not appear before [`commit`](OutputFile::commit). Several threads may write, in any order. If it
/// is dropped before that, nothing remains on the disk.
///
/// Whole pages at aligned addresses bypass the page cache where the file system allows it. Buffered writes of gigabytes
/// are slower, and they evict the cached pages of other programs.
#[derive(Debug)]
pub struct OutputFile {
    /// Path as the caller gave it.
    path: PathBuf,
    kind: Kind,
    cached: File,
    past_cache: Option<File>,
    /// True until a direct write is refused. Some file systems accept `O_DIRECT` on opening and refuse only the write.
    past_cache_works: AtomicBool,
}

#[derive(Debug)]
enum Kind {
    /// A device, a pipe or standard output, which is written directly.
    Direct,
    /// A regular file that gets its name on commit.
    Regular {
        /// Path of the file to create or replace, with symbolic links resolved.
        target: PathBuf,
        /// Temporary name. `None` if the file has no name at all, so that even a killed process leaves nothing behind.
        temporary: Option<TemporaryName>,
        replace: bool,
    },
}

impl OutputFile {
    /// Creates a new file, and refuses a path that exists. This is for programs that write one file and read none;
    /// other programs use [`Outputs`].
    ///
    /// # Errors
    /// Returns the errors of [`Outputs::create`].
    pub fn create(path: &Path) -> Result<OutputFile, OutputError> {
        Outputs::new(false).create(path)
    }

    /// Creates a file that replaces the existing file of this name, if there is one.
    ///
    /// # Errors
    /// Returns the errors of [`Outputs::create`].
    pub fn replace(path: &Path) -> Result<OutputFile, OutputError> {
        Outputs::new(true).create(path)
    }

    /// Opens the output at `path`. The caller has checked that it may be written.
    pub(super) fn open(path: &Path, replace: bool) -> Result<OutputFile, OutputError> {
        let failed = |error: io::Error| OutputError::create(path, &error);
        let found = fs::metadata(path).ok();
        if found.as_ref().is_some_and(|found| !found.is_file()) {
            return Ok(Self::direct(path, File::options().write(true).open(path).map_err(failed)?));
        }
        let target = match found {
            Some(_) => path.canonicalize().map_err(failed)?,
            None => path.to_path_buf(),
        };
        let folder = folder_of(&target);
        let (temporary, cached) = match unnamed(folder) {
            Some(file) => (None, file),
            None => named(folder).map(|(name, file)| (Some(name), file)).map_err(failed)?,
        };
        let own = match &temporary {
            Some(name) => name.path().to_path_buf(),
            None => descriptor_path(&cached),
        };
        let past_cache = File::options().write(true).custom_flags(libc::O_DIRECT).open(own).ok();
        reached("output begun");
        Ok(OutputFile {
            path: path.to_path_buf(),
            kind: Kind::Regular { target, temporary, replace },
            cached,
            past_cache_works: AtomicBool::new(past_cache.is_some()),
            past_cache,
        })
    }

    pub(super) fn direct(path: &Path, file: File) -> OutputFile {
        OutputFile {
            path: path.to_path_buf(),
            kind: Kind::Direct,
            cached: file,
            past_cache: None,
            past_cache_works: AtomicBool::new(false),
        }
    }

    /// Returns the path as the caller gave it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns this file if it can seek. Formats that are not written front to back use this to refuse pipes and
    /// terminals.
    ///
    /// # Errors
    /// Returns [`OutputError::NotSeekable`] for a pipe or terminal.
    pub fn seekable(self) -> Result<OutputFile, OutputError> {
        match rustix::fs::tell(&self.cached) {
            Ok(_) => Ok(self),
            Err(_) => Err(OutputError::NotSeekable { path: self.path }),
        }
    }

    /// Converts this file to a stream that is written front to back.
    pub fn into_stream(self) -> OutputStream {
        OutputStream::new(self)
    }

    /// Returns true if this output is written with [`append`](Self::append) and not with [`write_at`](Self::write_at).
    pub(super) fn is_direct(&self) -> bool {
        matches!(self.kind, Kind::Direct)
    }

    /// Reserves `bytes` on the disk, so that a full disk is noticed before any work. A regular file then has this
    /// length.
    ///
    /// # Errors
    /// Returns [`OutputError::NoRoom`] if the disk or quota has too little room, and [`OutputError::Write`] for other
    /// failures.
    pub fn reserve(&self, bytes: u64) -> Result<(), OutputError> {
        if self.is_direct() {
            return Ok(());
        }
        let free = || fstatvfs(&self.cached).map_or(0, |disk| disk.f_bavail * disk.f_frsize);
        let no_room = |free_bytes| OutputError::NoRoom {
            path: self.path.clone(),
            needed_bytes: bytes,
            free_bytes,
        };
        match fallocate(&self.cached, FallocateFlags::empty(), 0, bytes.max(1)) {
            Ok(()) if bytes > 0 => Ok(()),
            Err(Errno::NOSPC | Errno::DQUOT) => {
                // The failed call may have reserved a part. Release it, so that it counts as free below.
                let _ = self.cached.set_len(0);
                Err(no_room(free()))
            }
            // This file system cannot reserve room. Only check that there is enough; another program may still take it.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                let free = free();
                if free < bytes {
                    return Err(no_room(free));
                }
                self.cached.set_len(bytes).map_err(|error| self.failed(error))
            }
            Err(error) => Err(self.failed(error.into())),
        }
    }

    /// Cuts the file to `bytes`, if more were reserved. A device has no length.
    ///
    /// # Errors
    /// Returns [`OutputError::Write`] if the system refuses.
    pub fn truncate(&self, bytes: u64) -> Result<(), OutputError> {
        let found = self.cached.metadata().map_err(|error| self.failed(error))?;
        if !found.is_file() {
            return Ok(());
        }
        self.cached.set_len(bytes).map_err(|error| self.failed(error))
    }

    /// Returns true if writes of whole pages bypass the page cache.
    pub fn is_past_cache(&self) -> bool {
        self.past_cache_works.load(Ordering::Relaxed)
    }

    /// Writes `bytes` at `offset`.
    ///
    /// # Errors
    /// Returns [`OutputError::Write`] if the system refuses the write.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), OutputError> {
        let aligned = offset.is_multiple_of(SLOT_ALIGNMENT as u64)
            && bytes.as_ptr().addr().is_multiple_of(SLOT_ALIGNMENT);
        let whole = if aligned { bytes.len() / SLOT_ALIGNMENT * SLOT_ALIGNMENT } else { 0 };
        let (pages, rest) = bytes.split_at(whole);
        self.write_pages(offset, pages)?;
        let at = offset + whole as u64;
        self.cached.write_all_at(rest, at).map_err(|error| self.failed(error))
    }

    fn write_pages(&self, offset: u64, pages: &[u8]) -> Result<(), OutputError> {
        if pages.is_empty() {
            return Ok(());
        }
        if let Some(past_cache) = self.past_cache.as_ref().filter(|_| self.is_past_cache()) {
            match past_cache.write_all_at(pages, offset) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    tracing::warn!(
                        "{}: its file system refuses direct writes; writing through the page cache",
                        self.path.display()
                    );
                    self.past_cache_works.store(false, Ordering::Relaxed);
                }
                Err(error) => return Err(self.failed(error)),
            }
        }
        self.cached.write_all_at(pages, offset).map_err(|error| self.failed(error))
    }

    /// Appends `bytes` to an output that is [direct](Self::is_direct).
    pub(super) fn append(&self, bytes: &[u8]) -> Result<(), OutputError> {
        (&self.cached).write_all(bytes).map_err(|error| self.failed(error))
    }

    fn failed(&self, cause: io::Error) -> OutputError {
        OutputError::Write { path: self.path.clone(), cause }
    }

    /// Syncs everything to the disk and gives the file its name.
    ///
    /// # Errors
    /// Returns [`OutputError::Appeared`] if another program took the name meanwhile and this file may not replace it.
    /// Returns [`OutputError::Write`] if the file cannot be synced or named.
    pub fn commit(self) -> Result<(), OutputError> {
        let Kind::Regular { target, temporary, replace } = &self.kind else { return Ok(()) };
        let replaced = fs::metadata(target).ok().filter(|found| *replace && found.is_file());
        if let Some(replaced) = replaced {
            keep_permissions(&self.cached, replaced.permissions());
        }
        reached("output written");
        let named = self.cached.sync_all().and_then(|()| match temporary {
            None => name_unnamed(&self.cached, target, *replace),
            Some(name) => rename(name.path(), target, *replace),
        });
        named.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => OutputError::Appeared { path: self.path.clone() },
            _ => self.failed(error),
        })?;
        reached("output named");
        // The name is durable only after a sync of the folder. Some file systems refuse that. The data is safe by then,
        // so a refusal is not an error.
        if let Ok(folder) = File::open(folder_of(target)) {
            let _ = folder.sync_all();
        }
        Ok(())
    }
}

/// Gives `file` the permissions of the file that it replaces. They may be narrower or wider than those of a new file.
fn keep_permissions(file: &File, permissions: Permissions) {
    // A failure is ignored: a file system without permissions has none to lose.
    let _ = file.set_permissions(permissions);
}

/// Creates a file without a name that can be given one later. Returns `None` if the kernel or file system cannot do
/// that.
fn unnamed(folder: &Path) -> Option<File> {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_TMPFILE);
    let file = options.open(folder).ok()?;
    // Some systems can create such files but cannot name them, most often because they have no /proc. A name that exists is
    // refused only after the file was found there. A name that does not would stay behind a process that is killed.
    let refused = link(&file, &folder.join(".")).err()?;
    (refused.kind() == ErrorKind::AlreadyExists).then_some(file)
}

/// Gives an unnamed file its name. If the file system refuses that for a file without a name, copies the file.
fn name_unnamed(file: &File, target: &Path, replace: bool) -> io::Result<()> {
    let linked = match replace {
        false => link(file, target),
        true => TemporaryName::make(folder_of(target), |name| link(file, name))
            .and_then(|(name, ())| fs::rename(name.path(), target)),
    };
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => copy_to(file, target, replace),
        named => named,
    }
}

/// Writes the bytes and permissions of `file` to a new file, which then gets the name.
fn copy_to(mut file: &File, target: &Path, replace: bool) -> io::Result<()> {
    let (name, mut copy) = named(folder_of(target))?;
    file.rewind()?;
    io::copy(&mut file, &mut copy)?;
    keep_permissions(&copy, file.metadata()?.permissions());
    copy.sync_all()?;
    rename(name.path(), target, replace)
}

/// Creates a file with a temporary name, for folders where [`unnamed`] returns `None`.
fn named(folder: &Path) -> io::Result<(TemporaryName, File)> {
    let mut options = File::options();
    options.read(true).write(true).create_new(true);
    TemporaryName::make(folder, |name| options.open(name))
}

/// Returns a path that opens the file behind a descriptor.
fn descriptor_path(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Gives an unnamed file a name. Fails if the name exists.
fn link(file: &File, name: &Path) -> io::Result<()> {
    linkat(CWD, descriptor_path(file), CWD, name, AtFlags::SYMLINK_FOLLOW).map_err(io::Error::from)
}

/// Renames a file. Fails if the new name exists, unless that is replaced.
fn rename(from: &Path, to: &Path, replace: bool) -> io::Result<()> {
    match replace {
        true => fs::rename(from, to),
        false => rename_to_new(from, to),
    }
}

/// Renames a file. Fails if the new name exists.
fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            // The file system has no such rename. Creating the name first proves that no other program had it.
            File::options().write(true).create_new(true).open(to)?;
            fs::rename(from, to)
        }
        renamed => renamed.map_err(io::Error::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arena;

    fn names(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    /// Opens an output as on a file system without unnamed files.
    fn with_temporary_name(target: &Path, replace: bool) -> OutputFile {
        let mut file = OutputFile::open(target, replace).unwrap();
        let made = named(folder_of(target)).unwrap();
        let Kind::Regular { temporary, .. } = &mut file.kind else { panic!("is regular") };
        *temporary = Some(made.0);
        (file.cached, file.past_cache) = (made.1, None);
        file
    }

    #[test]
    fn appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        let bytes: Vec<u8> = (0..10_000_u32).map(|i| (i % 251) as u8).collect();
        let arena = Arena::reserve(12_288).unwrap();
        let mut slot = arena.carve(12_288).unwrap();
        slot.as_mut_slice()[..10_000].copy_from_slice(&bytes);
        for open in [OutputFile::open as fn(&Path, bool) -> _, |target, replace| {
            Ok(with_temporary_name(target, replace))
        }] {
            drop(open(&target, false).unwrap());
            assert_eq!(names(folder.path()), 0);
            let file = open(&target, false).unwrap();
            file.reserve(10_000).unwrap();
            // Aligned and unaligned writes, out of order.
            file.write_at(8192, &slot.as_slice()[8192..10_000]).unwrap();
            file.write_at(0, &bytes[..8192]).unwrap();
            file.write_at(4096, &slot.as_slice()[4096..8192]).unwrap();
            assert!(!target.exists());
            file.commit().unwrap();
            assert!(fs::read(&target).unwrap() == bytes);
            assert_eq!(names(folder.path()), 1);

            fs::set_permissions(&target, std::os::unix::fs::PermissionsExt::from_mode(0o640))
                .unwrap();
            let file = open(&target, true).unwrap();
            file.write_at(0, b"new").unwrap();
            assert!(fs::read(&target).unwrap() == bytes);
            file.commit().unwrap();
            assert_eq!(fs::read(&target).unwrap(), b"new");
            let mode =
                std::os::unix::fs::PermissionsExt::mode(&target.metadata().unwrap().permissions());
            assert_eq!((names(folder.path()), mode & 0o777), (1, 0o640));
            fs::remove_file(&target).unwrap();
        }
    }

    #[test]
    fn a_file_that_cannot_be_named_is_copied() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        let file = OutputFile::open(&target, false).unwrap();
        file.write_at(0, b"whole").unwrap();
        copy_to(&file.cached, &target, false).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"whole");
        let again = copy_to(&file.cached, &target, false).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AlreadyExists);
        file.write_at(0, b"WHOLE").unwrap();
        keep_permissions(&file.cached, std::os::unix::fs::PermissionsExt::from_mode(0o640));
        copy_to(&file.cached, &target, true).unwrap();
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&target.metadata().unwrap().permissions());
        assert_eq!((fs::read(&target).unwrap(), mode & 0o777), (b"WHOLE".to_vec(), 0o640));
        drop(file);
        assert_eq!(names(folder.path()), 1);
    }

    #[test]
    fn what_appeared_during_the_work_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        for named in [false, true] {
            let file = match named {
                false => OutputFile::create(&target).unwrap(),
                true => with_temporary_name(&target, false),
            };
            file.write_at(0, b"ours").unwrap();
            fs::write(&target, "theirs").unwrap();
            assert!(matches!(file.commit(), Err(OutputError::Appeared { .. })));
            assert_eq!(fs::read(&target).unwrap(), b"theirs");
            assert_eq!(names(folder.path()), 1);
            fs::remove_file(&target).unwrap();
        }
    }

    #[test]
    fn a_link_is_followed_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink("real", &link).unwrap();
        let file = OutputFile::replace(&link).unwrap();
        file.write_at(0, b"new").unwrap();
        file.commit().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        assert!(link.is_symlink());
    }

    #[test]
    fn no_room_is_an_error_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        let error = OutputFile::create(&target).unwrap().reserve(1 << 55).unwrap_err();
        assert!(matches!(error, OutputError::NoRoom { .. } | OutputError::Write { .. }), "{error}");
        assert_eq!(names(folder.path()), 0);
    }

    #[test]
    fn pipes_are_no_place_for_what_is_written_out_of_order() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        let file = OutputFile::create(&pipe).unwrap();
        assert!(matches!(file.seekable(), Err(OutputError::NotSeekable { .. })));
        assert_eq!(reader.join().unwrap(), b"");
        assert!(OutputFile::create(Path::new("/dev/null")).unwrap().seekable().is_ok());
    }
}
