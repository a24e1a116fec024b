//! GPUs: what there is, and how fast bytes get there and are read there.

use std::time::Duration;

use forebay_cuda::{CudaError, Direction, Gpu, PcieLink, Timer};
use serde::{Deserialize, Serialize};

use super::cufile::{self, CuFileRates};
use super::disk::Subject;
use super::{KernelRate, ProfiledRead, gpu_kernels};
use crate::EngineError;

/// Sizes of copies that are measured: bytes.
const COPY_SIZES: [usize; 6] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
const COPY_TIME: Duration = Duration::from_millis(100);
/// Host memory that copies go through in turn, where they are smaller.
const COPY_SPAN: usize = 64 << 20;
/// Device memory that is read or copied; more than any cache of a GPU.
const MEMORY_BYTES: usize = 1 << 30;
const MEMORY_ROUNDS: usize = 9;

/// GPUs of this machine.
#[derive(Debug, Clone, Serialize)]
pub struct GpuReport {
    /// How many the driver finds; the first is measured.
    pub count: usize,
    pub first: Option<GpuRates>,
    /// Why nothing is measured; empty if something is.
    pub why: String,
    /// Why cuFile is not measured; empty if it is.
    pub why_not_cufile: String,
}

/// One GPU, measured. Rates are bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuRates {
    pub name: String,
    pub compute_capability: (i32, i32),
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    /// As the kernel module says it; `None` where it is not to be seen.
    pub driver: Option<String>,
    pub pcie: Option<PcieRates>,
    pub pinned_copies: Vec<PinnedCopyRate>,
    pub pageable_copy_bytes_per_second: f64,
    pub memory_read_bytes_per_second: f64,
    /// Bytes copied: each is read once and written once.
    pub memory_copy_bytes_per_second: f64,
    /// Weights that one token's products go through, by type. (Older profiles have none.)
    #[serde(default)]
    pub kernels: Vec<KernelRate>,
    /// cuFile, where it works, beside the ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cufile: Option<CuFileRates>,
}

/// How the GPU is connected, as the system says it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PcieRates {
    pub address: String,
    pub speed: String,
    pub lanes: String,
}

/// Copies of one size, one after the other, between pinned memory and the GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PinnedCopyRate {
    pub bytes: usize,
    pub to_device_bytes_per_second: f64,
    pub from_device_bytes_per_second: f64,
}

/// Measures the first GPU, with a file for what reads to it. None, or one that fails, is said in words: the rest of the
/// machine can be measured anyway.
pub(super) fn measure(subject: &Subject, read: &ProfiledRead) -> GpuReport {
    let count = match Gpu::count() {
        Ok(0) => return none(0, &CudaError::NoGpu),
        Ok(count) => count,
        Err(error) => return none(0, &error),
    };
    let measured = Gpu::open(0).and_then(|gpu| Ok((rates(&gpu)?, gpu)));
    let (mut rates, gpu) = match measured {
        Ok(measured) => measured,
        Err(error) => return none(count, &error),
    };
    let mut why_not_cufile = String::new();
    match cufile::measure(&gpu, subject, read) {
        Ok(measured) => rates.cufile = Some(measured),
        // Nobody has asked for it here, as `load --io cufile` does.
        Err(EngineError::CuFile(error)) => why_not_cufile = error.to_string(),
        Err(error) => why_not_cufile = error.to_string(),
    }
    GpuReport { count, first: Some(rates), why: String::new(), why_not_cufile }
}

fn none(count: usize, error: &CudaError) -> GpuReport {
    let why_not_cufile = format!("it reads to GPUs: {error}");
    GpuReport { count, first: None, why: error.to_string(), why_not_cufile }
}

fn rates(gpu: &Gpu) -> Result<GpuRates, CudaError> {
    let pinned = |direction, bytes| gpu.pinned_copy_rate(direction, bytes, COPY_SPAN, COPY_TIME);
    let pinned_copies = COPY_SIZES.into_iter().map(|bytes| {
        Ok(PinnedCopyRate {
            bytes,
            to_device_bytes_per_second: pinned(Direction::ToDevice, bytes)?,
            from_device_bytes_per_second: pinned(Direction::FromDevice, bytes)?,
        })
    });
    let pinned_copies = pinned_copies.collect::<Result<_, CudaError>>()?;
    let (read, copy) = memory(gpu)?;
    let pcie =
        gpu.pcie()?.map(|PcieLink { address, speed, lanes }| PcieRates { address, speed, lanes });
    Ok(GpuRates {
        name: gpu.name().to_owned(),
        compute_capability: gpu.compute_capability(),
        multiprocessors: gpu.multiprocessors(),
        memory_bytes: gpu.memory_bytes()?.1,
        driver: Gpu::driver_version(),
        pcie,
        pinned_copies,
        pageable_copy_bytes_per_second: gpu.pageable_copy_rate(COPY_SPAN, COPY_TIME)?,
        memory_read_bytes_per_second: read,
        memory_copy_bytes_per_second: copy,
        kernels: gpu_kernels::measure(gpu)?,
        cufile: None,
    })
}

/// Bytes per second of reading device memory, and of copying it.
fn memory(gpu: &Gpu) -> Result<(f64, f64), CudaError> {
    let free = gpu.memory_bytes()?.0 as usize;
    let bytes = MEMORY_BYTES.min(free / 8 / 16 * 16);
    let (from, to) = (gpu.allocate(bytes)?, gpu.allocate(bytes)?);
    let words = gpu.allocate(4 * gpu.read_all_words())?;
    gpu.fill(from.ptr(), 1, bytes)?;
    let timer = Timer::new(gpu)?;
    let best = |work: &dyn Fn() -> Result<(), CudaError>| {
        (0..MEMORY_ROUNDS).try_fold(f64::INFINITY, |best, _| Ok(best.min(timer.time(gpu, work)?)))
    };
    let read = best(&|| gpu.read_all(from.ptr(), bytes, words.ptr()))?;
    let copy = best(&|| gpu.copy(from.ptr(), to.ptr(), bytes))?;
    Ok((bytes as f64 / read, bytes as f64 / copy))
}
