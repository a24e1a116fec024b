//! A file of random bytes to measure the disk with, which is gone afterwards whatever happens.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use forebay_store::{Interrupt, TemporaryName};

use super::folder_error;
use crate::EngineError;

/// Bytes of the file: large enough that a disk's own cache does not hold it.
pub(super) const SCRATCH_BYTES: u64 = 1 << 30;
const PIECE: usize = 4 << 20;
/// Pieces that are written before the disk has to have them.
const SYNCED_PIECES: u64 = 8;

/// A file without a name: even a killed process leaves nothing behind. Others open it through the path of its
/// descriptor.
pub(super) struct Scratch {
    path: PathBuf,
    /// Where it gets a name.
    folder: PathBuf,
    _file: File,
}

impl Scratch {
    /// Writes the file and waits until it is on the disk.
    pub(super) fn create(folder: &Path, interrupt: &Interrupt) -> Result<Scratch, EngineError> {
        let made = Scratch::write(folder, interrupt);
        interrupt.check()?;
        made.map_err(|source| folder_error(folder, source))
    }

    /// Stops early, with an incomplete file, when it is interrupted.
    fn write(folder: &Path, interrupt: &Interrupt) -> io::Result<Scratch> {
        let mut options = File::options();
        options.read(true).write(true).mode(0o600);
        // One that never had a name can be given one. Not every file system has such files.
        let mut file = match options.clone().custom_flags(libc::O_TMPFILE).open(folder) {
            Ok(file) => file,
            Err(_) => {
                options.create_new(true);
                TemporaryName::make(folder, |name| options.open(name))?.1
            }
        };
        let mut random = fastrand::Rng::with_seed(1);
        let mut piece = vec![0_u8; PIECE];
        for number in 1..=SCRATCH_BYTES / PIECE as u64 {
            if interrupt.is_requested() {
                break;
            }
            // Random, so that no disk and no file system makes it smaller than it is.
            random.fill(&mut piece);
            file.write_all(&piece)?;
            // A slow disk may need seconds for all of it at once, and nobody could interrupt that.
            if number.is_multiple_of(SYNCED_PIECES) {
                file.sync_all()?;
            }
        }
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
        let path = PathBuf::from(format!("/proc/self/fd/{descriptor}"));
        Ok(Scratch { path, folder: folder.to_path_buf(), _file: file })
    }

    /// Gives the file a name until the answer is dropped, for libraries that ask what the file is called.
    ///
    /// # Errors
    /// A file system whose files keep their first name.
    pub(super) fn named(&self) -> io::Result<TemporaryName> {
        use rustix::fs::{AtFlags, CWD, linkat};
        let link = |name: &Path| {
            linkat(CWD, &self.path, CWD, name, AtFlags::SYMLINK_FOLLOW).map_err(io::Error::from)
        };
        TemporaryName::make(&self.folder, link).map(|(name, ())| name)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}
