//! An output that is written front to back, at the speed of the disk.
//!
//! Buffered writes of gigabytes evict the page cache of other programs. They also reached only a third of the disk's
//! rate where this was measured (0.25 of 0.7 GB/s). So whole aligned pieces bypass the page cache where the file system
//! allows it. Only the end of the file is written through the cache.
//!
//! Several threads write the pieces, for two reasons. A disk needs several writes in flight. On a file system in
//! memory, the kernel allocates the pages in the writing thread, and one thread is then as slow as a slow disk (0.5
//! GB/s, measured).

use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::{OutputError, OutputFile};
use crate::arena::SLOT_ALIGNMENT;

/// Number of bytes per write. Smaller writes of the caller are gathered up to this size.
const PIECE_BYTES: usize = 4 << 20;

/// Maximum number of writer threads. It is also the maximum number of pieces in flight.
const WRITERS: usize = 8;

/// A buffer for one piece of the file, at an aligned address.
#[derive(Debug)]
struct Piece {
    room: Vec<u8>,
    /// Index in `room` where the aligned part begins.
    start: usize,
    filled: usize,
}

impl Piece {
    fn new() -> Self {
        let room = vec![0; PIECE_BYTES + SLOT_ALIGNMENT];
        let start = room.as_ptr().align_offset(SLOT_ALIGNMENT).min(SLOT_ALIGNMENT);
        Self { room, start, filled: 0 }
    }

    /// Copies as much of `bytes` as fits. Returns the number of bytes copied.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(PIECE_BYTES - self.filled);
        let at = self.start + self.filled;
        self.room[at..at + count].copy_from_slice(&bytes[..count]);
        self.filled += count;
        count
    }

    fn bytes(&self) -> &[u8] {
        &self.room[self.start..self.start + self.filled]
    }
}

/// An [`OutputFile`] that is written in order. A write may return the error of bytes written earlier. [`Write::flush`]
/// writes gathered bytes to a pipe or device. A regular file is complete only after [`commit`](Self::commit).
#[derive(Debug)]
pub struct OutputStream {
    writers: Vec<Writer>,
    file: Arc<OutputFile>,
    /// The piece that is being gathered.
    piece: Piece,
    /// Offset of `piece` in the file, in bytes; a multiple of [`PIECE_BYTES`].
    offset: u64,
    /// Channel on which the writers return written pieces with their results.
    written: (Sender<Written>, Receiver<Written>),
    under_way: usize,
}

type Written = (usize, Piece, Result<(), OutputError>);

impl OutputStream {
    pub(super) fn new(file: OutputFile) -> Self {
        Self {
            writers: Vec::new(),
            file: Arc::new(file),
            piece: Piece::new(),
            offset: 0,
            written: channel(),
            under_way: 0,
        }
    }

    /// Returns the path as the caller gave it.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Writes the remaining bytes, syncs everything to the disk and gives the file its name.
    ///
    /// # Errors
    /// Returns the errors of [`OutputFile::commit`], and those of earlier writes.
    pub fn commit(mut self) -> Result<(), OutputError> {
        if self.file.is_direct() {
            return self.file.append(self.piece.bytes());
        }
        while self.under_way > 0 {
            self.free_writer().map_err(|error| self.failed(error))?;
        }
        self.file.write_at(self.offset, self.piece.bytes())?;
        // The writer threads share the file. Once they are joined, this is the only reference.
        self.writers.clear();
        Arc::into_inner(self.file).expect("its writers have ended").commit()
    }

    fn failed(&self, cause: io::Error) -> OutputError {
        match cause.downcast::<OutputError>() {
            Ok(error) => error,
            Err(cause) => OutputError::Write { path: self.path().to_path_buf(), cause },
        }
    }

    /// Sends the gathered piece to a writer. Writes it here if the output is direct.
    fn write_piece(&mut self) -> io::Result<()> {
        if self.file.is_direct() {
            self.file.append(self.piece.bytes())?;
            self.piece.filled = 0;
            return Ok(());
        }
        let (writer, empty) = if self.writers.len() < WRITERS {
            let number = self.writers.len();
            let writer = Writer::start(number, Arc::clone(&self.file), self.written.0.clone())?;
            self.writers.push(writer);
            (number, Piece::new())
        } else {
            self.free_writer()?
        };
        let full = std::mem::replace(&mut self.piece, empty);
        self.writers[writer].write(self.offset, full)?;
        self.under_way += 1;
        self.offset += PIECE_BYTES as u64;
        Ok(())
    }

    /// Waits until a writer is free. Returns its number and its piece, which is empty again.
    fn free_writer(&mut self) -> io::Result<(usize, Piece)> {
        let (writer, mut piece, result) = self.written.1.recv().map_err(io::Error::other)?;
        self.under_way -= 1;
        piece.filled = 0;
        result?;
        Ok((writer, piece))
    }
}

impl Write for OutputStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.piece.filled == PIECE_BYTES {
            self.write_piece()?;
        }
        Ok(self.piece.take(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.file.is_direct() {
            self.write_piece()?;
        }
        Ok(())
    }
}

/// A thread that writes pieces.
#[derive(Debug)]
struct Writer {
    /// Sender of pieces with their file offsets. It is `None` only while the writer is being dropped.
    pieces: Option<Sender<(u64, Piece)>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    fn start(number: usize, file: Arc<OutputFile>, written: Sender<Written>) -> io::Result<Self> {
        let (pieces, mine) = channel::<(u64, Piece)>();
        let thread = std::thread::Builder::new().name("writer".into()).spawn(move || {
            for (offset, piece) in mine {
                let result = file.write_at(offset, piece.bytes());
                if written.send((number, piece, result)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { pieces: Some(pieces), thread: Some(thread) })
    }

    fn write(&self, offset: u64, piece: Piece) -> io::Result<()> {
        let sent = self.pieces.as_ref().map(|pieces| pieces.send((offset, piece)));
        sent.and_then(Result::ok).ok_or_else(|| io::Error::other("the writing thread ended early"))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.pieces = None;
        if let Some(thread) = self.thread.take() {
            // The thread does not panic. If it did, its unanswered pieces would already have been an error.
            let _ = thread.join();
        }
    }
}

/// An [`OutputStream`] with two owners: one that writes it, and one that completes it.
#[derive(Clone, Debug)]
pub struct SharedStream(Arc<Mutex<OutputStream>>);

impl SharedStream {
    pub fn new(stream: OutputStream) -> SharedStream {
        SharedStream(Arc::new(Mutex::new(stream)))
    }

    /// Returns the stream, or `None` while another owner is left.
    pub fn into_inner(self) -> Option<OutputStream> {
        let stream = Arc::into_inner(self.0)?;
        Some(stream.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Write for SharedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_and_the_rest_arrive_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let more_than_writers = (2 * WRITERS + 1) * PIECE_BYTES + 777;
        for (name, length) in
            [("empty", 0), ("small", 5000), ("whole", PIECE_BYTES), ("large", more_than_writers)]
        {
            let path = folder.path().join(name);
            let bytes: Vec<u8> = (0..length).map(|i: usize| (i * 31 / 7) as u8).collect();
            let mut output = OutputFile::create(&path).unwrap().into_stream();
            for part in bytes.chunks(1_000_003) {
                output.write_all(part).unwrap();
            }
            assert!(!path.exists());
            output.commit().unwrap();
            assert!(std::fs::read(&path).unwrap() == bytes, "{name}");
        }
        let mut dropped = OutputFile::create(&folder.path().join("dropped")).unwrap().into_stream();
        dropped.write_all(&vec![1; 3 * PIECE_BYTES]).unwrap();
        drop(dropped);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 4);
    }

    #[test]
    fn a_full_device_is_an_error_in_words() {
        for bytes in [1, 3 * PIECE_BYTES] {
            let mut full = OutputFile::create(Path::new("/dev/full")).unwrap().into_stream();
            let written = full.write_all(&vec![0; bytes]);
            let error = match written {
                Ok(()) => full.commit().unwrap_err().to_string(),
                Err(error) => error.to_string(),
            };
            assert_eq!(error, "/dev/full: cannot be written: the disk is full");
        }
    }
}
