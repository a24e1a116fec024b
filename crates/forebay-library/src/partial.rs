//! An unfinished file and the journal of its finished ranges.
//!
//! The journal names a range only after the range's bytes are on the disk. A pull that was killed therefore goes on with
//! the ranges that the journal does not name. The journal's first line says which file it belongs to.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Error;
use crate::error::at;
use crate::manifest::RepositoryFile;

/// A file that is being downloaded.
pub struct Partial {
    pub target: PathBuf,
    pub remote: RepositoryFile,
    partial: PathBuf,
    journal_path: PathBuf,
    file: File,
    range_bytes: u64,
    journal: Mutex<Journal>,
    /// True once one connection downloads the whole file, because the server ignores ranges.
    whole: AtomicBool,
}

struct Journal {
    file: File,
    /// For every range, whether its bytes are on the disk.
    done: Vec<bool>,
}

impl Partial {
    /// Opens what an earlier pull has left of a file, or begins a new one.
    pub fn open(
        target: PathBuf,
        remote: RepositoryFile,
        range_bytes: u64,
    ) -> Result<Partial, Error> {
        let partial = path(&target);
        let journal_path = with_ending(&partial, ".journal");
        let open = |path: &Path| {
            File::options().read(true).write(true).create(true).truncate(false).open(path)
        };
        let file = open(&partial).map_err(at(&partial))?;
        let mut journal = open(&journal_path).map_err(at(&journal_path))?;
        let count = usize::try_from(remote.size.div_ceil(range_bytes)).unwrap_or(usize::MAX);
        let header = format!("{} {} {range_bytes}", remote.checksum.text(), remote.size);
        let is_same_length = file.metadata().map_err(at(&partial))?.len() == remote.size;
        let found = read_journal(&mut journal, &header, count).map_err(at(&journal_path))?;
        let done = match found {
            Some(done) if is_same_length => done,
            _ => {
                // The old journal goes first: it must never describe the new file.
                journal.set_len(0).map_err(at(&journal_path))?;
                file.set_len(0).map_err(at(&partial))?;
                file.set_len(remote.size).map_err(at(&partial))?;
                journal
                    .write_all_at(format!("{header}\n").as_bytes(), 0)
                    .map_err(at(&journal_path))?;
                vec![false; count]
            }
        };
        // Writes append from here on.
        drop(journal);
        let journal =
            File::options().append(true).open(&journal_path).map_err(at(&journal_path))?;
        let journal = Mutex::new(Journal { file: journal, done });
        let whole = AtomicBool::new(false);
        Ok(Partial { target, remote, partial, journal_path, file, range_bytes, journal, whole })
    }

    /// Returns the bytes of a range.
    pub fn span(&self, range: usize) -> Range<u64> {
        let start = range as u64 * self.range_bytes;
        start..(start + self.range_bytes).min(self.remote.size)
    }

    /// Returns the range that a byte belongs to.
    pub fn range_of(&self, byte: u64) -> usize {
        (byte / self.range_bytes) as usize
    }

    /// Returns the ranges that are missing.
    pub fn missing(&self) -> Vec<usize> {
        let journal = self.journal();
        (0..journal.done.len()).filter(|&range| !journal.done[range]).collect()
    }

    pub fn is_done(&self, range: usize) -> bool {
        self.journal().done[range]
    }

    /// Writes bytes of a range.
    pub fn write(&self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        self.file.write_all_at(bytes, offset).map_err(at(&self.partial))
    }

    /// Notes that all bytes of a range were written.
    pub fn finish_range(&self, range: usize) -> Result<(), Error> {
        self.file.sync_data().map_err(at(&self.partial))?;
        let mut journal = self.journal();
        journal.file.write_all(format!("{range}\n").as_bytes()).map_err(at(&self.journal_path))?;
        journal.done[range] = true;
        Ok(())
    }

    /// Claims the download of the whole file for one connection. Returns false if another one has it.
    pub fn claim_whole(&self) -> bool {
        !self.whole.swap(true, Ordering::SeqCst)
    }

    /// Returns true if one connection downloads the whole file.
    pub fn is_whole(&self) -> bool {
        self.whole.load(Ordering::SeqCst)
    }

    /// Returns a reader of the downloaded bytes.
    pub fn reader(&self) -> Result<File, Error> {
        File::open(&self.partial).map_err(at(&self.partial))
    }

    /// Gives the file its name. The caller has checked its bytes.
    pub fn keep(&self) -> Result<(), Error> {
        self.file.sync_all().map_err(at(&self.partial))?;
        fs::rename(&self.partial, &self.target).map_err(at(&self.target))?;
        fs::remove_file(&self.journal_path).map_err(at(&self.journal_path))?;
        crate::manifest::sync_folder(&self.target).map_err(at(&self.target))
    }

    /// Deletes the file, whose bytes are wrong.
    pub fn discard(&self) -> Result<(), Error> {
        fs::remove_file(&self.journal_path).map_err(at(&self.journal_path))?;
        fs::remove_file(&self.partial).map_err(at(&self.partial))
    }

    fn journal(&self) -> MutexGuard<'_, Journal> {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the path of an unfinished file.
pub fn path(target: &Path) -> PathBuf {
    with_ending(target, ".partial")
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut path = path.to_owned().into_os_string();
    path.push(ending);
    path.into()
}

/// Reads which ranges are done, or `None` if the journal belongs to another file. Cuts off a line that is not complete.
fn read_journal(file: &mut File, header: &str, count: usize) -> io::Result<Option<Vec<bool>>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let complete = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let Ok(text) = std::str::from_utf8(&bytes[..complete]) else { return Ok(None) };
    let mut lines = text.lines();
    if lines.next() != Some(header) {
        return Ok(None);
    }
    let mut done = vec![false; count];
    for line in lines {
        match line.parse::<usize>().ok().and_then(|range| done.get_mut(range)) {
            Some(range) => *range = true,
            None => return Ok(None),
        }
    }
    file.set_len(complete as u64)?;
    Ok(Some(done))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Checksum;

    fn open(folder: &Path) -> Partial {
        let checksum = Checksum::Sha256("0".repeat(64));
        let remote = RepositoryFile { path: "a".into(), size: 25, checksum };
        Partial::open(folder.join("a"), remote, 10).unwrap()
    }

    #[test]
    fn a_journal_survives_and_a_cut_line_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let partial = open(folder.path());
        assert_eq!(partial.missing(), [0, 1, 2]);
        assert_eq!(partial.span(2), 20..25);
        partial.write(b"0123456789", 10).unwrap();
        partial.finish_range(1).unwrap();
        drop(partial);
        let journal = folder.path().join("a.partial.journal");
        let mut text = fs::read_to_string(&journal).unwrap();
        text.push('2');
        fs::write(&journal, text).unwrap();
        assert_eq!(open(folder.path()).missing(), [0, 2]);
        // The next line does not join the cut one.
        open(folder.path()).finish_range(0).unwrap();
        assert_eq!(open(folder.path()).missing(), [2]);
    }

    #[test]
    fn a_journal_of_another_file_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let journal = folder.path().join("a.partial.journal");
        for change in ["x\n0\n", "", "\u{0}\n"] {
            open(folder.path()).finish_range(1).unwrap();
            fs::write(&journal, change).unwrap();
            assert_eq!(open(folder.path()).missing(), [0, 1, 2]);
        }
        open(folder.path()).finish_range(1).unwrap();
        fs::write(&journal, fs::read_to_string(&journal).unwrap() + "7\n").unwrap();
        assert_eq!(open(folder.path()).missing(), [0, 1, 2]);
        open(folder.path()).finish_range(1).unwrap();
        fs::write(folder.path().join("a.partial"), "short").unwrap();
        assert_eq!(open(folder.path()).missing(), [0, 1, 2]);
    }
}
