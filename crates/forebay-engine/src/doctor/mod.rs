//! What this machine can do, measured, and written down where loads find it.

mod compute;
mod cufile;
mod disk;
mod gpu;
mod gpu_kernels;
mod paths;
mod profile;
mod scratch;

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;

use crate::EngineError;
pub(crate) use compute::BESIDE_TYPE;
pub use compute::{ComputeReport, MemoryRate};
pub use cufile::{CuFileCase, CuFileChoice, CuFileRates};
pub use disk::{CopyRate, DiskBursts, DiskCase, DiskReport, PlaceRates};
pub use gpu::{BesideCpu, GpuRates, GpuReport, PcieRates, PinnedCopyRate};
pub use paths::IoPath;
pub use profile::{
    KernelRate, MachineIdentity, MachineProfile, PROFILE_VERSION, ProfiledRead, ReadChoice,
};

/// What to measure.
#[derive(Debug, Clone)]
pub struct DoctorRequest {
    /// The folder whose disk is measured.
    pub folder: PathBuf,
    /// Measure with this file instead of the folder's largest model or a temporary one.
    pub file: Option<PathBuf>,
}

/// What `doctor` found.
#[derive(Debug, Clone, Serialize)]
pub struct DoctorReport {
    pub machine: MachineIdentity,
    pub folder: PathBuf,
    pub disk: DiskReport,
    pub compute: ComputeReport,
    pub gpu: GpuReport,
    pub paths: Vec<IoPath>,
    pub profile: MachineProfile,
    pub seconds: f64,
}

/// Measures the machine. `step` is told what begins.
///
/// # Errors
/// A folder that cannot be written, a disk without room, failed reads.
pub fn examine(
    request: &DoctorRequest,
    step: &mut dyn FnMut(&'static str),
) -> Result<DoctorReport, EngineError> {
    let started = Instant::now();
    let machine = MachineIdentity::here(&request.folder)
        .map_err(|source| folder_error(&request.folder, source))?;
    step("a file to read");
    let subject = disk::Subject::open(request)?;
    let disk = disk::measure(&subject, step)?;
    step("memory and kernels");
    let compute = compute::measure()?;
    step("GPU");
    let gpu = gpu::measure(&subject, &disk.best);
    let paths = paths::list(&disk, &gpu);
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
        gpu: gpu.first.clone(),
    };
    let folder = request.folder.clone();
    let seconds = started.elapsed().as_secs_f64();
    Ok(DoctorReport { machine, folder, disk, compute, gpu, paths, profile, seconds })
}

fn folder_error(folder: &Path, source: std::io::Error) -> EngineError {
    EngineError::Unmeasurable { folder: folder.to_path_buf(), source }
}
