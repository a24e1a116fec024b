//! A file that is written once, front to back, at the speed of the disk.
//!
//! Buffered writes of gigabytes go through the page cache, push out what others have there, and reach a third of what
//! the disk of the machine that this was measured on takes (0.25 of 0.7 GB/s). So whole aligned pieces go
//! past the cache where the file system allows it; the end of the file goes the usual way.
//!
//! Pieces are written by several threads: a disk has several under way at a time, and where a file is kept in memory each thread
//! asks for pages of its own, which takes one thread as long as a slow disk (0.5 GB/s, measured).

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// Bytes per write past the cache; also how much is gathered from small writes.
const PIECE_BYTES: usize = 4 << 20;

/// Every file system that allows writes past the cache is content with this alignment.
const ALIGNMENT: usize = 4096;

/// Threads that write, and pieces that are under way at most.
const WRITERS: usize = 8;

/// Room for one piece of the file at an aligned address.
#[derive(Debug)]
struct Piece {
    room: Vec<u8>,
    /// Where the aligned part begins.
    start: usize,
    filled: usize,
}

impl Piece {
    fn new() -> Self {
        let room = vec![0; PIECE_BYTES + ALIGNMENT];
        let start = room.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { room, start, filled: 0 }
    }

    /// Takes what fits of `bytes`; returns the rest.
    fn take<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let count = bytes.len().min(PIECE_BYTES - self.filled);
        let (now, later) = bytes.split_at(count);
        let at = self.start + self.filled;
        self.room[at..at + count].copy_from_slice(now);
        self.filled += count;
        later
    }

    fn bytes(&self) -> &[u8] {
        &self.room[self.start..self.start + self.filled]
    }
}

/// The file and what is still to be written to it.
#[derive(Debug)]
pub struct Output {
    file: File,
    path: PathBuf,
    /// Whether full pieces go past the page cache, if the file system lets them.
    direct: bool,
    /// What is being gathered.
    piece: Piece,
    /// Where that begins in the file, a multiple of [`PIECE_BYTES`].
    offset: u64,
    writers: Vec<Writer>,
    /// Pieces that are written, and how that went, with the number of the writer that is free again.
    written: (Sender<Written>, Receiver<Written>),
    under_way: usize,
}

type Written = (usize, Piece, io::Result<()>);

impl Output {
    /// An output to the empty file `file`, which lies at `path`, until it is finished at least.
    pub fn new(file: File, path: &Path) -> Self {
        Self {
            file,
            path: path.to_owned(),
            direct: true,
            piece: Piece::new(),
            offset: 0,
            writers: Vec::new(),
            written: channel(),
            under_way: 0,
        }
    }

    /// Appends `bytes`. An error may be that of bytes appended earlier.
    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            bytes = self.piece.take(bytes);
            if self.piece.filled == PIECE_BYTES {
                self.write_piece()?;
            }
        }
        Ok(())
    }

    /// Writes what is left and waits until all of it is on the disk.
    pub fn finish(mut self) -> io::Result<()> {
        while self.under_way > 0 {
            self.free_writer()?;
        }
        self.file.seek(SeekFrom::Start(self.offset))?;
        self.file.write_all(self.piece.bytes())?;
        self.file.sync_all()
    }

    /// Hands the full piece to a writer.
    fn write_piece(&mut self) -> io::Result<()> {
        let (writer, empty) = if self.writers.len() < WRITERS {
            let writer =
                Writer::start(self.writers.len(), &self.path, self.direct, self.written.0.clone())?;
            self.writers.push(writer);
            (self.writers.len() - 1, Piece::new())
        } else {
            self.free_writer()?
        };
        let full = std::mem::replace(&mut self.piece, empty);
        self.writers[writer].write(self.offset, full)?;
        self.under_way += 1;
        self.offset += PIECE_BYTES as u64;
        Ok(())
    }

    /// Waits for a writer: its number and its piece, which is empty again.
    fn free_writer(&mut self) -> io::Result<(usize, Piece)> {
        let (writer, mut piece, result) = self.written.1.recv().map_err(io::Error::other)?;
        self.under_way -= 1;
        piece.filled = 0;
        result.map(|()| (writer, piece))
    }
}

/// A thread that writes pieces with its own handle of the file.
#[derive(Debug)]
struct Writer {
    /// `None` only while it ends.
    pieces: Option<Sender<(u64, Piece)>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    fn start(
        number: usize,
        path: &Path,
        direct: bool,
        written: Sender<Written>,
    ) -> io::Result<Self> {
        let mut file = OpenOptions::new().write(true).open(path)?;
        let mut direct = if direct { open_direct(path) } else { None };
        let (pieces, mine) = channel::<(u64, Piece)>();
        let thread = std::thread::Builder::new().name("writer".into()).spawn(move || {
            for (offset, piece) in mine {
                let result = write_at(&mut file, &mut direct, offset, piece.bytes());
                if written.send((number, piece, result)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { pieces: Some(pieces), thread: Some(thread) })
    }

    fn write(&self, offset: u64, piece: Piece) -> io::Result<()> {
        let sent = self.pieces.as_ref().map(|pieces| pieces.send((offset, piece)));
        sent.and_then(Result::ok).ok_or_else(|| io::Error::other("the thread that writes is gone"))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.pieces = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic, and there is nobody to tell.
            let _ = thread.join();
        }
    }
}

/// Writes past the cache if `direct` is there and the file system does so.
fn write_at(
    file: &mut File,
    direct: &mut Option<File>,
    offset: u64,
    bytes: &[u8],
) -> io::Result<()> {
    if let Some(past_cache) = direct {
        match past_cache.seek(SeekFrom::Start(offset)).and_then(|_| past_cache.write_all(bytes)) {
            // The file system opened the file but does not write like that after all.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => *direct = None,
            result => return result,
        }
    }
    file.seek(SeekFrom::Start(offset))?;
    file.write_all(bytes)
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = rustix::fs::OFlags::DIRECT.bits();
    OpenOptions::new().write(true).custom_flags(flags as i32).open(path).ok()
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path) -> Option<File> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_and_the_rest_arrive_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let more_than_writers = (2 * WRITERS + 1) * PIECE_BYTES + 777;
        for (name, length) in [("small", 5000), ("large", more_than_writers)] {
            let path = folder.path().join(name);
            let bytes: Vec<u8> = (0..length).map(|i: usize| (i * 31 / 7) as u8).collect();
            for direct in [true, false] {
                let mut output = Output::new(File::create(&path).unwrap(), &path);
                output.direct = direct;
                for part in bytes.chunks(1_000_003) {
                    output.write(part).unwrap();
                }
                output.finish().unwrap();
                assert!(std::fs::read(&path).unwrap() == bytes, "{name}, direct: {direct}");
            }
        }
    }
}
