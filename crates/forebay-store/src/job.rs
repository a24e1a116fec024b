//! The read of one block in progress: how it is cut into requests, and what the answer to a request means.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use forebay_format::FileIndex;
use forebay_format::pack::Chunk;

use crate::arena::SLOT_ALIGNMENT;
use crate::chunks::{BadChunk, Chunks};
use crate::engine::{BlockLabel, BlockRead, Priority, ReadDone};
use crate::error::ReadError;
use crate::layout::Region;
use crate::relayout::Stage;

/// Number of times that a request is repeated after EINTR or EAGAIN without counting as a failure.
const TRANSIENT_REPEATS: u32 = 1000;

/// Most bytes that a request reads of coded blocks, unless one chunk has more. Memory is reserved for many of them.
pub(crate) const CODED_REQUEST_BYTES: u64 = 512 << 10;

#[derive(Debug)]
pub(crate) struct Job {
    pub read: BlockRead,
    /// Index of the region to request next. `position` is the offset in it.
    region: usize,
    position: u64,
    /// Number of requests at the device.
    pub in_flight: u32,
    pub done: ReadDone,
    /// Error with which the read fails once its requests are back. Nothing more is requested then.
    pub outcome: Option<ReadError>,
    /// True if the caller already has its answer. The buffer stays here until the device is done with it.
    pub abandoned: bool,
    /// Number of times that everything was read again because a checksum did not match.
    pub rereads: u32,
    /// Number of spans that are being verified or decoded, or of relayout tasks in progress. `checked_bytes` is the
    /// number of bytes that have been verified in the slot.
    pub checking: u32,
    pub checked_bytes: u64,
    /// The first damaged chunk that was found.
    pub bad: Option<(FileIndex, BadChunk)>,
    /// Stage of the block's relayout, if it has one.
    pub stage: Stage,
}

/// One span at the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub job: u32,
    pub file: FileIndex,
    /// Offset in the stored file.
    pub offset: u64,
    pub length: u64,
    /// Offset of the span in the slot, in bytes. If the span is coded, offset in the memory that it is read to.
    pub at: usize,
    /// Offset up to which the stored file must be read for the request to be complete.
    pub wanted_end: u64,
    /// By how much the same byte of the decoded file has a larger offset.
    pub behind: u64,
    pub coded: Option<CodedSpan>,
    /// Number of failed attempts. `transient` counts those that only met a busy kernel.
    pub attempts: u32,
    pub transient: u32,
    /// Start time of the current attempt, on the device's clock.
    pub started: Duration,
    /// True if the request counts against the background depth.
    pub background: bool,
    /// Priority of the read when the request began. The read may have been promoted since.
    pub why: Priority,
    /// Number of times that the request was started again.
    pub again: u32,
}

/// A part of a job whose bytes are decoded when they have arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CodedSpan {
    /// First byte and end in the decoded file: whole chunks.
    pub start: u64,
    pub end: u64,
    /// Offset in the job's slot of the first decoded byte.
    pub at: usize,
    /// Offset of the first chunk in the memory that the span is read to, and the number of bytes of all chunks.
    pub skip: usize,
    pub stored_bytes: usize,
    /// Number of the memory that the span is read to. `None` before the request begins, and after the memory was passed to the decoder.
    pub stage: Option<u32>,
}

impl Job {
    pub(crate) fn new(read: BlockRead) -> Job {
        Job {
            read,
            region: 0,
            position: 0,
            in_flight: 0,
            done: ReadDone::default(),
            outcome: None,
            abandoned: false,
            rereads: 0,
            checking: 0,
            checked_bytes: 0,
            bad: None,
            stage: Stage::AsRead,
        }
    }

    /// Starts over, with everything still to be requested.
    pub(crate) fn read_again(&mut self) {
        self.region = 0;
        self.position = 0;
        self.rereads += 1;
        self.checked_bytes = 0;
    }

    /// Returns true if nothing is left to request and all requests are back from the device.
    pub(crate) fn is_here(&self) -> bool {
        self.in_flight == 0 && !self.is_pending()
    }

    /// Returns true if something is left to request.
    pub(crate) fn is_pending(&self) -> bool {
        self.outcome.is_none() && !self.abandoned && self.region < self.read.layout.regions.len()
    }

    /// Returns the file and offset that would be requested next. If nothing is left, returns the last region's.
    pub(crate) fn place(&self) -> Option<(FileIndex, u64)> {
        let regions = &self.read.layout.regions;
        let region = regions.get(self.region).or(regions.last())?;
        Some((region.file, region.offset + self.position))
    }

    /// Cuts off and returns the next request. `chunks` are those of a file.
    pub(crate) fn next_request<'a>(
        &mut self,
        job: u32,
        request_bytes: u64,
        chunks: impl FnOnce(FileIndex) -> Option<&'a Chunks>,
    ) -> Option<Request> {
        if !self.is_pending() {
            return None;
        }
        let region: Region = *self.read.layout.regions.get(self.region)?;
        let start = self.position;
        let chunks = chunks(region.file);
        let first = region.offset + start;
        let coded = chunks.filter(|chunks| chunks.is_coded_at(first));
        let (length, span) = match coded {
            None => (piece_bytes(region.length, request_bytes).min(region.length - start), None),
            Some(chunks) => {
                let span = coded_span(chunks, first..region.wanted_end, request_bytes)?;
                (span.end - span.start, Some(span))
            }
        };
        let behind = chunks.map_or(0, |chunks| chunks.behind(first));
        self.position += length;
        if self.position == region.length {
            self.region += 1;
            self.position = 0;
        }
        let at = region.at + start as usize;
        let end = (first + length).min(region.wanted_end);
        let (offset, length, wanted_end, behind, coded) = match (coded, span) {
            (Some(chunks), Some(span)) => {
                let page = SLOT_ALIGNMENT as u64;
                let stored = chunks.stored(span.start..span.end);
                let offset = stored.start / page * page;
                let skip = (stored.start - offset) as usize;
                let stored_bytes = (stored.end - stored.start) as usize;
                let length = (stored.end - offset).next_multiple_of(page);
                (offset, length, stored.end, 0, Some(CodedSpan { at, skip, stored_bytes, ..span }))
            }
            _ => (first.wrapping_sub(behind), length, end.wrapping_sub(behind), behind, None),
        };
        Some(Request {
            job,
            file: region.file,
            offset,
            length,
            at: if coded.is_some() { 0 } else { at },
            wanted_end,
            behind,
            coded,
            attempts: 0,
            transient: 0,
            started: Duration::ZERO,
            background: false,
            why: self.read.priority,
            again: 0,
        })
    }
}

/// Returns as many whole chunks from the start of `range` on as fit into a request, or one.
fn coded_span(chunks: &Chunks, range: Range<u64>, request_bytes: u64) -> Option<CodedSpan> {
    let most = request_bytes.min(CODED_REQUEST_BYTES);
    let mut all = chunks.chunks(range.clone());
    let first = all.next()?;
    let fits = |chunk: &Chunk| chunk.stored_end() - first.stored_offset <= most;
    let end = all.take_while(fits).last().unwrap_or(first).end();
    let (start, at, skip, stored_bytes) = (range.start, 0, 0, 0);
    Some(CodedSpan { start, end, at, skip, stored_bytes, stage: None })
}

/// Returns the request size that cuts `length` into equal pieces. A small remainder would cost about as much as a full
/// request.
fn piece_bytes(length: u64, request_bytes: u64) -> u64 {
    let pieces = length.div_ceil(request_bytes).max(1);
    length.div_ceil(pieces).next_multiple_of(SLOT_ALIGNMENT as u64)
}

/// Decision about a request whose attempt has ended.
#[derive(Debug)]
pub(crate) enum Verdict {
    Complete,
    /// Start this request in its place: the same span again, or the rest that a short read left.
    Again(Request),
    Failed(ReadError),
}

/// Information that judging a request needs besides the request itself.
pub(crate) struct Circumstances<'a> {
    pub path: &'a Path,
    /// Size of the file when it was opened.
    pub file_bytes: u64,
    /// Alignment of offsets and lengths in this file.
    pub alignment: u64,
    pub retries: u32,
    pub block: BlockLabel,
}

/// Decides what follows the end of an attempt. `result` is the number of bytes from the start of the span, or an errno.
pub(crate) fn judge(request: Request, result: Result<u32, i32>, about: &Circumstances) -> Verdict {
    match result {
        Ok(count) => judge_count(request, u64::from(count).min(request.length), about),
        Err(errno) => judge_errno(request, errno, about),
    }
}

fn judge_count(mut request: Request, count: u64, about: &Circumstances) -> Verdict {
    let end = request.offset + count;
    if end >= request.wanted_end {
        return Verdict::Complete;
    }
    let ends = |request: &Request| {
        Verdict::Failed(ReadError::UnexpectedEnd {
            file: about.path.to_path_buf(),
            file_end: end,
            wanted_end: request.wanted_end,
            block: about.block,
        })
    };
    if count == 0 || end >= about.file_bytes {
        return ends(&request);
    }
    // Continue at the last aligned byte, because direct reads cannot begin in the middle of a unit.
    let kept = count / about.alignment * about.alignment;
    if kept == 0 {
        // If every attempt stops here, the file was truncated within a unit after it was opened.
        request.attempts += 1;
        return if request.attempts > about.retries {
            ends(&request)
        } else {
            Verdict::Again(request)
        };
    }
    request.offset += kept;
    request.at += kept as usize;
    request.length -= kept;
    Verdict::Again(request)
}

fn judge_errno(mut request: Request, errno: i32, about: &Circumstances) -> Verdict {
    let error = std::io::Error::from_raw_os_error(errno);
    match errno {
        libc::EINTR | libc::EAGAIN if request.transient < TRANSIENT_REPEATS => {
            request.transient += 1;
            Verdict::Again(request)
        }
        // Repeating the same request cannot succeed.
        libc::EINVAL | libc::EBADF | libc::EFAULT | libc::EOPNOTSUPP | libc::EISDIR => {
            request.attempts += 1;
            failed(request, error, about)
        }
        _ => repeat_or_fail(request, error, about),
    }
}

fn repeat_or_fail(mut request: Request, error: std::io::Error, about: &Circumstances) -> Verdict {
    request.attempts += 1;
    if request.attempts <= about.retries {
        return Verdict::Again(request);
    }
    failed(request, error, about)
}

fn failed(request: Request, source: std::io::Error, about: &Circumstances) -> Verdict {
    Verdict::Failed(ReadError::Io {
        file: about.path.to_path_buf(),
        offset: request.offset,
        block: about.block,
        attempts: request.attempts,
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request {
            job: 0,
            file: FileIndex(0),
            offset: 8192,
            length: 16384,
            at: 4096,
            wanted_end: 8192 + 16000,
            behind: 0,
            coded: None,
            attempts: 0,
            transient: 0,
            started: Duration::ZERO,
            background: false,
            why: Priority::Demand,
            again: 0,
        }
    }

    fn about(file_bytes: u64) -> Circumstances<'static> {
        Circumstances {
            path: Path::new("weights"),
            file_bytes,
            alignment: 512,
            retries: 2,
            block: BlockLabel::Dense(3),
        }
    }

    #[test]
    fn the_tail_past_the_wanted_bytes_may_be_missing() {
        assert!(matches!(judge(request(), Ok(16000), &about(1 << 20)), Verdict::Complete));
        assert!(matches!(judge(request(), Ok(16384), &about(1 << 20)), Verdict::Complete));
    }

    #[test]
    fn a_short_read_goes_on_at_an_aligned_byte() {
        let Verdict::Again(rest) = judge(request(), Ok(5000), &about(1 << 20)) else { panic!() };
        assert_eq!((rest.offset, rest.at, rest.length), (8192 + 4608, 4096 + 4608, 16384 - 4608));
        assert_eq!(rest.wanted_end, request().wanted_end);
    }

    #[test]
    fn reads_that_stop_within_a_unit_are_an_unexpected_end() {
        let mut current = request();
        for _ in 0..2 {
            let Verdict::Again(again) = judge(current, Ok(100), &about(1 << 20)) else { panic!() };
            current = again;
        }
        let Verdict::Failed(error) = judge(current, Ok(100), &about(1 << 20)) else { panic!() };
        assert!(
            matches!(error, ReadError::UnexpectedEnd { file_end, .. } if file_end == 8192 + 100)
        );
    }

    #[test]
    fn a_shrunken_file_is_an_unexpected_end() {
        for count in [0, 5000] {
            let verdict = judge(request(), Ok(count), &about(8192 + 5000));
            assert!(matches!(verdict, Verdict::Failed(ReadError::UnexpectedEnd { .. })));
        }
    }

    #[test]
    fn errors_are_repeated_unless_that_cannot_help() {
        assert!(matches!(judge(request(), Err(libc::EINTR), &about(0)), Verdict::Again(_)));
        assert!(matches!(judge(request(), Err(libc::EIO), &about(0)), Verdict::Again(_)));
        let verdict = judge(request(), Err(libc::EINVAL), &about(0));
        assert!(matches!(verdict, Verdict::Failed(ReadError::Io { attempts: 1, .. })));
        let mut tired = request();
        tired.attempts = 2;
        let Verdict::Failed(error) = judge(tired, Err(libc::EIO), &about(0)) else { panic!() };
        let text = error.to_string();
        for needed in ["weights", "8192", "dense block 3", "3 attempts", "Input/output error"] {
            assert!(text.contains(needed), "{text}");
        }
    }

    #[test]
    fn pieces_are_equal_whole_pages() {
        assert_eq!(piece_bytes(884_736, 512 << 10), 442_368);
        assert_eq!(piece_bytes(512, 512 << 10), 4096);
        assert_eq!(piece_bytes(513 << 10, 512 << 10), 260 << 10);
        assert_eq!(piece_bytes(1 << 20, 4096), 4096);
    }
}
