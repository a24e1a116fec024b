//! GPUs: what there is, and how fast bytes get there and are read there.

use std::fmt::Display;
use std::time::Duration;

use forebay_cuda::{CudaError, Direction, Gpu, PcieLink, Timer};
use serde::{Deserialize, Serialize};

use super::cufile::{self, CuFileRates};
use super::disk::Subject;
use super::{KernelRate, ProfiledRead, compute, gpu_kernels};
use crate::EngineError;

/// Sizes of copies that are measured: bytes.
const COPY_SIZES: [usize; 6] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
const COPY_TIME: Duration = Duration::from_millis(100);
/// Host memory that copies go through in turn, where they are smaller.
const COPY_SPAN: usize = 64 << 20;
/// Copies beside the CPU: large ones, from more memory than a cache holds, for long enough that products begin and end in it.
const BESIDE_BYTES: usize = 16 << 20;
const BESIDE_SPAN: usize = 512 << 20;
const BESIDE_TIME: Duration = Duration::from_secs(1);
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
    /// The bus and the CPU at the same time. (Older profiles do not have it.)
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside_cpu: Option<BesideCpu>,
    /// cuFile, where it works, beside the ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cufile: Option<CuFileRates>,
}

/// Copies from pinned memory to the GPU while the CPU multiplies with weights in memory: both read it. Bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BesideCpu {
    pub copy_bytes_per_second: f64,
    pub cpu_bytes_per_second: f64,
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
    match beside_cpu(&gpu) {
        Ok(both) => rates.beside_cpu = Some(both),
        Err(error) => return none(count, &error),
    }
    let mut why_not_cufile = String::new();
    match cufile::measure(&gpu, subject, read) {
        Ok(measured) => rates.cufile = Some(measured),
        // Nobody has asked for it here, as `load --io cufile` does.
        Err(EngineError::CuFile(error)) => why_not_cufile = error.to_string(),
        Err(error) => why_not_cufile = error.to_string(),
    }
    GpuReport { count, first: Some(rates), why: String::new(), why_not_cufile }
}

fn none(count: usize, error: &dyn Display) -> GpuReport {
    let why_not_cufile = format!("it reads to GPUs: {error}");
    GpuReport { count, first: None, why: error.to_string(), why_not_cufile }
}

fn beside_cpu(gpu: &Gpu) -> Result<BesideCpu, EngineError> {
    let copy = || gpu.pinned_copy_rate(Direction::ToDevice, BESIDE_BYTES, BESIDE_SPAN, BESIDE_TIME);
    let (cpu_bytes_per_second, copy) = compute::beside(BESIDE_TIME, copy)?;
    Ok(BesideCpu { copy_bytes_per_second: copy?, cpu_bytes_per_second })
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
        beside_cpu: None,
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
