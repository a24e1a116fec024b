//! Copies of pieces that the page cache has, by many threads.

use forebay_format::FileIndex;

use super::landing::Landing;
use super::shared::Shared;
use crate::engine::{BlockLabel, Completion, ReadDone};
use crate::error::ReadError;
use crate::files::{FileSet, StoredFile};
use crate::pieces::Piece;
use crate::trace::{ReadEnd, ReadRecord, Why, nanoseconds};

/// The work of one thread: copies pieces until none is left for copies.
pub(super) fn copy_cached(shared: &Shared, files: &FileSet) {
    // Compares while the bytes are in this core's cache.
    let landing = Landing::new(files, false);
    let (mut done, mut next) = (Vec::new(), Vec::new());
    while shared.next_cached(&mut done, &mut next) {
        done.extend(next.drain(..).map(|piece| copy(piece, files, landing)));
    }
}

/// Copies one piece to its buffer.
pub(super) fn copy(piece: Piece, files: &FileSet, landing: Landing<'_>) -> Completion {
    let Piece { index, label, layout, mut buffer } = piece;
    let mut copied = || -> Result<ReadDone, ReadError> {
        let (needed_bytes, given_bytes) = (layout.slot_bytes, buffer.len());
        if given_bytes < needed_bytes {
            return Err(ReadError::SlotTooSmall { needed_bytes, given_bytes, block: label });
        }
        let mut done = ReadDone::default();
        for region in layout.regions.iter() {
            let slot = &mut buffer.as_mut_slice()[region.at..];
            let wanted = &mut slot[..(region.wanted_end - region.offset) as usize];
            let read = |offset, out: &mut [u8]| read_part(files, region.file, label, offset, out);
            landing.fill(label, region, wanted, &read)?;
            done.bytes_read += wanted.len() as u64;
            done.requests += 1;
        }
        Ok(done)
    };
    let result = copied();
    Completion { id: index as u64, buffer: Some(buffer), result }
}

/// Fills `out` with the bytes at `offset`.
fn read_part(
    files: &FileSet,
    index: FileIndex,
    label: BlockLabel,
    offset: u64,
    out: &mut [u8],
) -> Result<(), ReadError> {
    let Some(file) = files.file(index) else {
        return Err(ReadError::UnknownFile { index: index.0, files: files.len(), block: label });
    };
    let mut done = 0;
    while done < out.len() {
        let at = offset + done as u64;
        let started = files.recorder().map(|recorder| recorder.now());
        let result = file.read_at(at, &mut out[done..]);
        if let (Some(recorder), Some(started)) = (files.recorder(), started) {
            let (bytes, end) = match &result {
                Ok(count) => (*count as u32, ReadEnd::Done),
                Err(error) => (0, ReadEnd::Failed(error.raw_os_error().unwrap_or(libc::EIO))),
            };
            recorder.read(ReadRecord {
                start_nanoseconds: nanoseconds(started),
                duration_nanoseconds: nanoseconds(recorder.now().saturating_sub(started)),
                file: index,
                offset: at,
                length: (out.len() - done) as u32,
                bytes,
                block: Some(label),
                why: Why::Load,
                attempt: 0,
                end,
                faults: None,
            });
        }
        match result {
            Ok(0) => return Err(ends_early(file, at, offset + out.len() as u64, label)),
            Ok(count) => done += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(source) => {
                let file = file.path.clone();
                return Err(ReadError::Io { file, offset: at, block: label, attempts: 1, source });
            }
        }
    }
    Ok(())
}

fn ends_early(file: &StoredFile, file_end: u64, wanted_end: u64, block: BlockLabel) -> ReadError {
    ReadError::UnexpectedEnd { file: file.path.clone(), file_end, wanted_end, block }
}
