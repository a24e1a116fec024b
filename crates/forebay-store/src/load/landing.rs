//! The last step of loading a piece: puts its bytes in their slot and, for a pack, verifies their checksums.

use std::path::PathBuf;
use std::sync::Arc;

use forebay_format::Extent;
use forebay_format::pack::checksum;

use super::past_cache::{copy, copy_with_checksum};
use crate::arena::SlotBuffer;
use crate::chunks::Chunks;
use crate::engine::{BlockLabel, Completion};
use crate::error::{ReadError, StoreError};
use crate::files::FileSet;
use crate::layout::Region;

/// Regions of a piece: which bytes of its slot were read from where.
pub(super) type Regions = Arc<[Region]>;

/// Function that fills a buffer with the bytes at an offset of a file.
pub(super) type ReadPart<'a> = dyn Fn(u64, &mut [u8]) -> Result<(), ReadError> + 'a;

/// Verifies the checksums of pieces if the engine does not.
#[derive(Clone, Copy)]
pub(super) struct Landing<'a> {
    /// The files whose checksums are verified. `None` if nothing is to be verified here.
    files: Option<&'a FileSet>,
}

impl<'a> Landing<'a> {
    /// Creates a `Landing` that verifies pieces if the files have checksums and the engine does not verify them.
    pub fn new(files: &'a FileSet, engine_compares: bool) -> Landing<'a> {
        Landing { files: Some(files).filter(|files| files.is_checked() && !engine_compares) }
    }

    /// Returns true if pieces must be verified here.
    pub fn compares(&self) -> bool {
        self.files.is_some()
    }

    /// Copies the first `bytes` of a piece from a ring slot to its destination, and verifies them.
    pub fn move_over(
        &self,
        label: BlockLabel,
        regions: &[Region],
        to: &mut SlotBuffer,
        from: &SlotBuffer,
        bytes: usize,
    ) -> Result<(), ReadError> {
        let (to, from) = (&mut to.as_mut_slice()[..bytes], &from.as_slice()[..bytes]);
        if self.files.is_none() {
            copy(to, from);
            return Ok(());
        }
        for region in regions {
            let range = region.wanted_in_slot();
            match self.checks(region) {
                None => copy(&mut to[range.clone()], &from[range]),
                Some(checks) => {
                    let to = &mut to[range.clone()];
                    if !copy_checked(checks, region, to, &from[range]) {
                        self.read_again(label, region, to)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Fills a region of a piece with `read`, and verifies it. `read` gets a file offset and the buffer for the bytes
    /// there. A region with checksums is read chunk by chunk.
    pub fn fill(
        &self,
        label: BlockLabel,
        region: &Region,
        out: &mut [u8],
        read: &ReadPart<'_>,
    ) -> Result<(), ReadError> {
        let range = region.wanted();
        let Some(checks) = self.checks(region).filter(|checks| checks.is_whole(range.clone()))
        else {
            read(region.offset, out)?;
            let wanted = (region.wanted_start - region.offset) as usize..;
            return match self.checks(region) {
                Some(_) => self.read_again(label, region, &mut out[wanted]),
                None => Ok(()),
            };
        };
        let (mut good, mut done) = (true, 0);
        for chunk in checks.chunks(range) {
            let start = (chunk.offset - region.offset) as usize;
            let end = start + chunk.bytes as usize;
            // For the first chunk, this includes any bytes before it.
            read(region.offset + done as u64, &mut out[done..end])?;
            good &= checksum(&out[start..end]) == chunk.checksum;
            done = end;
        }
        read(region.offset + done as u64, &mut out[done..])?;
        let wanted = (region.wanted_start - region.offset) as usize..;
        if good { Ok(()) } else { self.read_again(label, region, &mut out[wanted]) }
    }

    /// Verifies a piece that was read in place.
    pub fn settle(&self, completion: &mut Completion, label: BlockLabel, regions: &[Region]) {
        let Some(buffer) = completion.buffer.as_mut().filter(|_| completion.result.is_ok()) else {
            return;
        };
        for region in regions {
            let Some(checks) = self.checks(region) else { continue };
            let bytes = &mut buffer.as_mut_slice()[region.wanted_in_slot()];
            if checks.first_bad(region.wanted_start, bytes).is_none() {
                continue;
            }
            if let Err(error) = self.read_again(label, region, bytes) {
                completion.result = Err(error);
                return;
            }
        }
    }

    /// Returns the chunks of a region that is to be verified here. Coded blocks were verified when they were decoded.
    fn checks(&self, region: &Region) -> Option<&'a Chunks> {
        self.files?.file(region.file)?.checks(region.offset)
    }

    /// Reads a region again, through the page cache. The bytes may have been damaged in transfer and not on the disk.
    fn read_again(
        &self,
        label: BlockLabel,
        region: &Region,
        out: &mut [u8],
    ) -> Result<(), ReadError> {
        let Some(files) = self.files else { return Ok(()) };
        let (file, offset, length) = (region.file, region.wanted_start, out.len() as u64);
        tracing::warn!(block = %label, offset, "a checksum does not match; reading again");
        let read = files.read_exact(Extent { file, offset, length }, out);
        read.map_err(|error| read_error(error, label, region, 2))
    }
}

/// Converts the error of reading a region through the page cache to one that names the block.
pub(super) fn read_error(
    error: StoreError,
    block: BlockLabel,
    region: &Region,
    attempts: u32,
) -> ReadError {
    let offset = region.offset;
    match error {
        StoreError::Corrupt { file, offset, place, damage } => {
            ReadError::Corrupt { file, offset, place, block, damage }
        }
        StoreError::UnexpectedEnd { file, file_bytes: file_end, .. } => {
            ReadError::UnexpectedEnd { file, file_end, wanted_end: region.wanted_end, block }
        }
        StoreError::Read { file, offset, source } => {
            ReadError::Io { file, offset, block, attempts, source }
        }
        StoreError::UnknownFile { index, files } => ReadError::UnknownFile { index, files, block },
        other => {
            let source = std::io::Error::other(other);
            ReadError::Io { file: PathBuf::new(), offset, block, attempts, source }
        }
    }
}

/// Copies one region chunk by chunk. Returns false if a chunk does not match its checksum, or if the region does not
/// consist of whole chunks.
fn copy_checked(checks: &Chunks, region: &Region, to: &mut [u8], from: &[u8]) -> bool {
    if !checks.is_whole(region.wanted()) {
        return false;
    }
    let (mut good, mut done) = (true, 0);
    for chunk in checks.chunks(region.wanted()) {
        let start = (chunk.offset - region.wanted_start) as usize;
        let end = start + chunk.bytes as usize;
        copy(&mut to[done..start], &from[done..start]);
        good &= copy_with_checksum(&mut to[start..end], &from[start..end]) == chunk.checksum;
        done = end;
    }
    copy(&mut to[done..], &from[done..]);
    good
}
