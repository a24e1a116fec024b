//! Measures this machine and writes the results where loads find them.

mod compute;
mod cufile;
#[cfg(feature = "cuda")]
mod cufile_measure;
pub(crate) mod disk;
mod error;
pub(crate) mod gpu;
#[cfg(feature = "cuda")]
mod gpu_kernels;
#[cfg(feature = "cuda")]
pub(crate) mod gpu_measure;
mod paths;
mod profile;
mod quality;
mod scratch;

use std::path::{Path, PathBuf};
use std::time::Instant;

use forebay_store::{Interrupt, last_cache_bytes};
use serde::Serialize;

pub(crate) use compute::BESIDE_TYPE;
pub use compute::{ComputeReport, MemoryRate};
pub use cufile::{CuFileCase, CuFileChoice, CuFileRates};
pub use disk::{CopyRate, DiskBursts, DiskCase, DiskReport, PlaceRates};
pub use error::DoctorError;
pub use gpu::{BesideCpu, GpuRates, GpuReport, PcieRates, PinnedCopyRate};
pub use paths::IoPath;
pub use profile::{
    DecoderRate, KernelRate, MachineIdentity, MachineProfile, PROFILE_VERSION, ProfileError,
    ProfiledRead, ReadChoice, folder_of,
};
pub use quality::{Activity, ProfileQuality, QualityState, RepeatedReading};

use compute::SteadyRates;
use quality::Watch;

/// Options of a measurement.
#[derive(Debug, Clone)]
pub struct DoctorRequest {
    /// Folder whose disk is measured.
    pub folder: PathBuf,
    /// File to measure with, instead of the folder's largest model or a temporary file.
    pub file: Option<PathBuf>,
    /// Measures every case of the disk twice instead of seven times.
    pub quick: bool,
    /// Interrupt that ends the measurements early.
    pub interrupt: Interrupt,
}

/// Report of [`examine`].
#[derive(Debug, Clone, Serialize)]
pub struct DoctorReport {
    pub machine: MachineIdentity,
    pub folder: PathBuf,
    pub disk: DiskReport,
    pub compute: ComputeReport,
    pub gpu: GpuReport,
    pub paths: Vec<IoPath>,
    /// Other activity of the machine during the measurement.
    pub activity: Activity,
    /// Rates that were measured more than once.
    pub repeated: Vec<RepeatedReading>,
    pub profile: MachineProfile,
    pub seconds: f64,
}

/// Measures the machine. `step` is called with the name of each step before it begins.
///
/// # Errors
/// Returns an error if the folder cannot be written, the disk is full, or a read fails.
pub fn examine(
    request: &DoctorRequest,
    step: &mut dyn FnMut(&'static str),
) -> Result<DoctorReport, DoctorError> {
    let started = Instant::now();
    // The watch starts first, because writing a temporary file is load, too.
    let watch = Watch::start();
    let _span = tracing::debug_span!("doctor", folder = %request.folder.display()).entered();
    let machine = MachineIdentity::here(&request.folder)
        .map_err(|source| folder_error(&request.folder, source))?;
    step("a file to read");
    let subject = disk::Subject::open(request)?;
    let before = SteadyRates::measure(&request.interrupt)?;
    let disk = disk::measure(&subject, request.quick, step)?;
    step("memory and kernels");
    let compute = compute::measure(&request.interrupt)?;
    step("GPU");
    let gpu = crate::gpu::measure(&subject, &disk.best, &request.interrupt);
    request.interrupt.check()?;
    let paths = paths::list(&disk, &gpu);
    let after = SteadyRates::measure(&request.interrupt)?;
    let activity = watch.end();
    let repeated = repeated(&before, &disk, &compute, &after);
    let quality = ProfileQuality::judge(&activity, &repeated);
    let profile = MachineProfile {
        version: PROFILE_VERSION,
        machine: machine.clone(),
        read: disk.best.clone(),
        read_64kib_p50_seconds: disk.latency_64kib.p50_seconds,
        read_64kib_p99_seconds: disk.latency_64kib.p99_seconds,
        cached_copy_bytes_per_second: disk
            .copies
            .iter()
            .map(|copy| copy.bytes_per_second)
            .max_by(f64::total_cmp),
        memory_read_bytes_per_second: compute.memory.read_bytes_per_second,
        memory_copy_bytes_per_second: compute.memory.copy_bytes_per_second,
        threads: Some(compute.threads),
        kernels: compute.kernels.clone(),
        decoders: compute.decoders.clone(),
        gpu: gpu.first.clone(),
        last_cache_bytes: Some(last_cache_bytes() as u64),
        quality: Some(quality),
    };
    let folder = request.folder.clone();
    let seconds = started.elapsed().as_secs_f64();
    Ok(DoctorReport {
        machine,
        folder,
        disk,
        compute,
        gpu,
        paths,
        activity,
        repeated,
        profile,
        seconds,
    })
}

/// Returns the rates of the same cases at different times of the measurement.
fn repeated(
    before: &SteadyRates,
    disk: &DiskReport,
    compute: &ComputeReport,
    after: &SteadyRates,
) -> Vec<RepeatedReading> {
    let measured = SteadyRates::of(compute);
    let in_order = [Some(*before), measured, Some(*after)];
    let rates = |rate: fn(SteadyRates) -> f64| in_order.into_iter().flatten().map(rate).collect();
    vec![
        RepeatedReading::of_disk(disk.same_case_twice.to_vec()),
        RepeatedReading::new("memory", rates(|rates| rates.memory_bytes_per_second)),
        RepeatedReading::new("a kernel", rates(|rates| rates.kernel_bytes_per_second)),
    ]
}

fn folder_error(folder: &Path, source: std::io::Error) -> DoctorError {
    DoctorError::Unmeasurable { folder: folder.to_path_buf(), source }
}
