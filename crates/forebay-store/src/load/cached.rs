//! Copies cached pieces out of the page cache, on many threads.

use super::landing::{Landing, read_error};
use super::shared::Shared;
use crate::engine::{Completion, ReadDone};
use crate::error::ReadError;
use crate::files::FileSet;
use crate::pieces::Piece;

/// Runs one copy thread: copies pieces until no cached piece is left.
pub(super) fn copy_cached(shared: &Shared, files: &FileSet) {
    // Verify here, while the bytes are in this core's cache.
    let landing = Landing::new(files, false);
    let (mut done, mut next) = (Vec::new(), Vec::new());
    while shared.next_cached(&mut done, &mut next) {
        done.extend(next.drain(..).map(|piece| copy(piece, files, landing)));
    }
}

/// Copies one piece to its buffer.
pub(super) fn copy(piece: Piece, files: &FileSet, landing: Landing<'_>) -> Completion {
    let Piece { index, label, layout, mut buffer } = piece;
    let _span = tracing::trace_span!("copy", block = %label, bytes = buffer.len()).entered();
    let mut copied = || -> Result<ReadDone, ReadError> {
        let (needed_bytes, given_bytes) = (layout.slot_bytes, buffer.len());
        if given_bytes < needed_bytes {
            return Err(ReadError::SlotTooSmall { needed_bytes, given_bytes, block: label });
        }
        let mut done = ReadDone::default();
        for region in layout.regions.iter() {
            let slot = &mut buffer.as_mut_slice()[region.at..];
            let wanted = &mut slot[..(region.wanted_end - region.offset) as usize];
            let read = |offset, out: &mut [u8]| {
                let read = files.read_for_load(region.file, offset, out, label);
                read.map_err(|error| read_error(error, label, region, 1))
            };
            landing.fill(label, region, wanted, &read)?;
            done.bytes_read += wanted.len() as u64;
            done.requests += 1;
        }
        Ok(done)
    };
    let result = copied();
    Completion { id: index as u64, buffer: Some(buffer), result }
}
