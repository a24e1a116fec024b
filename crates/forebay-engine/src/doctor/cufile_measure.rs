//! Compares cuFile with the ring: both load the same bytes of the same file to the same GPU, taking turns.

use forebay_cuda::{CuFileMode, Gpu};
use forebay_format::{Extent, FileIndex};
use forebay_store::{BlockLabel, UploadPart, UploadPlan};

use super::DoctorError;
use super::cufile::{CuFileCase, CuFileRates};
use super::disk::Subject;
use super::{ProfiledRead, ReadChoice};
use crate::load::{CuFileReader, CuFileRequests, GpuRing, RingRequest};

/// Number of rounds over all cases. Cases take turns so that a slow moment does not affect one case alone. The best
/// round counts.
const ROUNDS: usize = 3;

/// Time that the disk should take for one load, in seconds.
const LOAD_SECONDS: f64 = 0.25;

/// Bounds of the size that is loaded from the beginning of the file, in bytes.
const SAMPLE_BYTES: std::ops::RangeInclusive<u64> = 64 << 20..=1 << 30;

/// Request size in MiB and number of threads of each case. Cases that ask least of the processor come first.
const CASES: [(usize, usize); 5] = [(16, 4), (4, 8), (1, 16), (4, 16), (2, 32)];

/// Measures cuFile and the ring.
///
/// # Errors
/// Returns an error if cuFile cannot be used here.
pub(super) fn measure(
    gpu: &Gpu,
    subject: &Subject,
    read: &ProfiledRead,
) -> Result<CuFileRates, DoctorError> {
    let files = subject.files();
    let bytes = sample_bytes(gpu, subject, read)?;
    let reader = subject.with_name(|named| Ok(CuFileReader::open(gpu, named, bytes as usize)?))?;
    let to = reader.ptr().address();
    let part = UploadPart {
        label: BlockLabel::Other(0),
        extent: Extent { file: FileIndex(0), offset: 0, length: bytes },
        to,
    };
    let choice = ReadChoice::of(read, None);
    let request = RingRequest::new(files, choice.kind, &choice);
    let mut ring = GpuRing::open(gpu, request, &[part], &[reader.ptr()])?;
    let plans: Vec<UploadPlan> =
        CASES.iter().map(|&(mib, _)| UploadPlan::new(&[part], files, (mib << 20) as u64)).collect();
    let (mut ring_rate, mut rates) = (0.0_f64, [0.0_f64; CASES.len()]);
    for _ in 0..ROUNDS {
        files.drop_cached()?;
        ring_rate = ring_rate.max(bytes as f64 / ring.fill(&mut |_, _| {})?.seconds);
        for ((rate, plan), &(_, threads)) in rates.iter_mut().zip(&plans).zip(&CASES) {
            files.drop_cached()?;
            let filled = reader.fill(files, plan, threads, &mut |_, _| {})?;
            *rate = rate.max(bytes as f64 / filled.seconds);
        }
    }
    let case = |(&(mib, threads), bytes_per_second): (&(usize, usize), f64)| CuFileCase {
        requests: CuFileRequests { request_bytes: mib << 20, threads },
        bytes_per_second,
    };
    let cases: Vec<CuFileCase> = CASES.iter().zip(rates).map(case).collect();
    let top = rates.into_iter().fold(0.0, f64::max);
    let best = cases.iter().find(|case| case.bytes_per_second * 1.03 >= top);
    Ok(CuFileRates {
        version: reader.version().map(str::to_owned),
        mode: reader.mode().to_string(),
        straight: reader.mode() != CuFileMode::Compatibility,
        memory_is_registered: reader.memory_is_registered(),
        sample_bytes: bytes,
        best: best.unwrap_or(&cases[0]).clone(),
        cases,
        ring_bytes_per_second: ring_rate,
    })
}

/// Returns the bytes that keep the disk busy for [`LOAD_SECONDS`], as far as the GPU has room.
fn sample_bytes(gpu: &Gpu, subject: &Subject, read: &ProfiledRead) -> Result<u64, DoctorError> {
    let wanted = (LOAD_SECONDS * read.bytes_per_second) as u64;
    let wanted = wanted.clamp(*SAMPLE_BYTES.start(), *SAMPLE_BYTES.end());
    let free = gpu.memory_bytes()?.0 / 4;
    Ok(wanted.min(free).min(subject.file_bytes()) / (1 << 20) * (1 << 20))
}
