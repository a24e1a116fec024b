//! An unfinished file and the journal of its finished ranges.
//!
//! The journal names a range, or how much of it there is, only after these bytes are on the disk. A pull that was killed
//! therefore goes on where the journal ends. Its first line says which file it belongs to. Each further line is the number of
//! a range that is done, or `RANGE+BYTES` for one whose first bytes are there.

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
    ranges: Vec<Kept>,
}

/// What is on the disk of a range.
#[derive(Clone, Copy, Default)]
struct Kept {
    done: bool,
    /// Number of its first bytes.
    bytes: u64,
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
        let ranges = match found {
            Some(ranges) if is_same_length => ranges,
            _ => {
                // The old journal goes first: it must never describe the new file.
                journal.set_len(0).map_err(at(&journal_path))?;
                file.set_len(0).map_err(at(&partial))?;
                file.set_len(remote.size).map_err(at(&partial))?;
                journal
                    .write_all_at(format!("{header}\n").as_bytes(), 0)
                    .map_err(at(&journal_path))?;
                vec![Kept::default(); count]
            }
        };
        // Writes append from here on.
        drop(journal);
        let journal =
            File::options().append(true).open(&journal_path).map_err(at(&journal_path))?;
        let journal = Mutex::new(Journal { file: journal, ranges });
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
        (0..journal.ranges.len()).filter(|&range| !journal.ranges[range].done).collect()
    }

    pub fn is_done(&self, range: usize) -> bool {
        self.journal().ranges[range].done
    }

    /// Returns how many of a range's first bytes are on the disk.
    pub fn kept_bytes(&self, range: usize) -> u64 {
        let span = self.span(range);
        self.journal().ranges[range].bytes.min(span.end - span.start)
    }

    /// Notes that the first bytes of a range were written.
    pub fn keep_bytes(&self, range: usize, bytes: u64) -> Result<(), Error> {
        self.file.sync_data().map_err(at(&self.partial))?;
        let mut journal = self.journal();
        let line = format!("{range}+{bytes}\n");
        journal.file.write_all(line.as_bytes()).map_err(at(&self.journal_path))?;
        journal.ranges[range].bytes = bytes;
        Ok(())
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
        journal.ranges[range].done = true;
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
fn read_journal(file: &mut File, header: &str, count: usize) -> io::Result<Option<Vec<Kept>>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let complete = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let Ok(text) = std::str::from_utf8(&bytes[..complete]) else { return Ok(None) };
    let mut lines = text.lines();
    if lines.next() != Some(header) {
        return Ok(None);
    }
    let mut ranges = vec![Kept::default(); count];
    for line in lines {
        let (number, bytes) = match line.split_once('+') {
            Some((number, bytes)) => (number, bytes.parse::<u64>().ok()),
            None => (line, Some(u64::MAX)),
        };
        let range = number.parse::<usize>().ok().and_then(|range| ranges.get_mut(range));
        match range.zip(bytes) {
            Some((range, u64::MAX)) => range.done = true,
            Some((range, bytes)) => range.bytes = bytes,
            None => return Ok(None),
        }
    }
    file.set_len(complete as u64)?;
    Ok(Some(ranges))
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
    fn the_first_bytes_of_a_range_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let partial = open(folder.path());
        partial.write(b"0123", 10).unwrap();
        partial.keep_bytes(1, 2).unwrap();
        partial.keep_bytes(1, 4).unwrap();
        partial.keep_bytes(2, 3).unwrap();
        partial.finish_range(2).unwrap();
        drop(partial);
        let partial = open(folder.path());
        assert_eq!(partial.missing(), [0, 1]);
        assert_eq!([0, 1].map(|range| partial.kept_bytes(range)), [0, 4]);
        // More than the range has is no more than all of it.
        partial.keep_bytes(0, 99).unwrap();
        assert_eq!(open(folder.path()).kept_bytes(0), 10);
        let journal = folder.path().join("a.partial.journal");
        for wrong in ["0+\n", "+5\n", "0+x\n", "9+1\n"] {
            open(folder.path()).keep_bytes(1, 4).unwrap();
            fs::write(&journal, fs::read_to_string(&journal).unwrap() + wrong).unwrap();
            assert_eq!(open(folder.path()).kept_bytes(1), 0, "{wrong}");
        }
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
