//! One block's read in progress: how it is cut into requests, and what the answer to a request
//! means.

use std::path::Path;
use std::time::Duration;

use forebay_format::FileIndex;

use crate::arena::SLOT_ALIGNMENT;
use crate::checks::BadChunk;
use crate::engine::{BlockLabel, BlockRead, Priority, ReadDone};
use crate::error::ReadError;
use crate::layout::Region;
use crate::relayout::Stage;

/// Answers that say "not now" are repeated this often without counting as failures.
const TRANSIENT_REPEATS: u32 = 1000;

#[derive(Debug)]
pub(crate) struct Job {
    pub read: BlockRead,
    /// The next span to request: region and position inside it.
    region: usize,
    position: u64,
    /// Requests at the device.
    pub in_flight: u32,
    pub done: ReadDone,
    /// Why the read fails once its requests are back; nothing more is requested then.
    pub outcome: Option<ReadError>,
    /// The caller has its answer already; the buffer stays here until the device is done with it.
    pub abandoned: bool,
    /// Times that everything was read again because a checksum did not match.
    pub rereads: u32,
    /// Spans that are being compared with their checksums, and bytes that have been; or shares of a recast.
    pub checking: u32,
    pub checked_bytes: u64,
    /// The first chunk found that does not match.
    pub bad: Option<(FileIndex, BadChunk)>,
    /// Of its recast, where it has one.
    pub stage: Stage,
}

/// One span at the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub job: u32,
    pub file: FileIndex,
    pub offset: u64,
    pub length: u64,
    /// Where the span lands in the slot.
    pub at: usize,
    /// The request is complete when the file was read up to here.
    pub wanted_end: u64,
    /// Failed attempts, and those that only met a busy kernel.
    pub attempts: u32,
    pub transient: u32,
    /// When the current attempt was started, on the device's clock.
    pub started: Duration,
    /// Counts against the background depth.
    pub background: bool,
    /// The read's priority when the request began; it may be promoted since.
    pub why: Priority,
    /// How often it was started again.
    pub again: u32,
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

    /// Begins anew, with everything still to be requested.
    pub(crate) fn read_again(&mut self) {
        self.region = 0;
        self.position = 0;
        self.rereads += 1;
        self.checked_bytes = 0;
    }

    /// Whether all that was and will be requested is back from the device.
    pub(crate) fn is_here(&self) -> bool {
        self.in_flight == 0 && !self.is_pending()
    }

    /// Whether something is left to request.
    pub(crate) fn is_pending(&self) -> bool {
        self.outcome.is_none() && !self.abandoned && self.region < self.read.layout.regions.len()
    }

    /// The file and offset that would be requested next, or were requested last.
    pub(crate) fn place(&self) -> Option<(FileIndex, u64)> {
        let regions = &self.read.layout.regions;
        let region = regions.get(self.region).or(regions.last())?;
        Some((region.file, region.offset + self.position))
    }

    /// Cuts off the next request.
    pub(crate) fn next_request(&mut self, job: u32, request_bytes: u64) -> Option<Request> {
        if !self.is_pending() {
            return None;
        }
        let region: Region = *self.read.layout.regions.get(self.region)?;
        let start = self.position;
        let length = piece_bytes(region.length, request_bytes).min(region.length - start);
        let end = region.offset + start + length;
        self.position += length;
        if self.position == region.length {
            self.region += 1;
            self.position = 0;
        }
        Some(Request {
            job,
            file: region.file,
            offset: region.offset + start,
            length,
            at: region.at + start as usize,
            wanted_end: end.min(region.wanted_end),
            attempts: 0,
            transient: 0,
            started: Duration::ZERO,
            background: false,
            why: self.read.priority,
            again: 0,
        })
    }
}

/// Equal pieces rather than full ones and a crumb: a request costs about the same whatever its
/// size.
fn piece_bytes(length: u64, request_bytes: u64) -> u64 {
    let pieces = length.div_ceil(request_bytes).max(1);
    length.div_ceil(pieces).next_multiple_of(SLOT_ALIGNMENT as u64)
}

/// What to do with a request whose attempt has ended.
#[derive(Debug)]
pub(crate) enum Verdict {
    Complete,
    /// Start this one in its place: the same span again, or what a short read left over.
    Again(Request),
    Failed(ReadError),
}

/// What judging needs to know beside the request.
pub(crate) struct Circumstances<'a> {
    pub path: &'a Path,
    /// Size of the file when it was opened.
    pub file_bytes: u64,
    /// What offsets and lengths of this file must keep.
    pub alignment: u64,
    pub retries: u32,
    pub block: BlockLabel,
}

/// Judges the end of an attempt: bytes from the start of the span, or an errno.
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
    // Go on at the last aligned byte: direct reads cannot begin in the middle of a unit.
    let kept = count / about.alignment * about.alignment;
    if kept == 0 {
        // Reads that always stop there: the file was cut within a unit after it was opened.
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
        // Asking again in the same way cannot help.
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
