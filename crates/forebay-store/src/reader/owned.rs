//! The safe interface of the reader: a read owns its buffer until the answer returns it.

use std::path::Path;

use forebay_format::FileIndex;

use super::{RawReader, RawRequest, ReadAnswer, ReadRequest, ReaderEnd, ReaderOptions};
use crate::arena::{Arena, SlotBuffer};
use crate::engine::{EngineInfo, IoStatistics, Priority};
use crate::error::{ReadError, StoreError};
use crate::files::FileSet;

/// Reads many spans of files at a time, of any offset and length. The answer returns each buffer to
/// the caller.
///
/// ```
/// use forebay_store::{BlockReader, FileIndex, Priority, ReadRequest, ReaderOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("weights");
/// # std::fs::write(&path, vec![7_u8; 100_000])?;
/// let mut reader = BlockReader::open(&[&path], &ReaderOptions::default())?;
///
/// // One span now, into any memory.
/// let mut row = [0; 100];
/// reader.read(FileIndex(0), 12_345, &mut row)?;
///
/// // Many spans, answered in any order. Buffers of `buffer` are aligned: no copy where the disk
/// // allows it.
/// for tag in 0..10 {
///     let buffer = reader.buffer(8192)?;
///     let (file, offset) = (FileIndex(0), tag * 8192);
///     let priority = Priority::Demand;
///     reader.submit(ReadRequest { tag, file, offset, length: 8192, priority }, buffer)?;
/// }
/// while let Some(read) = reader.wait()? {
///     let bytes = read.result?;
///     assert!(bytes.as_slice()[..8192].iter().all(|&byte| byte == 7), "block {}", read.tag);
/// }
/// # Ok(())
/// # }
/// ```
pub struct BlockReader {
    raw: RawReader,
}

/// The answer to a read of a [`BlockReader`].
#[derive(Debug)]
pub struct BlockAnswer {
    pub tag: u64,
    /// The filled buffer. A read that fails does not return its buffer, because the disk may still
    /// write to it.
    pub result: Result<SlotBuffer, ReadError>,
}

/// Errors of [`BlockReader`].
#[derive(Debug, thiserror::Error)]
pub enum ReaderError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("{limit} reads are unanswered already: wait for some before submitting more")]
    Full { limit: usize },
    #[error("a read of {wanted} bytes was submitted with a buffer of {given}")]
    BufferTooSmall { wanted: usize, given: usize },
}

impl BlockReader {
    /// Opens the files. A [`FileIndex`] is the position in `paths`, from 0.
    ///
    /// # Errors
    /// Returns the errors of [`RawReader::open`].
    pub fn open<P: AsRef<Path>>(
        paths: &[P],
        options: &ReaderOptions,
    ) -> Result<BlockReader, StoreError> {
        Ok(BlockReader { raw: RawReader::open(paths, options)? })
    }

    /// Opens a reader for files that are open already.
    ///
    /// # Errors
    /// Returns the errors of [`RawReader::open`].
    pub fn over(files: FileSet, options: &ReaderOptions) -> Result<BlockReader, StoreError> {
        Ok(BlockReader { raw: RawReader::over(files, options)? })
    }

    /// Allocates a buffer of at least `bytes` bytes that has the alignment for every file.
    ///
    /// # Errors
    /// Returns [`StoreError::Memory`] if the memory cannot be reserved.
    pub fn buffer(&self, bytes: usize) -> Result<SlotBuffer, StoreError> {
        Arena::reserve(bytes)?.carve(bytes)
    }

    /// Reads the bytes from `offset` on into `out`, and waits until it is full.
    ///
    /// # Errors
    /// Returns an error if the read fails, the file ends before `out` is full, or the engine has
    /// failed. Returns [`ReaderError::Full`] if too many reads are unanswered.
    pub fn read(
        &mut self,
        file: FileIndex,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), ReaderError> {
        self.raw.claim()?;
        let length = out.len();
        let read = ReadRequest { tag: 0, file, offset, length, priority: Priority::Demand };
        let limit = self.raw.options.requests_max;
        let request = RawRequest { read, destination: out.as_mut_ptr() };
        // The read is staged, because a disk that never answers must not keep the caller's memory.
        let ticket = self.raw.take(request, None, true).ok_or(ReaderError::Full { limit })?;
        let answer = self.raw.wait_for(ticket);
        if answer.is_err() {
            self.raw.disown(ticket);
        }
        match answer?.map(|answer| answer.end) {
            Some(ReaderEnd::Failed(error)) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Starts a read into the beginning of `buffer`. The answer returns the buffer.
    ///
    /// # Errors
    /// Returns [`ReaderError::Full`] or [`ReaderError::BufferTooSmall`], or [`ReaderError::Store`]
    /// if the engine has failed. Errors of the read itself are in the answer.
    pub fn submit(&mut self, read: ReadRequest, mut buffer: SlotBuffer) -> Result<(), ReaderError> {
        if buffer.len() < read.length {
            let (wanted, given) = (read.length, buffer.len());
            return Err(ReaderError::BufferTooSmall { wanted, given });
        }
        self.raw.claim()?;
        let destination = buffer.as_mut_slice().as_mut_ptr();
        let limit = self.raw.options.requests_max;
        let taken = self.raw.take(RawRequest { read, destination }, Some(buffer), false);
        taken.ok_or(ReaderError::Full { limit })?;
        self.raw.progress()?;
        Ok(())
    }

    /// Waits for the next answer and returns it. Returns `None` if nothing is in flight.
    ///
    /// # Errors
    /// Returns an error if the engine has failed.
    pub fn wait(&mut self) -> Result<Option<BlockAnswer>, ReaderError> {
        self.raw.wait_until(|reader| !reader.ready.is_empty())?;
        Ok(self.raw.hand_out().and_then(answered))
    }

    /// Returns the next answer that is ready, without waiting.
    ///
    /// # Errors
    /// Returns an error if the engine has failed.
    pub fn poll(&mut self) -> Result<Option<BlockAnswer>, ReaderError> {
        self.raw.progress()?;
        Ok(self.raw.hand_out().and_then(answered))
    }

    /// Cancels all reads with this tag, as [`RawReader::cancel`] does.
    pub fn cancel(&mut self, tag: u64) {
        self.raw.cancel(tag);
    }

    /// Returns the number of reads whose answers have not been handed out yet.
    pub fn in_flight(&self) -> usize {
        self.raw.in_flight()
    }

    pub fn describe(&self) -> EngineInfo {
        self.raw.describe()
    }

    pub fn io_statistics(&self) -> IoStatistics {
        self.raw.io_statistics()
    }
}

fn answered((answer, owner): (ReadAnswer, Option<SlotBuffer>)) -> Option<BlockAnswer> {
    let result = match answer.end {
        ReaderEnd::Failed(error) => Err(error),
        // A read that succeeded always has its buffer here.
        ReaderEnd::Done => Ok(owner?),
    };
    Some(BlockAnswer { tag: answer.tag, result })
}
