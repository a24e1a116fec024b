//! File of random bytes to measure the disk with. It disappears afterwards even if the process is killed.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use forebay_store::{Interrupt, TemporaryName};

use super::DoctorError;
use super::folder_error;

/// Size of the file in bytes: large enough that a disk's own cache does not hold it.
pub(super) const SCRATCH_BYTES: u64 = 1 << 30;
const PIECE: usize = 4 << 20;
/// Number of pieces that are written between two syncs to the disk.
const SYNCED_PIECES: u64 = 8;

/// File without a name, so that even a killed process leaves nothing behind. Readers open it through the path of its
/// descriptor.
pub(super) struct Scratch {
    path: PathBuf,
    /// Folder in which the file can get a name.
    folder: PathBuf,
    _file: File,
}

impl Scratch {
    /// Writes the file and waits until it is on the disk.
    pub(super) fn create(folder: &Path, interrupt: &Interrupt) -> Result<Scratch, DoctorError> {
        let made = Scratch::write(folder, interrupt);
        interrupt.check()?;
        made.map_err(|source| folder_error(folder, source))
    }

    /// Writes the file. An interrupt stops this early and leaves the file incomplete.
    fn write(folder: &Path, interrupt: &Interrupt) -> io::Result<Scratch> {
        let mut options = File::options();
        options.read(true).write(true).mode(0o600);
        // A file that never had a name can be given one later. Not every file system supports such files, so the
        // fallback creates a named file and removes its name.
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
            // The bytes are random so that no disk and no file system can compress them.
            random.fill(&mut piece);
            file.write_all(&piece)?;
            // Syncing everything at once may take seconds on a slow disk, and could not be interrupted.
            if number.is_multiple_of(SYNCED_PIECES) {
                file.sync_all()?;
            }
        }
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
        let path = PathBuf::from(format!("/proc/self/fd/{descriptor}"));
        Ok(Scratch { path, folder: folder.to_path_buf(), _file: file })
    }

    /// Gives the file a name until the returned value is dropped. Some libraries ask for a file's name.
    ///
    /// # Errors
    /// Returns an error if the file system does not allow a file to get a name later.
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
