//! A file of random bytes to measure the disk with, which is gone afterwards whatever happens.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Bytes of the file: large enough that a disk's own cache does not hold it.
pub(super) const SCRATCH_BYTES: u64 = 1 << 30;
const PIECE: usize = 4 << 20;

/// A file without a name: even a killed process leaves nothing behind. Others open it through the path of its
/// descriptor.
pub(super) struct Scratch {
    path: PathBuf,
    /// What it is called while it has a name.
    name: PathBuf,
    _file: File,
}

/// A name of the file, until this is dropped.
pub(super) struct Named<'a> {
    path: &'a Path,
}

impl Named<'_> {
    pub(super) fn path(&self) -> &Path {
        self.path
    }
}

impl Drop for Named<'_> {
    fn drop(&mut self) {
        // Nothing that could be done about an error would be better than what the next run says.
        let _ = std::fs::remove_file(self.path);
    }
}

impl Scratch {
    /// Writes the file and waits until it is on the disk.
    pub(super) fn create(folder: &Path) -> io::Result<Scratch> {
        let name = folder.join(format!(".forebay-doctor-{}", std::process::id()));
        let mut options = File::options();
        options.read(true).write(true).mode(0o600);
        // One that never had a name can be given one. Not every file system has such files.
        let mut file = match options.clone().custom_flags(libc::O_TMPFILE).open(folder) {
            Ok(file) => file,
            Err(_) => {
                let file = options.create_new(true).open(&name)?;
                std::fs::remove_file(&name)?;
                file
            }
        };
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut piece = vec![0_u8; PIECE];
        for _ in 0..SCRATCH_BYTES / PIECE as u64 {
            // Random, so that no disk and no file system makes it smaller than it is.
            for word in piece.chunks_exact_mut(8) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                word.copy_from_slice(&state.to_le_bytes());
            }
            file.write_all(&piece)?;
        }
        file.sync_all()?;
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
        let path = PathBuf::from(format!("/proc/self/fd/{descriptor}"));
        Ok(Scratch { path, name, _file: file })
    }

    /// Gives the file a name for a moment, for those who ask by whom it goes.
    ///
    /// # Errors
    /// A file system whose files keep their first name.
    pub(super) fn named(&self) -> io::Result<Named<'_>> {
        use rustix::fs::{AtFlags, CWD, linkat};
        linkat(CWD, &self.path, CWD, &self.name, AtFlags::SYMLINK_FOLLOW)?;
        Ok(Named { path: &self.name })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}
