//! The disk by engine, request size and depth; the page cache by threads.

use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use forebay_format::FileIndex;
use forebay_store::{CacheMethod, DiskProbe, FileSet, IoKind, Latencies, copy_rate};
use serde::Serialize;

use super::scratch::{SCRATCH_BYTES, Scratch};
use super::{DoctorRequest, ProfiledRead, folder_error};
use crate::EngineError;

/// Rounds over all cases, one after the other, so that a slow moment does not hit one case alone;
/// the best of them counts.
const ROUNDS: usize = 7;
const CASE_TIME: Duration = Duration::from_millis(250);
const LATENCY_TIME: Duration = Duration::from_millis(700);
const COPY_TIME: Duration = Duration::from_millis(150);
/// Part of the file that copies from the page cache use.
const COPIED_BYTES: u64 = 512 << 20;
/// A case must be better by this factor to be preferred to one that asks less of the disk.
const CLEARLY_BETTER: f64 = 1.03;

/// Memory that stands for a model's.
const LARGE_BYTES: usize = 1 << 30;
/// Reading into a small ring and copying from there costs processor time: it must gain this much.
const WORTH_A_COPY: f64 = 1.15;

/// Engine, request KiB, depth: those that ask least of the disk first.
const CASES: [(IoKind, usize, usize); 10] = [
    (IoKind::Uring, 512, 16),
    (IoKind::Uring, 512, 32),
    (IoKind::Uring, 512, 64),
    (IoKind::Uring, 256, 32),
    (IoKind::Uring, 256, 64),
    (IoKind::Uring, 128, 64),
    (IoKind::Uring, 1024, 32),
    (IoKind::Pread, 1024, 4),
    (IoKind::Pread, 512, 16),
    (IoKind::Pread, 1024, 16),
];

/// One way of reading.
#[derive(Debug, Clone, Serialize)]
pub struct DiskCase {
    pub engine: String,
    pub request_bytes: usize,
    pub queue_depth: usize,
    pub registered_buffers: bool,
    /// The best of several measurements.
    pub bytes_per_second: f64,
    /// The worst of them.
    pub bytes_per_second_min: f64,
    pub cpu_seconds_per_gigabyte: f64,
}

/// Copies out of the page cache.
#[derive(Debug, Clone, Serialize)]
pub struct CopyRate {
    pub threads: usize,
    pub bytes_per_second: f64,
}

/// What the disk and its page cache give.
#[derive(Debug, Clone, Serialize)]
pub struct DiskReport {
    /// The file that was read; `None` for a temporary one.
    pub file: Option<PathBuf>,
    pub file_bytes: u64,
    /// Whether reads pass the page cache by.
    pub direct: bool,
    /// Alignment of direct reads, bytes.
    pub alignment: usize,
    pub cases: Vec<DiskCase>,
    pub best: ProfiledRead,
    pub latency_64kib: Latencies,
    pub copies: Vec<CopyRate>,
    pub page_cache_method: CacheMethod,
    /// Why some engine or path is not there, in words.
    pub remarks: Vec<String>,
}

/// The file that is read.
pub(super) struct Subject {
    files: FileSet,
    file_bytes: u64,
    /// Keeps a temporary one.
    scratch: Option<Scratch>,
}

impl Subject {
    /// The file that was named, or a temporary one.
    ///
    /// # Errors
    /// A file that is too small, a folder that cannot be written, a disk without room.
    pub(super) fn open(request: &DoctorRequest) -> Result<Subject, EngineError> {
        let scratch = match request.file {
            Some(_) => None,
            None => Some(
                Scratch::create(&request.folder)
                    .map_err(|source| folder_error(&request.folder, source))?,
            ),
        };
        let path = match (&request.file, &scratch) {
            (Some(path), _) => path.as_path(),
            (None, Some(scratch)) => scratch.path(),
            (None, None) => request.folder.as_path(),
        };
        let files = FileSet::open(&[path])?;
        let file_bytes = files.file_bytes(FileIndex(0)).unwrap_or(0);
        if file_bytes < SCRATCH_BYTES {
            return Err(EngineError::BadOption {
                name: "--file",
                value: format!("a file of {file_bytes} bytes"),
                expected: format!("it must have at least {SCRATCH_BYTES} to measure a disk with"),
            });
        }
        Ok(Subject { files, file_bytes, scratch })
    }

    pub(super) fn files(&self) -> &FileSet {
        &self.files
    }

    /// What `work` makes of the same file, opened by a name, which a temporary one has only meanwhile: cuFile refuses
    /// files without.
    ///
    /// # Errors
    /// Those of `work`; a file that cannot get a name.
    pub(super) fn with_name<T>(
        &self,
        work: impl FnOnce(&FileSet) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let Some(scratch) = &self.scratch else { return work(&self.files) };
        let named = scratch.named().map_err(|source| EngineError::Unmeasurable {
            folder: scratch.path().to_path_buf(),
            source,
        })?;
        work(&FileSet::open(&[named.path()])?)
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }
}

pub(super) fn measure(
    request: &DoctorRequest,
    subject: &Subject,
    step: &mut dyn FnMut(&'static str),
) -> Result<DiskReport, EngineError> {
    let (files, file_bytes) = (&subject.files, subject.file_bytes);
    step("the disk");
    let mut remarks: Vec<String> = files.why_not_direct().into_iter().collect();
    let cases = cases(files, file_bytes, &mut remarks)?;
    let mut best = best(&cases);
    let kind = best.engine.parse().unwrap_or(IoKind::Auto);
    let (small, large) = places(files, file_bytes, kind, &best)?;
    if small > large * WORTH_A_COPY {
        best.staging_bytes = 2 * best.queue_depth * best.request_bytes;
    }
    best.in_place_bytes_per_second = large;
    step("latency of small reads");
    let probe = DiskProbe { kind, request_bytes: 64 << 10, depth: 1, memory_bytes: 0 };
    let latency_64kib = probe.latency(files, FileIndex(0), 0..file_bytes, LATENCY_TIME)?;
    step("the page cache");
    let copies = copies(files, file_bytes)?;
    let (_, page_cache_method) = files.cached_bytes()?;
    Ok(DiskReport {
        file: request.file.clone(),
        file_bytes,
        direct: files.why_not_direct().is_none(),
        alignment: files.alignment(),
        cases,
        best,
        latency_64kib,
        copies,
        page_cache_method,
        remarks,
    })
}

/// Measures every case that works here.
fn cases(
    files: &FileSet,
    file_bytes: u64,
    remarks: &mut Vec<String>,
) -> Result<Vec<DiskCase>, EngineError> {
    let mut found: Vec<Option<DiskCase>> = CASES.iter().map(|_| None).collect();
    for round in 0..ROUNDS {
        for (place, (kind, kib, depth)) in found.iter_mut().zip(CASES) {
            if round > 0 && place.is_none() {
                continue;
            }
            let probe = DiskProbe { kind, request_bytes: kib << 10, depth, memory_bytes: 0 };
            let measured = match probe.rate(files, FileIndex(0), 0..file_bytes, CASE_TIME) {
                Ok(measured) => measured,
                Err(error @ forebay_store::StoreError::Unavailable { .. }) => {
                    let remark = error.to_string();
                    if !remarks.contains(&remark) {
                        remarks.push(remark);
                    }
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            if !measured.engine.why.is_empty() && !remarks.contains(&measured.engine.why) {
                remarks.push(measured.engine.why.clone());
            }
            let rate = measured.bytes_per_second;
            let case = place.get_or_insert_with(|| DiskCase {
                engine: kind.to_string(),
                request_bytes: probe.request_bytes,
                queue_depth: depth,
                registered_buffers: measured.engine.registered_buffers,
                bytes_per_second: 0.0,
                bytes_per_second_min: f64::INFINITY,
                cpu_seconds_per_gigabyte: 0.0,
            });
            case.bytes_per_second_min = case.bytes_per_second_min.min(rate);
            if rate > case.bytes_per_second {
                case.bytes_per_second = rate;
                case.cpu_seconds_per_gigabyte =
                    measured.cpu_seconds / (measured.bytes as f64 * 1e-9);
            }
        }
    }
    Ok(found.into_iter().flatten().collect())
}

/// The first case that no other clearly beats.
fn best(cases: &[DiskCase]) -> ProfiledRead {
    let top = cases.iter().map(|case| case.bytes_per_second).fold(0.0, f64::max);
    let chosen = cases.iter().find(|case| case.bytes_per_second * CLEARLY_BETTER >= top);
    let options = forebay_store::EngineOptions::default();
    ProfiledRead {
        engine: chosen.map_or_else(|| IoKind::Auto.to_string(), |case| case.engine.clone()),
        request_bytes: chosen.map_or(options.request_bytes, |case| case.request_bytes),
        queue_depth: chosen.map_or(options.queue_depth, |case| case.queue_depth),
        bytes_per_second: chosen.map_or(0.0, |case| case.bytes_per_second),
        in_place_bytes_per_second: 0.0,
        staging_bytes: 0,
    }
}

/// The best rates into little and into much memory, alternating.
fn places(
    files: &FileSet,
    file_bytes: u64,
    kind: IoKind,
    read: &ProfiledRead,
) -> Result<(f64, f64), EngineError> {
    let (request_bytes, depth) = (read.request_bytes, read.queue_depth);
    let mut best = [0.0_f64; 2];
    for _ in 0..ROUNDS {
        for (best, memory_bytes) in best.iter_mut().zip([0, LARGE_BYTES]) {
            let probe = DiskProbe { kind, request_bytes, depth, memory_bytes };
            let rate = probe.rate(files, FileIndex(0), 0..file_bytes, CASE_TIME)?;
            *best = best.max(rate.bytes_per_second);
        }
    }
    Ok((best[0], best[1]))
}

/// Copies with 1, 2, 4, ... threads up to the number of processors.
fn copies(files: &FileSet, file_bytes: u64) -> Result<Vec<CopyRate>, EngineError> {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let mut counts: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|&n| n < processors).collect();
    counts.push(processors);
    let range = 0..file_bytes.min(COPIED_BYTES);
    // Makes the range cached; what it takes is not counted.
    let warm = Duration::from_secs(1);
    copy_rate(files, FileIndex(0), range.clone(), processors, warm)?;
    let mut found: Vec<CopyRate> =
        counts.into_iter().map(|threads| CopyRate { threads, bytes_per_second: 0.0 }).collect();
    for _ in 0..ROUNDS {
        for copy in &mut found {
            let rate = copy_rate(files, FileIndex(0), range.clone(), copy.threads, COPY_TIME)?;
            copy.bytes_per_second = copy.bytes_per_second.max(rate.unwrap_or(0.0));
        }
    }
    Ok(found)
}
