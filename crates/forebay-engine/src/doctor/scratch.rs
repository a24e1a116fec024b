//! A file of random bytes to measure the disk with, which is gone afterwards whatever happens.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Bytes of the file: large enough that a disk's own cache does not hold it.
pub(super) const SCRATCH_BYTES: u64 = 1 << 30;
const PIECE: usize = 4 << 20;

/// A file that was unlinked as soon as it was open: even a killed process leaves nothing behind.
/// Others open it through the path of its descriptor.
pub(super) struct Scratch {
    path: PathBuf,
    _file: File,
}

impl Scratch {
    /// Writes the file and waits until it is on the disk.
    pub(super) fn create(folder: &Path) -> io::Result<Scratch> {
        let name = folder.join(format!(".forebay-doctor-{}", std::process::id()));
        let mut file =
            File::options().read(true).write(true).create_new(true).mode(0o600).open(&name)?;
        std::fs::remove_file(&name)?;
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
        Ok(Scratch { path: PathBuf::from(format!("/proc/self/fd/{descriptor}")), _file: file })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}
