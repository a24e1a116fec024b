//! Rates of the disk by engine, request size and depth, and of the page cache by threads.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_format::{FileIndex, at_least, at_most};
use forebay_options::{BadOption, OptionName};
use forebay_store::{
    CacheMethod, DiskProbe, DiskRate, FileSet, IoKind, Latencies, ProbeLength, StoreError,
    copy_rate,
};
use serde::Serialize;
use tracing::field::Empty;

use super::DoctorError;
use super::scratch::{SCRATCH_BYTES, Scratch};
use super::{DoctorRequest, ProfiledRead, folder_error};
use crate::statistics::median;

/// Number of rounds over all cases. Cases take turns so that neither a slow moment nor a burst affects one case alone.
///
/// The median of a case's rates counts. On a disk throttled by a token bucket, the best rate would belong to the first
/// case after a pause.
const ROUNDS: usize = 7;
/// The same for a quick measurement.
const QUICK_ROUNDS: usize = 2;
const CASE_TIME: Duration = Duration::from_millis(250);
const LATENCY_TIME: Duration = Duration::from_millis(700);
const COPY_TIME: Duration = Duration::from_millis(150);
/// Bytes of the file that copies from the page cache use.
const COPIED_BYTES: u64 = 512 << 20;
/// Factor by which a case must be better to be preferred to one that asks less of the disk.
const CLEARLY_BETTER: f64 = 1.03;

/// File name extensions of models. The folder's largest model is read if it has at least [`SCRATCH_BYTES`]. The layer
/// beneath a virtual disk caches a small file that was just written, and delivers it faster than a model.
const MODEL_ENDINGS: [&str; 3] = ["gguf", "fbay", "safetensors"];

/// Bytes of memory as large as a model's.
const LARGE_BYTES: usize = 1 << 30;
/// Smallest gain that justifies reading into a small ring. The copy from the ring costs processor time.
const WORTH_A_COPY: f64 = 1.15;
/// Ratio of the best reading to the median reading above which a disk has bursts.
const BURSTS: f64 = 1.3;

/// Engine, request size in KiB, and depth of each case. Cases that ask least of the disk come first.
const CASES: [(IoKind, usize, usize); 12] = [
    (IoKind::Uring, 512, 16),
    (IoKind::Uring, 512, 32),
    (IoKind::Uring, 512, 64),
    (IoKind::Uring, 256, 32),
    (IoKind::Uring, 256, 64),
    (IoKind::Uring, 128, 64),
    (IoKind::Uring, 1024, 32),
    (IoKind::Uring, 4096, 16),
    (IoKind::Pread, 1024, 4),
    (IoKind::Pread, 512, 16),
    (IoKind::Pread, 1024, 16),
    (IoKind::Pread, 4096, 16),
];

/// Results of one way of reading.
#[derive(Debug, Clone, Serialize)]
pub struct DiskCase {
    pub engine: String,
    pub request_bytes: usize,
    pub queue_depth: usize,
    pub registered_buffers: bool,
    /// Median of several measurements.
    pub bytes_per_second: f64,
    /// Worst of these measurements.
    pub bytes_per_second_min: f64,
    /// Best of these measurements.
    pub bytes_per_second_max: f64,
    pub cpu_seconds_per_gigabyte: f64,
}

/// Median rates of the same reads into a ring and into memory as large as a model's, taking turns.
#[derive(Debug, Clone, Serialize)]
pub struct PlaceRates {
    pub ring_bytes_per_second: f64,
    pub in_place_bytes_per_second: f64,
    /// Median over the rounds of the ring rate divided by the in-place rate.
    pub ring_gain: f64,
}

/// Variation of the disk's rate by itself.
#[derive(Debug, Clone, Serialize)]
pub struct DiskBursts {
    /// Best of all readings, whatever the case.
    pub burst_bytes_per_second: f64,
    /// Median of the readings of the chosen case.
    pub sustained_bytes_per_second: f64,
    /// True if the burst rate is so much higher that it says nothing about a load.
    pub bursty: bool,
}

/// Rate of copies out of the page cache.
#[derive(Debug, Clone, Serialize)]
pub struct CopyRate {
    pub threads: usize,
    pub bytes_per_second: f64,
}

/// Rates of the disk and its page cache.
#[derive(Debug, Clone, Serialize)]
pub struct DiskReport {
    /// File that was read: the one that the user named, or the largest model in the folder. `None` means a temporary
    /// file.
    pub file: Option<PathBuf>,
    pub file_bytes: u64,
    /// True if reads bypass the page cache.
    pub direct: bool,
    /// Alignment of direct reads in bytes.
    pub alignment: usize,
    pub cases: Vec<DiskCase>,
    pub best: ProfiledRead,
    pub bursts: DiskBursts,
    /// Bytes per second of the chosen case, measured among the other cases and once more after them.
    pub same_case_twice: [f64; 2],
    pub places: PlaceRates,
    pub latency_64kib: Latencies,
    pub copies: Vec<CopyRate>,
    pub page_cache_method: CacheMethod,
    /// Reasons why some engine or path is not available, in words.
    pub remarks: Vec<String>,
}

/// File that is read.
pub(crate) struct Subject {
    files: FileSet,
    file_bytes: u64,
    /// Path of the file. `None` means a temporary file.
    file: Option<PathBuf>,
    /// Keeps the temporary file open.
    scratch: Option<Scratch>,
}

impl Subject {
    /// Opens the file that the user named, the largest model in the folder, or else a temporary file.
    ///
    /// # Errors
    /// Returns an error if the file is too small, the folder cannot be written, or the disk is full.
    pub(super) fn open(request: &DoctorRequest) -> Result<Subject, DoctorError> {
        let in_folder = |source| folder_error(&request.folder, source);
        let file = match &request.file {
            Some(file) => Some(file.clone()),
            None => largest_model(&request.folder).map_err(in_folder)?,
        };
        let scratch = match file {
            Some(_) => None,
            None => Some(Scratch::create(&request.folder, &request.interrupt)?),
        };
        let path = match (&file, &scratch) {
            (Some(path), _) => path.as_path(),
            (None, Some(scratch)) => scratch.path(),
            (None, None) => unreachable!("what is not there is made"),
        };
        let files = FileSet::open(&[path])?.interruptible(&request.interrupt);
        let file_bytes = files.file_bytes(FileIndex(0)).unwrap_or(0);
        if file_bytes < SCRATCH_BYTES {
            return Err(DoctorError::Option(BadOption {
                name: OptionName::File,
                value: format!("a file of {}", at_most(file_bytes)),
                expected: format!(
                    "it must have at least {} to measure a disk with",
                    at_least(SCRATCH_BYTES)
                ),
            }));
        }
        Ok(Subject { files, file_bytes, file, scratch })
    }

    pub(super) fn files(&self) -> &FileSet {
        &self.files
    }

    /// Calls `work` with the same file, opened by a name, and returns its result. A temporary file has a name only
    /// during the call. cuFile rejects files without a name.
    ///
    /// # Errors
    /// Returns the errors of `work`. Returns an error if the file cannot get a name.
    pub(super) fn with_name<T>(
        &self,
        work: impl FnOnce(&FileSet) -> Result<T, DoctorError>,
    ) -> Result<T, DoctorError> {
        let Some(scratch) = &self.scratch else { return work(&self.files) };
        let named = scratch.named().map_err(|source| DoctorError::Unmeasurable {
            folder: scratch.path().to_path_buf(),
            source,
        })?;
        let files = FileSet::open(&[named.path()])?;
        work(&match self.files.interrupt() {
            Some(interrupt) => files.interruptible(interrupt),
            None => files,
        })
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }
}

pub(super) fn measure(
    subject: &Subject,
    is_quick: bool,
    step: &mut dyn FnMut(&'static str),
) -> Result<DiskReport, DoctorError> {
    let rounds = if is_quick { QUICK_ROUNDS } else { ROUNDS };
    let (files, file_bytes) = (&subject.files, subject.file_bytes);
    step("the disk");
    let mut remarks: Vec<String> = files.why_not_direct().into_iter().collect();
    let mut readings = Readings { files, file_bytes, next: 0, rounds };
    let cases = cases(&mut readings, &mut remarks)?;
    let mut best = best(&cases);
    let kind = best.engine.parse().unwrap_or(IoKind::Auto);
    let bursts = DiskBursts::of(&cases, best.bytes_per_second);
    let places = places(&mut readings, kind, &best)?;
    if places.ring_gain > WORTH_A_COPY {
        best.staging_bytes = 2 * best.queue_depth * best.request_bytes;
    }
    let same_case_twice = [best.bytes_per_second, places.ring_bytes_per_second];
    // Measured once more, because the best of many noisy readings is too high.
    best.bytes_per_second = places.ring_bytes_per_second;
    best.in_place_bytes_per_second = places.in_place_bytes_per_second;
    step("latency of small reads");
    let probe = DiskProbe { kind, request_bytes: 64 << 10, depth: 1, memory_bytes: 0 };
    let latency_64kib = probe.latency(files, FileIndex(0), 0..file_bytes, LATENCY_TIME)?;
    step("the page cache");
    let copies = copies(files, file_bytes, rounds)?;
    let (_, page_cache_method) = files.cached_bytes()?;
    Ok(DiskReport {
        file: subject.file.clone(),
        file_bytes,
        direct: files.why_not_direct().is_none(),
        alignment: files.alignment(),
        cases,
        best,
        bursts,
        same_case_twice,
        places,
        latency_64kib,
        copies,
        page_cache_method,
        remarks,
    })
}

/// Returns the order of the cases in a round. Over the rounds, every case is measured early and late, and both before
/// and after every other case.
fn order(round: usize, rounds: usize, cases: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..cases).collect();
    order.rotate_left(round * cases / rounds);
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// Returns the largest model in a folder that is large enough to measure with.
fn largest_model(folder: &Path) -> std::io::Result<Option<PathBuf>> {
    let mut largest = None;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_model = path.extension().is_some_and(|e| MODEL_ENDINGS.iter().any(|&m| e == m));
        let Some(about) = is_model.then(|| path.metadata().ok()).flatten() else { continue };
        if about.is_file() && about.len() >= SCRATCH_BYTES {
            largest = largest.max(Some((about.len(), path)));
        }
    }
    Ok(largest.map(|(_, path)| path))
}

/// Consecutive readings of a file. Each one starts where the last one ended.
struct Readings<'a> {
    files: &'a FileSet,
    file_bytes: u64,
    next: u64,
    /// Number of readings of each case.
    rounds: usize,
}

impl Readings<'_> {
    fn rate(&mut self, probe: &DiskProbe) -> Result<DiskRate, StoreError> {
        if self.next + SCRATCH_BYTES > self.file_bytes {
            self.next = 0;
        }
        let range = self.next..self.next + SCRATCH_BYTES;
        let length = ProbeLength::of_time(CASE_TIME);
        let rate = probe.rate(self.files, FileIndex(0), range, length)?;
        self.next += rate.bytes.min(SCRATCH_BYTES);
        Ok(rate)
    }
}

/// Measures every case that works on this machine.
fn cases(
    readings: &mut Readings<'_>,
    remarks: &mut Vec<String>,
) -> Result<Vec<DiskCase>, DoctorError> {
    let mut found: Vec<Option<Vec<DiskRate>>> = vec![Some(Vec::new()); CASES.len()];
    for round in 0..readings.rounds {
        for case in order(round, readings.rounds, CASES.len()) {
            let Some(rates) = &mut found[case] else { continue };
            let (kind, kib, depth) = CASES[case];
            let (request_bytes, bytes_per_second) = (kib << 10, Empty);
            let span = tracing::debug_span!(
                "doctor_case", engine = %kind, request_bytes, depth, bytes_per_second
            );
            let _entered = span.enter();
            let probe = DiskProbe { kind, request_bytes: kib << 10, depth, memory_bytes: 0 };
            let remark = match readings.rate(&probe) {
                Ok(measured) => {
                    span.record("bytes_per_second", measured.bytes_per_second);
                    let why = measured.engine.why.clone();
                    rates.push(measured);
                    why
                }
                Err(error @ StoreError::Unavailable { .. }) => {
                    found[case] = None;
                    error.to_string()
                }
                Err(error) => return Err(error.into()),
            };
            if !remark.is_empty() && !remarks.contains(&remark) {
                remarks.push(remark);
            }
        }
    }
    let measured = CASES.iter().zip(found);
    Ok(measured.filter_map(|(case, rates)| DiskCase::of(case, &rates?)).collect())
}

impl DiskCase {
    fn of(&(kind, kib, depth): &(IoKind, usize, usize), rates: &[DiskRate]) -> Option<DiskCase> {
        let per_second = || rates.iter().map(|rate| rate.bytes_per_second);
        let cpu = rates.iter().map(|rate| rate.cpu_seconds / (rate.bytes as f64 * 1e-9));
        Some(DiskCase {
            engine: kind.to_string(),
            request_bytes: kib << 10,
            queue_depth: depth,
            registered_buffers: rates.first()?.engine.registered_buffers,
            bytes_per_second: median(per_second()),
            bytes_per_second_min: per_second().fold(f64::INFINITY, f64::min),
            bytes_per_second_max: per_second().fold(0.0, f64::max),
            cpu_seconds_per_gigabyte: median(cpu),
        })
    }
}

impl DiskBursts {
    fn of(cases: &[DiskCase], sustained_bytes_per_second: f64) -> DiskBursts {
        let burst = cases.iter().map(|case| case.bytes_per_second_max).fold(0.0, f64::max);
        DiskBursts {
            burst_bytes_per_second: burst,
            sustained_bytes_per_second,
            bursty: burst > BURSTS * sustained_bytes_per_second,
        }
    }
}

/// Returns the first case that no other case clearly beats.
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

/// Measures reads into a small ring and into large memory, taking turns.
fn places(
    readings: &mut Readings<'_>,
    kind: IoKind,
    read: &ProfiledRead,
) -> Result<PlaceRates, DoctorError> {
    let (request_bytes, depth) = (read.request_bytes, read.queue_depth);
    let sizes = [0, LARGE_BYTES];
    let mut rounds = Vec::with_capacity(readings.rounds);
    for round in 0..readings.rounds {
        let mut rates = [0.0; 2];
        for place in order(round, readings.rounds, sizes.len()) {
            let probe = DiskProbe { kind, request_bytes, depth, memory_bytes: sizes[place] };
            rates[place] = readings.rate(&probe)?.bytes_per_second;
        }
        rounds.push(rates);
    }
    Ok(PlaceRates {
        ring_bytes_per_second: median(rounds.iter().map(|rates| rates[0])),
        in_place_bytes_per_second: median(rounds.iter().map(|rates| rates[1])),
        ring_gain: median(rounds.iter().map(|[ring, in_place]| ring / in_place)),
    })
}

/// Measures copies with 1, 2, 4, ... threads up to the number of processors.
fn copies(files: &FileSet, file_bytes: u64, rounds: usize) -> Result<Vec<CopyRate>, DoctorError> {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let mut counts: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|&n| n < processors).collect();
    counts.push(processors);
    let range = 0..file_bytes.min(COPIED_BYTES);
    // Brings the range into the page cache. The time for this is not counted.
    let warm = Duration::from_secs(1);
    copy_rate(files, FileIndex(0), range.clone(), processors, warm)?;
    let mut found: Vec<CopyRate> =
        counts.into_iter().map(|threads| CopyRate { threads, bytes_per_second: 0.0 }).collect();
    for _ in 0..rounds {
        for copy in &mut found {
            let rate = copy_rate(files, FileIndex(0), range.clone(), copy.threads, COPY_TIME)?;
            copy.bytes_per_second = copy.bytes_per_second.max(rate.unwrap_or(0.0));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rates of each case on a simulated disk, which gives 3.3 until 5 units are read, and 1.7 from then
    /// on.
    fn throttled(cases: usize) -> Vec<Vec<f64>> {
        let (mut rates, mut spent) = (vec![Vec::new(); cases], 0.0);
        for round in 0..ROUNDS {
            for case in order(round, ROUNDS, cases) {
                let rate = if spent < 5.0 { 3.3 } else { 1.7 };
                spent += rate * CASE_TIME.as_secs_f64();
                rates[case].push(rate);
            }
        }
        rates
    }

    #[test]
    fn a_burst_does_not_choose() {
        let rates = throttled(CASES.len());
        assert!(
            rates.iter().any(|rates| rates[0] > 3.0) && rates.iter().any(|rates| rates[0] < 2.0)
        );
        for rates in rates {
            assert!((median(rates) - 1.7).abs() < 1e-9);
        }
    }

    #[test]
    fn every_case_is_measured_early_and_late() {
        for cases in [2, CASES.len()] {
            let mut places = vec![Vec::new(); cases];
            for round in 0..ROUNDS {
                let order = order(round, ROUNDS, cases);
                order.iter().enumerate().for_each(|(place, &case)| places[case].push(place));
            }
            for places in places {
                assert_eq!(places.len(), ROUNDS);
                assert!(places.iter().any(|&place| place < cases / 2), "{places:?}");
                assert!(places.iter().any(|&place| place >= cases / 2), "{places:?}");
            }
        }
    }

    #[test]
    fn a_disk_that_varies_little_has_no_bursts() {
        let case = |least: f64, median: f64, most: f64| DiskCase {
            engine: "uring".into(),
            request_bytes: 512 << 10,
            queue_depth: 16,
            registered_buffers: true,
            bytes_per_second: median,
            bytes_per_second_min: least,
            bytes_per_second_max: most,
            cpu_seconds_per_gigabyte: 0.0,
        };
        assert!(!DiskBursts::of(&[case(2.9, 3.0, 3.2)], 3.0).bursty);
        let bursts = DiskBursts::of(&[case(1.5, 1.7, 1.9), case(1.5, 1.6, 3.3)], 1.7);
        assert!(bursts.bursty && bursts.burst_bytes_per_second > 3.2, "{bursts:?}");
    }
}
